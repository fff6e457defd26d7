"""A folder of a server, which may refuse, break off or drip: one throttle, retry and deadline for
all schemes.

A read is resumed at the byte reached and checked against its generation.
"""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import urllib3

from shardset.errors import NotFound, PreconditionFailed, StorageError, TransientError
from shardset.per_process import PerProcess
from shardset.storage.base import Stat, check_generation, check_range, stat_or_none
from shardset.storage.checked import DamagedObject, facts_of, read_twice
from shardset.storage.remote import RemoteFolder
from shardset.storage.retry import RetryPolicy, Throttle, persist

T = TypeVar("T")
_Running = dict[urllib3.BaseHTTPResponse, tuple[RetryPolicy, float]]

# one allocation for a usual range: pieces and their sum take up to three times as long
_PIECE_BYTES = 8 << 20
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object as an answer describes it, and the bytes from `first` on, in pieces as they
    arrive.
    """

    stat: Stat
    first: int
    pieces: Iterable[bytes]


def pieces_of(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """The bytes of a body as they are sent."""
    return iter(partial(response.read, _PIECE_BYTES, decode_content=False), b"")


def span_of(status: int, headers: Mapping[str, str]) -> tuple[int, int]:
    """The first byte of an answer and the size of the object; KeyError or ValueError if its headers
    lack them.
    """
    if status != 206:
        return 0, int(headers.get("X-Goog-Stored-Content-Length") or headers["Content-Length"])
    bounds, _, num_bytes = headers["Content-Range"].removeprefix("bytes ").partition("/")
    return int(bounds.partition("-")[0].replace("*", "0")), int(num_bytes)


def refuse_compressed(encoding: str | None, name: str, where: str) -> None:
    """Raises StorageError for an object whose bytes are the gzip of what its name says."""
    if encoding == "gzip" and not name.endswith((".gz", ".tgz")):
        raise StorageError(
            f"{where}: is stored with `Content-Encoding: gzip`, so it is not the file itself;"
            " upload it again without compression (gcloud storage cp without --gzip-...)"
        )


@contextmanager
def in_time(policy: RetryPolicy, response: urllib3.BaseHTTPResponse, where: str) -> Iterator[None]:
    """Closes the response after the block; raises TransientError there if its body is slower than
    64 KiB/s.
    """
    until = policy.clock() + policy.deadline_of(response.length_remaining or 0)
    running = _running()
    running[response] = policy, until
    try:
        yield
    except (OSError, urllib3.exceptions.HTTPError) as error:
        if policy.clock() < until:
            raise
        raise TransientError(f"{where}: slower than 64 KiB/s") from error
    finally:
        del running[response]
        response.close()


@PerProcess
def _running() -> _Running:
    """The answers that this process receives, with their deadlines.

    A thread breaks off what lasts longer.

    To look between pieces instead, these would have to be as small as what arrives at once: with
    TLS, that takes a third more processor time.
    """
    running: _Running = {}

    def watch() -> None:
        while True:
            time.sleep(_LOOK_S)
            for response, (policy, until) in list(running.items()):
                if policy.clock() > until:
                    with suppress(OSError, RuntimeError, ValueError):  # it has just ended
                        response.shutdown()

    threading.Thread(target=watch, name="shardset-deadlines", daemon=True).start()
    return running


@dataclass
class _Download:
    """The bytes [start, stop) of one generation of an object, in as many requests as that takes.

    Whenever that is the whole object, also as a range, the bytes are compared with its CRC32C, and
    received once more if they differ. `farthest` is the last byte that any attempt reached;
    receiving lost or damaged bytes again does not move it.
    """

    folder: "ServedFolder"
    name: str
    start: int
    stop: int | None
    generation: str | None

    def __post_init__(self) -> None:
        self.where = f"{self.folder.url}/{self.name}"
        if (self.start, self.stop) != (0, None):
            self.where += f" bytes {self.start} to {self.stop or 'the end'}"
        self.farthest = self.start
        self._damaged: str | None = None
        self._restart()

    def _restart(self) -> None:
        self._pieces: list[bytes] = []
        self._position = self.start
        self._end = self.stop
        self._pinned = self.generation
        self._crc32c: str | None = None

    def attempt(self) -> tuple[bytes, Stat]:
        """All the bytes, and the facts about the object; goes on where the last attempt stopped.

        Raises TransientError if some bytes are still missing.
        """
        try:
            with self.folder.request(
                self.where, self.name, self._position, self._end, self._pinned
            ) as answer:
                self._end = self._accept(answer)
                self._collect(answer.pieces, self._end)
        except PreconditionFailed as error:
            if self.generation is not None:
                raise
            self._restart()
            raise TransientError(f"{self.where}: was replaced while it was read") from error
        if self._position != self._end:
            raise TransientError(
                f"{self.where}: the body ended at byte {self._position}, expected {self._end}"
            )
        return self._checked(b"".join(self._pieces)), answer.stat

    def end_of(self, stat: Stat) -> int:
        """The end of the wanted bytes of an object; raises if it is another generation or does not
        hold them.
        """
        check_generation(stat.generation, self._pinned, self.where)
        return check_range(self.start, self.stop, stat.num_bytes, self.where)

    def _accept(self, answer: Answer) -> int:
        """The end of the wanted bytes; raises unless the answer has the wanted generation and
        range.

        An answer is not enough to call the object another one: its metadata must say so too.
        """
        stat = answer.stat
        try:
            end = self.end_of(stat)
        except StorageError as error:
            self.end_of(self.folder.stat(self.name))  # raises if the object really is another one
            raise TransientError(
                f"{self.where}: the answer is of {stat.num_bytes} bytes of generation"
                f" {stat.generation}, the object is not"
            ) from error
        self._pinned = stat.generation  # later requests must not mix in bytes of another generation
        if self._position < end and answer.first != self._position:
            raise TransientError(
                f"{self.where}: answered from byte {answer.first}, expected {self._position}"
            )
        if self._position == self.start and (self.start, end) == (0, stat.num_bytes):
            self._crc32c = stat.crc32c
        return end

    def _collect(self, pieces: Iterable[bytes], end: int) -> None:
        if self._position == end:
            return
        for piece in pieces:
            wanted = piece[: end - self._position]
            self._pieces.append(wanted)
            self._position += len(wanted)
            self.farthest = max(self.farthest, self._position)
            if self._position == end:
                return

    def _checked(self, data: bytes) -> bytes:
        expected = self._crc32c
        if expected is None or (found := facts_of(data)[1]) == expected:
            return data
        if found == self._damaged:  # damage in transfer does not repeat
            raise DamagedObject(
                f"{self.where}: has the CRC32C {found}, not the one it was written with,"
                f" {expected}; replace it",
                data,
            )
        self._damaged = found
        self._restart()
        raise TransientError(f"{self.where}: arrived with the CRC32C {found}, expected {expected}")


@PerProcess
def _throttle(scheme: str, bucket: str, is_range: bool) -> Throttle:
    """The throttle of a bucket; byte ranges have another, or a heartbeat would queue."""
    return Throttle()


@dataclass(frozen=True, slots=True)
class ServedFolder(RemoteFolder):
    """A folder of a server."""

    @property
    def is_throttled(self) -> bool:
        return self._throttle(is_range=True).is_busy(self.retry)

    def stat(self, name: str) -> Stat:
        where = f"{self.url}/{name}"

        def attempt() -> Stat:
            with self.request(where, name, 0, 0, None) as answer:
                return answer.stat

        return self.persist(attempt)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """Unless the server confirms it, the object must be gone."""
        where = f"{self.url}/{name}"

        def attempt() -> None:
            with suppress(NotFound, PreconditionFailed):
                if self._delete(name, generation):
                    return
            if self._holds(name, generation):
                raise TransientError(f"{where}: it is still stored after its deletion")

        # a server may not know the condition
        if generation is None or self._holds(name, generation):
            self.persist(attempt)

    def _holds(self, name: str, generation: str | None) -> bool:
        stored = read_twice(partial(stat_or_none, self, name), lambda stat: stat is not None)
        return stored is not None and generation in (None, stored.generation)

    def _read(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> tuple[bytes, Stat]:
        download = _Download(self, name, start, stop, generation)
        if stop is not None and stop <= start:  # no request asks for zero bytes
            stat = self.stat(name)
            download.end_of(stat)
            return b"", stat
        throttle = self._throttle(is_range=(start, stop) != (0, None))
        return persist(self.retry, download.attempt, throttle, lambda: download.farthest)

    def persist(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, at the bucket's pace, repeated until the policy gives up."""
        return persist(self.retry, attempt, self._throttle(is_range=False))

    def _throttle(self, *, is_range: bool) -> Throttle:
        return _throttle(self.scheme, self.bucket, is_range)

    @abstractmethod
    def request(
        self, where: str, name: str, start: int, stop: int | None, generation: str | None
    ) -> AbstractContextManager[Answer]:
        """One answer to a request for the bytes [start, stop); without bytes if there are none.

        Raises TransientError, which names `where`, if another try may help, in the block too.
        """

    @abstractmethod
    def _delete(self, name: str, generation: str | None) -> bool:
        """Asks once for a deletion; whether the answer confirms it."""
