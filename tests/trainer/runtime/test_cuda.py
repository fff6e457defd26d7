"""What CUDA devices get, as far as a machine without one can tell: the order of copies, flags,
refusals.
"""

import getpass
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from shardset.errors import ConfigError
from tests.makers.training import tiny_config
from trainer.data.device_feed import DeviceFeed
from trainer.model.learner import Learner
from trainer.runtime import cuda
from trainer.runtime.base import Single
from trainer.runtime.torchtpu import TorchTpu
from trainer.runtime.xla import Spmd


class LateStream:
    """Does nothing of what it is given until somebody waits for it, as a slow device would."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.num_given = 0
        self.lock = threading.Lock()

    def give(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.waiting.append(work)
            self.num_given += 1

    def do(self, until: int) -> None:
        with self.lock:
            while self.num_given - len(self.waiting) < until:
                self.waiting.pop(0)()

    def synchronize(self) -> None:
        pytest.fail("a stream was waited for on the host")


class LateEvent:
    def record(self, stream: LateStream) -> None:
        self.stream, self.at = stream, stream.num_given


class Compute:
    """The stream of the steps."""

    def wait_event(self, event: LateEvent) -> None:
        event.stream.do(event.at)


class LateCuda:
    """Like torch.cuda, each thread begins on device 0, and leaving a stream opens a context there
    if none is.
    """

    Event = LateEvent

    def __init__(self, device: int = 0) -> None:
        self.copies, self.reads = LateStream(), Compute()
        streams = iter([self.copies, self.reads])
        self.Stream = lambda device: next(streams)
        self.device, self.current, self.contexts = device, threading.local(), set[int]()

    def set_device(self, device: torch.device) -> None:
        self.current.device = self.device

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before = getattr(self.current, "device", 0)
        self.contexts.add(self.device)
        yield
        self.contexts.add(before)

    def current_stream(self, device: torch.device) -> Compute:
        return Compute()


class LateCopies(cuda.PinnedCopies):
    """The copies of a device that has not begun them when it says that it has."""

    def __init__(self, late: LateCuda) -> None:
        super().__init__(torch.device("cpu"), late)
        self.late = late.copies

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned, copy = tensor.clone(), torch.full_like(tensor, 99)
        self.late.give(lambda: copy.copy_(pinned))
        return copy

    def _keep(self, tensor: torch.Tensor, stream: Any) -> None: ...


def numbered(number, size=4):
    return {"image": torch.full((size, 2), number), "weight": torch.full((size,), float(number))}


def test_the_feed_runs_ahead_and_its_thread_opens_no_context_on_another_device():
    late = LateCuda(device=3)
    copies = LateCopies(late)

    def batches() -> Iterator[tuple[int, int, dict[str, Any]]]:
        for step in range(20):
            arrays = {name: one.numpy() for name, one in numbered(step).items()}
            yield 0, step, arrays | {"id": np.arange(4)}

    with DeviceFeed(batches(), copies.start) as feed:
        for fed in feed:
            assert isinstance(fed.tensors, cuda.CopiedBatch)
            copies.wait(fed.tensors)
            assert fed.tensors["image"].unique().tolist() == [fed.step]
    assert late.contexts == {3}


def test_rows_are_read_once_their_steps_are_done_and_no_later_step_is_waited_for():
    late = LateCuda()
    copies, steps = LateCopies(late), LateStream()
    rows, events = [torch.zeros(2) for _ in range(3)], []
    for number, row in enumerate(rows):
        steps.give(partial(row.fill_, number + 1))
        events.append(LateEvent())
        events[-1].record(steps)
    assert copies.read(rows[:2], events[1]).tolist() == [[1, 1], [2, 2]]
    assert (rows[2].tolist(), len(late.copies.waiting)) == ([0, 0], 0)


def test_tf32_is_for_products_and_convolutions_alike():
    flags = (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
    )
    try:
        for tf32 in (True, False):
            cuda.set_flags(tf32=tf32)
            assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == tf32
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, precision = flags
        torch.set_float32_matmul_precision(precision)


def test_compiling_without_a_compiler_or_the_headers_of_python_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", sys.executable)
    with monkeypatch.context() as without:
        without.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        assert "python3-dev" in str(Single("fp32").compile_obstacle())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    with pytest.raises(
        ConfigError, match=r"^compile is true, .*it needs a compiler, g\+\+ or clang\+\+, or .* CXX"
    ):
        Learner(Single("fp32"), tiny_config(None, "run", compile=True), 10, None)
    Learner(Single("fp32"), tiny_config(None, "run"), 10, None)


@pytest.mark.parametrize(
    ("name", "kind", "precision", "expected"),
    [
        ("sgd", cuda.Cuda, "bf16", {"fused": True}),
        ("sgd", cuda.Cuda, "fp16", {}),
        ("lamb", cuda.Cuda, "bf16", {}),
        ("nadam", cuda.Cuda, "bf16", {"capturable": True}),
        ("nadam", cuda.Cuda, "fp16", {}),
        ("adamw", Spmd, "bf16", {}),
        ("nadam", Spmd, "bf16", {"capturable": True}),
        ("adamw", TorchTpu, "bf16", {"capturable": True}),
        ("adamw", Single, "bf16", {}),
    ],
)
def test_the_options_of_an_optimizer_follow_the_device(name, kind, precision, expected):
    runtime = object.__new__(kind)  # whose device this machine lacks
    runtime.precision = precision
    assert runtime.optimizer_options(name) == expected


@pytest.mark.parametrize("error", [KeyError("no such uid"), OSError])  # the first until Python 3.12
def test_a_user_id_without_a_name_is_its_number(monkeypatch, error):
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=error))
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    cuda.name_user()
    assert getpass.getuser() == str(os.getuid())
