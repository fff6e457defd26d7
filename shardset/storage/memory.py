"""Objects in the memory of this process: what tests use in place of a bucket."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import NotFound
from shardset.storage.base import (
    ABSENT,
    ObjectWriter,
    Stat,
    Storage,
    accept_identical_object,
    check_generation,
    check_name,
    check_prefix,
    check_range,
    join,
    utf8,
)
from shardset.storage.remote import WholeWriter


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    generation: str
    crc32c: str

    def stat(self, name: str) -> Stat:
        return Stat(name=name, num_bytes=len(self.data), generation=self.generation, crc32c=self.crc32c)


_memories: dict[str, dict[str, _Object]] = {}
_memory_lock = threading.Lock()
_generations = itertools.count(1)


@dataclass(frozen=True, slots=True)
class MemoryStorage(Storage):
    """Objects in the memory of this process, shared by all that open the same `name`."""

    name: str
    prefix: str = ""

    is_remote: ClassVar[bool] = True
    is_shared: ClassVar[bool] = False
    reads_at_once: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.prefix:
            check_name(self.prefix, f"memory://{self.name}")

    @property
    def url(self) -> str:
        """`memory://name/prefix`."""
        return f"memory://{self.name}/{self.prefix}".rstrip("/")

    def stat(self, name: str) -> Stat:
        return self._get(name).stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        item, where = self._get(name), f"{self.url}/{name}"
        check_generation(item.generation, generation, where)
        return item.data[start : check_range(start, stop, len(item.data), where)]

    def read_with_stat(self, name: str, start: int = 0, stop: int | None = None) -> tuple[bytes, Stat]:
        item = self._get(name)
        return item.data[start : check_range(start, stop, len(item.data), f"{self.url}/{name}")], item.stat(name)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        wanted, skip = join(self.prefix, check_prefix(prefix, self.url)), len(join(self.prefix, ""))
        with _memory_lock:
            items = [(name, item) for name, item in self._objects.items() if name.startswith(wanted)]
        return (item.stat(name[skip:]) for name, item in sorted(items, key=lambda pair: utf8(pair[0])))

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        return WholeWriter(partial(self._store, self._full(name), if_generation))

    def _store(self, full: str, if_generation: str | None, data: bytes) -> None:
        crc32c = crc32c_text(crc32c_of(data))
        with _memory_lock:
            item = self._objects.get(full)
            if if_generation in (None, item.generation if item else ABSENT):
                self._objects[full] = _Object(data, str(next(_generations)), crc32c)
                return
        stored = item.stat(full) if item else None
        accept_identical_object(stored, len(data), crc32c, f"memory://{self.name}/{full}")

    def delete(self, name: str, *, generation: str | None = None) -> None:
        full = self._full(name)
        with _memory_lock:
            item = self._objects.get(full)
            if item and generation in (None, item.generation):
                del self._objects[full]

    @property
    def _objects(self) -> dict[str, _Object]:
        return _memories.setdefault(self.name, {})

    def _full(self, name: str) -> str:
        return join(self.prefix, check_name(name, self.url))

    def _get(self, name: str) -> _Object:
        item = self._objects.get(self._full(name))
        if item is None:
            raise NotFound(f"{self.url}/{name}: nothing is stored there; check the name")
        return item
