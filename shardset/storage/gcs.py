"""Google Cloud Storage behind the Storage interface.

Requests go to the JSON API with the credentials of Google's client, so that every range can be
pinned to a generation and resumed at the byte reached.
"""

import json
import mimetypes
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, ClassVar, TypeVar
from urllib.parse import quote

import urllib3

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import PreconditionFailed, TransientError
from shardset.storage.base import (
    ABSENT,
    ObjectWriter,
    Stat,
    accept_identical_object,
    check_generation,
    os_errors_as_storage_errors,
    stat_or_none,
)
from shardset.storage.gcs_http import (
    BROKEN,
    BucketFacts,
    ListingPage,
    StoredObject,
    explain,
    json_object,
    send,
)
from shardset.storage.served import (
    Answer,
    ServedFolder,
    in_time,
    pieces_of,
    refuse_compressed,
    span_of,
)

T = TypeVar("T")

SPOOL_BYTES = 16 << 20
PAGE_SIZE = 1000
# urllib3 gives each of these the connect timeout; a mebibyte is too much for a slow line
_SENT_AT_ONCE = 1 << 16
_STAT_FIELDS = "kind,name,size,generation,crc32c"
_CRC32C = re.compile("crc32c=([^, ]+)")  # in `crc32c=yZRlqg==,md5=...`


@dataclass(frozen=True, slots=True)
class GcsStorage(ServedFolder):
    """Objects of a bucket below a prefix.

    Uses the emulator at STORAGE_EMULATOR_HOST anonymously if that is set; otherwise Application
    Default Credentials, or no credentials where there are none.
    """

    scheme: ClassVar[str] = "gs"

    def stat(self, name: str) -> Stat:
        full, where = self._full(name), f"{self.url}/{name}"
        params = {"fields": _STAT_FIELDS}
        check = partial(_check_name, full, where)
        return self._ask(self._path(full), where, params, StoredObject, check).stat(name)

    @contextmanager
    def request(
        self,
        where: str,
        name: str,
        start: int,
        stop: int | None,
        generation: str | None,
    ) -> Iterator[Answer]:
        path = self._path(self._full(name))
        # Accepting gzip means "as stored". Otherwise the server would unpack such objects and
        # ignore the range.
        headers = {"Accept-Encoding": "gzip"}
        if (start, stop) != (0, None):
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        params = {"alt": "media"} | _only_if(generation)
        response = send(self.retry, "GET", path, where, params=params, headers=headers)
        try:
            with in_time(self.retry, response, where):
                if response.status == 416:  # if the object says that it ends here
                    yield Answer(stat=self.stat(name), first=start, pieces=())
                else:
                    yield _described(response, name, where)
        except BROKEN as error:
            raise TransientError(f"{where}: {explain(error)}") from error

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """Keeps up to 16 MiB in memory, more in a temporary file; sends all at the block's end."""
        return _GcsWriter(replace(self, prefix=""), self._full(name), if_generation)

    def _delete(self, name: str, generation: str | None) -> bool:
        where, path = f"{self.url}/{name}", self._path(self._full(name))
        condition = _only_if(generation)
        with closing(send(self.retry, "DELETE", path, where, params=condition)) as response:
            return response.status == 204

    def location(self) -> str:
        """The location of the bucket as the server spells it: `EUROPE-WEST4`, `EU`, `NAM4`.

        Raises NotFound if there is no such bucket. Needs the permission storage.buckets.get.
        """
        params = {"fields": "kind,location"}
        return self._ask(_bucket_path(self.bucket), self.url, params, BucketFacts).location

    def _path(self, full: str) -> str:
        return f"{_bucket_path(self.bucket)}/o/{quote(full, safe='')}"

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        """Leaves out objects whose names end with `/`, by which consoles draw folders."""
        where, last, token = f"gs://{self.bucket}/{wanted}", "", ""
        params = {
            "prefix": wanted,
            "fields": "kind,items(name,size,generation,crc32c),nextPageToken",
            "maxResults": str(PAGE_SIZE),
        }

        def check(page: ListingPage) -> None:
            foreign = [
                item.name
                for item in page.items
                if not item.name.startswith(wanted) or item.name <= last
            ]
            if foreign or (token and page.next_page_token == token):
                name = f"object {foreign[0]!r}" if foreign else "page token"
                raise TransientError(
                    f"{where}: the answer is another page of the list, by its {name}"
                )

        while True:
            page = self._ask(f"{_bucket_path(self.bucket)}/o", where, params, ListingPage, check)
            # Google lists in the order of names; an emulator that does not answers with a single
            # page.
            for item in sorted(page.items, key=lambda item: item.name):
                last = item.name
                if not last.endswith("/"):
                    yield item.stat(last[skip:])
            token = page.next_page_token
            if not token:
                return
            params["pageToken"] = token

    def _ask(
        self,
        path: str,
        where: str,
        params: dict[str, str],
        kind: type[T],
        check: Callable[[T], None] = lambda answer: None,
    ) -> T:
        """The JSON object that answers a small request; repeats the request until `check` accepts
        one.
        """

        def attempt() -> T:
            response = send(self.retry, "GET", path, where, params=params)
            answer = json_object(self.retry, response, where, kind)
            check(answer)
            return answer

        return self.persist(attempt)


def _bucket_path(bucket: str) -> str:
    return f"/storage/v1/b/{quote(bucket, safe='')}"


def _only_if(generation: str | None) -> dict[str, str]:
    return {} if generation is None else {"ifGenerationMatch": generation}


def _described(response: urllib3.BaseHTTPResponse, name: str, where: str) -> Answer:
    """An answer with bytes of an object, as its headers describe it; raises TransientError if they
    do not.
    """
    headers = response.headers
    refuse_compressed(headers.get("Content-Encoding"), name, where)
    try:
        generation = headers["X-Goog-Generation"]
        first, num_bytes = span_of(response.status, headers)
    except (KeyError, ValueError) as error:
        raise TransientError(
            f"{where}: the answer doesn't say which bytes it holds of what"
        ) from error
    found = _CRC32C.search(headers.get("X-Goog-Hash", ""))
    stat = Stat(
        name=name, num_bytes=num_bytes, generation=generation, crc32c=found[1] if found else None
    )
    return Answer(stat=stat, first=first, pieces=pieces_of(response))


def _check_name(full: str, where: str, item: StoredObject) -> None:
    """Raises TransientError if the object has another name."""
    if item.name != full:
        raise TransientError(f"{where}: the answer is about another object, {item.name!r}")


@dataclass
class _GcsWriter:
    """Collects the bytes and their CRC32C, then sends them in one request that the server accepts
    or refuses whole.

    One request instead of a resumable session: the server checks generation and CRC32C before the
    object appears, an aborted body was never sent, and a retry can't join halves of two attempts.
    """

    bucket: GcsStorage
    full: str
    if_generation: str | None
    num_bytes: int = 0
    crc: int = 0
    file: IO[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.where = f"{self.bucket.url}/{self.full}"
        spooled = f"{self.where}, in the temporary folder {tempfile.gettempdir()}"
        self._spool_errors = os_errors_as_storage_errors(spooled)

    def __enter__(self) -> ObjectWriter:
        self.file = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)
        return self

    def write(self, data: bytes | memoryview) -> None:
        self.num_bytes += len(data)
        self.crc = extend_crc32c(self.crc, data)
        with self._spool_errors:
            self.file.write(data)

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                with self._spool_errors:
                    self.file.flush()
                self._commit()
        finally:
            # on a full disk, closing complains about bytes that nobody wants any more
            with suppress(OSError):
                self.file.close()

    def _commit(self) -> None:
        try:
            # saves an upload that the server would refuse at its end
            if self.if_generation is not None:
                stored = stat_or_none(self.bucket, self.full)
                check_generation(
                    stored.generation if stored else ABSENT, self.if_generation, self.where
                )
            self.bucket.persist(self._upload)
        except PreconditionFailed:
            stored = stat_or_none(self.bucket, self.full)
            accept_identical_object(stored, self.num_bytes, crc32c_text(self.crc), self.where)

    def _upload(self) -> None:
        condition = _only_if(self.if_generation)
        # random for each attempt, so that no content can contain it
        boundary = f"shardset-{secrets.token_hex(16)}"
        tail = f"\r\n--{boundary}--\r\n".encode()
        head = self._head(boundary)
        length = str(len(head) + self.num_bytes + len(tail))
        response = send(
            self.bucket.retry,
            "POST",
            f"/upload{_bucket_path(self.bucket.bucket)}/o",
            self.where,
            params={"uploadType": "multipart", "fields": _STAT_FIELDS} | condition,
            headers={
                "Content-Type": f"multipart/related; boundary={boundary}",
                "Content-Length": length,
            },
            body=partial(self._body, head, tail),
        )
        stored = json_object(self.bucket.retry, response, self.where, StoredObject)
        _check_name(self.full, self.where, stored)

    def _body(self, head: bytes, tail: bytes) -> Iterator[bytes]:
        yield head
        self.file.seek(0)
        pieces = iter(partial(self.file.read, _SENT_AT_ONCE), b"")
        yield from self.bucket.retry.paced(pieces, self.where)
        yield tail

    def _head(self, boundary: str) -> bytes:
        kind = mimetypes.guess_type(self.full)[0] or "application/octet-stream"
        facts = json.dumps(
            {"name": self.full, "contentType": kind, "crc32c": crc32c_text(self.crc)}
        )
        return (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{facts}\r\n"
            f"--{boundary}\r\nContent-Type: {kind}\r\n\r\n"
        ).encode()
