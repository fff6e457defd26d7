"""A storage at whose door a test stands: told of each call before it is made, it may change what is
read.
"""

from collections.abc import Callable
from typing import Any

from shardset.storage.base import ObjectWriter, Stat, Storage

Told = Callable[[str, str], None]
"""Told of (verb, name): `read`, `stat`, `delete`; of a writer `write` at its start, `close` and
`closed` at its end.
"""
Changed = Callable[[str, bytes], bytes]

_told: dict[str, Told] = {}
_changed: dict[str, Changed] = {}


class Door:
    """The storage behind it, for everybody who has the same `key`; pickles within a process."""

    def __init__(self, inner: Storage, key: str) -> None:
        self.inner, self.key = inner, key

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # of an object that is just being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def stat(self, name: str) -> Stat:
        self._tell("stat", name)
        return self.inner.stat(name)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        self._tell("read", name)
        data = self.inner.read(name, start, stop, generation=generation)
        return _changed[self.key](f"{name} {start} {stop}", data) if self.key in _changed else data

    def read_with_stat(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[bytes, Stat]:
        return self.read(name, start, stop), self.inner.stat(name)

    def writer(self, name: str, **condition: Any) -> ObjectWriter:
        self._tell("write", name)
        return _Writer(self, name, self.inner.writer(name, **condition))

    def write(self, name: str, data: bytes, **condition: Any) -> None:
        with self.writer(name, **condition) as out:
            out.write(data)

    def delete(self, name: str, **condition: Any) -> None:
        self._tell("delete", name)
        self.inner.delete(name, **condition)

    def on_retry(self, tell: Callable[[], None]) -> "Door":
        return Door(self.inner.on_retry(tell), self.key)

    def _tell(self, verb: str, name: str) -> None:
        if self.key in _told:
            _told[self.key](verb, name)


class _Writer:
    def __init__(self, door: Door, name: str, inner: ObjectWriter) -> None:
        self._door, self._name, self._inner = door, name, inner

    def __enter__(self) -> ObjectWriter:
        self._inner.__enter__()
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._inner.write(data)

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._door._tell("close", self._name)
        self._inner.__exit__(*exc)
        if exc[0] is None:
            self._door._tell("closed", self._name)


def told(inner: Storage, key: str, tell: Told) -> Any:
    """A door whose calls are told."""
    _told[key] = tell
    return Door(inner, key)


def changing(inner: Storage, key: str, change: Changed) -> Any:
    """A door that gives what `change` makes of (`NAME START STOP`, the bytes read)."""
    _changed[key] = change
    return Door(inner, key)
