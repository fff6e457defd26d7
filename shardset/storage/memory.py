"""Objects in the memory of this process: what tests use in place of a bucket."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from shardset.errors import NotFound
from shardset.storage import base
from shardset.storage.base import ObjectWriter, Stat
from shardset.storage.remote_folder import RemoteFolder, SpooledWriter


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    generation: str
    crc32c: str

    def stat(self, name: str) -> Stat:
        return Stat(
            name=name, num_bytes=len(self.data), generation=self.generation, crc32c=self.crc32c
        )


_memories: dict[str, dict[str, _Object]] = {}
_memory_lock = threading.Lock()
_generations = itertools.count(1)


@dataclass(frozen=True, slots=True)
class MemoryStorage(RemoteFolder):
    """Objects in the memory of this process, shared by all that open the same `bucket`."""

    scheme: ClassVar[str] = "memory"
    is_shared: ClassVar[bool] = False
    reads_at_once: ClassVar[int] = 1

    def _read(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> tuple[bytes, Stat]:
        item, where = self._objects.get(self._full(name)), f"{self.url}/{name}"
        if item is None:
            raise NotFound(f"{where}: nothing is stored there; check the name")
        base.check_generation(item.generation, generation, where)
        return item.data[start : base.check_range(start, stop, len(item.data), where)], item.stat(
            name
        )

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        with _memory_lock:
            items = [
                (name, item) for name, item in self._objects.items() if name.startswith(wanted)
            ]
        return (
            item.stat(name[skip:])
            for name, item in sorted(items, key=lambda pair: base.utf8(pair[0]))
        )

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        return SpooledWriter(
            partial(self._store, self._full(name), if_generation), f"{self.url}/{name}"
        )

    def _store(self, full: str, if_generation: str | None, written: SpooledWriter) -> None:
        data, crc32c = written.data(), written.crc32c
        with _memory_lock:
            item = self._objects.get(full)
            if if_generation in (None, item.generation if item else base.ABSENT):
                self._objects[full] = _Object(data, str(next(_generations)), crc32c)
                return
        stored = item.stat(full) if item else None
        base.accept_identical_object(stored, len(data), crc32c, f"memory://{self.bucket}/{full}")

    def delete(self, name: str, *, generation: str | None = None) -> None:
        full = self._full(name)
        with _memory_lock:
            item = self._objects.get(full)
            if item and generation in (None, item.generation):
                del self._objects[full]

    @property
    def _objects(self) -> dict[str, _Object]:
        return _memories.setdefault(self.bucket, {})
