"""A storage on which damage comes once."""

import threading
from collections.abc import Callable
from typing import Self

from shardset.storage.base import Stat, Storage
from tests.makers.doors import Door
from tests.makers.objects import flipped


class DamagesOnce(Door):
    """Another storage, of which the first read of each object (or its read number `turn`) has one
    bit flipped: of the byte `at`, or else of the one in the middle. It keeps no checksums.
    """

    def __init__(self, inner: Storage, turn: int = 0, at: int | None = None) -> None:
        super().__init__(inner, "")
        self.turn, self.at, self.num_reads = turn, at, 0
        self.damaged: list[str] = []
        self._turns: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        """The bytes, flipped the first time."""
        data = self.inner.read(name, start, stop, generation=generation)
        with self._lock:
            self.num_reads += 1
            turn = self._turns[name] = self._turns.get(name, -1) + 1
            if turn != self.turn or not data:
                return data
            self.damaged.append(name)
        return flipped(data, len(data) // 2 if self.at is None else self.at)

    def read_with_stat(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[bytes, Stat]:
        return self.read(name, start, stop), self.stat(name)

    def on_retry(self, tell: Callable[[], None]) -> Self:
        """The same: the other storage is one that tries nothing again."""
        return self

    def stat(self, name: str) -> Stat:
        """As of a storage that keeps no checksums."""
        found = self.inner.stat(name)
        return Stat(
            name=found.name, num_bytes=found.num_bytes, generation=found.generation, crc32c=None
        )
