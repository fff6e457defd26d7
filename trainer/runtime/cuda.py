"""A CUDA device, and what makes it fast: flags of the process, kernels of torch.compile, and copies
during the computation.
"""

import getpass
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config import Precision
from trainer.runtime.base import Single, Step, TensorBatch
from trainer.runtime.machine import check_precision


def set_flags(*, tf32: bool) -> None:
    """Sets how CUDA devices compute in float32; cuDNN takes the fastest of its algorithms, which it
    tries.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True


def name_user() -> None:
    """Names the user where the system can't, as in containers with another id: torch calls the
    folder of its compiled kernels after the user.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


class CopiedBatch(dict[str, torch.Tensor]):
    """A batch of which copies have begun. `copied` is the event of their end."""

    copied: Any = None


class PinnedCopies:
    """Copies batches to a CUDA device, and the rows of steps back, on separate streams during
    the steps, none of which waits on the host.

    Batches go through pinned memory, which torch keeps, and reuses when its copies are done.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda  # its streams and events are not typed
        self._stream, self._reads = cuda.Stream(device), cuda.Stream(device)

    def start(self, batch: TensorBatch) -> CopiedBatch:
        """The batch on the device once its copies are done.

        The caller may change its own at once.
        """
        # The thread that copies begins on device 0, to which leaving the stream would return: a
        # context for nothing.
        self._cuda.set_device(self._device)
        with self._cuda.stream(self._stream):
            copies = CopiedBatch((name, self._copy(tensor)) for name, tensor in batch.items())
            copies.copied = self._cuda.Event()
            copies.copied.record(self._stream)
            return copies

    def wait(self, batch: CopiedBatch) -> None:
        """Has the current stream of the device, and not the host, wait for the batch."""
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(batch.copied)
        for tensor in batch.values():
            self._keep(tensor, stream)

    def read(self, rows: Sequence[torch.Tensor], done: Any) -> torch.Tensor:
        """The rows, stacked, on the host once the event is past. The device continues meanwhile."""
        with self._cuda.stream(self._reads):
            self._reads.wait_event(done)
            return torch.stack(list(rows)).cpu()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the allocator from reusing the tensor, which is of the stream that copies, before
        the other is done.
        """
        tensor.record_stream(stream)


class Cuda(Single):
    """One process with one CUDA device."""

    compiles_models, steps_block = True, False
    compiler = "CC", ("gcc", "clang")
    capturable = ("nadam",)

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        capability = torch.cuda.get_device_capability(self.device)
        check_precision(precision, capability, torch.cuda.get_device_name(self.device))
        self._copies = PinnedCopies(self.device)
        # the events of the ends of steps, by the ids of their rows
        self._ends: dict[int, Any] = {}

    def _find_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def module_to_device(self, module: nn.Module) -> nn.Module:
        module = super().module_to_device(module)
        lay_out: Any = module.to  # its types lack this argument
        lay_out(memory_format=torch.channels_last)
        return module

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        return self._copies.start(batch)

    def accelerate(self, modules: Iterable[nn.Module], *, compile: bool | None, tf32: bool) -> None:
        set_flags(tf32=tf32)
        super().accelerate(modules, compile=compile, tf32=tf32)

    def compile_obstacle(self) -> str | None:
        has_triton = importlib.util.find_spec("triton") is not None
        return super().compile_obstacle() or (None if has_triton else "it needs the package triton")

    def optimizer_options(self, name: str) -> dict[str, Any]:
        # a fused SGD whose first step is skipped continues with momentum that nobody has set
        if self.precision == "fp16":
            return {}
        if name in ("sgd", "momentum", "adam", "adamw"):
            return {"fused": True}  # one kernel for all weights
        return super().optimizer_options(name)

    def compiled(self, step: Step, name: str) -> Step:
        def noted(batch: TensorBatch, *args: Any) -> torch.Tensor:
            if isinstance(batch, CopiedBatch):
                self._copies.wait(batch)
            result = step(batch, *args)
            self._ends[id(result)] = torch.cuda.current_stream().record_event()
            return result

        return noted

    def _read(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        *_, end = (self._ends.pop(id(row)) for row in rows)
        return self._copies.read(rows, end)
