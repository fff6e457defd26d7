"""Threads for jobs that may wait for minutes, futures that they settle, and a lock that survives a fork."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Daemon threads that take jobs in turn.

    Unlike the pools of concurrent.futures they do not keep the program alive: their jobs may wait for the network.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Runs `job` on the next free thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """Drops the jobs that have not begun; each thread ends with the job that it runs."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Waits until all threads have ended, which they do after `close`."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class ProcessLock:
    """A lock per process: a plain lock that another thread holds during a fork stays locked in the child."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        self._own().acquire()

    def __exit__(self, *exc: object) -> None:
        self._own().release()

    def _own(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())


def outcome_of(call: Callable[[], T]) -> T | BaseException:
    """What `call` returns or raises."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - handed to `settle`, which raises it to all who wait
        return error


def settle(future: Future[T], outcome: T | BaseException) -> None:
    """Gives a future its result or exception, unless it has one already."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
