"""A storage on which damage comes once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from shardset.storage.base import Stat, Storage


@dataclass
class DamagesOnce:
    """Another storage, of which the first read of each object (or its read number `turn`) has one
    bit flipped.

    The flipped byte is that at `at`. Where `at` is None it is in the middle.
    """

    inner: Storage
    turn: int = 0
    at: int | None = None
    num_reads: int = 0
    damaged: list[str] = field(default_factory=list)
    _turns: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __getattr__(self, name: str) -> Any:
        """What has nothing to do with reading is that of the other storage."""
        if name == "inner":  # of an object that is just being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        """The bytes, flipped the first time."""
        data = bytearray(self.inner.read(name, start, stop, generation=generation))
        with self._lock:
            self.num_reads += 1
            turn = self._turns[name] = self._turns.get(name, -1) + 1
            if turn != self.turn or not data:
                return bytes(data)
            self.damaged.append(name)
        data[len(data) // 2 if self.at is None else self.at] ^= 1
        return bytes(data)

    def read_with_stat(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[bytes, Stat]:
        """The same bytes as `read`, and the facts of `stat`."""
        return self.read(name, start, stop), self.stat(name)

    def stat(self, name: str) -> Stat:
        """As of a storage that keeps no checksums."""
        found = self.inner.stat(name)
        return Stat(
            name=found.name, num_bytes=found.num_bytes, generation=found.generation, crc32c=None
        )

    def on_retry(self, tell: Callable[[], None]) -> Self:
        """The same: the other storage is one that tries nothing again."""
        return self
