"""The interface over devices and strategies, and its plainest form: one process with one device.

A runtime knows where tensors live, which part of the data this process reads, and how processes agree. The training
loop knows none of that. Another back end is one more subclass of `Runtime`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardset.errors import ConfigError
from trainer.config import Precision
from trainer.runtime.machine import available_memory, local_processes
from trainer.supervise.heartbeat import Address, HeartbeatClient

STATIC_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lars")
"""Optimizers that compile to one graph: their state exists from the start and holds no number of the host."""

TEXT_BYTES = 6
"""Bytes of text in each number that `gather_texts` sums: 48 bits, which every runtime can add up."""

TensorBatch = dict[str, torch.Tensor]
"""`image`, `label` and `weight`, maybe `flip` and `mix`: first dimension is the sample."""

Step = Callable[..., torch.Tensor]


class Runtime:
    """Devices and processes as the training loop sees them. The defaults fit a run of one process.

    This process reads part `host` of `num_hosts` of the data. Gradients are averages over `num_replicas`. Runtimes that
    compile a step to a graph set `compiles`; `graphs` counts those of each step.
    """

    strategy: str
    compiles: bool = False
    host: int = 0
    num_hosts: int = 1
    num_replicas: int = 1

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.device = self._find_device()
        self.graphs: dict[str, int] = {}
        self.heartbeat = HeartbeatClient()

    @property
    def num_devices(self) -> int:
        """Devices of the whole run."""
        return self.num_hosts

    @property
    def replica(self) -> int:
        """The number of the model that this process computes; each draws its own random numbers (dropout)."""
        return self.host

    @property
    def is_cloud(self) -> bool:
        """Whether this is a Compute Engine machine that can be preempted and announces it."""
        return False

    @property
    def is_master(self) -> bool:
        """Whether this process writes what a run writes once."""
        return self.host == 0

    @property
    def batch_divisor(self) -> int:
        """A global batch must be a multiple of this."""
        return self.num_devices

    def join(self, timeout_s: float) -> None:
        """Connects to the other processes; from here on they compute together.

        `timeout_s` is how long one process may then wait for another, which may still be waiting for data.
        """

    def close(self) -> None:
        """Leaves the group of processes, if there is one."""

    @property
    def on_host(self) -> bool:
        """Whether the device computes in host memory, which it shares with the streams."""
        return self.device.type == "cpu"

    def free_bytes(self) -> int | None:
        """Memory that this process can still take for its device; None where the back end does not say."""
        return available_memory() // local_processes() if self.on_host else None

    def _find_device(self) -> torch.device:
        raise NotImplementedError

    # --- moving data -------------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """The module on the device (the same object where the back end allows)."""
        raise NotImplementedError

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        """The batch on the device, each tensor split along its first dimension over the local devices."""
        raise NotImplementedError

    def to_host(self, tree: Any) -> Any:
        """A copy of nested dicts, lists and tensors: every tensor on the CPU, no memory shared with the device."""
        raise NotImplementedError

    def mark_replicated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares device tensors of which every replica holds a full copy for the whole run."""

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """The module that the training step calls instead of the model, so that gradients are averaged."""
        return model

    # --- stepping ----------------------------------------------------------------------------------------------------

    def compiled(self, step: Step, name: str) -> Step:
        """The step, compiled where the back end compiles, and timed."""
        raise NotImplementedError

    def seed(self, key: int) -> None:
        """Seeds the randomness inside the model (dropout and the like) from the key and the replica alone."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in bfloat16 where that is safe, if the run asks for it; weights and loss stay float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def rate(self, value: float) -> float | torch.Tensor:
        """The learning rate as a step takes it; a tensor where a number would become part of the graph."""
        return value

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages gradients over replicas, unless the backward pass has done so."""

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor summed over replicas, on the device; part of a step."""
        return tensor

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Equal device vectors, summed over replicas: float64 [rows, columns] on the CPU. Waits for the device."""
        raise NotImplementedError

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        """Integers from 0 to 2**63 summed over processes; every process must call."""
        return list(values)

    def any_host(self, flag: bool) -> bool:
        """Whether the flag is set in any process; every process must call."""
        return self.sum_hosts([int(flag)])[0] > 0

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all processes, by host; every process must call. Raises ConfigError if two have one number."""
        data = text.encode()
        one_hot = [int(host == self.host) for host in range(self.num_hosts)]
        sums = self.sum_hosts([*one_hot, *(len(data) * is_own for is_own in one_hot)])
        counts, sizes = sums[: self.num_hosts], sums[self.num_hosts :]
        if counts != [1] * self.num_hosts:
            raise ConfigError(
                f"host numbers from 0 on are taken by {counts} processes, expected one each; this one has "
                f"{self.host}; two of the same number would train on the same data"
            )
        width = max(1, -(-max(sizes) // TEXT_BYTES))
        numbers = _numbers_of(data, width)
        joined = _bytes_of(self.sum_hosts([number * is_own for is_own in one_hot for number in numbers]))
        starts = range(0, len(joined), width * TEXT_BYTES)
        return [joined[start : start + size].decode() for start, size in zip(starts, sizes, strict=True)]

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Gives every replica the buffers (BatchNorm statistics) of replica 0."""

    def heartbeat_address(self, exits: ExitStack) -> Address | None:
        """Where the processes send heartbeats; None if there is one process only. Every process must call.

        The first process starts the server, which stops with `exits`.
        """
        return None

    # --- measuring ---------------------------------------------------------------------------------------------------

    @property
    def compilations(self) -> int:
        """Graphs that this process has compiled so far."""
        return 0

    @property
    def busy_s(self) -> float:
        """Seconds that the device has worked on steps, up to the last fetch."""
        raise NotImplementedError

    def start_trace(self, folder: Path) -> None:
        """Starts a profile."""
        raise NotImplementedError

    def stop_trace(self, folder: Path) -> None:
        """Ends a profile and writes it to the folder."""
        raise NotImplementedError


class Single(Runtime):
    """One process, one device: a CUDA device if there is one, else the CPU."""

    strategy = "single"

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self._busy_s = 0.0
        self._spans: list[tuple[Any, Any]] = []
        self._profiler: torch.profiler.profile | None = None
        self._copy_stream: Any = None
        self._cuda: Any = torch.cuda  # its streams and events have no types

    def _find_device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def free_bytes(self) -> int | None:
        return super().free_bytes() if self.on_host else torch.cuda.mem_get_info(self.device)[0]

    def module_to_device(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        # torch's stubs do not know the argument.
        return module.to(memory_format=torch.channels_last) if self.device.type == "cuda" else module  # type: ignore

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        if self.device.type != "cuda":
            return batch
        stream = self._copy_stream = self._copy_stream or self._cuda.Stream(self.device)
        with self._cuda.stream(stream):
            copies = {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in batch.items()}
        stream.synchronize()
        # The step uses them on another stream than the one that made them.
        for tensor in copies.values():
            tensor.record_stream(self._cuda.default_stream(self.device))
        return copies

    def to_host(self, tree: Any) -> Any:
        return map_tensors(tree, lambda tensor: tensor.detach().to("cpu", copy=True))

    def compiled(self, step: Step, name: str) -> Step:
        return self._timed_by_events(step) if self.device.type == "cuda" else self._timed_by_clock(step)

    def seed(self, key: int) -> None:
        torch.manual_seed(replica_key(key, self.replica))

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        fetched = self.sum_replicas(torch.stack(list(rows)).double()).cpu()
        self._busy_s += sum(start.elapsed_time(stop) for start, stop in self._spans) / 1000
        self._spans.clear()
        return fetched

    @property
    def busy_s(self) -> float:
        return self._busy_s

    def start_trace(self, folder: Path) -> None:
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop_trace(self, folder: Path) -> None:
        assert self._profiler is not None
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(folder / f"host-{self.host:03d}.json"))

    def _timed_by_clock(self, step: Step) -> Step:
        def timed(*args: Any) -> torch.Tensor:
            start = time.perf_counter()
            result = step(*args)
            self._busy_s += time.perf_counter() - start
            return result

        return timed

    def _timed_by_events(self, step: Step) -> Step:
        def timed(*args: Any) -> torch.Tensor:
            start, stop = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = step(*args)
            stop.record()
            self._spans.append((start, stop))
            return result

        return timed


def replica_key(key: int, replica: int) -> int:
    """A replica's own random key, 63 bits."""
    return (key >> 1) ^ replica


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested dicts and lists with the function applied to each tensor; tuples become lists."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: map_tensors(value, function) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [map_tensors(value, function) for value in tree]
    return tree


def _numbers_of(data: bytes, count: int) -> list[int]:
    padded = data.ljust(count * TEXT_BYTES, b"\0")
    return [int.from_bytes(padded[at : at + TEXT_BYTES], "little") for at in range(0, len(padded), TEXT_BYTES)]


def _bytes_of(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(TEXT_BYTES, "little") for number in numbers)
