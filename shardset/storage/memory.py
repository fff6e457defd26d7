"""Objects in the memory of this process: what tests use in place of a bucket."""

import io
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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
        return _MemoryWriter(self, self._full(name), if_generation)

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


class _MemoryWriter:
    def __init__(self, storage: MemoryStorage, full: str, if_generation: str | None) -> None:
        self._storage = storage
        self._full = full
        self._if_generation = if_generation
        self._data = io.BytesIO()

    def __enter__(self) -> ObjectWriter:
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._data.write(data)

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            return
        data, objects = self._data.getvalue(), self._storage._objects
        crc32c = crc32c_text(crc32c_of(data))
        with _memory_lock:
            item = objects.get(self._full)
            if self._if_generation in (None, item.generation if item else ABSENT):
                objects[self._full] = _Object(data, str(next(_generations)), crc32c)
                return
        stored, where = item.stat(self._full) if item else None, f"memory://{self._storage.name}/{self._full}"
        accept_identical_object(stored, len(data), crc32c, where)
