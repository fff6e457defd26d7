"""Threads for jobs that may wait for minutes, and the futures of their results."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


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
                if job := self._jobs.get_nowait():
                    job[1].set_exception(CancelledError())
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Waits until all threads have ended; call `close` first."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while job := self._jobs.get():
            function, future = job
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is raised to all who wait
                future.set_exception(error)
            del job, function, future  # an idle thread must not keep the bytes of its last job


def results_in_order(name: str, num_threads: int, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of some calls in their order, of which `num_threads` run at a time."""
    threads = Threads(name, num_threads)
    pending: deque[Future[T]] = deque()
    try:
        for call in calls:
            if len(pending) == num_threads:
                yield pending.popleft().result()
            pending.append(threads.call(call))
        while pending:
            yield pending.popleft().result()
    finally:
        threads.close()
        threads.join()
