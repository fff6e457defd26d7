"""Threads for jobs that may wait for minutes, and a lock that a fork does no harm."""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress


class Threads:
    """Daemon threads that take jobs in turn: leaving the program does not wait for them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Runs `job` on the next thread that is free."""
        self._jobs.put(job)

    def close(self) -> None:
        """Each thread ends with the job that it has; the others are not done."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Waits until all threads have ended; they do after `close`."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class ProcessLock:
    """A lock of each process: one that another thread held during a fork stays locked in the child."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        self._own().acquire()

    def __exit__(self, *exc: object) -> None:
        self._own().release()

    def _own(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())
