"""Moves batches to the device, a few ahead of the step that takes them, and passes on every
failure.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.data.step_rows import ids_as_floats

DEPTH = 3
"""The number of batches that are prepared ahead."""

POLL_S = 0.2
"""How often a waiting consumer asks whether to give up."""

STOP_S = 0.05
"""How often the source is stopped until the thread no longer waits for it."""

ON_DEVICE = ("image", "label", "weight", "flip", "mix")
"""The fields of a batch that go to the device; `id` goes, as floats, where what becomes of each
sample is asked for.
"""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The batch of one step: tensors on the device; ids and weights of this host's samples on the
    host.
    """

    epoch: int
    step: int
    tensors: dict[str, torch.Tensor]
    ids: np.ndarray
    weights: np.ndarray

    @property
    def real_ids(self) -> np.ndarray:
        """The ids without the pads."""
        real: np.ndarray = self.ids[self.weights > 0]
        return real


class DeviceFeed:
    """Iterates over `DeviceBatch`es that a thread prepares.

    `wait_s` is how long the consumer has waited for them.

    Tensors have at least `num_rows` rows: a smaller share of a batch repeats samples with weight 0
    (see `filled_up`). `with_ids` adds `id` to them (see `ids_as_floats`).

    Raises an exception of the source in place of the batch that is missing. The loader of torch_xla
    ends normally instead, so that a damaged shard would look like a short epoch.

    `stop` must end the source while the thread waits for it. `gives_up` is called while the
    consumer waits: once it returns True the batches end, and `gave_up` is set.
    """

    def __init__(
        self,
        batches: Iterator[tuple[int, int, dict[str, Any]]],
        to_device: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
        stop: Callable[[], None] = lambda: None,
        gives_up: Callable[[], bool] = lambda: False,
        *,
        num_rows: int = 0,
        with_ids: bool = False,
    ) -> None:
        self.wait_s = 0.0
        self.gave_up = False
        self._batches, self._to_device, self._num_rows = batches, to_device, num_rows
        self._names = (*ON_DEVICE, "id") if with_ids else ON_DEVICE
        self._stop, self._gives_up = stop, gives_up
        self._thread = ThreadPoolExecutor(1, "feed")
        self._ahead = deque(self._thread.submit(self._prepare) for _ in range(DEPTH))

    def __iter__(self) -> Iterator[DeviceBatch]:
        while self._waited_for(self._ahead[0]):
            batch = self._ahead.popleft().result()
            if batch is None:
                return
            self._ahead.append(self._thread.submit(self._prepare))
            yield batch

    def __enter__(self) -> "DeviceFeed":
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends the thread and drops the batches that were not taken."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop()
        running = [batch for batch in self._ahead if not batch.cancelled()]
        while wait(running, STOP_S).not_done:  # it may wait for the source more than once
            self._stop()
        self._thread.shutdown()
        self._ahead.clear()
        self._batches = iter(())  # closes the source, if it is a generator

    def _waited_for(self, batch: Future[DeviceBatch | None]) -> bool:
        """Waits until the batch is there; False if the consumer gives up before."""
        start = time.perf_counter()
        while not self.gave_up and not wait([batch], POLL_S).done:
            self.gave_up = self._gives_up()
        self.wait_s += time.perf_counter() - start
        return not self.gave_up

    def _prepare(self) -> DeviceBatch | None:
        """The next batch; None at the end."""
        if (step := next(self._batches, None)) is None:
            return None
        epoch, number, batch = step
        arrays = filled_up(
            {name: np.asarray(batch[name]) for name in self._names if name in batch},
            self._num_rows,
        )
        if "id" in arrays:
            arrays["id"] = ids_as_floats(arrays["id"], arrays["weight"])
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return DeviceBatch(epoch, number, self._to_device(tensors), batch["id"], batch["weight"])


def filled_up(arrays: dict[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """The arrays with at least `num_rows` rows: samples are repeated, first ones first, with weight
    0.

    Repeats, because BatchNorm sees every row: its statistics then cover real images only.
    """
    size = len(arrays["weight"])
    if size >= num_rows:
        return arrays
    rows = np.arange(num_rows) % size
    repeated = {name: array[rows] for name, array in arrays.items()}
    repeated["weight"][size:] = 0
    return repeated
