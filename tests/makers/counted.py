"""A bucket in memory that counts the requests to it and their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, NamedTuple
from unittest.mock import patch

from shardset.storage import memory
from shardset.storage.base import Stat
from shardset.storage.memory import MemoryStorage
from shardset.storage.remote_folder import SpooledWriter

PAGE = 1000
"""So many objects come with one request for a list."""


class Request(NamedTuple):
    """`read`, `stat`, `list`, `write` or `delete` of an object, and its bytes, up or down."""

    verb: str
    url: str
    num_bytes: int = 0


class CountedStorage(MemoryStorage):
    """A bucket as far as others can tell, which keeps what it was asked."""

    reads_at_once: ClassVar[int] = 16
    asked: ClassVar[list[Request]] = []

    def stat(self, name: str) -> Stat:
        self.asked.append(Request("stat", f"{self.url}/{name}"))
        return super()._read(name, 0, 0, None)[1]

    def _read(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> tuple[bytes, Stat]:
        num_bytes = 0
        try:
            found = super()._read(name, start, stop, generation)
            num_bytes = len(found[0])
            return found
        finally:
            self.asked.append(Request("read", f"{self.url}/{name}", num_bytes))

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        page = Request("list", f"memory://{self.bucket}/{wanted}")
        self.asked.append(page)
        for number, stat in enumerate(super()._list(wanted, skip), start=1):
            yield stat
            if number % PAGE == 0:
                self.asked.append(page)

    def _store(self, full: str, if_generation: str | None, written: SpooledWriter) -> None:
        name = f"memory://{self.bucket}/{full}"
        self.asked.append(Request("write", name, written.num_bytes))
        super()._store(full, if_generation, written)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        self.asked.append(Request("delete", f"{self.url}/{name}"))
        super().delete(name, generation=generation)


@contextmanager
def counted() -> Iterator[list[Request]]:
    """A block in which `memory://` counts; its requests so far."""
    CountedStorage.asked.clear()
    with patch.object(memory, "MemoryStorage", CountedStorage):
        yield CountedStorage.asked
