"""`single`: the simplest runtime, one process with one device."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardset.errors import ConfigError
from trainer.config import Precision
from trainer.runtime import cuda, torchtpu
from trainer.runtime.base import Runtime, Step, TensorBatch, moved, replica_key
from trainer.runtime.machine import check_precision


class Single(Runtime):
    """One process, one device: a CUDA device if there is one, else a TPU with TorchTPU, else the CPU."""

    strategy = "single"
    compile_backend = "inductor"

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        if self.device.type == "cuda":
            capability, name = torch.cuda.get_device_capability(self.device), torch.cuda.get_device_name(self.device)
            check_precision(precision, capability, name)
        self._busy_s = 0.0
        self._spans: dict[int, tuple[Any, Any]] = {}  # the events around a step, by the id of its row
        self._profiler: torch.profiler.profile | None = None
        self._copies = cuda.PinnedCopies(self.device) if self.device.type == "cuda" else None

    def _find_device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(torchtpu.DEVICE_TYPE if torchtpu.is_available() else "cpu")

    @property
    def steps_block(self) -> bool:
        return self.on_host

    def module_to_device(self, module: nn.Module) -> nn.Module:
        module = moved(module, self.device)
        # torch's stubs lack this argument.
        return module.to(memory_format=torch.channels_last) if self.device.type == "cuda" else module  # type: ignore

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        if self._copies is not None:
            return self._copies.start(batch)
        return batch if self.on_host else {name: tensor.to(self.device) for name, tensor in batch.items()}

    def to_host(self, tree: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree)

    def accelerate(self, modules: Iterable[nn.Module], *, compile: bool | None, tf32: bool) -> None:
        if self.device.type == "cuda":
            cuda.set_flags(tf32=tf32)
        if self.device.type == "tpu":
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        backend = torchtpu.COMPILE_BACKEND if self.device.type == "tpu" else self.compile_backend
        obstacle = cuda.compile_obstacle(self.device) if backend == "inductor" else None
        if compile and obstacle is not None:
            raise ConfigError(
                f"compile is true, but torch.compile can't make kernels here: {obstacle}; or set it to false"
            )
        if compile or (compile is None and not self.on_host and obstacle is None):
            for module in modules:
                module.compile(backend=backend, dynamic=False)

    def compiled(self, step: Step, name: str) -> Step:
        if self._copies is not None:
            return self._timed_by_events(step, self._copies)

        def timed(*args: Any) -> torch.Tensor:
            start = time.perf_counter()
            result = step(*args)
            self._busy_s += time.perf_counter() - start
            return result

        return timed

    def seed(self, key: int) -> None:
        torch.manual_seed(replica_key(key, self.replica))

    def number(self, value: float) -> float | torch.Tensor:
        # A Python number would be a constant of what a TPU compiles, so each step would compile anew.
        return torch.tensor(value, device=self.device) if self.device.type == "tpu" else value

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        spans = [self._spans.pop(id(row)) for row in rows if id(row) in self._spans]
        if self._copies is not None and spans:
            fetched = self._copies.read(rows, spans[-1][1])
        else:
            # One by one: a kernel that joins them would run after the steps that are under way.
            fetched = torch.stack([row.cpu() for row in rows])
        self._busy_s += sum(start.elapsed_time(stop) for start, stop in spans) / 1000
        return self.sum_replicas(fetched.double())

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

    def _timed_by_events(self, step: Step, copies: cuda.PinnedCopies) -> Step:
        make_event: Any = torch.cuda.Event  # its constructor is not typed

        def timed(batch: TensorBatch, *args: Any) -> torch.Tensor:
            if isinstance(batch, cuda.CopiedBatch):
                copies.wait(batch)
            start, stop = (make_event(enable_timing=True) for _ in range(2))
            start.record()
            result = step(batch, *args)
            stop.record()
            self._spans[id(result)] = start, stop
            return result

        return timed
