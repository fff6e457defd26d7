"""Google Cloud Storage behind the Storage interface.

Requests go to the JSON API with the credentials of google-auth, so that every range can be
pinned to a generation and resumed at the byte reached.
"""

import json
import mimetypes
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar
from urllib.parse import quote

import requests

from shardset.errors import PreconditionFailed, TransientError
from shardset.storage.base import (
    ABSENT,
    ObjectWriter,
    Stat,
    accept_identical_object,
    check_generation,
    stat_or_none,
)
from shardset.storage.gcs_http import BucketFacts, ListingPage, StoredObject, read_json, send
from shardset.storage.remote_folder import SpooledWriter
from shardset.storage.retry import RetryPolicy
from shardset.storage.served import (
    Answer,
    ServedFolder,
    pieces_of,
    range_header,
    refuse_compressed,
    span_of,
)

T = TypeVar("T")

SPOOL_BYTES = 16 << 20
PAGE_SIZE = 1000
# urllib3 gives each of these the connect timeout; a mebibyte is too much for a slow line
_SENT_AT_ONCE = 1 << 16
_FACTS = "name,size,generation,crc32c"
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
        return self._ask(self._path(full), where, {"fields": _FACTS}, StoredObject).stat(name)

    @contextmanager
    def request(
        self,
        where: str,
        name: str,
        start: int,
        stop: int | None,
        generation: str | None,
    ) -> Iterator[Answer]:
        # Accepting gzip means "as stored". Otherwise the server would unpack such objects and
        # ignore the range.
        headers = {"Accept-Encoding": "gzip"} | range_header(start, stop)
        params = {"alt": "media"} | _only_if(generation)
        path = self._path(self._full(name))
        with send(self.retry, "GET", path, where, params=params, headers=headers) as response:
            if response.status_code == 416:  # if the object says that it ends here
                yield Answer(stat=self.stat(name), first=start, pieces=())
            else:
                yield _described(response, name, where)

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """Keeps up to 16 MiB in memory, more in a temporary file; sends all at the block's end.

        One request instead of a resumable session: the server checks generation and CRC32C before
        the object appears, an aborted body was never sent, and a retry can't join halves of two
        attempts.
        """
        commit = partial(self._commit, name, self._full(name), if_generation)
        return SpooledWriter(commit, f"{self.url}/{name}", SPOOL_BYTES)

    def _commit(
        self, name: str, full: str, if_generation: str | None, written: SpooledWriter
    ) -> None:
        where = f"{self.url}/{name}"
        kind = mimetypes.guess_type(full)[0] or "application/octet-stream"
        facts = {"name": full, "contentType": kind, "crc32c": written.crc32c}
        body = _Upload(facts, written, self.retry)
        path = f"/upload{_bucket_path(self.bucket)}/o"
        params = {"uploadType": "multipart", "fields": _FACTS} | _only_if(if_generation)
        headers = {"Content-Type": f"multipart/related; boundary={body.boundary}"}

        def upload() -> None:
            sent = send(self.retry, "POST", path, where, params=params, headers=headers, body=body)
            _ = sent.content  # read, so that the connection is used again

        try:
            # saves an upload that the server would refuse at its end
            if if_generation is not None:
                stored = stat_or_none(self, name)
                check_generation(stored.generation if stored else ABSENT, if_generation, where)
            self.persist(where, upload)
        except PreconditionFailed:
            stored = stat_or_none(self, name)
            accept_identical_object(stored, written.num_bytes, written.crc32c, where)

    def _delete(self, name: str, generation: str | None) -> None:
        path, condition = self._path(self._full(name)), _only_if(generation)
        send(self.retry, "DELETE", path, f"{self.url}/{name}", params=condition).close()

    def location(self) -> str:
        """The location of the bucket as the server spells it: `EUROPE-WEST4`, `EU`, `NAM4`.

        Raises NotFound if there is no such bucket. Needs the permission storage.buckets.get.
        """
        path, params = _bucket_path(self.bucket), {"fields": "location"}
        return self._ask(path, self.url, params, BucketFacts).location

    def _path(self, full: str) -> str:
        return f"{_bucket_path(self.bucket)}/o/{quote(full, safe='')}"

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        """Leaves out objects whose names end with `/`, by which consoles draw folders."""
        where, path = f"gs://{self.bucket}/{wanted}", f"{_bucket_path(self.bucket)}/o"
        params = {
            "prefix": wanted,
            "fields": f"kind,items({_FACTS}),nextPageToken",
            "maxResults": str(PAGE_SIZE),
        }
        while True:
            page = self._ask(path, where, params, ListingPage)
            # Google lists in the order of names; an emulator that does not answers with a single
            # page.
            for item in sorted(page.items, key=lambda item: item.name):
                if not item.name.endswith("/"):
                    yield item.stat(item.name[skip:])
            if not page.next_page_token:
                return
            params["pageToken"] = page.next_page_token

    def _ask(self, path: str, where: str, params: dict[str, str], kind: type[T]) -> T:
        return self.persist(
            where,
            lambda: read_json(send(self.retry, "GET", path, where, params=params), where, kind),
        )


def _bucket_path(bucket: str) -> str:
    return f"/storage/v1/b/{quote(bucket, safe='')}"


def _only_if(generation: str | None) -> dict[str, str]:
    return {} if generation is None else {"ifGenerationMatch": generation}


def _described(response: requests.Response, name: str, where: str) -> Answer:
    """An answer with bytes of an object, as its headers describe it; raises TransientError if they
    do not.
    """
    headers = response.headers
    refuse_compressed(headers.get("Content-Encoding"), name, where)
    try:
        generation = headers["X-Goog-Generation"]
        first, num_bytes = span_of(response.status_code, headers)
    except (KeyError, ValueError) as error:
        raise TransientError(
            f"{where}: the answer doesn't say which bytes it holds of what"
        ) from error
    match = _CRC32C.search(headers.get("X-Goog-Hash", ""))
    stat = Stat(
        name=name, num_bytes=num_bytes, generation=generation, crc32c=match[1] if match else None
    )
    return Answer(stat=stat, first=first, pieces=pieces_of(response))


class _Upload:
    """The body of an upload: the facts of the object, then its bytes, from the start each time."""

    def __init__(
        self, facts: Mapping[str, str], written: SpooledWriter, policy: RetryPolicy
    ) -> None:
        # random, so that no content can contain it
        self.boundary = f"shardset-{secrets.token_hex(16)}"
        self.written, self.policy = written, policy
        self.head = (
            f"--{self.boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(facts)}\r\n"
            f"--{self.boundary}\r\nContent-Type: {facts['contentType']}\r\n\r\n"
        ).encode()
        self.tail = f"\r\n--{self.boundary}--\r\n".encode()

    def __len__(self) -> int:
        return len(self.head) + self.written.num_bytes + len(self.tail)

    def __iter__(self) -> Iterator[bytes]:
        yield self.head
        self.written.file.seek(0)
        pieces = iter(partial(self.written.file.read, _SENT_AT_ONCE), b"")
        yield from self.policy.paced(pieces, self.written.where)
        yield self.tail
