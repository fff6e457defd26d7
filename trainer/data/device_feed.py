"""Moves batches to the device, a few ahead of the step that takes them, and loses no failure on the way."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

DEPTH = 2
"""Batches on the device that wait for their step."""

POLL_S = 0.2
"""How often a waiting thread checks whether it should stop."""

ON_DEVICE = ("image", "label", "weight", "flip", "mix")
"""The fields of a batch that go to the device."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One step's batch: tensors on the device, and on the host the ids and weights of this host's samples."""

    epoch: int
    step: int
    tensors: dict[str, torch.Tensor]
    ids: np.ndarray
    weights: np.ndarray

    @property
    def real_ids(self) -> np.ndarray:
        """The ids without those of pads."""
        real: np.ndarray = self.ids[self.weights > 0]
        return real


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class DeviceFeed:
    """Iterates over `DeviceBatch`es that a thread prepares; `wait_s` is how long the consumer has waited for them.

    Raises an exception of the source at the place of the batch that is missing. torch_xla's own loader ends normally
    instead, so that a damaged shard becomes a short epoch.

    `stop` ends the source while the thread waits in it. `gives_up` is asked while the consumer waits: once it returns
    True the batches end, and `gave_up` is set.
    """

    def __init__(
        self,
        batches: Iterator[tuple[int, int, dict[str, Any]]],
        to_device: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
        stop: Callable[[], None] = lambda: None,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wait_s = 0.0
        self.gave_up = False
        self._to_device = to_device
        self._stop, self._gives_up = stop, gives_up
        self._queue: queue.Queue[DeviceBatch | _Failure | None] = queue.Queue(DEPTH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches,), name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        while (item := self._next()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def __enter__(self) -> "DeviceFeed":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; drops the batches that nobody took."""
        self._stopped.set()
        while self._thread.is_alive():
            self._stop()
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _next(self) -> DeviceBatch | _Failure | None:
        start = time.perf_counter()
        item = self._poll()
        self.wait_s += time.perf_counter() - start
        return item

    def _poll(self) -> DeviceBatch | _Failure | None:
        while not self.gave_up:
            try:
                return self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self.gave_up = self._gives_up()
        return None

    def _run(self, batches: Iterator[tuple[int, int, dict[str, Any]]]) -> None:
        try:
            for epoch, step, batch in batches:
                tensors = {name: torch.from_numpy(np.asarray(batch[name])) for name in ON_DEVICE if name in batch}
                self._offer(DeviceBatch(epoch, step, self._to_device(tensors), batch["id"], batch["weight"]))
                if self._stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that consumes
            self._offer(_Failure(error))
        self._offer(None)

    def _offer(self, item: DeviceBatch | _Failure | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return
