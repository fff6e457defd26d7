"""The bytes of a remote object, resumed at the byte reached and checked against its generation."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import PreconditionFailed, StorageError, TransientError
from shardset.storage.base import Stat, check_generation, check_range
from shardset.storage.retry import RetryPolicy

AT_ONCE_BYTES = 1 << 18  # takes the least processor time of 64 KiB to 4 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object as an answer describes it, and the bytes from `first` on, in pieces as they arrive.

    `crc32c` is the checksum that the server computed of the whole object; None if it did not.
    """

    stat: Stat
    first: int
    pieces: Iterable[bytes]
    crc32c: str | None = None


Request = Callable[[int, int | None, str | None], AbstractContextManager[Answer]]
"""Asks for the bytes [start, stop) of a generation."""


@dataclass
class Download:
    """The bytes [start, stop) of one generation of an object, in as many requests as that takes.

    Whenever that is the whole object, also as a range, the bytes are compared with the CRC32C that the server keeps.
    `farthest` is the last byte that any attempt reached; receiving lost or damaged bytes again does not move it.
    `found` are the facts about the object, as its last answer says.
    """

    policy: RetryPolicy
    where: str
    request: Request
    stat: Callable[[], Stat]
    start: int
    stop: int | None
    generation: str | None
    found: Stat = field(init=False)

    def __post_init__(self) -> None:
        self.farthest = self.start
        self._restart()

    def _restart(self) -> None:
        self._data = io.BytesIO()
        self._position = self.start
        self._end = self.stop
        self._pinned = self.generation
        self._crc32c: str | None = None

    def attempt(self) -> bytes:
        """All the bytes, from where the last attempt stopped; raises TransientError if some are still missing."""
        try:
            with self.request(self._position, self._end, self._pinned) as answer:
                self._end = self._accept(answer)
                self._collect(answer.pieces, self._end)
        except PreconditionFailed as error:
            if self.generation is not None:
                raise
            self._restart()
            raise TransientError(f"{self.where}: was replaced while it was read") from error
        if self._position != self._end:
            raise TransientError(f"{self.where}: the body ended at byte {self._position}, expected {self._end}")
        return self._checked(self._data.getvalue())

    def _end_of(self, stat: Stat) -> int:
        """The end of the wanted bytes of an object; raises if it is another generation or does not hold them."""
        check_generation(stat.generation, self._pinned, self.where)
        return check_range(self.start, self.stop, stat.num_bytes, self.where)

    def _accept(self, answer: Answer) -> int:
        """The end of the wanted bytes; raises unless the answer has the wanted generation and range.

        An answer is not enough to call the object another one: its metadata must say so too.
        """
        stat = answer.stat
        try:
            end = self._end_of(stat)
        except StorageError as error:
            self._end_of(self.stat())  # raises if the object really is another one
            raise TransientError(
                f"{self.where}: the answer is of {stat.num_bytes} bytes of generation {stat.generation}, the object is "
                "not"
            ) from error
        self._pinned = stat.generation  # later requests must not mix in bytes of another generation
        if self._position < end and answer.first != self._position:
            raise TransientError(f"{self.where}: answered from byte {answer.first}, expected {self._position}")
        if self._position == self.start and (self.start, end) == (0, stat.num_bytes):
            self._crc32c = answer.crc32c
        self.found = stat
        return end

    def _collect(self, pieces: Iterable[bytes], end: int) -> None:
        if self._position == end:
            return
        for piece in self.policy.paced(pieces, self.where):
            self._data.write(memoryview(piece)[: end - self._position])
            self._position = min(end, self._position + len(piece))
            self.farthest = max(self.farthest, self._position)
            if self._position == end:
                return

    def _checked(self, data: bytes) -> bytes:
        expected = self._crc32c
        if expected is None or crc32c_text(crc32c_of(data)) == expected:
            return data
        self._restart()
        raise TransientError(f"{self.where}: what arrived does not have the CRC32C that the server keeps, {expected}")


def arriving(
    read1: Callable[[int, bool], bytes], num_bytes: int = AT_ONCE_BYTES, *, decode: bool = False
) -> Iterator[bytes]:
    """The bytes of a body by its `read1`, each time up to so many of those that have arrived."""
    return iter(partial(read1, num_bytes, decode), b"")


def span_of(content_range: str) -> tuple[int, int]:
    """The first byte and the object's size in a `Content-Range`; raises ValueError without them."""
    bounds, _, num_bytes = content_range.removeprefix("bytes ").partition("/")
    return int(bounds.partition("-")[0].replace("*", "0")), int(num_bytes)
