"""Processes and threads of a simulated cluster: one runs at a time, which one a seed decides, and
time is virtual.

The threads are real. Inside a simulation, Python's locks, events, queues, pools, clocks and sleeps
are those of the baton: whoever has to wait hands it on. So the whole product runs unchanged, and
the same seed gives the same schedule.
"""

import _thread
import concurrent.futures.thread
import logging
import math
import os
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

from shardset.per_process import PerProcess
from shardset.storage import retry

EVENTS_SHOWN = 20
WALL_S = 1_790_000_000.0
"""The wall clock at the start of a simulation."""

FOREVER = math.inf


class Failed(AssertionError):
    """What a simulation found wrong, with its last events."""


class Over(BaseException):
    """Ends the threads that are left when a simulation is over."""


@dataclass(eq=False)
class Process:
    """Threads that are killed and stopped together.

    `fate` is called after so many of its requests.
    """

    name: str
    pid: int
    resumes: float = 0.0
    num_requests: int = 0
    fate: tuple[int, Callable[["Process"], None]] | None = None

    @property
    def is_killed(self) -> bool:
        return self.resumes == FOREVER

    def kill(self) -> None:
        """Nothing of the process runs ever again: no `finally`, and its temporary files stay."""
        self.resumes = FOREVER


@dataclass(eq=False)
class Task:
    """A thread, which waits until `ready` or for a time."""

    process: Process
    name: str
    ready: Callable[[], bool] | None = None
    until: float = 0.0
    ident: int = 0
    is_done: bool = False
    error: BaseException | None = None
    result: Any = None
    wake: Any = field(default_factory=_thread.allocate_lock)
    gone: Any = field(default_factory=_thread.allocate_lock)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or never will."""
        return self.is_done or self.process.is_killed


class Baton:
    """A simulation: `run` it once.

    `limit_s` is the virtual time within which everything must end.
    """

    def __init__(self, seed: int, limit_s: float = 4 * 3600) -> None:
        self.random, self.now, self.wall_jump_s = random.Random(seed), 0.0, 0.0
        self.events: list[str] = []
        self._limit_s = limit_s
        self._tasks: list[Task] = []
        self._running: Task | None = None
        self._main_lock = _thread.allocate_lock()
        self._is_over = False
        self._failure: BaseException | None = None
        self._pids, self._hashes = 100_000, 0

    def run(self, main: Callable[[], Any]) -> Any:
        """The result of `main`; raises what it raised, or Failed if a thread failed or all wait for
        ever.
        """
        self._main_lock.acquire()
        with _installed(self):
            task = self._running = self.spawn(main, "main", self.process("main"))
            task.wake.release()
            self._main_lock.acquire()
            self._end_all()
        if self._failure:
            self._failure.add_note("\n".join(["the last events:", *self.events[-EVENTS_SHOWN:]]))
            raise self._failure
        return task.result

    def process(self, name: str) -> Process:
        """A new process."""
        self._pids += 1
        return Process(name, self._pids)

    def spawn(self, function: Callable[[], Any], name: str, process: Process) -> Task:
        """A thread of a process that calls the function when its turn comes."""
        task = Task(process, name, until=self.now)
        task.wake.acquire()
        task.gone.acquire()
        self._tasks.append(task)
        _thread.start_new_thread(self._live, (task, function))
        return task

    def start(
        self, function: Callable[..., Any], name: str, process: Process | None = None
    ) -> Task:
        """A thread whose errors are for whoever looks at `error`; by default of a process of its
        own.
        """

        def run() -> Any:
            try:
                return function()
            except Exception as error:  # noqa: BLE001 - `error` has it
                task.error = error

        task = self.spawn(run, name, process or self.process(name))
        return task

    @property
    def running(self) -> Task:
        """The running task."""
        assert self._running is not None
        return self._running

    def current(self) -> Task | None:
        """The running task, if this is its thread."""
        running = self._running
        return running if running and running.ident == _thread.get_ident() else None

    def wait(self, ready: Callable[..., bool] | None = None, seconds: float = FOREVER) -> None:
        """Hands the baton on until `ready`, or for some seconds."""
        me = self.current()
        if me is None or self._is_over:
            raise Over
        me.ready, me.until = ready, self.now + max(0.0, seconds)
        self._hand_on(me)
        me.ready = None

    @property
    def wall_clock(self) -> datetime:
        """Date and time, which may jump."""
        return datetime.fromtimestamp(WALL_S + self.now + self.wall_jump_s, UTC)

    def sleep(self, seconds: float) -> None:
        """Hands the baton on for some seconds."""
        self.wait(None, seconds)

    def next_hash(self) -> int:
        """A number for each object whose place in a set must not depend on its address."""
        self._hashes += 1
        return self._hashes

    def wait_for_peace(self) -> None:
        """Hands the baton on until nobody else will ever run again."""
        me = self.running
        self.wait(
            lambda: all(self._due(task) == FOREVER for task in self._living() if task is not me)
        )

    def note(self, text: str) -> None:
        """Records an event of the running process."""
        self.events.append(f"{self.now:9.3f} {self.running.process.name}: {text}")

    def fail(self, text: str) -> None:
        """Ends the simulation: it has found something wrong."""
        task = self.current()
        self._give_up(Failed(text))
        assert task is not None
        task.wake.acquire()
        raise Over

    # --- who is next ------------------------------------------------------------------------------

    def _hand_on(self, me: Task) -> None:
        chosen = self._choose()
        if chosen is me:
            return
        if chosen is not None:
            self._running = chosen
            chosen.wake.release()
        if not me.is_done:
            me.wake.acquire()
            if self._is_over:
                raise Over

    def _choose(self) -> Task | None:
        """The next task at its time; None ends the simulation."""
        while not self._is_over:
            times = [self._due(task) for task in self._tasks if not task.is_done]
            due = [task for task, at in zip(self._living(), times, strict=True) if at <= self.now]
            if due:
                return due[0] if len(due) == 1 else self.random.choice(due)
            soonest = min(times, default=FOREVER)
            if soonest == FOREVER:
                waiting = (f"{task.process.name}/{task.name}" for task in self._living())
                self._give_up(Failed(f"all wait for ever: {', '.join(waiting)}"))
            elif soonest > self._limit_s:
                self._give_up(Failed(f"not at its end after {self._limit_s:.0f} s of virtual time"))
            self.now = soonest
        return None

    def _living(self) -> list[Task]:
        return [task for task in self._tasks if not task.is_done]

    def _due(self, task: Task) -> float:
        if task.process.resumes == FOREVER:
            return FOREVER
        wakes = (
            self.now
            if task.until > self.now and task.ready is not None and task.ready()
            else task.until
        )
        return max(wakes, task.process.resumes)

    def _live(self, task: Task, function: Callable[[], Any]) -> None:
        task.wake.acquire()
        task.ident = _thread.get_ident()
        try:
            if not self._is_over:
                task.result = function()
        except Over:
            pass
        except BaseException as error:  # noqa: BLE001 - no thread may end by an error
            if not self._is_over:
                self._give_up(
                    error if isinstance(error, Failed) or task.name == "main" else _uncaught(error)
                )
        finally:
            task.is_done = True
            self._tasks.remove(task)
            if not self._is_over:
                self._end_or_hand_on(task)
            task.gone.release()

    def _end_or_hand_on(self, task: Task) -> None:
        if task.name == "main":
            self._give_up(None)
        self._hand_on(task)

    def _give_up(self, failure: BaseException | None) -> None:
        if not self._is_over:
            self._failure, self._is_over = failure, True
            self._main_lock.release()

    def _end_all(self) -> None:
        """Has every thread that is left raise Over, one by one."""
        logging.disable(logging.CRITICAL)  # pools report each end
        try:
            for task in tuple(self._tasks):
                self._running = task
                task.wake.release()
                task.gone.acquire()
        finally:
            logging.disable(logging.NOTSET)
            self._running = None


def _uncaught(error: BaseException) -> Failed:
    failed = Failed(f"a thread ended by {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class _Lock:
    """A lock whose waiters hand the baton on.

    Conditions, events, semaphores and queues are made of it.
    """

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_held and blocking:
            baton().wait(lambda: not self._is_held, FOREVER if timeout < 0 else timeout)
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


_RealThread = threading.Thread


class _Thread(_RealThread):
    """A thread of the process that starts it."""

    _task: Task | None = None
    _hash = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        # Timer, and the object of a thread that Python did not start, call this one for themselves;
        # whether there is such an object depends on the system's numbers of threads that have
        # ended.
        if isinstance(self, _Thread) and _is_inside():
            self._hash = baton().next_hash()
        _RealThread.__init__(self, *args, **options)

    def __hash__(self) -> int:
        # a pool holds its threads in a set, whose order is then that of every run
        return self._hash or id(self)

    def start(self) -> None:
        if _is_inside():
            self._task = baton().spawn(self.run, self.name, baton().running.process)
        else:
            super().start()

    def is_alive(self) -> bool:
        return super().is_alive() if self._task is None else not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        if (task := self._task) is None:
            super().join(timeout)
        elif _is_inside():
            baton().wait(lambda: task.is_done, FOREVER if timeout is None else timeout)


# --- what Python and the product call -------------------------------------------------------------

_active: Baton | None = None


def baton() -> Baton:
    """The simulation that runs."""
    if _active is None:
        raise Over
    return _active


def _is_inside() -> bool:
    return _active is not None and _active.current() is not None


def clock(*_: object) -> float:
    """Virtual seconds since the start."""
    return baton().now


def sleep(seconds: float) -> None:
    """Hands the baton on for some seconds."""
    baton().wait(None, seconds)


def draw() -> float:
    """A random number below 1."""
    return baton().random.random()


def _policy() -> retry.RetryPolicy:
    return retry.RetryPolicy(clock=clock, sleep=sleep, jitter=draw)


@contextmanager
def _installed(simulation: Baton) -> Iterator[None]:
    global _active
    simulated: list[tuple[Any, str, Callable[..., Any]]] = [
        (threading, "Lock", _Lock),
        (threading, "_allocate_lock", _Lock),
        (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]  # in no stub
        (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]  # in no stub
        (time, "sleep", sleep),
        (time, "monotonic", clock),
        (time, "perf_counter", clock),
        (threading, "_time", clock),  # these two have taken the function from its module
        (queue, "time", clock),
        (time, "clock_gettime", clock),
        (time, "time", lambda: baton().wall_clock.timestamp()),
        (os, "getpid", lambda: baton().running.process.pid),
        (uuid, "uuid4", lambda: uuid.UUID(int=baton().random.getrandbits(128), version=4)),
    ]
    replaced = [(module, name, getattr(module, name)) for module, name, _ in simulated]
    with ExitStack() as exits:
        for (module, name, real), (_, _, inside) in zip(replaced, simulated, strict=True):
            exits.enter_context(patch.object(module, name, _either(inside, real)))
        exits.enter_context(patch.object(threading, "Thread", _Thread))
        exits.enter_context(
            patch.object(concurrent.futures.thread, "_global_shutdown_lock", _Lock())
        )
        exits.enter_context(patch.object(retry, "_of_process", _policy))
        # No body is slow here, so no thread looks for those that are.
        exits.enter_context(patch.object(PerProcess, "__call__", _per_process()))
        _active = simulation
        try:
            yield
        finally:
            _active = None


def _per_process() -> Callable[..., Any]:
    """What a PerProcess does when it is called: each process of the simulation has its results."""
    made: dict[tuple[object, ...], object] = {}

    def call(self: PerProcess[Any], *key: object) -> object:
        whole = (baton().running.process, self, *key)
        if whole not in made:
            made[whole] = self._make(*key)
        return made[whole]

    return _either(call, PerProcess.__call__)


def _either(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """The simulated one in the threads of the simulation, the real one in all others."""
    return lambda *args, **options: (simulated if _is_inside() else real)(*args, **options)
