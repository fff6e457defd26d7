"""A folder of a server, which may refuse or break off: one throttle and one retry for all schemes.

A read is resumed at the byte reached and checked against its generation.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import requests
import urllib3
from requests.adapters import HTTPAdapter

from shardset.errors import NotFound, PreconditionFailed, StorageError, TransientError
from shardset.per_process import PerProcess
from shardset.storage.base import Stat, check_generation, check_range
from shardset.storage.checked import DamagedObject, facts_of
from shardset.storage.many import REQUESTS_AT_ONCE
from shardset.storage.remote_folder import RemoteFolder
from shardset.storage.retry import Throttle, persist

T = TypeVar("T")

# one allocation for a usual range: pieces and their sum take up to three times as long
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object as an answer describes it, and the bytes from `first` on, in pieces as they
    arrive.
    """

    stat: Stat
    first: int
    pieces: Iterable[bytes]


BROKEN = (OSError, urllib3.exceptions.HTTPError)
"""Exceptions of a broken connection, while a request is sent or its response is read."""


def keep_connections(session: requests.Session) -> None:
    """Lets a session keep the connections of all that a process does at once."""
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=2 * REQUESTS_AT_ONCE))


def reason_of(error: BaseException) -> str:
    """The system's message, or the name of the first error."""
    while context := error.__cause__ or error.__context__:
        error = context
    return getattr(error, "strerror", None) or type(error).__name__


def pieces_of(response: requests.Response) -> Iterator[bytes]:
    """The bytes of a body as they are sent."""
    return iter(partial(response.raw.read, _PIECE_BYTES, decode_content=False), b"")


def range_header(start: int, stop: int | None) -> dict[str, str]:
    """The header that asks for the bytes [start, stop), at least for one; none for all bytes."""
    if (start, stop) == (0, None):
        return {}
    return {"Range": f"bytes={start}-{'' if stop is None else max(start, stop - 1)}"}


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
                self._collect(self.folder.retry.paced(answer.pieces, self.where), self._end)
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
        """
        stat = answer.stat
        end = self.end_of(stat)
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
        if expected is None or (crc32c := facts_of(data)[1]) == expected:
            return data
        if crc32c == self._damaged:  # damage in transfer does not repeat
            raise DamagedObject(
                f"{self.where}: has the CRC32C {crc32c}, not the one it was written with,"
                f" {expected}; replace it",
                data,
            )
        self._damaged = crc32c
        self._restart()
        raise TransientError(f"{self.where}: arrived with the CRC32C {crc32c}, expected {expected}")


@PerProcess
def _throttle(scheme: str, bucket: str, is_range: bool) -> Throttle:
    """The throttle of a bucket; byte ranges have another, or a heartbeat would queue."""
    return Throttle()


@dataclass(frozen=True, slots=True)
class ServedFolder(RemoteFolder):
    """A folder of a server."""

    @property
    def is_throttled(self) -> bool:
        return _throttle(self.scheme, self.bucket, True).is_busy(self.retry)

    def stat(self, name: str) -> Stat:
        where = f"{self.url}/{name}"

        def attempt() -> Stat:
            with self.request(where, name, 0, 0, None) as answer:
                return answer.stat

        return self.persist(where, attempt)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        where = f"{self.url}/{name}"
        with suppress(NotFound, PreconditionFailed):
            if generation is not None:  # not all servers know the condition of a deletion
                check_generation(self.stat(name).generation, generation, where)
            self.persist(where, lambda: self._delete(name, generation))

    def _read(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> tuple[bytes, Stat]:
        download = _Download(self, name, start, stop, generation)
        if stop is not None and stop <= start:  # no request asks for zero bytes
            stat = self.stat(name)
            download.end_of(stat)
            return b"", stat
        is_range = (start, stop) != (0, None)
        return self.persist(
            download.where, download.attempt, is_range=is_range, progress=lambda: download.farthest
        )

    def persist(
        self,
        where: str,
        attempt: Callable[[], T],
        *,
        is_range: bool = False,
        progress: Callable[[], int] = lambda: 0,
    ) -> T:
        """The result of `attempt`, at the bucket's pace, repeated until the policy gives up."""

        def answered() -> T:
            try:
                return attempt()
            except BROKEN as error:  # whose text may hold a signed address
                raise TransientError(f"{where}: no answer: {reason_of(error)}") from None

        throttle = _throttle(self.scheme, self.bucket, is_range)
        return persist(self.retry, answered, throttle, progress)

    @abstractmethod
    def request(
        self, where: str, name: str, start: int, stop: int | None, generation: str | None
    ) -> AbstractContextManager[Answer]:
        """One answer to a request for the bytes [start, stop); without bytes if there are none.

        Raises TransientError, which names `where`, if another try may help, in the block too.
        """

    @abstractmethod
    def _delete(self, name: str, generation: str | None) -> None:
        """Asks once for a deletion; NotFound or PreconditionFailed if it is gone or another one."""
