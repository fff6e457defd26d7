"""`spmd` and `replica`: the strategies of torch_xla, and the only module that imports it.

torch_xla is imported when one of them starts and never before: importing it chooses the devices of the process.
"""

import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardset.errors import ConfigError
from trainer.config import Precision
from trainer.runtime.base import Runtime, Step, TensorBatch, map_tensors, replica_key
from trainer.supervise.heartbeat import PORT, Address, HeartbeatServer

HEARTBEAT_ADDRESS = "TRAINER_HUB"
"""Environment variable by which a launcher names the heartbeat server to its replicas: `10.0.0.1:8490`."""

NUM_WORDS = 4
"""16-bit words of a number that is summed over hosts: XLA adds up 32 bits."""


class Xla(Runtime):
    """What both torch_xla strategies share: lazy tensors, one graph for each step, counters of the back end."""

    compiles = True
    _max_graphs = 1

    def __init__(self, precision: Precision) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met
        import torch_xla.debug.profiler as xp
        import torch_xla.runtime as xr

        # Parts of torch_xla have no types.
        self._torch_xla: Any = torch_xla
        self._xm: Any = xm
        self._xr: Any = xr
        self._metrics: Any = met
        self._profiler: Any = xp
        super().__init__(precision)

    def _find_device(self) -> torch.device:
        device: torch.device = self._torch_xla.device()
        return device

    def _one_graph(self, step: Step, name: str) -> Step:
        """The step, which runs as one graph."""
        raise NotImplementedError

    def module_to_device(self, module: nn.Module) -> nn.Module:
        shared = _shared_parameters(module)
        module = module.to(self.device)
        # Moving to XLA, unlike to other devices, gives each layer a copy of a weight that several share.
        for first, *others in shared:
            for name in others:
                owner, _, own_name = name.rpartition(".")
                setattr(module.get_submodule(owner), own_name, module.get_parameter(first))
        self._torch_xla.sync()
        return module

    def compiled(self, step: Step, name: str) -> Step:
        """The step as one graph; raises ConfigError when it compiles a second one."""
        run = self._one_graph(step, name)
        self.graphs.setdefault(name, 0)

        def counted(*args: Any) -> torch.Tensor:
            before = self.compilations
            result = run(*args)
            self.graphs[name] += self.compilations - before
            if self.graphs[name] > self._max_graphs:
                raise ConfigError(
                    f"{name} compiled {self.graphs[name]} graphs, expected {self._max_graphs}: a shape or a "
                    "Python number in the model or optimizer changes from step to step; keep it in a tensor"
                )
            return result

        return counted

    def rate(self, value: float) -> torch.Tensor:
        return self._send(torch.tensor(value, dtype=torch.float32))

    def seed(self, key: int) -> None:
        self._xm.set_rng_state(replica_key(key, self.replica), str(self.device))

    def to_host(self, tree: Any) -> Any:
        self._torch_xla.sync()
        return map_tensors(tree, lambda tensor: tensor.detach().cpu())

    @property
    def is_cloud(self) -> bool:
        return bool(self._xr.device_type() == "TPU")

    @property
    def on_host(self) -> bool:
        return bool(self._xr.device_type() == "CPU")

    @property
    def compilations(self) -> int:
        return self._metrics.counter_value("UncachedCompile") or 0

    @property
    def busy_s(self) -> float:
        metrics = [self._metrics.metric_data(name) for name in ("ExecuteTime", "ExecuteReplicatedTime")]
        nanoseconds: float = sum(data[1] for data in metrics if data)
        return nanoseconds / 1e9

    def start_trace(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.start_trace(str(folder))

    def stop_trace(self, folder: Path) -> None:
        self._xm.wait_device_ops()
        self._profiler.stop_trace()

    def _send(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        sent: torch.Tensor = self._xm.send_cpu_data_to_device([tensor], self.device, **options)[0]
        return sent


class Spmd(Xla):
    """One process for each host, all devices of all hosts in one mesh; the compiler partitions the program.

    The numbers are those of one device with the whole global batch, BatchNorm statistics included.
    """

    strategy = "spmd"
    heartbeat_port = PORT

    def __init__(self, precision: Precision) -> None:
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        super().__init__(precision)
        # Not xr.global_ordinal() and xr.world_size(): they are 0 and 1 on every host here.
        self.host, self.num_hosts = xr.process_index(), xr.process_count()
        self._local_devices = xr.addressable_runtime_device_count()
        self._spmd: Any = xs
        self._num_devices = xr.global_runtime_device_count()
        self._mesh = xs.Mesh(np.arange(self._num_devices), (self._num_devices,), ("data",))

    @property
    def num_devices(self) -> int:
        return self._num_devices

    @property
    def replica(self) -> int:
        # All hosts compute one model, and XLA takes the key of each as the same value: never the host's number.
        return 0

    def mark_replicated(self, tensors: Iterable[torch.Tensor]) -> None:
        # Without the mark, the first step's outputs would set it, and the second step would be another graph.
        for tensor in tensors:
            self._spmd.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        return {name: self._shard(tensor) for name, tensor in batch.items()}

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([row.cpu() for row in rows]).double()

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        if self.num_hosts == 1:
            return list(values)
        # One row for each local device, of which one carries this host's numbers; the mesh adds them up.
        rows = torch.zeros(self._local_devices, NUM_WORDS * len(values), dtype=torch.int32)
        rows[0] = torch.tensor(_words_of(values), dtype=torch.int32)
        return _from_words(self._shard(rows).sum(0).cpu().tolist())

    def heartbeat_address(self, exits: ExitStack) -> Address | None:
        if self.num_hosts == 1:
            return None
        workers, own = tpu_workers()
        if own == 0:
            exits.enter_context(HeartbeatServer(("", self.heartbeat_port), self.heartbeat.timing))
        return workers[0], self.heartbeat_port

    def _one_graph(self, step: Step, name: str) -> Step:
        compiled: Step = self._torch_xla.compile(step, full_graph=True, name=name)
        return compiled

    def _shard(self, tensor: torch.Tensor) -> torch.Tensor:
        # Each tensor has a spec of its own rank: torch_xla silently leaves a tensor whole if the rank does not fit.
        dimensions = ("data",) + (None,) * (tensor.dim() - 1)
        return self._send(tensor, input_sharding=self._spmd.ShardingSpec(self._mesh, dimensions, minibatch=True))


class Replica(Xla):
    """One model for each device, started by `torch_xla.launch`; BatchNorm sees its own part of the batch."""

    strategy = "replica"

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self.host, self.num_hosts = self._xr.global_ordinal(), self._xr.world_size()
        self.num_replicas = self.num_hosts
        # The replicas of a process are threads. Each compiles its own graph; the counters are those of the process.
        self._max_graphs = self._xr.addressable_device_count()

    def mark_replicated(self, tensors: Iterable[torch.Tensor]) -> None:
        # Equal numbers that were sent, such as Adam's step counts, are a constant of the graph or one input that
        # all share. From the second step on each would be an input of its own, and that is another graph.
        with torch.no_grad():
            for tensor in tensors:
                if tensor.dim() == 0 and tensor.dtype != torch.bool:
                    tensor.add_(0)
        self._torch_xla.sync()

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        tensors = self._xm.send_cpu_data_to_device(list(batch.values()), self.device)
        return dict(zip(batch, tensors, strict=True))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._xm.reduce_gradients(optimizer)

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self._xm.all_reduce(self._xm.REDUCE_SUM, tensor)
        return summed

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        summed = self.sum_replicas(torch.stack(list(rows)))
        self._torch_xla.sync()
        return summed.cpu().double()

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        if self.num_hosts == 1:
            return list(values)
        summed = self.sum_replicas(torch.tensor(_words_of(values), dtype=torch.int32, device=self.device))
        self._torch_xla.sync()
        return _from_words(summed.cpu().tolist())

    def broadcast_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            buffer.copy_(self.sum_replicas(buffer if self.is_master else torch.zeros_like(buffer)))
        self._torch_xla.sync()

    def heartbeat_address(self, exits: ExitStack) -> Address:
        host, _, port = os.environ[HEARTBEAT_ADDRESS].rpartition(":")
        return host, int(port)

    def _one_graph(self, step: Step, name: str) -> Step:
        def run(*args: Any) -> torch.Tensor:
            result = step(*args)
            self._torch_xla.sync()
            return result

        return run


# --- before a runtime starts -----------------------------------------------------------------------------------------


def is_installed() -> bool:
    """Whether torch_xla can be imported; does not import it."""
    return importlib.util.find_spec("torch_xla") is not None


def select_device() -> str:
    """The PJRT device, set before torch_xla starts: "TPU" if this machine has one, else "CPU"."""
    if not is_installed():
        raise ConfigError("torch_xla is not installed; install torch_xla 2.9 or use --strategy ddp or single")
    if "PJRT_DEVICE" not in os.environ:
        from torch_xla._internal import tpu

        os.environ["PJRT_DEVICE"] = "TPU" if tpu.num_available_chips() > 0 else "CPU"
    return os.environ["PJRT_DEVICE"]


def tpu_workers() -> tuple[list[str], int]:
    """The addresses of all workers of this TPU slice in their order, and the number of this one."""
    from torch_xla._internal import tpu

    workers: list[str] = tpu.get_worker_ips()
    return workers, tpu.worker_id() if len(workers) > 1 else 0


def spawn_replicas(function: Callable[..., None], *args: Any) -> None:
    """Runs `function(index, *args)` in one process or thread for each local device; returns when all have ended."""
    import torch_xla

    torch_xla.launch(function, args=args)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _shared_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each weight that several layers share."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def _words_of(values: Sequence[int]) -> list[int]:
    """Each number as 16-bit words, lowest first, so that sums over hosts stay within 32 bits."""
    return [(value >> (16 * word)) & 0xFFFF for value in values for word in range(NUM_WORDS)]


def _from_words(words: Sequence[int]) -> list[int]:
    groups = [words[start : start + NUM_WORDS] for start in range(0, len(words), NUM_WORDS)]
    return [sum(word << (16 * number) for number, word in enumerate(group)) for group in groups]
