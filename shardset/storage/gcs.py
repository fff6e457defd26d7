"""Google Cloud Storage behind the Storage interface.

Requests go to the JSON API with the credentials of Google's client, so that every range can be pinned to a generation
and resumed at the byte reached.
"""

import json
import mimetypes
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import IO, ClassVar, TypeVar
from urllib.parse import quote

import urllib3

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage.base import (
    ABSENT,
    ObjectWriter,
    Stat,
    accept_identical_object,
    check_generation,
    check_range,
    os_errors_as_storage_errors,
    stat_or_none,
)
from shardset.storage.gcs_download import Download
from shardset.storage.gcs_http import Body, BucketFacts, ListingPage, StoredObject, is_throttled, json_object, send
from shardset.storage.remote import RemoteFolder
from shardset.storage.retry import RetryPolicy, persist

T = TypeVar("T")

_STAT_FIELDS = "kind,name,size,generation,crc32c"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsLimits:
    """How much of an object or of a listing is held at once."""

    piece_bytes: int = 8 << 20  # one allocation for a usual range: two halves and their sum take three times as long
    spool_bytes: int = 16 << 20
    page_size: int = 1000


@dataclass(frozen=True, slots=True)
class GcsStorage(RemoteFolder):
    """Objects of a bucket below a prefix.

    Uses the emulator at STORAGE_EMULATOR_HOST anonymously if that is set; otherwise Application Default Credentials,
    or no credentials where there are none.
    """

    limits: GcsLimits = field(default_factory=GcsLimits)

    scheme: ClassVar[str] = "gs"

    def stat(self, name: str) -> Stat:
        full, where = self._full(name), f"{self.url}/{name}"
        params = {"fields": _STAT_FIELDS}
        return _ask(self.retry, self._path(full), where, params, lambda r: _named(r, full, where)).stat(name)

    def _read(self, name: str, start: int, stop: int | None, generation: str | None) -> tuple[bytes, Stat]:
        """Compares a whole object with the CRC32C that the server keeps."""
        where = f"{self.url}/{name}"
        if start == stop:  # no Range header asks for zero bytes
            stat = self.stat(name)
            check_generation(stat.generation, generation, where)
            check_range(start, stop, stat.num_bytes, where)
            return b"", stat
        download = Download(
            policy=self.retry,
            path=self._path(self._full(name)),
            where=where,
            name=name,
            stat=lambda: self.stat(name),
            start=start,
            stop=stop,
            generation=generation,
            piece_bytes=self.limits.piece_bytes,
        )
        data = persist(self.retry, where, download.attempt, lambda: download.farthest)
        return data, download.found

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """Keeps up to 16 MiB in memory, more in a temporary file; sends all at the block's end."""
        return _GcsWriter(replace(self, prefix=""), self._full(name), if_generation)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """Only a 204 is taken for a deletion; after any other answer, the object must be gone."""
        where, path = f"{self.url}/{name}", self._path(self._full(name))
        condition = {} if generation is None else {"ifGenerationMatch": generation}

        def attempt() -> None:
            try:
                with closing(send(self.retry, "DELETE", path, where, params=condition)) as response:
                    answer = str(response.status)
            except (NotFound, PreconditionFailed) as error:
                answer = str(error).removeprefix(f"{where}: ")
            if answer != "204" and self._holds(name, generation):
                raise TransientError(f"{where}: it is still stored after its deletion was answered with: {answer}")

        if generation is None or self._holds(name, generation):  # an emulator may not know the condition
            persist(self.retry, where, attempt)

    def _holds(self, name: str, generation: str | None) -> bool:
        stored = stat_or_none(self, name)
        return stored is not None and generation in (None, stored.generation)

    @property
    def is_throttled(self) -> bool:
        return is_throttled(self.retry, self._path(""))

    def _path(self, full: str) -> str:
        return f"{_bucket_path(self.bucket)}/o/{quote(full, safe='')}"

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        """Leaves out objects whose names end with `/`, by which consoles draw folders."""
        where, last, token = f"gs://{self.bucket}/{wanted}", "", ""
        params = {
            "prefix": wanted,
            "fields": "kind,items(name,size,generation,crc32c),nextPageToken",
            "maxResults": str(self.limits.page_size),
        }

        def accept(response: urllib3.BaseHTTPResponse) -> ListingPage:
            page = json_object(response, where, ListingPage)
            foreign = [item.name for item in page.items if not item.name.startswith(wanted) or item.name <= last]
            if foreign or (token and page.next_page_token == token):
                name = f"object {foreign[0]!r}" if foreign else "page token"
                raise TransientError(f"{where}: the answer is another page of the list, by its {name}")
            return page

        while True:
            page = _ask(self.retry, f"{_bucket_path(self.bucket)}/o", where, params, accept)
            # Google lists in the order of names; an emulator that does not answers with a single page.
            for item in sorted(page.items, key=lambda item: item.name):
                last = item.name
                if not last.endswith("/"):
                    yield item.stat(last[skip:])
            token = page.next_page_token
            if not token:
                return
            params["pageToken"] = token


def bucket_location(bucket: str, retry: RetryPolicy) -> str:
    """The location of a bucket as the server spells it: `EUROPE-WEST4`, `EU`, `NAM4`; a pair is joined by `+`.

    Raises NotFound if there is no such bucket. Needs the permission storage.buckets.get.
    """
    where, params = f"gs://{bucket}", {"fields": "kind,location,customPlacementConfig"}
    answer = _ask(retry, _bucket_path(bucket), where, params, lambda r: json_object(r, where, BucketFacts))
    return "+".join(answer.custom_placement_config.get("dataLocations") or [answer.location])


def _ask(
    retry: RetryPolicy, path: str, where: str, params: dict[str, str], accept: Callable[[urllib3.BaseHTTPResponse], T]
) -> T:
    """The result of `accept` on the answer to a small request; repeats the request until it accepts one."""

    def attempt() -> T:
        with closing(send(retry, "GET", path, where, params=params)) as response:
            return accept(response)

    return persist(retry, where, attempt)


def _bucket_path(bucket: str) -> str:
    return f"/storage/v1/b/{quote(bucket, safe='')}"


def _named(response: urllib3.BaseHTTPResponse, full: str, where: str) -> StoredObject:
    """The object in an answer; raises TransientError if it has another name."""
    item = json_object(response, where, StoredObject)
    if item.name != full:
        raise TransientError(f"{where}: the answer is about another object, {item.name!r}")
    return item


class _GcsWriter:
    """Collects the bytes and their CRC32C, then sends them in one request that the server accepts or refuses whole.

    One request instead of a resumable session: the server checks generation and CRC32C before the object appears, an
    aborted body was never sent, and a retry can't join halves of two attempts.
    """

    _file: IO[bytes]

    def __init__(self, bucket: GcsStorage, full: str, if_generation: str | None) -> None:
        self._bucket = bucket
        self._full = full
        self._where = f"{bucket.url}/{full}"
        self._if_generation = if_generation
        self._num_bytes = 0
        self._crc = 0
        spooled = f"{self._where}, in the temporary folder {tempfile.gettempdir()}"
        self._spool_errors = os_errors_as_storage_errors(spooled)

    def __enter__(self) -> ObjectWriter:
        self._file = tempfile.SpooledTemporaryFile(max_size=self._bucket.limits.spool_bytes)
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._num_bytes += len(data)
        self._crc = extend_crc32c(self._crc, data)
        with self._spool_errors:
            self._file.write(data)

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                with self._spool_errors:
                    self._file.flush()
                self._commit()
        finally:
            with suppress(OSError):  # on a full disk, closing complains about bytes that nobody wants any more
                self._file.close()

    def _commit(self) -> None:
        self._crc32c = crc32c_text(self._crc)
        try:
            if self._if_generation is not None:  # saves an upload that the server would refuse at its end
                stored = stat_or_none(self._bucket, self._full)
                check_generation(stored.generation if stored else ABSENT, self._if_generation, self._where)
            self._verify(persist(self._bucket.retry, self._where, self._upload))
        except PreconditionFailed:
            stored = stat_or_none(self._bucket, self._full)
            accept_identical_object(stored, self._num_bytes, self._crc32c, self._where)

    def _upload(self) -> StoredObject:
        condition = {} if self._if_generation is None else {"ifGenerationMatch": self._if_generation}
        boundary = f"shardset-{secrets.token_hex(16)}"  # random for each attempt, so that no content can contain it
        tail = f"\r\n--{boundary}--\r\n".encode()
        response = send(
            self._bucket.retry,
            "POST",
            f"/upload{_bucket_path(self._bucket.bucket)}/o",
            self._where,
            params={"uploadType": "multipart", "fields": _STAT_FIELDS} | condition,
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            body=Body(self._head(boundary), self._file, self._num_bytes, self._bucket.retry, tail),
        )
        with closing(response):
            return _named(response, self._full, self._where)

    def _head(self, boundary: str) -> bytes:
        kind = mimetypes.guess_type(self._full)[0] or "application/octet-stream"
        facts = json.dumps({"name": self._full, "contentType": kind, "crc32c": self._crc32c})
        return (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{facts}\r\n"
            f"--{boundary}\r\nContent-Type: {kind}\r\n\r\n"
        ).encode()

    def _verify(self, reply: StoredObject) -> None:
        """Compares what the server stored with what was sent; deletes it and raises StorageError if they differ."""
        stored = reply.stat(self._full)
        if (stored.num_bytes, stored.crc32c) == (self._num_bytes, self._crc32c):
            return
        self._bucket.delete(self._full, generation=stored.generation)
        raise StorageError(
            f"{self._where}: stored as {stored.num_bytes} bytes with CRC32C {stored.crc32c}, expected "
            f"{self._num_bytes} bytes, {self._crc32c}; that generation was deleted, write it again"
        )
