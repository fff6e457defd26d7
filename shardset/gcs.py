"""Google Cloud Storage behind the Storage interface. The only import of google-cloud-storage.

Requests go through the authorised session of Google's client to the JSON API, so that every range can be pinned to
a generation and go on at the byte reached. `docs/log.md` has what that costs beside the client's own download.
"""

import json
import mimetypes
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar
from urllib.parse import quote, urlsplit

import google.auth
import requests
import urllib3
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, InvalidOperation, TransportError
from google.auth.transport.requests import Request
from google.cloud import storage as google_storage
from requests.adapters import HTTPAdapter

from shardset.errors import NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage import (
    ABSENT,
    Stat,
    Writer,
    check_name,
    check_prefix,
    check_range,
    explained,
    extend_crc32c,
    join,
    settle_twin,
)
from shardset.tarindex import crc32c_text

T = TypeVar("T")

_POOL = 64
_PIECE = 8 << 20  # one allocation for a usual range: two halves and their sum take three times as long
_SPOOL_IN_MEMORY = 16 << 20
_SENT_AT_ONCE = 1 << 20
_LISTED_AT_ONCE = 1000
_PROBE_TIMEOUT_S = 1.0
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_BROKEN = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
    TransportError,
    ConnectionError,
    TimeoutError,
)
_STAT_FIELDS = "name,size,generation,crc32c"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_BOUNDARY = b"shardset-2f9f6e0b8f5c4d6c"


def _jitter() -> float:
    return random.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a request counts as lost, how long to wait before the next, and when to give up.

    A request is lost when it can't connect, hears nothing for `stall_timeout_s`, or isn't done after
    `request_deadline_s` (looked at every 8 MiB). Pauses double from `first_pause_s` to `max_pause_s`, each cut by
    up to half at random. An operation gives up `give_up_after_s` after its first failure since the last new byte.
    """

    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    request_deadline_s: float = 120.0
    give_up_after_s: float = 180.0
    first_pause_s: float = 0.25
    max_pause_s: float = 16.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter

    def pause_s(self, failures: int) -> float:
        """How long to wait after that many failures in a row."""
        return min(self.max_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30)) * (1 - self.jitter() / 2)


@dataclass(frozen=True, slots=True)
class GcsStorage:
    """Objects of a bucket below a prefix.

    With STORAGE_EMULATOR_HOST set, the emulator there, anonymously; else Application Default Credentials, and
    anonymously where there are none.
    """

    bucket: str
    prefix: str = ""
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.prefix:
            check_name(self.prefix, f"gs://{self.bucket}")

    @property
    def url(self) -> str:
        """`gs://bucket/prefix`."""
        return f"gs://{join(self.bucket, self.prefix) if self.prefix else self.bucket}"

    def stat(self, name: str) -> Stat:
        """See Storage.stat."""
        reply = self._json("GET", self._object(name), f"{self.url}/{name}", params={"fields": _STAT_FIELDS})
        return _stat(name, reply)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        """See Storage.read. A whole object is compared with the CRC32C that the server keeps."""
        if start == stop:
            return self._read_nothing(name, start, generation)
        download = _Download(self, self._object(name), f"{self.url}/{name}", start, stop, generation)
        return _persist(self.retry, download.attempt, lambda: download.farthest)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """See Storage.list. Objects whose names end with `/`, by which consoles draw folders, are left out."""
        return self._list(join(self.prefix, check_prefix(prefix, self.url)), len(join(self.prefix, "")))

    def writer(self, name: str, *, if_generation: str | None = None) -> Writer:
        """See Storage.writer. Keeps up to 16 MiB in memory, more in a temporary file; sends all at the block's end."""
        return _GcsWriter(self, self._full(name), if_generation)

    def delete(self, name: str) -> None:
        """See Storage.delete."""
        url = self._object(name)
        try:
            self._json("DELETE", url, f"{self.url}/{name}")
        except NotFound:
            return

    def _full(self, name: str) -> str:
        return join(self.prefix, check_name(name, self.url))

    def _object(self, name: str) -> str:
        return f"{_objects_path(self.bucket)}/{quote(self._full(name), safe='')}"

    def _read_nothing(self, name: str, start: int, generation: str | None) -> bytes:
        found, where = self.stat(name), f"{self.url}/{name}"
        _check_generation(found.generation, generation, where)
        check_range(start, start, found.num_bytes, where)
        return b""

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        params = {
            "prefix": wanted,
            "fields": f"items({_STAT_FIELDS}),nextPageToken",
            "maxResults": str(_LISTED_AT_ONCE),
        }
        while True:
            page = self._json("GET", _objects_path(self.bucket), f"gs://{self.bucket}/{wanted}", params=params)
            for item in page.get("items", ()):
                if not item["name"].endswith("/"):
                    yield _stat(item["name"][skip:], item)
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = page["nextPageToken"]

    def _json(self, method: str, path: str, where: str, **options: Any) -> dict[str, Any]:
        """The reply to a small request, tried until it is answered."""

        def attempt() -> dict[str, Any]:
            with closing(send(self.retry, method, path, where, **options)) as response:
                return _body_json(response, where)

        return _persist(self.retry, attempt)


def _objects_path(bucket: str) -> str:
    return f"/storage/v1/b/{quote(bucket, safe='')}/o"


def _stat(name: str, item: Mapping[str, Any]) -> Stat:
    return Stat(name=name, num_bytes=int(item["size"]), generation=str(item["generation"]), crc32c=item.get("crc32c"))


def _check_generation(found: str, wanted: str | None, where: str) -> None:
    if wanted is not None and found != wanted:
        raise PreconditionFailed(f"{where}: was replaced (generation {found}, expected {wanted}); start again from it")


# -- one request ------------------------------------------------------------------------------------------------


def send(policy: RetryPolicy, method: str, path: str, where: str, **options: Any) -> requests.Response:
    """One request, its body not read yet. Raises TransientError if another try may help, other StorageErrors if not."""
    connection = _connection()
    try:
        response = connection.session.request(
            method,
            connection.base_url + path,
            timeout=(policy.connect_timeout_s, policy.stall_timeout_s),
            stream=True,
            allow_redirects=False,
            **options,
        )
        if response.status_code < 300 or response.status_code == 416:
            return response
        with closing(response):
            raise _refusal(response.status_code, response.text[:500], where, connection)
    except _BROKEN as error:
        raise TransientError(f"{where}: {_short(error)}") from error
    except InvalidOperation as error:  # what anonymous credentials raise when a 401 asks them for a fresh token
        raise _refusal(401, "", where, connection) from error
    except GoogleAuthError as error:
        kind = TransientError if error.retryable else StorageError
        raise kind(f"{where}: {connection.who} could not authenticate ({_short(error)}); {_LOGIN}") from error


_LOGIN = "run `gcloud auth application-default login`, or use a service account that may"
_NEEDED = "it needs storage.objects.get and .list to read (roles/storage.objectViewer), .create and .delete to write"


def _refusal(status: int, text: str, where: str, connection: "_Connection") -> StorageError:
    if status in _AGAIN or (status == 400 and "crc32c" in text.lower()):
        return TransientError(f"{where}: the server answered {status} ({_one_line(text)})")
    if status == 404:
        return NotFound(f"{where}: nothing is stored there, or there is no such bucket; check the name")
    if status == 412:
        return PreconditionFailed(f"{where}: something else stands there than was expected")
    if status in (401, 403):
        return StorageError(f"{where}: {status}: {connection.who} may not do this; {_NEEDED}; {_LOGIN}")
    return StorageError(f"{where}: the server answered {status} ({_one_line(text)}); check name and settings")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {_one_line(str(error))}"


def _body_json(response: requests.Response, where: str) -> dict[str, Any]:
    try:
        body = response.content
        return (json.loads(body) if body else None) or {}
    except _BROKEN as error:
        raise TransientError(f"{where}: {_short(error)}") from error
    except ValueError as error:
        raise TransientError(f"{where}: the answer is not JSON ({error})") from error


def _persist(policy: RetryPolicy, attempt: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """What `attempt` returns, tried again after TransientErrors until the policy gives up."""
    failures, since, reached = 0, 0.0, progress()
    while True:
        try:
            return attempt()
        except TransientError as error:
            now = policy.clock()
            if failures == 0 or progress() > reached:
                failures, since, reached = 0, now, progress()
            failures += 1
            pause = policy.pause_s(failures)
            if now + pause - since > policy.give_up_after_s:
                tries = f"{failures} tries in {now - since:.0f} s"
                raise TransientError(f"{error}; gave up after {tries}; check the network and try again") from error
            policy.sleep(pause)


# -- reading ----------------------------------------------------------------------------------------------------


class _Download:
    """The bytes [start, stop) of one generation of an object, over as many requests as it takes.

    `farthest` is the byte reached by any try; reading again what was lost or damaged does not move it.
    """

    def __init__(
        self, storage: GcsStorage, path: str, where: str, start: int, stop: int | None, wanted: str | None
    ) -> None:
        self._policy = storage.retry
        self._path = path
        self._where = where if stop is None and start == 0 else f"{where} bytes {start} to {stop or 'the end'}"
        self._start = start
        self._stop = stop
        self._wanted = wanted
        self.farthest = start
        self._restart()

    def attempt(self) -> bytes:
        """All the bytes, going on where the attempt before stopped; TransientError if this one did not suffice."""
        try:
            self._receive()
        except PreconditionFailed as error:
            if self._wanted is not None:
                raise
            self._restart()
            raise TransientError(f"{self._where}: was replaced while it was read") from error
        if self._position != self._end:
            raise TransientError(f"{self._where}: the body ended at byte {self._position}, expected {self._end}")
        return self._checked(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))

    def _restart(self) -> None:
        self._parts: list[bytes] = []
        self._position = self._start
        self._end = self._stop
        self._pinned = self._wanted
        self._crc32c: str | None = None

    @property
    def _whole(self) -> bool:
        return self._start == 0 and self._stop is None

    def _receive(self) -> None:
        began = self._policy.clock()
        # As stored: without this header, an object stored as gzip would be unpacked on the way and ignore ranges.
        headers = {"Accept-Encoding": "gzip"}
        if not self._whole or self._position:
            headers["Range"] = f"bytes={self._position}-{'' if self._end is None else self._end - 1}"
        params = {"alt": "media"} | ({"ifGenerationMatch": self._pinned} if self._pinned else {})
        with closing(send(self._policy, "GET", self._path, self._where, params=params, headers=headers)) as response:
            self._end = self._accept(response)
            self._collect(response.raw, began)

    def _accept(self, response: requests.Response) -> int:
        """Checks generation and range of an answer; returns where the wanted bytes end."""
        first, size = _place(response, self._where)
        end = check_range(self._start, self._stop, size, self._where)
        found = response.headers.get("X-Goog-Generation", "")
        if found and response.status_code != 416:
            _check_generation(found, self._pinned, self._where)
            self._pinned = found
        if self._position < end and first != self._position:
            raise TransientError(f"{self._where}: answered from byte {first}, expected {self._position}")
        if self._whole and not self._position:
            self._crc32c = _crc32c_header(response.headers.get("X-Goog-Hash", ""))
        return end

    def _collect(self, body: urllib3.HTTPResponse, began: float) -> None:
        assert self._end is not None
        while self._position < self._end:
            try:
                piece = body.read(min(_PIECE, self._end - self._position), decode_content=False)
            except _BROKEN as error:
                raise TransientError(f"{self._where}: stopped at byte {self._position}: {_short(error)}") from error
            if not piece:
                return
            self._parts.append(piece)
            self._position += len(piece)
            self.farthest = max(self.farthest, self._position)
            self._check_deadline(began)

    def _check_deadline(self, began: float) -> None:
        if self._position != self._end and self._policy.clock() - began > self._policy.request_deadline_s:
            raise TransientError(f"{self._where}: at byte {self._position} after {self._policy.request_deadline_s:g} s")

    def _checked(self, data: bytes) -> bytes:
        if self._crc32c is None or crc32c_text(extend_crc32c(0, data)) == self._crc32c:
            return data
        expected = self._crc32c
        self._restart()
        raise TransientError(f"{self._where}: what arrived does not have the CRC32C that the server keeps, {expected}")


def _place(response: requests.Response, where: str) -> tuple[int, int]:
    """The first byte of an answer and the size of the object, from its headers."""
    try:
        content_range = response.headers.get("Content-Range")
        if content_range is None:
            return 0, int(response.headers.get("X-Goog-Stored-Content-Length") or response.headers["Content-Length"])
        span, _, size = content_range.removeprefix("bytes ").partition("/")
        return int(span.partition("-")[0].replace("*", "0")), int(size)
    except (KeyError, ValueError) as error:
        raise TransientError(f"{where}: the answer does not say which bytes it holds") from error


def _crc32c_header(text: str) -> str | None:
    """The CRC32C in an `X-Goog-Hash` header such as `crc32c=yZRlqg==,md5=...`."""
    pairs = (pair.strip().partition("=") for pair in text.split(","))
    return next((value for key, _, value in pairs if key == "crc32c"), None)


# -- writing ----------------------------------------------------------------------------------------------------


class _GcsWriter:
    """Collects the bytes and their CRC32C, then sends all in one request that the server takes or refuses whole.

    One request rather than a resumable session: the server checks generation and CRC32C before anything is visible,
    an aborted body was never sent, and a retry can't join two halves of different tries.
    """

    def __init__(self, storage: GcsStorage, full: str, if_generation: str | None) -> None:
        self._storage = storage
        self._full = full
        self._where = f"gs://{storage.bucket}/{full}"
        self._if_generation = if_generation
        self._num_bytes = 0
        self._crc = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Writer:
        self._file = tempfile.SpooledTemporaryFile(max_size=_SPOOL_IN_MEMORY)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""
        assert self._file is not None, "write() outside the with block"
        self._num_bytes += len(data)
        self._crc = extend_crc32c(self._crc, data)
        with explained(f"{self._where}, in the temporary folder {tempfile.gettempdir()}"):
            self._file.write(data)

    def __exit__(self, *exc: object) -> None:
        assert self._file is not None
        with closing(self._file):
            if exc[0] is None:
                self._commit(self._file)

    @property
    def _crc32c(self) -> str:
        return crc32c_text(self._crc)

    def _commit(self, file: IO[bytes]) -> None:
        try:
            if self._if_generation is not None:
                self._check_before_sending(self._if_generation)
            self._verify(_persist(self._storage.retry, lambda: self._upload(file)))
        except PreconditionFailed:
            settle_twin(self._found(), self._num_bytes, self._crc32c, self._where)

    def _check_before_sending(self, wanted: str) -> None:
        found = self._found()
        if (found.generation if found else ABSENT) != wanted:
            raise PreconditionFailed(f"{self._where}: something else stands there than was expected")

    def _upload(self, file: IO[bytes]) -> dict[str, Any]:
        body = _Body(self._head(), file, self._num_bytes, self._storage.retry)
        condition = {} if self._if_generation is None else {"ifGenerationMatch": self._if_generation}
        response = send(
            self._storage.retry,
            "POST",
            "/upload" + _objects_path(self._storage.bucket),
            self._where,
            params={"uploadType": "multipart", "fields": _STAT_FIELDS} | condition,
            headers={"Content-Type": f"multipart/related; boundary={_BOUNDARY.decode()}"},
            data=body,
        )
        with closing(response):
            return _body_json(response, self._where)

    def _head(self) -> bytes:
        kind = mimetypes.guess_type(self._full)[0] or "application/octet-stream"
        facts = {"name": self._full, "contentType": kind, "crc32c": self._crc32c}
        parts = (
            b"--",
            _BOUNDARY,
            b"\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n",
            json.dumps(facts).encode(),
        )
        return b"".join((*parts, b"\r\n--", _BOUNDARY, b"\r\nContent-Type: ", kind.encode(), b"\r\n\r\n"))

    def _verify(self, reply: Mapping[str, Any]) -> None:
        """Compares what the server says it stored with what was sent; removes it again and raises if they differ."""
        stored = _stat(self._full, reply)
        if (stored.num_bytes, stored.crc32c) == (self._num_bytes, self._crc32c):
            return
        self._remove(stored.generation)
        raise StorageError(
            f"{self._where}: stored as {stored.num_bytes} bytes with CRC32C {stored.crc32c}, expected "
            f"{self._num_bytes} bytes, {self._crc32c}; that generation was deleted, write it again"
        )

    def _remove(self, generation: str) -> None:
        root = GcsStorage(self._storage.bucket, retry=self._storage.retry)
        try:
            root._json("DELETE", root._object(self._full), self._where, params={"generation": generation})
        except NotFound:
            return

    def _found(self) -> Stat | None:
        try:
            return GcsStorage(self._storage.bucket, retry=self._storage.retry).stat(self._full)
        except NotFound:
            return None


class _Body:
    """The body of an upload: sized, and iterable as often as it has to be sent."""

    def __init__(self, head: bytes, file: IO[bytes], num_bytes: int, policy: RetryPolicy) -> None:
        self._head = head
        self._tail = b"\r\n--" + _BOUNDARY + b"--\r\n"
        self._file = file
        self._num_bytes = num_bytes
        self._policy = policy

    def __len__(self) -> int:
        return len(self._head) + self._num_bytes + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        began = self._policy.clock()
        yield self._head
        self._file.seek(0)
        while piece := self._file.read(_SENT_AT_ONCE):
            if self._policy.clock() - began > self._policy.request_deadline_s + self._num_bytes / _SENT_AT_ONCE:
                raise TimeoutError("the upload is slower than 1 MiB/s")
            yield piece
        yield self._tail


# -- who we are -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Connection:
    session: requests.Session
    base_url: str
    who: str


_connections: dict[tuple[int, str], _Connection] = {}
_locks: dict[int, threading.Lock] = {}


def _connection() -> _Connection:
    """This process's connection to the server that the environment names now."""
    key = (os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST", ""))
    if key not in _connections:
        # A lock of this process: one that another thread held during a fork stays locked in the child.
        with _locks.setdefault(key[0], threading.Lock()):
            if key not in _connections:
                _connections[key] = _connect(key[1])
    return _connections[key]


def _connect(emulator: str) -> _Connection:
    credentials = AnonymousCredentials() if emulator else _credentials()
    client = google_storage.Client(project="none", credentials=credentials)
    session = client._http
    if not session.is_mtls:
        session.mount("https://", HTTPAdapter(pool_connections=4, pool_maxsize=_POOL))
        session.mount("http://", HTTPAdapter(pool_connections=4, pool_maxsize=_POOL))
    return _Connection(session, _base_url(client.api_endpoint), _who(credentials, emulator))


def _base_url(endpoint: str) -> str:
    return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")


def _who(credentials: Credentials, emulator: str) -> str:
    if isinstance(credentials, AnonymousCredentials):
        return f"the emulator at {emulator}" if emulator else "an anonymous user (no Google credentials were found)"
    return getattr(credentials, "service_account_email", None) or "the user of the Application Default Credentials"


class _NoMetadataServer(Exception):
    """Nothing answers where Google's machines have their metadata server: this is no such machine."""


class _ShortProbe(Request):
    """Looks once and briefly for the metadata server, where google-auth alone looks for 9 to 27 s.

    On Google's own hardware the server is certain to come up, so there its patience is kept.
    """

    def __call__(
        self, url: str, method: str = "GET", body: Any = None, headers: Any = None, timeout: Any = None, **more: Any
    ) -> Any:
        if urlsplit(url).path not in ("", "/") or _on_google_hardware():
            return super().__call__(url, method, body, headers, timeout, **more)
        try:
            return super().__call__(url, method, body, headers, _PROBE_TIMEOUT_S, **more)
        except TransportError as error:
            raise _NoMetadataServer from error


def _on_google_hardware() -> bool:
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            return file.read().startswith("Google")
    except OSError:
        return False


def _credentials() -> Credentials:
    """Application Default Credentials, or anonymous ones where there are none; StorageError if they are broken."""
    try:
        return google.auth.default(scopes=[_SCOPE], request=_ShortProbe())[0]
    except _NoMetadataServer:
        return AnonymousCredentials()
    except DefaultCredentialsError as error:
        if "default credentials were not found" in str(error):
            return AnonymousCredentials()
        raise StorageError(f"Google credentials are broken ({_one_line(str(error))}); {_LOGIN}") from error
