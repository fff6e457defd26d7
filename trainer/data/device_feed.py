"""Moves batches to the device, a few ahead of the step that takes them, and passes on every
failure.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.data.rows import ids_as_floats

DEPTH = 2
"""The number of batches that wait on the device."""

POLL_S = 0.2
"""How often a waiting thread checks whether it should stop."""

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
        self._to_device, self._num_rows = to_device, num_rows
        self._names = (*ON_DEVICE, "id") if with_ids else ON_DEVICE
        self._stop, self._gives_up = stop, gives_up
        self._queue: queue.Queue[DeviceBatch | BaseException | None] = queue.Queue(DEPTH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches,), name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        while (item := self._next()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> "DeviceFeed":
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends the thread and drops the batches that were not taken."""
        self._stopped.set()
        # The thread may wait for the source or for room in the queue, more than once.
        while self._thread.is_alive():
            self._stop()
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _next(self) -> DeviceBatch | BaseException | None:
        start = time.perf_counter()
        try:
            while not self.gave_up:
                with suppress(queue.Empty):
                    return self._queue.get(timeout=POLL_S)
                self.gave_up = self._gives_up()
            return None
        finally:
            self.wait_s += time.perf_counter() - start

    def _run(self, batches: Iterator[tuple[int, int, dict[str, Any]]]) -> None:
        try:
            for epoch, step, batch in batches:
                arrays = filled_up(
                    {name: np.asarray(batch[name]) for name in self._names if name in batch},
                    self._num_rows,
                )
                if "id" in arrays:
                    arrays["id"] = ids_as_floats(arrays["id"], arrays["weight"])
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
                self._offer(
                    DeviceBatch(epoch, step, self._to_device(tensors), batch["id"], batch["weight"])
                )
                if self._stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that consumes
            self._offer(error)
        self._offer(None)

    def _offer(self, item: DeviceBatch | BaseException | None) -> None:
        # Waits in short turns: the consumer may leave while the queue is full.
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return


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
