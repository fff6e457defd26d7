"""Batches on their way to the device, a few ahead of the step, and no failure lost on the way."""

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
"""Between two looks, where it waits, at whether it should."""

ON_DEVICE = ("image", "label", "weight", "flip", "mix")


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch at its place: tensors on the device, and the ids and weights of this host's samples."""

    epoch: int
    step: int
    tensors: dict[str, torch.Tensor]
    ids: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class DeviceFeed:
    """Iterates over `Fed` batches that a thread prepares; `wait_s` is the time the consumer has waited for them.

    An exception of the source is raised here, at the place of the batch that it prevented. torch_xla's own loader ends
    normally instead, and a broken shard becomes a short epoch.

    `stop` has the source end while its thread waits in it. `gives_up` is asked while the consumer waits: once it says
    so the batches end, and `gave_up` is set.
    """

    def __init__(
        self,
        batches: Iterator[tuple[int, int, dict[str, np.ndarray]]],
        put: Callable[[Any], Any],
        stop: Callable[[], None] = lambda: None,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wait_s = 0.0
        self.gave_up = False
        self._put = put
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
        """Ends the thread; batches that nobody took are dropped."""
        self._stopped.set()
        while self._thread.is_alive():
            self._stop()
            self._drain()
            self._thread.join(timeout=0.05)

    def _next(self) -> DeviceBatch | _Failure | None:
        start = time.perf_counter()
        item = self._taken()
        self.wait_s += time.perf_counter() - start
        return item

    def _taken(self) -> DeviceBatch | _Failure | None:
        while not self.gave_up:
            try:
                return self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self.gave_up = self._gives_up()
        return None

    def _drain(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    def _run(self, batches: Iterator[tuple[int, int, dict[str, np.ndarray]]]) -> None:
        try:
            for epoch, step, batch in batches:
                self._offer(DeviceBatch(epoch, step, self._placed(batch), batch["id"], batch["weight"]))
                if self._stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that consumes
            self._offer(_Failure(error))
        self._offer(None)

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        return self._put({name: torch.from_numpy(np.asarray(batch[name])) for name in ON_DEVICE if name in batch})

    def _offer(self, item: DeviceBatch | _Failure | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return
