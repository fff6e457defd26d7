"""A storage at whose door a test stands: told of each call before it is made, it may change what is
read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardset.storage.base import ObjectWriter, Stat, Storage

Told = Callable[[str, str], None]
"""Told of (verb, name): `read`, `stat`, `delete`; of a writer `write` at its start, `close` and
`closed` at its end.
"""
Changed = Callable[[str, bytes], bytes]

_told: dict[str, Told] = {}
_changed: dict[str, Changed] = {}


@dataclass(frozen=True)
class Door:
    """The storage behind it, for everybody who has the same `key`; pickles within a process."""

    inner: Storage
    key: str

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    @property
    def is_shared(self) -> bool:
        return self.inner.is_shared

    @property
    def reads_at_once(self) -> int:
        return self.inner.reads_at_once

    @property
    def is_throttled(self) -> bool:
        return self.inner.is_throttled

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

    def list(self, prefix: str = "") -> Iterator[Stat]:
        return self.inner.list(prefix)

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        self._tell("write", name)
        return _Writer(self, name, self.inner.writer(name, if_generation=if_generation))

    def write(self, name: str, data: bytes, *, if_generation: str | None = None) -> None:
        with self.writer(name, if_generation=if_generation) as out:
            out.write(data)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        self._tell("delete", name)
        self.inner.delete(name, generation=generation)

    def sweep(self) -> None:
        self.inner.sweep()

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


def told(inner: Storage, key: str, tell: Told) -> Door:
    """A door whose calls are told."""
    _told[key] = tell
    return Door(inner, key)


def changing(inner: Storage, key: str, change: Changed) -> Door:
    """A door that gives what `change` makes of (`NAME START STOP`, the bytes read)."""
    _changed[key] = change
    return Door(inner, key)
