"""One request to Google Cloud Storage: credentials, connections, refusals in plain words.

The only import of google-cloud-storage. Google's client supplies credentials and connections; its own download takes
1.4 ms of processor time a MB at 4 MiB a range, `send_get` 0.35 ms a request and 0.5 ms a MB (emulator on the same
machine).
"""

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import google.auth
import msgspec
import requests
import urllib3
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, InvalidOperation, TransportError
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud.storage import Client
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy

from shardset.addresses import masked
from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, Throttled, TransientError
from shardset.prepared import prepared
from shardset.storage.retry import RetryPolicy
from shardset.storage.throttle import Throttle

T = TypeVar("T")

_POOL = 64  # connections, for GcsStorage.reads_at_once and all else that a process does
_PROBE_TIMEOUT_S = 1.0
INCOMPLETE = 308
"""The status of the answer to a part of an upload that is not the last."""
_AGAIN = frozenset({408, 416, 500, 502, 504})
_TOO_MANY = frozenset({429, 503})
BROKEN = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
    TransportError,
    ConnectionError,
    TimeoutError,
)
"""Exceptions of a broken connection, while a request is sent or its response is read."""

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


def send(policy: RetryPolicy, method: str, path: str, where: str, **options: Any) -> requests.Response:
    """The response to one request, its body unread; raises TransientError if another try may help, or StorageError."""
    connection = _connection()
    headers = options.get("headers") or {}

    def request() -> requests.Response:
        with _refused_in_words(where, connection):
            response: requests.Response = connection.session.request(
                method,
                connection.base_url + path,
                timeout=(policy.connect_timeout_s, policy.stall_timeout_s),
                stream=True,
                allow_redirects=False,
                **options,
            )
            if _is_answer(response.status_code, headers):
                return response
            with closing(response):
                raise _refusal(response.status_code, response.text, where, connection, response.headers)

    return connection.throttle(path, headers).ask(policy, request)


def send_get(
    policy: RetryPolicy, path: str, where: str, params: Mapping[str, str], headers: Mapping[str, str]
) -> urllib3.BaseHTTPResponse:
    """`send` for a GET in half the processor time: bypasses requests, but uses its connections and credentials.

    Falls back to requests behind a proxy, with a client certificate and after a refused token.
    """
    connection = _connection()
    pool = connection.pool
    if pool is None:
        return _raw(send(policy, "GET", path, where, params=params, headers=headers))

    def request() -> urllib3.BaseHTTPResponse | None:
        with _refused_in_words(where, connection):
            sent, url = {**connection.session.headers, **headers}, connection.base_url + path
            connection.session.credentials.before_request(connection.token_request, "GET", url, sent)
            response = pool.urlopen(
                "GET",
                f"{urlsplit(connection.base_url).path}{path}?{urlencode(params)}",
                headers=sent,
                timeout=urllib3.Timeout(connect=policy.connect_timeout_s, read=policy.stall_timeout_s),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            if _is_answer(response.status, headers):
                return response
            with closing(response):
                if response.status == 401:
                    return None
                text = response.read(decode_content=True).decode(errors="replace")
                raise _refusal(response.status, text, where, connection, response.headers)

    response = connection.throttle(path, headers).ask(policy, request)
    return _raw(send(policy, "GET", path, where, params=params, headers=headers)) if response is None else response


def is_throttled(policy: RetryPolicy, path: str) -> bool:
    """Whether the bucket has refused to send byte ranges to this process within a minute."""
    return _connection().throttle(path, {"Range": ""}).is_busy(policy)


def _raw(response: requests.Response) -> urllib3.BaseHTTPResponse:
    body = response.raw
    assert isinstance(body, urllib3.BaseHTTPResponse)
    return body


def _is_answer(status: int, headers: Mapping[str, str]) -> bool:
    return (
        status < 300 or (status == 416 and "Range" in headers) or (status == INCOMPLETE and "Content-Range" in headers)
    )


@contextmanager
def _refused_in_words(where: str, connection: "_Connection") -> Iterator[None]:
    try:
        yield
    except BROKEN as error:
        raise TransientError(f"{where}: {explain(error)}") from error
    except requests.exceptions.InvalidURL as error:
        raise ConfigError(f"{where}: {explain(error)}; {_CHECK_ENVIRONMENT}") from None
    except InvalidOperation as error:  # what anonymous credentials raise when a 401 asks them for a fresh token
        raise _refusal(401, "", where, connection) from error
    except GoogleAuthError as error:
        kind = TransientError if error.retryable else StorageError
        raise kind(f"{where}: {connection.who} could not authenticate ({explain(error)}); {_LOGIN}") from error


_CHECK_ENVIRONMENT = "check STORAGE_EMULATOR_HOST, HTTP_PROXY and HTTPS_PROXY, such as http://localhost:9023"
_LOGIN = "run `gcloud auth application-default login`, or use a service account that may"
_NEEDED = (
    "if a permission is missing, it needs storage.objects.get and .list to read (roles/storage.objectViewer), "
    ".create and .delete to write"
)


def _refusal(
    status: int, text: str, where: str, connection: "_Connection", headers: Mapping[str, str] | None = None
) -> StorageError:
    said = _said(text)
    if status in _TOO_MANY:
        return Throttled(f"{where}: the server answered {status} ({said})", _retry_after_s(headers or {}))
    if status in _AGAIN or (status == 400 and "crc32c" in text.lower()):
        return TransientError(f"{where}: the server answered {status} ({said})")
    if status in (404, 410):  # both are what Google says of an upload that it no longer knows
        return NotFound(f"{where}: nothing is stored there, or there is no such bucket; check the name")
    if status == 412:
        return PreconditionFailed(f"{where}: something else stands there than was expected")
    if status in (401, 403):
        why = f" ({said})" if said else ""
        return StorageError(f"{where}: {status}: {connection.who} may not do this{why}; {_NEEDED}; {_LOGIN}")
    return StorageError(f"{where}: the server answered {status} ({said}); check name and settings")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The pause that a Retry-After asks for, in seconds or as a date beside the server's own; 0 without one."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        now = headers.get("Date") or formatdate(usegmt=True)
        return max(0.0, (parsedate_to_datetime(text) - parsedate_to_datetime(now)).total_seconds())
    except (ValueError, TypeError):  # no date, or one of them without a zone
        return 0.0


def _said(text: str) -> str:
    """The reason that the server gives for a refusal, in one line: the message in its JSON, else the text itself."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return _one_line(text)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def explain(error: Exception) -> str:
    """An exception in one line: its class and its message."""
    return f"{type(error).__name__}: {_one_line(str(error))}"


def json_object(response: requests.Response, where: str, kind: type[T]) -> T:
    """The JSON object in a response; raises TransientError unless it arrived whole and is of that kind.

    Accepts numbers in strings: Google sends 64-bit numbers so.
    """
    body = body_of(response, where)
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        beginning = _one_line(body[:60].decode(errors="replace"))
        content = f"{len(body)} bytes, {beginning!r}" if body else "it is empty"
        raise TransientError(f"{where}: the answer is not what was asked for ({error}): {content}") from error


def body_of(response: requests.Response, where: str) -> bytes:
    """The whole body of a response; raises TransientError if it did not arrive whole."""
    try:
        return response.content
    except BROKEN as error:
        raise TransientError(f"{where}: {explain(error)}") from error


def check_empty(response: requests.Response, where: str) -> None:
    """Raises TransientError unless an answer is that to a deletion, which is empty; an emulator says `null`."""
    body = body_of(response, where)
    if body.strip() not in (b"", b"null"):
        raise TransientError(f"{where}: {len(body)} bytes came as the answer to a deletion, expected none")


@dataclass(frozen=True, slots=True)
class _Connection:
    session: AuthorizedSession
    base_url: str
    who: str
    pool: urllib3.HTTPConnectionPool | None
    token_request: Request
    throttles: defaultdict[tuple[str, bool], Throttle]

    def throttle(self, path: str, headers: Mapping[str, str]) -> Throttle:
        """The throttle of a bucket. Byte ranges have one of their own, so that a heartbeat does not queue with them."""
        return self.throttles[path.partition("/b/")[2].partition("/")[0], "Range" in headers]


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
    credentials: Credentials = AnonymousCredentials() if emulator else _credentials()
    client = Client(project="none", credentials=credentials)
    session = client._http
    if not session.is_mtls:
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=_POOL))
    session._auth_request = _TokenRequest(session._auth_request.session)
    url = _base_url(client.api_endpoint)
    try:
        pool = _pool(session, url)
    except (ValueError, urllib3.exceptions.HTTPError) as error:
        raise ConfigError(f"{url} is no address of a server ({explain(error)}); {_CHECK_ENVIRONMENT}") from None
    return _Connection(session, url, _who(credentials, emulator), pool, _TokenRequest(), defaultdict(Throttle))


def _pool(session: AuthorizedSession, url: str) -> urllib3.HTTPConnectionPool | None:
    """The connection pool of a session to a server; None where a request needs more than a connection."""
    settings = session.merge_environment_settings(url, {}, True, None, None)
    if session.is_mtls or select_proxy(url, settings["proxies"]) is not None:
        return None
    request = requests.Request("GET", url).prepare()
    adapter = session.get_adapter(url)
    assert isinstance(adapter, HTTPAdapter)
    pool = adapter.get_connection_with_tls_context(request, settings["verify"], cert=settings["cert"])
    adapter.cert_verify(pool, url, settings["verify"], settings["cert"])
    return pool


def _base_url(endpoint: str) -> str:
    return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")


def _who(credentials: Credentials, emulator: str) -> str:
    if emulator:
        return f"the emulator at {masked(_base_url(emulator))}"
    if isinstance(credentials, AnonymousCredentials):
        return "an anonymous user (no Google credentials were found)"
    return getattr(credentials, "service_account_email", None) or "the user of the Application Default Credentials"


@prepared
class _Token(msgspec.Struct, rename="camel"):
    """The response of a token server; which of the two names it uses depends on the kind of credentials."""

    token: str = msgspec.field(name="access_token", default="")
    access_token: str = ""
    expires_in: int | None = msgspec.field(name="expires_in", default=None)

    def __post_init__(self) -> None:
        if not (self.token or self.access_token):
            raise ValueError("no token")


@prepared
class _TimedToken(_Token):
    """The token of a metadata server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expires_in is None:
            raise ValueError("no time at which the token expires")


@prepared
class _Account(msgspec.Struct):
    """A metadata server's description of a machine's service account."""

    email: str
    scopes: list[str]


class _TokenRequest(Request):
    """Requests tokens; treats a response without one as a broken connection, where google-auth raises KeyError."""

    def __call__(self, url: str, method: str = "GET", *args: Any, **options: Any) -> Any:
        response = super().__call__(url, method, *args, **options)
        kind = _kind_of_answer(method, urlsplit(url).path)
        if response.status == 200 and kind is not None:
            try:
                msgspec.json.decode(response.data, type=kind, strict=False)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TransportError(f"{masked(url)} answered with no token ({error})") from error
        return response


def _kind_of_answer(method: str, path: str) -> type[msgspec.Struct] | None:
    if method == "POST":
        return _Token
    if "/service-accounts/" not in path:
        return None
    return _TimedToken if path.endswith("/token") else _Account if path.endswith("/") else None


class _NoMetadataServer(Exception):
    """Nothing answers at the address of the metadata server, so this is not one of Google's machines."""


class _ShortProbe(Request):
    """Looks for the metadata server once and briefly, where google-auth alone looks for 9 to 27 s.

    On Google's own hardware the server is certain to come up, so google-auth's patience is kept.
    """

    def __call__(self, url: str, *args: Any, **options: Any) -> Any:
        if urlsplit(url).path not in ("", "/") or _on_google_hardware():
            return super().__call__(url, *args, **options)
        try:
            return super().__call__(url, *args, **{**options, "timeout": _PROBE_TIMEOUT_S})
        except TransportError as error:
            raise _NoMetadataServer from error


def _on_google_hardware() -> bool:
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            return file.read().startswith("Google")
    except OSError:
        return False


def _credentials() -> Credentials:
    """Application Default Credentials, or anonymous ones where there are none; raises StorageError for broken ones."""
    try:
        return google.auth.default(scopes=[_SCOPE], request=_ShortProbe())[0]
    except _NoMetadataServer:
        return AnonymousCredentials()
    except DefaultCredentialsError as error:
        if "default credentials were not found" in str(error):
            return AnonymousCredentials()
        raise StorageError(f"Google credentials are broken ({_one_line(str(error))}); {_LOGIN}") from error
