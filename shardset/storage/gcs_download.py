"""The bytes of an object of Cloud Storage, resumed at the byte reached and checked against its generation."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import urllib3

from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import PreconditionFailed, StorageError, TransientError
from shardset.storage.base import Stat, check_generation, check_range
from shardset.storage.gcs_http import BROKEN, explain, send
from shardset.storage.retry import RetryPolicy


@dataclass
class Download:
    """The bytes [start, stop) of one generation of an object, in as many requests as that takes.

    Whenever that is the whole object, also as a range, the bytes are compared with the CRC32C that the server keeps.
    `farthest` is the last byte that any attempt reached; receiving lost or damaged bytes again does not move it.
    `found` are the facts about the object, as the headers of its last answer say.
    """

    policy: RetryPolicy
    path: str
    where: str
    name: str
    stat: Callable[[], Stat]
    start: int
    stop: int | None
    generation: str | None
    piece_bytes: int
    found: Stat = field(init=False)

    def __post_init__(self) -> None:
        self._is_whole = self.start == 0 and self.stop is None
        if not self._is_whole:
            self.where += f" bytes {self.start} to {self.stop or 'the end'}"
        self.farthest = self.start
        self._restart()

    def _restart(self) -> None:
        self._pieces: list[bytes] = []
        self._position = self.start
        self._end = self.stop
        self._pinned = self.generation
        self._crc32c: str | None = None

    def attempt(self) -> bytes:
        """All the bytes, from where the last attempt stopped; raises TransientError if some are still missing."""
        try:
            self._receive()
        except PreconditionFailed as error:
            if self.generation is not None:
                raise
            self._restart()
            raise TransientError(f"{self.where}: was replaced while it was read") from error
        if self._position != self._end:
            raise TransientError(f"{self.where}: the body ended at byte {self._position}, expected {self._end}")
        return self._checked(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))

    def _receive(self) -> None:
        began = self.policy.clock()
        # Accepting gzip means "as stored". Otherwise the server would unpack such objects and ignore the range.
        headers = {"Accept-Encoding": "gzip"}
        if not self._is_whole or self._position:
            headers["Range"] = f"bytes={self._position}-{'' if self._end is None else self._end - 1}"
        params = {"alt": "media"} | ({"ifGenerationMatch": self._pinned} if self._pinned else {})
        with closing(send(self.policy, "GET", self.path, self.where, params=params, headers=headers)) as response:
            if response.status == 416:
                self._end = self._past_the_end()
            else:
                self._end = self._accept(response)
                self._collect(response, self._end, began)

    def _past_the_end(self) -> int:
        """The end of the wanted bytes after a 416; raises unless the object's size confirms that none are left."""
        stat = self.found = self.stat()
        end = self._end_of(stat.generation, stat.num_bytes)
        if self._position < end:
            raise TransientError(f"{self.where}: the server answered 416, though it holds {stat.num_bytes} bytes")
        return end

    def _end_of(self, generation: str, num_bytes: int) -> int:
        """The end of the wanted bytes of an object; raises if it is another generation or does not hold them."""
        check_generation(generation, self._pinned, self.where)
        return check_range(self.start, self.stop, num_bytes, self.where)

    def _accept(self, response: urllib3.BaseHTTPResponse) -> int:
        """The end of the wanted bytes; raises unless the response has the wanted generation and range.

        A response is not enough to call the object another one: its metadata must say so too.
        """
        generation = response.headers.get("X-Goog-Generation", "")
        if not generation:
            raise TransientError(f"{self.where}: the answer names no generation, so it is not from Cloud Storage")
        first, size = _span(response, self.where)
        try:
            end = self._end_of(generation, size)
        except StorageError as error:
            stat = self.stat()
            self._end_of(stat.generation, stat.num_bytes)  # raises if the object really is another one
            raise TransientError(
                f"{self.where}: the answer is of {size} bytes of generation {generation}, the object is not"
            ) from error
        self._pinned = generation  # later requests must not mix in bytes of another generation
        if self._position < end and first != self._position:
            raise TransientError(f"{self.where}: answered from byte {first}, expected {self._position}")
        crc32c = _crc32c_header(response.headers.get("X-Goog-Hash", ""))
        if self._position == self.start and (self.start, end) == (0, size):
            self._crc32c = crc32c
        self.found = Stat(name=self.name, num_bytes=size, generation=generation, crc32c=crc32c)
        return end

    def _collect(self, body: urllib3.BaseHTTPResponse, end: int, began: float) -> None:
        while self._position < end:
            try:
                piece = body.read(min(self.piece_bytes, end - self._position), decode_content=False)
            except BROKEN as error:
                raise TransientError(f"{self.where}: stopped at byte {self._position}: {explain(error)}") from error
            if not piece:
                return
            self._pieces.append(piece)
            self._position += len(piece)
            self.farthest = max(self.farthest, self._position)
            # The stall timeout does not end a body that trickles.
            if self._position != end and self.policy.clock() - began > self.policy.request_deadline_s:
                deadline = f"{self.policy.request_deadline_s:g} s"
                raise TransientError(f"{self.where}: at byte {self._position} after {deadline}")

    def _checked(self, data: bytes) -> bytes:
        expected = self._crc32c
        if expected is None or crc32c_text(crc32c_of(data)) == expected:
            return data
        self._restart()
        raise TransientError(f"{self.where}: what arrived does not have the CRC32C that the server keeps, {expected}")


def _span(response: urllib3.BaseHTTPResponse, where: str) -> tuple[int, int]:
    """The first byte of a response and the size of the object, from the headers."""
    try:
        content_range = response.headers.get("Content-Range")
        if content_range is None:
            return 0, int(response.headers.get("X-Goog-Stored-Content-Length") or response.headers["Content-Length"])
        bounds, _, size = content_range.removeprefix("bytes ").partition("/")
        return int(bounds.partition("-")[0].replace("*", "0")), int(size)
    except (KeyError, ValueError) as error:
        raise TransientError(f"{where}: the answer does not say which bytes it holds") from error


def _crc32c_header(text: str) -> str | None:
    """The CRC32C in an `X-Goog-Hash` header such as `crc32c=yZRlqg==,md5=...`."""
    pairs = (pair.strip().partition("=") for pair in text.split(","))
    return next((value for key, _, value in pairs if key == "crc32c"), None)
