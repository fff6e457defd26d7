"""An upload to Cloud Storage in parts, for an object that need not fit a disk of this machine.

The object appears when the server has accepted the last one. Until then nothing is listed, and an upload that
is given up leaves nothing.
"""

import io
import json
import re
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import urllib3

from shardset.errors import NotFound, StorageError, TransientError
from shardset.storage.gcs_http import INCOMPLETE, Body, send
from shardset.storage.retry import RetryPolicy, persist

PART_UNIT = 1 << 18
"""Cloud Storage takes parts of whole multiples of 256 KiB; only the last may be smaller."""

_RECEIVED = re.compile(r"bytes=0-(\d+)")


class UploadGone(StorageError):
    """The server no longer knows an upload: it is complete, or it was given up."""


@dataclass(slots=True, kw_only=True)
class ResumableUpload:
    """An upload of unknown length in parts of `part_bytes`.

    `params` are those of the request that begins it. A part is sent again until the server has it; the server ignores
    the bytes that it has already.
    """

    policy: RetryPolicy
    path: str
    name: str
    where: str
    params: dict[str, str]
    content_type: str
    part_bytes: int
    _session: str = ""
    _num_sent: int = 0
    _rest: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        assert self.part_bytes % PART_UNIT == 0, "the server takes no other parts"

    def begin(self) -> None:
        """Starts the upload; raises PreconditionFailed if the server refuses its generation now."""
        self._session = persist(self.policy, self.where, self._begin)

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes; sends them once they are a part."""
        self._rest += data
        while len(self._rest) > self.part_bytes:  # keeps at least one byte for the last part
            self._send_part(self.part_bytes)

    def finish(self, crc32c: str, accept: Callable[[urllib3.BaseHTTPResponse], None]) -> None:
        """Sends the last part, with the CRC32C of the whole object; `accept` takes the server's answer.

        Raises PreconditionFailed if another generation is stored by now.
        """
        stop = self._num_sent + len(self._rest)
        said = {"X-Goog-Hash": f"crc32c={crc32c}"}

        def attempt() -> None:
            with closing(self._put(bytes(self._rest), f"{self._num_sent}-{stop - 1}/{stop}", said)) as response:
                if response.status == INCOMPLETE:
                    raise TransientError(f"{self.where}: the server did not take the last part ({_received(response)})")
                accept(response)

        persist(self.policy, self.where, attempt)

    def abort(self) -> None:
        """Tells the server to forget the upload; it would do so by itself after a week."""
        if self._session:
            with suppress(StorageError):  # a server answers 499 to a cancelled upload
                send(self.policy, "DELETE", self._session, self.where).close()

    def _begin(self) -> str:
        body = json.dumps({"name": self.name, "contentType": self.content_type})
        headers = {"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Type": self.content_type}
        params = {"uploadType": "resumable"} | self.params
        with closing(
            send(self.policy, "POST", self.path, self.where, params=params, headers=headers, body=body.encode())
        ) as got:
            address = urlsplit(got.headers.get("Location", ""))
        if not address.query:
            raise TransientError(f"{self.where}: the answer names no address for the parts of the upload")
        return f"{address.path}?{address.query}"

    def _send_part(self, num_bytes: int) -> None:
        """Sends the next bytes until the server has taken some of them; keeps those that it has not."""
        part, start = bytes(self._rest[:num_bytes]), self._num_sent

        def attempt() -> int:
            with closing(self._put(part, f"{start}-{start + len(part) - 1}/*", {})) as response:
                taken = _received(response) - start if response.status == INCOMPLETE else 0
            if not 0 < taken <= len(part):
                raise TransientError(
                    f"{self.where}: the server has bytes up to {start + taken} of the upload, expected "
                    f"{start + len(part)}"
                )
            return taken

        taken = persist(self.policy, self.where, attempt)
        del self._rest[:taken]
        self._num_sent += taken

    def _put(self, data: bytes, content_range: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        sent = {"Content-Range": f"bytes {content_range}", "Content-Type": self.content_type} | headers
        body = Body(b"", io.BytesIO(data), len(data), self.policy, b"")
        try:
            return send(self.policy, "PUT", self._session, self.where, headers=sent, body=body)
        except NotFound as error:
            raise UploadGone(f"{self.where}: the server has forgotten the upload; write it again") from error


def _received(response: urllib3.BaseHTTPResponse) -> int:
    """The number of bytes that the server has."""
    match = _RECEIVED.fullmatch(response.headers.get("Range", ""))
    return int(match[1]) + 1 if match else 0
