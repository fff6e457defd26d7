"""Objects in the memory of this process: what tests use in place of a bucket."""

import io
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import NotFound, PreconditionFailed
from shardset.storage.base import (
    ABSENT,
    Stat,
    Writer,
    accept_identical_object,
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


_memories: dict[str, dict[str, _Object]] = {}
_memory_lock = threading.Lock()
_generations = itertools.count(1)


@dataclass(frozen=True, slots=True)
class MemoryStorage:
    """Objects in the memory of this process, shared by all who open the same `name`."""

    name: str
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix:
            check_name(self.prefix, f"memory://{self.name}")

    @property
    def url(self) -> str:
        """`memory://name/prefix`."""
        return f"memory://{join(self.name, self.prefix) if self.prefix else self.name}"

    @property
    def is_remote(self) -> bool:
        """See Storage.is_remote."""
        return True

    @property
    def is_shared(self) -> bool:
        """See Storage.is_shared."""
        return False

    @property
    def reads_at_once(self) -> int:
        """See Storage.reads_at_once."""
        return 1

    def stat(self, name: str) -> Stat:
        """See Storage.stat."""
        return _memory_stat(name, self._get(name))

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        """See Storage.read."""
        item = self._get(name)
        if generation not in (None, item.generation):
            raise PreconditionFailed(
                f"{self.url}/{name}: was replaced (generation {item.generation}, not {generation})"
            )
        return item.data[start : check_range(start, stop, len(item.data), f"{self.url}/{name}")]

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """See Storage.list."""
        wanted, skip = join(self.prefix, check_prefix(prefix, self.url)), len(join(self.prefix, ""))
        with _memory_lock:
            items = [(name, item) for name, item in self._objects.items() if name.startswith(wanted)]
        return (_memory_stat(name[skip:], item) for name, item in sorted(items, key=lambda pair: utf8(pair[0])))

    def writer(self, name: str, *, if_generation: str | None = None) -> Writer:
        """See Storage.writer."""
        return _MemoryWriter(self, self._full(name), if_generation)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """See Storage.delete."""
        full = self._full(name)
        with _memory_lock:
            item = self._objects.get(full)
            if item and generation in (None, item.generation):
                del self._objects[full]

    def sweep(self) -> None:
        """See Storage.sweep: there are no temporaries."""

    def on_retry(self, tell: Callable[[], None]) -> Self:
        """See Storage.on_retry: nothing is tried again."""
        return self

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

    def _publish(self, full: str, data: bytes, if_generation: str | None) -> None:
        with _memory_lock:
            item = self._objects.get(full)
            generation = item.generation if item else ABSENT
            if if_generation in (None, generation):
                self._objects[full] = _Object(data, str(next(_generations)))
                return
        stored = _memory_stat(full, item) if item else None
        accept_identical_object(stored, len(data), crc32c_text(extend_crc32c(0, data)), f"memory://{self.name}/{full}")


def _memory_stat(name: str, item: _Object) -> Stat:
    crc = crc32c_text(extend_crc32c(0, item.data))
    return Stat(name=name, num_bytes=len(item.data), generation=item.generation, crc32c=crc)


class _MemoryWriter:
    def __init__(self, storage: MemoryStorage, full: str, if_generation: str | None) -> None:
        self._storage = storage
        self._full = full
        self._if_generation = if_generation
        self._data = io.BytesIO()

    def __enter__(self) -> Writer:
        self._data = io.BytesIO()
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""
        self._data.write(data)

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._storage._publish(self._full, self._data.getvalue(), self._if_generation)
