"""One interface over devices and strategies: `single`, `ddp`, `spmd`, `replica`. The only import of torch_xla.

A runtime knows where tensors live, which part of the data this process reads, and how processes agree. The training
loop knows none of that. `Single` and `Ddp` are plain PyTorch; `Spmd` and `Replica` need torch_xla, which is imported
when one of them starts and never before. Another back end is one more class here.
"""

import datetime
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardset.errors import ConfigError
from trainer.config import Precision, Strategy, TrainConfig
from trainer.errors import PeerLost
from trainer.supervise.heartbeat import (
    AGAIN,
    GRACE_S,
    JOIN_S,
    PORT,
    HeartbeatClient,
    HeartbeatServer,
    HostAddress,
    LauncherHeartbeat,
)
from trainer.supervise.preemption import relay

HUB = "TRAINER_HUB"
"""Environment variable by which a launcher tells its replicas where the hub of their run listens: `10.0.0.1:8490`."""

STATIC_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lars")
"""What compiles to one graph: their state is there from the start and holds no number that changes on the host."""

_WORDS = 4
_BYTES = 6
"""Of a text in each number that is summed; 48 bits, as in every digest that is summed."""

Batch = dict[str, torch.Tensor]
Worker = Callable[["Runtime", TrainConfig], None]


class Single:
    """One process, one device: a CUDA device if there is one, else the CPU. Also what the other runtimes build on.

    `host` of `num_hosts` is the part of the data this process reads; gradients are averaged over `num_replicas`;
    `num_devices` counts the devices of the whole run. Compiled runtimes set `compiles`.
    """

    strategy: str = "single"
    compiles: bool = False
    host: int = 0
    num_hosts: int = 1
    num_replicas: int = 1

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.device = self._find_device()
        self.graphs: dict[str, int] = {}
        self.watch = HeartbeatClient()
        self._busy_s = 0.0
        self._spans: list[tuple[Any, Any]] = []
        self._profiler: Any = None

    @property
    def num_devices(self) -> int:
        """Devices of the whole run."""
        return self.num_hosts

    @property
    def replica(self) -> int:
        """The number of the model that this process computes; each draws other random numbers (dropout)."""
        return self.host

    @property
    def is_cloud(self) -> bool:
        """Whether this is a machine that Compute Engine may take away, and says so beforehand."""
        return False

    @property
    def is_master(self) -> bool:
        """Whether this process writes what a run writes once."""
        return self.host == 0

    @property
    def batch_divisor(self) -> int:
        """What a global batch must be divisible by."""
        return self.num_devices

    def join(self, patience_s: float) -> None:
        """Meets the other processes, where that takes a call of its own; from here on they compute together.

        Then one may wait that long for another, which may still wait for its data.
        """

    def close(self) -> None:
        """Leaves the group of processes, if there is one."""

    # --- placing -----------------------------------------------------------------------------------------------------

    def place(self, module: nn.Module) -> nn.Module:
        """The module on the device (the same object where the back end allows)."""
        module = module.to(self.device)
        # torch's stubs do not know the argument.
        return module.to(memory_format=torch.channels_last) if self.device.type == "cuda" else module  # type: ignore

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says of device tensors that every replica holds all of each, for as long as the run lasts."""

    def parallel(self, model: nn.Module) -> nn.Module:
        """What the training step calls instead of the model, so that gradients are averaged."""
        return model

    def put(self, batch: Batch) -> Batch:
        """The batch on the device, each tensor cut along its first dimension over the local devices."""
        if self.device.type != "cuda":
            return batch
        with torch.cuda.stream(self._copies()):
            placed = {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in batch.items()}
        self._copies().synchronize()
        for tensor in placed.values():
            tensor.record_stream(torch.cuda.default_stream(self.device))
        return placed

    def to_host(self, tree: Any) -> Any:
        """A copy of nested dicts, lists and tensors with every tensor on the CPU and nothing shared with the device."""
        return _mapped(tree, lambda tensor: tensor.detach().to("cpu", copy=True))

    # --- stepping ----------------------------------------------------------------------------------------------------

    def compiled(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The step, compiled where the back end compiles, and timed."""
        return self._timed(step)

    def autocast(self) -> AbstractContextManager:
        """bfloat16 where it is safe, if the run asked for it; weights and loss stay float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def rate(self, value: float) -> float | torch.Tensor:
        """The learning rate as a step takes it: a number, or a tensor where a number would be part of the graph."""
        return value

    def seed(self, key: int) -> None:
        """Makes the randomness inside the model (dropout and the like) depend on the key and the replica alone."""
        torch.manual_seed(replica_key(key, self.replica))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages gradients over replicas, where backward has not done it."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor summed over replicas, on the device; part of a step."""
        return tensor

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Equal device vectors as float64 [rows, columns] on the CPU, summed over replicas; waits for the device."""
        fetched = self.total(torch.stack(list(rows)).double()).cpu()
        self._settle()
        return fetched

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        """Whole numbers from 0 to 2**63 summed over processes; every process must call."""
        return list(values)

    def any_host(self, flag: bool) -> bool:
        """Whether any process says so; every process must call."""
        return self.sum_hosts([int(flag)])[0] > 0

    def gather(self, text: str) -> list[str]:
        """The texts of all processes, by host; every process must call. Raises ConfigError if two are the same host."""
        data = text.encode()
        own = [int(host == self.host) for host in range(self.num_hosts)]
        found = self.sum_hosts([*own, *(len(data) * one for one in own)])
        if found[: self.num_hosts] != [1] * self.num_hosts:
            raise ConfigError(
                f"host numbers from 0 on are taken by {found[: self.num_hosts]} processes, expected one "
                f"each; this one has {self.host}; two of the same number would train on the same data"
            )
        numbers = max(1, -(-max(found[self.num_hosts :]) // _BYTES))
        padded = data.ljust(numbers * _BYTES, b"\0")
        values = [int.from_bytes(padded[at : at + _BYTES], "little") for at in range(0, len(padded), _BYTES)]
        summed = self.sum_hosts([value * one for one in own for value in values])
        whole = b"".join(value.to_bytes(_BYTES, "little") for value in summed)
        starts = range(0, len(whole), numbers * _BYTES)
        return [
            whole[start : start + size].decode() for start, size in zip(starts, found[self.num_hosts :], strict=True)
        ]

    def share(self, module: nn.Module) -> None:
        """Gives every replica the buffers (BatchNorm statistics) of replica 0."""

    def hub(self, exits: ExitStack) -> HostAddress | None:
        """Where the processes watch each other; one of them opens the hub, until the exits. Every process must call."""
        return None

    # --- watching ----------------------------------------------------------------------------------------------------

    @property
    def compilations(self) -> int:
        """Graphs compiled by this process so far."""
        return 0

    @property
    def busy_s(self) -> float:
        """Seconds in which the device worked on steps, up to the last fetch."""
        return self._busy_s

    def start_trace(self, folder: Path) -> None:
        """Begins a profile."""
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop_trace(self, folder: Path) -> None:
        """Ends a profile and writes it into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(folder / f"host-{self.host:03d}.json"))

    def _find_device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _copies(self) -> Any:
        if not hasattr(self, "_copy_stream"):
            self._copy_stream = torch.cuda.Stream(self.device)
        return self._copy_stream

    def _timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self._timed_by_events(step) if self.device.type == "cuda" else self._timed_by_clock(step)

    def _timed_by_clock(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = step(*args)
            self._busy_s += time.perf_counter() - start
            return result

        return timed

    def _timed_by_events(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            span[0].record()
            result = step(*args)
            span[1].record()
            self._spans.append(span)
            return result

        return timed

    def _settle(self) -> None:
        self._busy_s += sum(start.elapsed_time(stop) for start, stop in self._spans) / 1000
        self._spans.clear()


Runtime = Single
"""The interface; `Single` is its plainest form."""


class Ddp(Single):
    """One process for each device, started by torchrun: nccl on GPUs, gloo on CPUs."""

    strategy = "ddp"

    def __init__(self, precision: Precision) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ConfigError(
                    f"strategy ddp: {name} is not set; start it with `torchrun --nproc-per-node N -m trainer ...`"
                )
        self.host, self.num_hosts = _number("RANK"), _number("WORLD_SIZE")
        if self.host >= self.num_hosts:
            raise ConfigError(f"strategy ddp: RANK {self.host} is not below WORLD_SIZE {self.num_hosts}")
        self.num_replicas = self.num_hosts
        super().__init__(precision)

    def join(self, patience_s: float) -> None:
        self._patience_s = patience_s
        timeout = _seconds(patience_s)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._store.set_timeout(timeout)
        try:
            dist.init_process_group(
                backend, store=self._store, rank=self.host, world_size=self.num_hosts, timeout=timeout
            )
        except (RuntimeError, ValueError) as error:
            if (news := self.watch.news()) is not None:
                raise PeerLost(news) from error
            raise ConfigError(
                f"strategy ddp: RANK {self.host} of WORLD_SIZE {self.num_hosts} could not join the others "
                f"({_first_line(error)}); each process needs a RANK of its own below the same WORLD_SIZE"
            ) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def parallel(self, model: nn.Module) -> nn.Module:
        # Buffers are shared before an evaluation and a checkpoint only: training does not read them.
        with self._peers_answer():
            return DistributedDataParallel(model, broadcast_buffers=False)

    def compiled(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        return self._peers_answer()(super().compiled(step, name))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.detach().clone()
        with self._peers_answer():
            dist.all_reduce(summed)
        return summed

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        return self.total(torch.tensor(list(values), dtype=torch.int64, device=self.device)).tolist()

    def share(self, module: nn.Module) -> None:
        with self._peers_answer():
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def hub(self, exits: ExitStack) -> HostAddress | None:
        if self.num_hosts == 1:
            return None
        try:
            if self.is_master:
                self._store.set(HUB, str(exits.enter_context(HeartbeatServer(("", 0))).port))
            return os.environ["MASTER_ADDR"], int(self._store.get(HUB))
        except RuntimeError as error:
            raise PeerLost(
                f"the process of RANK 0 ended at its start, or does not answer at port {os.environ['MASTER_PORT']} of "
                f"{os.environ['MASTER_ADDR']} ({_first_line(error)}); its log says why; {AGAIN}"
            ) from error

    @functools.cached_property
    def _store(self) -> dist.Store:
        return _ddp_store(opens=self.is_master and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")

    @contextmanager
    def _peers_answer(self) -> Iterator[None]:
        """PeerLost for what torch says when another process is gone; gloo's errors have no class of their own."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            said = f"another process of this run ended, or did not answer for {self._patience_s} s"
            raise PeerLost(self.watch.news() or f"{said} ({_first_line(error)}); its log says why; {AGAIN}") from error

    def _find_device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())


class Xla(Single):
    """What both torch_xla strategies share: lazy tensors, one graph for each phase, counters of the back end."""

    compiles = True
    _graphs_a_phase = 1

    def __init__(self, precision: Precision) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met
        import torch_xla.debug.profiler as xp
        import torch_xla.runtime as xr

        self._torch_xla, self._xm, self._xr, self._met, self._xp = torch_xla, xm, xr, met, xp
        super().__init__(precision)

    def place(self, module: nn.Module) -> nn.Module:
        shared = _shared_parameters(module)
        module = module.to(self.device)
        # Moving gives each layer weights of its own, here alone.
        for first, *others in shared:
            for name in others:
                owner, _, own_name = name.rpartition(".")
                setattr(module.get_submodule(owner), own_name, module.get_parameter(first))
        self._torch_xla.sync()
        return module

    def compiled(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The step as one graph; raises ConfigError when a second one would be compiled."""
        run = self._one_graph(step, name)
        self.graphs.setdefault(name, 0)

        def counted(*args: Any) -> Any:
            before = self.compilations
            result = run(*args)
            self.graphs[name] += self.compilations - before
            if self.graphs[name] > self._graphs_a_phase:
                raise ConfigError(
                    f"{name} compiled {self.graphs[name]} graphs, expected {self._graphs_a_phase}: a shape or a "
                    "Python number in the model or optimizer changes from step to step; keep it in a tensor"
                )
            return result

        return counted

    def rate(self, value: float) -> torch.Tensor:
        return self._sent([torch.tensor(value, dtype=torch.float32)])[0]

    def seed(self, key: int) -> None:
        self._xm.set_rng_state(replica_key(key, self.replica), str(self.device))

    def to_host(self, tree: Any) -> Any:
        self._torch_xla.sync()
        return _mapped(tree, lambda tensor: tensor.detach().cpu())

    @property
    def is_cloud(self) -> bool:
        return self._xr.device_type() == "TPU"

    @property
    def compilations(self) -> int:
        return self._met.counter_value("UncachedCompile") or 0

    @property
    def busy_s(self) -> float:
        found = [self._met.metric_data(name) for name in ("ExecuteTime", "ExecuteReplicatedTime")]
        return sum(data[1] for data in found if data) / 1e9

    def start_trace(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._xp.start_trace(str(folder))

    def stop_trace(self, folder: Path) -> None:
        self._xm.wait_device_ops()
        self._xp.stop_trace()

    def _sent(self, tensors: list[torch.Tensor], **options: Any) -> Any:
        return self._xm.send_cpu_data_to_device(tensors, self.device, **options)

    def _one_graph(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        return self._torch_xla.compile(step, full_graph=True, name=name)

    def _find_device(self) -> torch.device:
        return self._torch_xla.device()


class Spmd(Xla):
    """One process for each host, all devices of all hosts in one mesh; the compiler cuts the program.

    The numbers are those of one device with the whole global batch, BatchNorm statistics included.
    """

    strategy = "spmd"

    def __init__(self, precision: Precision) -> None:
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        super().__init__(precision)
        # Not xr.global_ordinal() and xr.world_size(): they are 0 and 1 on every host here.
        self.host, self.num_hosts = xr.process_index(), xr.process_count()
        self._local_devices = xr.addressable_runtime_device_count()
        self._sharding, self._mark = xs.ShardingSpec, xs.mark_sharding
        count = xr.global_runtime_device_count()
        self._mesh = xs.Mesh(np.arange(count), (count,), ("data",))

    @property
    def num_devices(self) -> int:
        return int(self._mesh.size())

    @property
    def replica(self) -> int:
        # All hosts compute one model, and XLA takes the key of each as the same value: never the host's number.
        return 0

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        # Said from the start: otherwise the first step's outputs say it, and the second step is another graph.
        for tensor in tensors:
            self._mark(tensor, self._mesh, (None,) * tensor.dim())

    def put(self, batch: Batch) -> Batch:
        return {name: self._cut(tensor) for name, tensor in batch.items()}

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([row.cpu() for row in rows]).double()

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        if self.num_hosts == 1:
            return list(values)
        # One row for each local device, of which one carries this host's numbers; the mesh adds them up.
        rows = torch.zeros(self._local_devices, _WORDS * len(values), dtype=torch.int32)
        rows[0] = torch.tensor(_words(values), dtype=torch.int32)
        return _from_words(self._cut(rows).sum(0).cpu().tolist())

    def hub(self, exits: ExitStack) -> HostAddress | None:
        if self.num_hosts == 1:
            return None
        workers, own = _slice()
        if own == 0:
            exits.enter_context(HeartbeatServer(("", PORT)))
        return workers[0], PORT

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        # A spec of its own rank for each tensor: one that does not fit leaves a tensor whole without a word.
        dimensions = ("data",) + (None,) * (tensor.dim() - 1)
        spec = self._sharding(self._mesh, dimensions, minibatch=True)
        return self._sent([tensor], input_sharding=spec)[0]


class Replica(Xla):
    """One model for each device, started by `torch_xla.launch`; BatchNorm sees its own part of the batch."""

    strategy = "replica"

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self.host, self.num_hosts = self._xr.global_ordinal(), self._xr.world_size()
        self.num_replicas = self.num_hosts
        # Each replica of a process is a thread that compiles its own, and the counters are the process'.
        self._graphs_a_phase = self._xr.addressable_device_count()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        # Equal numbers that were sent, such as Adam's counts of steps, are a constant of the graph or one input that
        # all share; from the second step on each would be an input of its own, and that another graph.
        with torch.no_grad():
            for tensor in tensors:
                if tensor.dim() == 0 and tensor.dtype != torch.bool:
                    tensor.add_(0)
        self._torch_xla.sync()

    def put(self, batch: Batch) -> Batch:
        names = list(batch)
        placed = self._sent([batch[name] for name in names])
        return dict(zip(names, placed, strict=True))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._xm.reduce_gradients(optimizer)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._xm.all_reduce(self._xm.REDUCE_SUM, tensor)

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        summed = self.total(torch.stack(list(rows)))
        self._torch_xla.sync()
        return summed.cpu().double()

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        if self.num_hosts == 1:
            return list(values)
        summed = self.total(torch.tensor(_words(values), dtype=torch.int32, device=self.device))
        self._torch_xla.sync()
        return _from_words(summed.cpu().tolist())

    def share(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            own = buffer if self.is_master else torch.zeros_like(buffer)
            buffer.copy_(self.total(own))
        self._torch_xla.sync()

    def hub(self, exits: ExitStack) -> HostAddress:
        host, _, port = os.environ[HUB].rpartition(":")
        return host, int(port)

    def _one_graph(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = step(*args)
            self._torch_xla.sync()
            return result

        return run


# --- choosing and starting -------------------------------------------------------------------------------------------


def launch(config: TrainConfig, worker: Worker) -> None:
    """Runs `worker(runtime, config)` in every process of the strategy, in this process where one is enough.

    Raises ConfigError where the strategy can't run here.
    """
    _refuse_old_switches()
    strategy = choose(config.strategy)
    _refuse_copies(strategy)
    if strategy == "replica":
        _launch_replicas(config, worker)
    else:
        with started(strategy, config) as runtime:
            worker(runtime, config)


@contextmanager
def started(strategy: str, config: TrainConfig) -> Iterator[Runtime]:
    """A runtime of this process, watched. A start that takes longer than a step may ends with a trace of where it is.

    Until all processes have come, some back ends wait for them for ever and in native code.
    """
    with ExitStack() as exits:
        exits.callback(faulthandler.cancel_dump_traceback_later)
        faulthandler.dump_traceback_later(config.stall_timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
        runtime = exits.enter_context(running(strategy, config.precision))
        exits.enter_context(watched(runtime))
        runtime.join(config.stall_timeout_s)
        faulthandler.cancel_dump_traceback_later()
        yield runtime


@contextmanager
def watched(runtime: Runtime) -> Iterator[None]:
    """While the block runs, this process and the others of the run end when one of them is lost."""
    with ExitStack() as exits:
        place = runtime.hub(exits)
        exits.enter_context(runtime.watch)
        if place is not None:
            runtime.watch.start(place, runtime.host, runtime.num_hosts)
        yield


@contextmanager
def running(strategy: str, precision: Precision) -> Iterator[Runtime]:
    """A runtime of this process, closed at the end."""
    if strategy in ("spmd", "replica"):
        _prepare_xla()
    kinds: dict[str, type[Runtime]] = {"single": Single, "ddp": Ddp, "spmd": Spmd, "replica": Replica}
    runtime = kinds[strategy](precision)
    try:
        yield runtime
    finally:
        runtime.close()


def choose(strategy: Strategy) -> str:
    """What "auto" means here: ddp under torchrun, spmd on a TPU, single on a CUDA device, else spmd on XLA:CPU."""
    if strategy != "auto":
        return strategy
    if dist.is_torchelastic_launched():
        return "ddp"
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if torch.cuda.is_available() and os.environ.get("PJRT_DEVICE") is None:
        return "single"
    return "spmd" if has_xla else "single"


def _refuse_old_switches() -> None:
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if name in os.environ:
            raise ConfigError(f"{name} is set, but torch_xla no longer reads it; unset it and use --precision bf16")


def _refuse_copies(strategy: str) -> None:
    """Raises ConfigError where torchrun starts several processes that would know nothing of each other."""
    if strategy != "ddp" and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but strategy {strategy} starts its own: "
            "each would train on all of the data; use --strategy ddp, or start it without torchrun"
        )


def _prepare_xla() -> None:
    """Names the device before torch_xla starts: a TPU if this machine has one, else the CPU."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ConfigError("torch_xla is not installed; install torch_xla 2.9 or use --strategy ddp or single")
    if "PJRT_DEVICE" not in os.environ:
        from torch_xla._internal import tpu

        os.environ["PJRT_DEVICE"] = "TPU" if tpu.num_available_chips() > 0 else "CPU"


def _launch_replicas(config: TrainConfig, worker: Worker) -> None:
    _prepare_xla()
    if os.environ["PJRT_DEVICE"] == "CPU" and int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        raise ConfigError(
            f"strategy replica: CPU_NUM_DEVICES is {os.environ['CPU_NUM_DEVICES']}, but several replicas on the CPU "
            "wait for each other for ever; use --strategy spmd, or unset CPU_NUM_DEVICES"
        )
    import torch_xla

    workers, own = _slice() if os.environ["PJRT_DEVICE"] == "TPU" else (["127.0.0.1"], 0)
    with tempfile.TemporaryDirectory() as folder, _guarded(workers, own):
        relay(Path(folder) / "asked to stop")
        with _replicas_ended_by_ctrl_c():
            torch_xla.launch(_run_replica, args=(worker, config))


@contextmanager
def _replicas_ended_by_ctrl_c() -> Iterator[None]:
    """By itself each replica would go on to the end, in a thread that its process waits for.

    Where Ctrl-C is ignored, as in the background of a script, or somebody's own, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*_: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_replica(index: int, worker: Worker, config: TrainConfig) -> None:
    with started("replica", config) as runtime:
        worker(runtime, config)


@contextmanager
def _guarded(workers: list[str], own: int) -> Iterator[None]:
    """The hub of the run on the first worker, and on each of them the end of its replicas when one of them is lost."""
    with ExitStack() as exits:
        place = ("", PORT) if len(workers) > 1 else (workers[0], 0)
        port = exits.enter_context(HeartbeatServer(place)).port if own == 0 else PORT
        os.environ[HUB] = f"{workers[0]}:{port}"
        watch = exits.enter_context(LauncherHeartbeat())
        watch.start_beside((workers[0], port))
        try:
            yield
        except BrokenProcessPool as error:
            raise PeerLost(
                watch.news() or f"a process of this host ended; what it said stands above; {AGAIN}"
            ) from error


def _slice() -> tuple[list[str], int]:
    """The addresses of all workers of this TPU slice in their order, and the number of this one."""
    from torch_xla._internal import tpu

    workers = tpu.get_worker_ips()
    return workers, tpu.worker_id() if len(workers) > 1 else 0


def _ddp_store(*, opens: bool) -> dist.Store:
    """Where the processes of ddp find each other: one of them opens it, or torchrun did. Waits for that one only."""
    place = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    if not opens:
        _wait_for(place)
    try:
        store = dist.TCPStore(*place, is_master=opens, timeout=_seconds(GRACE_S), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"strategy ddp: can't {'listen on' if opens else 'use'} port {place[1]} of {place[0]}, as MASTER_ADDR and "
            f"MASTER_PORT say ({_first_line(error)}); each process needs a RANK of its own, each run a port of its own"
        ) from error
    store.set_timeout(_seconds(JOIN_S))
    return store


def _wait_for(place: HostAddress) -> None:
    """Until somebody listens there. Not left to torch, which may take twice as long as it is told."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection(place, timeout=GRACE_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"the process of RANK 0 did not open port {place[1]} of {place[0]} within {JOIN_S:.0f} s "
                    f"({error}): see in its log whether it ended at its start, and give all processes the same "
                    "MASTER_ADDR and MASTER_PORT"
                ) from error
        time.sleep(0.1)


# --- small parts -----------------------------------------------------------------------------------------------------


def replica_key(key: int, replica: int) -> int:
    """A replica's own random key, 63 bits."""
    return (key >> 1) ^ replica


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def _number(name: str) -> int:
    """What an environment variable of ddp says; raises ConfigError if it is no whole number."""
    if not os.environ[name].isdecimal():
        raise ConfigError(f"strategy ddp: {name} is {os.environ[name]!r}, expected a whole number; torchrun sets it")
    return int(os.environ[name])


def _shared_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each weight that several layers have in common."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def _mapped(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _mapped(value, function) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(value, function) for value in tree]
    return tree


def _words(values: Sequence[int]) -> list[int]:
    """Each number as four 16-bit words, lowest first, so that sums over hosts stay inside 32 bits."""
    return [(value >> (16 * word)) & 0xFFFF for value in values for word in range(_WORDS)]


def _from_words(words: Sequence[int]) -> list[int]:
    groups = [words[start : start + _WORDS] for start in range(0, len(words), _WORDS)]
    return [sum(word << (16 * place) for place, word in enumerate(group)) for group in groups]
