"""`spmd` and `replica`: the strategies of torch_xla, and the only module that imports it.

torch_xla is imported when one of them starts, not before: importing it chooses the devices of the
process.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardset.errors import ConfigError
from trainer.config import Precision
from trainer.runtime.base import Runtime, Step, TensorBatch, moved, replica_key
from trainer.runtime.heartbeat import PORT, Address, HeartbeatServer
from trainer.runtime.machine import num_chips, tpu_workers

HEARTBEAT_ADDRESS = "TRAINER_HUB"
"""Environment variable in which a launcher gives its replicas the heartbeat server:
`10.0.0.1:8490`.
"""

CACHE = "XLA_PERSISTENT_CACHE_PATH"
"""Environment variable that names the folder of compiled graphs to torch_xla, which reads it at its
first graph.
"""


class Xla(Runtime):
    """The common part of both torch_xla strategies: lazy tensors, counters of the back end, and the
    number of graphs of each step, `graphs`.
    """

    steps_block, scales_gradients = False, False
    capturable = ("nadam",)
    _max_graphs = 8
    """For a step: the first one has no moments, and torch_xla compiles another graph when a Python
    number becomes 0, 1 or equal to another one.
    """

    def __init__(self, precision: Precision) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met
        import torch_xla.debug.profiler as xp
        import torch_xla.runtime as xr

        # Parts of torch_xla are not typed.
        self._torch_xla: Any = torch_xla
        self._xm: Any = xm
        self._xr: Any = xr
        self._metrics: Any = met
        super().__init__(precision)
        self.graphs: dict[str, int] = {}
        self._profiler = xp
        self.is_cloud = xr.device_type() == "TPU"
        # On TPUs only: XLA:CPU writes compiled graphs, but can't read them.
        if self.is_cloud and CACHE not in os.environ:
            use_cache(xr.process_index())

    def _find_device(self) -> torch.device:
        device: torch.device = self._torch_xla.device()
        return device

    def module_to_device(self, module: nn.Module) -> nn.Module:
        module = moved(module, self.device)
        self._torch_xla.sync()
        return module

    def accelerate(self, modules: Iterable[nn.Module], *, compile: bool | None, tf32: bool) -> None:
        torch.compiler.set_stance("force_eager")  # optimizers compile parts, as kron does

    def data_parallel(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                _UnbiasedVariance(module)
        return model

    def _counted(self, run: Step, name: str) -> Step:
        """The step, whose graphs are counted. Raises ConfigError for one that compiles again and
        again, or that torch_xla can't compile.
        """
        self.graphs.setdefault(name, 0)

        def counted(*args: Any) -> torch.Tensor:
            before = self.compilations
            try:
                result = run(*args)
            except RuntimeError as error:
                if "Unexpected execution" not in str(error):
                    raise
                raise ConfigError(
                    f"the model or the optimizer reads a number back from the device in a {name},"
                    f" which strategy {self.strategy} can't compile; use another optimizer, such"
                    " as adamw, or --strategy ddp or single"
                ) from error
            self.graphs[name] += self.compilations - before
            if self.graphs[name] > self._max_graphs:
                raise ConfigError(
                    f"{name} compiled {self.graphs[name]} graphs, expected at most"
                    f" {self._max_graphs}: a shape in the model or optimizer changes from step to"
                    " step, or a number is read back; use another one, or --strategy ddp or single"
                )
            return result

        return counted

    def seed(self, key: int) -> None:
        self._xm.set_rng_state(replica_key(key, self.replica), str(self.device))

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        # One by one: a graph that joins them would run after the steps that are under way.
        return torch.stack([row.cpu() for row in rows]).double()

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        return list(values) if self.num_hosts == 1 else self._begin_sum(values)()

    def ask_hosts(self, flag: bool) -> Callable[[], bool]:
        sums = self._begin_sum([int(flag)])
        return lambda: sums()[0] > 0

    @property
    def compilations(self) -> int:
        return self._metrics.counter_value("UncachedCompile") or 0

    def start_trace(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.start_trace(str(folder))

    def stop_trace(self, folder: Path) -> None:
        self._xm.wait_device_ops()
        self._profiler.stop_trace()

    def _begin_sum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Has the devices add up the numbers of all hosts. What it returns awaits the sums."""
        # As 16-bit words, lowest first, whose sums over hosts fit the 32 bits that XLA adds up.
        words = np.array(values, dtype="<u8").view("<u2").astype(np.int32)
        summed = self._sum_words(torch.from_numpy(words))
        self._torch_xla.sync()

        def fetch() -> list[int]:
            rows = summed.cpu().reshape(len(values), -1).tolist()
            return [sum(word << (16 * place) for place, word in enumerate(row)) for row in rows]

        return fetch

    def _sum_words(self, words: torch.Tensor) -> torch.Tensor:
        """The words of all hosts, added up by the devices."""
        raise NotImplementedError


class Spmd(Xla):
    """One process for each host, all devices of all hosts in one mesh; the compiler partitions the
    program.

    The numbers equal one device's with the complete global batch, BatchNorm statistics included.
    """

    strategy = "spmd"
    heartbeat_port = PORT

    def __init__(self, precision: Precision) -> None:
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        super().__init__(precision)
        # Not xr.global_ordinal() and xr.world_size(): under SPMD they are 0 and 1 on every host.
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
        # All hosts compute one model, and XLA assumes that their random keys are equal.
        return 0

    def mark_replicated(self, tensors: Iterable[torch.Tensor]) -> None:
        # Otherwise the outputs of the first step would set the sharding, and the second step
        # compile another graph.
        for tensor in tensors:
            self._spmd.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())

    def of_all(self, rows: torch.Tensor) -> torch.Tensor:
        # Complete on each device: otherwise fetching them would be another graph, after the steps
        # under way.
        self._spmd.mark_sharding(rows, self._mesh, (None, None))
        return rows

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        return {name: self._shard(tensor) for name, tensor in batch.items()}

    def heartbeat_address(self, exits: ExitStack) -> Address | None:
        if self.num_hosts == 1:
            return None
        workers, number = tpu_workers()
        if number == 0:
            exits.enter_context(
                HeartbeatServer(Address("", self.heartbeat_port), self.heartbeat.timing)
            )
        return Address(workers[0], self.heartbeat_port)

    def _sum_words(self, words: torch.Tensor) -> torch.Tensor:
        # One row for each local device. The first carries the numbers of this host; the mesh adds
        # up all rows.
        rows = torch.zeros(self._local_devices, len(words), dtype=torch.int32)
        rows[0] = words
        return self._shard(rows).sum(0)

    def compiled(self, step: Step, name: str) -> Step:
        return self._counted(self._torch_xla.compile(step, full_graph=True, name=name), name)

    def _shard(self, tensor: torch.Tensor) -> torch.Tensor:
        # Every tensor needs a spec with its rank: torch_xla silently leaves it whole if the rank
        # differs.
        dimensions = ("data",) + (None,) * (tensor.dim() - 1)
        spec = self._spmd.ShardingSpec(self._mesh, dimensions, minibatch=True)
        sharded: list[torch.Tensor] = self._xm.send_cpu_data_to_device(
            [tensor], self.device, input_sharding=spec
        )
        return sharded[0]


class Replica(Xla):
    """One model for each device, started by `torch_xla.launch`.

    BatchNorm sees only its part of the batch.
    """

    strategy = "replica"

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self.host, self.num_hosts = self._xr.global_ordinal(), self._xr.world_size()
        self.num_replicas = self.num_hosts
        # Each replica of a process is a thread that compiles its own graph. The counters are those
        # of the process.
        self._max_graphs *= self._xr.addressable_device_count()

    def mark_replicated(self, tensors: Iterable[torch.Tensor]) -> None:
        # Equal scalars that were sent, such as Adam's step counts, become a constant of the graph
        # or one shared input. After the first step each would be a separate input, which is
        # another graph. Adding 0 separates them now.
        with torch.no_grad():
            for tensor in tensors:
                if tensor.dim() == 0 and tensor.dtype != torch.bool:
                    tensor.add_(0)
        self._torch_xla.sync()

    def synchronize_norms(self, model: nn.Module) -> nn.Module:
        raise ConfigError(
            "sync_batch_norm is true, which strategy replica can't do; use --strategy spmd"
        )

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        tensors = self._xm.send_cpu_data_to_device(list(batch.values()), self.device)
        return dict(zip(batch, tensors, strict=True))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._xm.reduce_gradients(optimizer)

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self._xm.all_reduce(self._xm.REDUCE_SUM, tensor)
        return summed

    def broadcast_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            buffer.copy_(self.sum_replicas(buffer if self.is_master else torch.zeros_like(buffer)))
        self._torch_xla.sync()

    def heartbeat_address(self, exits: ExitStack) -> Address:
        host, _, port = os.environ[HEARTBEAT_ADDRESS].rpartition(":")
        return Address(host, int(port))

    def _sum_words(self, words: torch.Tensor) -> torch.Tensor:
        return self.sum_replicas(words.to(self.device))

    def compiled(self, step: Step, name: str) -> Step:
        def run(*args: Any) -> torch.Tensor:
            # Summed in the step's graph: a separate graph would run after the steps that are
            # under way.
            result = self.sum_replicas(step(*args))
            self._torch_xla.sync()
            return result

        return self._counted(run, name)


# --- before a runtime starts ----------------------------------------------------------------------


def is_installed() -> bool:
    """Whether torch_xla can be imported; does not import it.

    One that was built for another torch can't.
    """
    return importlib.util.find_spec("torch_xla") is not None and _release("torch_xla") == _release(
        "torch"
    )


def select_device() -> str:
    """The PJRT device, chosen before torch_xla starts: "TPU" if this machine has one, else "CPU".

    Also turns off torch_xla's functionalization, unless the environment turns it on: the step
    computes the same without it, and tracing takes less than half of the time on the host.
    torch_xla reads the choice once.
    """
    if not is_installed():
        raise ConfigError(
            f"there is no torch_xla for torch {torch.__version__}: use --strategy ddp or single, or"
            " run pip install 'shardset[trainer,xla]' in a separate environment"
        )
    os.environ.setdefault("XLA_DISABLE_FUNCTIONALIZATION", "1")
    if "PJRT_DEVICE" not in os.environ:
        os.environ["PJRT_DEVICE"] = "TPU" if num_chips() else "CPU"
    return os.environ["PJRT_DEVICE"]


def use_cache(process: int) -> None:
    """Lets torch_xla keep compiled graphs in the cache folder of the user, for later runs.

    Each process has its own folder in it, because torch_xla does not write files atomically. Prints
    a warning where it can't be used.
    """
    # Not torch_xla's `initialize_cache`, which sets this too, but refuses the second replica of a
    # process.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home, "shardset/xla", f"process-{process:03d}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"warning: compile cache: {error}; the run continues without it",
            file=sys.stderr,
            flush=True,
        )
        return
    os.environ[CACHE] = str(folder)


def spawn_replicas(function: Callable[..., None], *args: Any) -> None:
    """Runs `function(index, *args)` in one process or thread for each local device; returns when
    all have ended.
    """
    import torch_xla

    torch_xla.launch(function, args=args)


# --- helpers --------------------------------------------------------------------------------------


class _UnbiasedVariance:
    """Gives a BatchNorm the running variance that torch has, whose part of a batch divides by n -
    1.

    torch_xla takes the variance that it normalizes by, which divides by n.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        # torch reads a number back in each step
        if norm.momentum is None and norm.track_running_stats:
            raise ConfigError(
                "the model has a BatchNorm with momentum=None, whose steps XLA can't compile to one"
                " graph; give it a momentum, such as 0.1, or use --strategy ddp or single"
            )
        self._kept: torch.Tensor | None = None
        norm.register_forward_pre_hook(self._before)
        norm.register_forward_hook(self._after)

    def _before(self, norm: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        """Keeps what stays of the variance so far."""
        if norm.training and norm.running_var is not None and norm.momentum is not None:
            self._kept = (1 - norm.momentum) * norm.running_var

    def _after(
        self, norm: _BatchNorm, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        kept, self._kept = self._kept, None  # or it would be an output of the graph
        if kept is not None and norm.running_var is not None:
            # as many as the input, which may be a keyword's
            num_values = output.numel() // output.shape[1]
            # Not the tensor itself, which the backward pass has noted, though in training it does
            # not read it.
            norm.running_var.data.lerp_(kept, -1 / (num_values - 1))


def _release(distribution: str) -> list[str]:
    """The first two numbers of a version, ["2", "9"]."""
    return importlib.metadata.version(distribution).split(".")[:2]
