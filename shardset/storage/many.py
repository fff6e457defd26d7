"""Many calls at once: how many of which kind, and the daemon threads that make them."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

REQUESTS_AT_ONCE: Final = 32
"""Requests to a server for little: facts of an object, an index, a range of a shard."""
OBJECTS_AT_ONCE: Final = 16
"""Objects of some MB, whose bytes share the line and the memory."""
SHARDS_AT_ONCE: Final = 4
"""Shards, each of them completely in memory."""
MAX_READ: Final = 8 * 2**20
"""The bytes of a request for neighbours."""


class Threads:
    """Daemon threads that take jobs in turn.

    Unlike the pools of concurrent.futures, they don't keep the program alive while a job waits for
    the network.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls `function` on the next free thread; raises CancelledError after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise CancelledError
            self._jobs.put((function, future))
        return future

    def close(self) -> None:
        """Cancels the jobs that have not begun; each thread ends after its current job."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job and job[1].set_running_or_notify_cancel():
                    job[1].set_exception(CancelledError())
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until all threads have ended, for each so long; call `close` first."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        while job := self._jobs.get():
            function, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it is raised to all who wait
                    future.set_exception(error)
            del job, function, future  # an idle thread must not keep the bytes of its last job


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_bytes: int) -> Iterator[slice]:
    """Slices of `ranges`, one per request.

    `ranges` are half-open (start, stop), ascending by start. Neighbours share a request if they are
    at most `max_gap` bytes apart and the request stays within `max_bytes`; a longer range is a
    separate request.
    """
    first, end = 0, 0
    for number, (start, stop) in enumerate(ranges):
        if number > first and (
            start - end > max_gap or max(end, stop) - ranges[first][0] > max_bytes
        ):
            yield slice(first, number)
            first, end = number, start
        end = max(end, stop)
    if ranges:
        yield slice(first, len(ranges))


def in_order(
    at_once: int, items: Iterable[T], call: Callable[[T], R], *, shared: Threads | None = None
) -> Iterator[R]:
    """The result of `call` for each item, in order; `at_once` items are in work or wait for their
    turn to be returned.

    A single one is called in this thread, such as a read from a local disk, which answers faster
    than threads start. `shared` are the threads of several callers; without it, it starts its own.
    Once the caller stops, no other call begins.
    """
    if at_once <= 1:
        yield from map(call, items)
        return
    threads = shared or Threads("shardset-many", at_once)
    pending, remaining = deque[Future[R]](), iter(items)
    try:
        while True:
            for item in islice(remaining, at_once - len(pending)):
                pending.append(threads.call(partial(call, item)))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
        if not shared:
            threads.close()
            threads.join()
