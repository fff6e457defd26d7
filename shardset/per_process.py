"""Objects that each process makes for itself, because a fork breaks them: locks that another
thread held, threads that don't exist, connections that two processes would share.
"""

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A function whose results are kept, one for each list of arguments, as `functools.cache` does.

    Threads that ask at the same time get the same result. A forked process starts without results,
    and so does a pickled copy.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self.inherited: list[T] = []
        """The results of the processes that this one was forked from. They are kept, because
        destroying them here could end what those processes still use.
        """
        self._made: dict[tuple[Hashable, ...], T] = {}
        self._lock = threading.Lock()
        _instances.add(self)

    def __reduce__(self) -> tuple[type["PerProcess[T]"], tuple[Callable[..., T]]]:
        return PerProcess, (self._make,)

    def __call__(self, *key: Hashable) -> T:
        """The result of this process for these arguments, made at the first call."""
        try:
            return self._made[key]
        except KeyError:
            with self._lock:
                if key not in self._made:
                    self._made[key] = self._make(*key)
                return self._made[key]

    def take(self) -> list[T]:
        """All results of this process, which it forgets."""
        with self._lock:
            made, self._made = self._made, {}
        return list(made.values())

    def start_in_child(self) -> None:
        self.inherited += self._made.values()
        self._made, self._lock = {}, threading.Lock()


_instances: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


def _start_all() -> None:
    for each in _instances:
        each.start_in_child()


os.register_at_fork(after_in_child=_start_all)
