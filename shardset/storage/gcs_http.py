"""One request to Google Cloud Storage: credentials, connections, what its answers mean, refusals in
plain words.

The only import of google-cloud-storage. Google's client supplies credentials and connections; its
own download takes 1.4 ms of processor time a MB at 4 MiB a range, `send` 0.35 ms a request and 0.5
ms a MB (emulator on the same machine).
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode, urlsplit

import google.auth
import msgspec
import requests
import urllib3
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import (
    DefaultCredentialsError,
    GoogleAuthError,
    InvalidOperation,
    TransportError,
)
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud.storage import Client
from requests.adapters import HTTPAdapter

from shardset.errors import (
    ConfigError,
    NotFound,
    PreconditionFailed,
    StorageError,
    TransientError,
    masked,
)
from shardset.per_process import PerProcess
from shardset.prepared import prepared
from shardset.storage.base import Stat
from shardset.storage.retry import RetryPolicy, kind_of, refusal
from shardset.storage.served import in_time

T = TypeVar("T")

_POOL = 64  # connections, for GcsStorage.reads_at_once and all else that a process does
_PROBE_TIMEOUT_S = 1.0
BROKEN = (urllib3.exceptions.HTTPError, TransportError, ConnectionError, TimeoutError)
"""Exceptions of a broken connection, while a request is sent or its response is read."""

_TOKEN = re.compile(rb'"access_?[tT]oken"')
"""The answer of a token server; which of the two names it uses depends on the kind of credentials.
"""
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


def send(
    policy: RetryPolicy,
    method: str,
    path: str,
    where: str,
    *,
    params: Mapping[str, str] = {},
    headers: Mapping[str, str] = {},
    body: Callable[[], Iterator[bytes] | None] = lambda: None,
) -> urllib3.BaseHTTPResponse:
    """The response to one request, its body unread; raises TransientError if another try may help,
    or StorageError.

    `body` makes the pieces of the body, once for each try. Takes half the processor time of
    requests, whose connections it uses.
    """
    connection = _connect(os.environ.get("STORAGE_EMULATOR_HOST", ""))
    # pays where the bucket has the requester pay
    if payer := os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT"):
        params = {**params, "userProject": payer}
    target = f"{connection.target}{path}" + (f"?{urlencode(params)}" if params else "")
    token_request = partial(connection.token_request, timeout=policy.stall_timeout_s)

    refreshes_left = 2
    while True:
        try:
            sent = {**connection.headers, **headers}
            connection.credentials.before_request(
                token_request, method, connection.base_url + path, sent
            )
            response = connection.pool.urlopen(
                method,
                target,
                body=body(),
                headers=sent,
                timeout=urllib3.Timeout(
                    connect=policy.connect_timeout_s, read=policy.stall_timeout_s
                ),
                retries=False,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
                decode_content=False,
            )
            if response.status < 300 or (response.status == 416 and "Range" in headers):
                return response
            with closing(response):
                text = response.read(decode_content=True).decode(errors="replace")
            if response.status != 401 or not refreshes_left:
                raise _refusal(response.status, text, where, connection, response.headers)
            refreshes_left -= 1
            connection.credentials.refresh(token_request)  # a token may expire on its way
        except BROKEN as error:
            raise TransientError(f"{where}: {explain(error)}") from error
        # what anonymous credentials raise when they are asked for a fresh token
        except InvalidOperation as error:
            raise _refusal(401, "", where, connection, {}) from error
        except GoogleAuthError as error:
            kind = TransientError if error.retryable else StorageError
            raise kind(
                f"{where}: {connection.who} could not authenticate ({explain(error)}); {_LOGIN}"
            ) from error


_CHECK_ENVIRONMENT = (
    "check STORAGE_EMULATOR_HOST, HTTP_PROXY and HTTPS_PROXY, such as http://localhost:9023"
)
_LOGIN = "run `gcloud auth application-default login`, or use a service account that may"
_NEEDED = (
    "if a permission is missing, it needs storage.objects.get and .list to read"
    " (roles/storage.objectViewer), .create and .delete to write"
)


def _refusal(
    status: int, text: str, where: str, connection: "_Connection", headers: Mapping[str, str]
) -> StorageError:
    is_damaged = status == 400 and "crc32c" in text.lower()
    kind = TransientError if is_damaged or status == 416 else kind_of(status)
    why = f" ({said})" if (said := _said(text)) else ""
    answered = f"the server answered {status}{why}"
    message = {
        NotFound: "nothing is stored there, or there is no such bucket; check the name",
        PreconditionFailed: "another generation is stored than was expected",
        StorageError: f"{answered}; check name and settings",
    }.get(kind, answered)
    if status in (401, 403):
        message = f"{status}: {connection.who} may not do this{why}; {_NEEDED}; {_LOGIN}"
    return refusal(kind, f"{where}: {message}", headers)


def _said(text: str) -> str:
    """The reason that the server gives for a refusal, in one line: the message in its JSON, else
    the text itself.
    """
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return _one_line(text)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def explain(error: Exception) -> str:
    """An exception in one line: its class and its message."""
    return f"{type(error).__name__}: {_one_line(str(error))}"


_OF_NOTHING = "AAAAAA=="
"""The CRC32C of an empty object, of which some emulators leave the size out."""


@prepared
class ListedObject(msgspec.Struct, frozen=True):
    """An object in a listing."""

    name: str
    generation: int
    size: int = -1
    crc32c: str | None = None

    def __post_init__(self) -> None:
        if self.size < 0 and self.crc32c != _OF_NOTHING:
            raise ValueError("it has no size")

    def stat(self, name: str) -> Stat:
        """The object as a Stat; `name` is its name in the folder."""
        return Stat(
            name=name,
            num_bytes=max(0, self.size),
            generation=str(self.generation),
            crc32c=self.crc32c,
        )


@prepared
class StoredObject(ListedObject, frozen=True, kw_only=True):
    kind: Literal["storage#object"]


@prepared
class ListingPage(msgspec.Struct, frozen=True, rename="camel"):
    kind: Literal["storage#objects"]
    items: list[ListedObject] = []
    next_page_token: str = ""


@prepared
class BucketFacts(msgspec.Struct, frozen=True, rename="camel"):
    kind: Literal["storage#bucket"]
    location: str = "unknown"


def json_object(
    policy: RetryPolicy, response: urllib3.BaseHTTPResponse, where: str, kind: type[T]
) -> T:
    """The JSON object in a response, which it closes; TransientError unless it arrived whole and
    is of that kind.

    Accepts numbers in strings: Google sends 64-bit numbers so.
    """
    try:
        with in_time(policy, response, where):
            body = response.read(decode_content=True)
    except BROKEN as error:
        raise TransientError(f"{where}: {explain(error)}") from error
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        beginning = _one_line(body[:60].decode(errors="replace"))
        content = f"{len(body)} bytes, {beginning!r}" if body else "it is empty"
        raise TransientError(
            f"{where}: the answer is not what was asked for ({error}): {content}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Connection:
    credentials: Credentials
    base_url: str
    who: str
    pool: urllib3.HTTPConnectionPool
    target: str
    headers: Mapping[str, str]
    token_request: Request


@PerProcess
def _connect(emulator: str) -> _Connection:
    """This process's connection to the emulator, or to Google if none is named."""
    token_request = _TokenRequest()
    credentials: Credentials = AnonymousCredentials() if emulator else _credentials(token_request)
    client = Client(project="none", credentials=credentials)
    session = client._http
    if not session.is_mtls:
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=_POOL))
    url = _base_url(client.api_endpoint)
    try:
        pool, target, headers = _pool(session, url)
    except (ValueError, urllib3.exceptions.HTTPError) as error:
        raise ConfigError(
            f"{url} is not the address of a server ({explain(error)}); {_CHECK_ENVIRONMENT}"
        ) from None
    who = _who(credentials, emulator)
    return _Connection(credentials, url, who, pool, target, headers, token_request)


def _pool(
    session: AuthorizedSession, url: str
) -> tuple[urllib3.HTTPConnectionPool, str, dict[str, Any]]:
    """The connection pool of a session to a server or the proxy before it, and each request's
    target and headers.
    """
    settings = session.merge_environment_settings(url, {}, True, None, None)
    request = requests.Request("GET", url).prepare()
    adapter = session.get_adapter(url)
    assert isinstance(adapter, HTTPAdapter)
    proxies, verify, cert = settings["proxies"], settings["verify"], settings["cert"]
    pool = adapter.get_connection_with_tls_context(request, verify, proxies=proxies, cert=cert)
    adapter.cert_verify(pool, url, verify, cert)
    return (
        pool,
        adapter.request_url(request, proxies).rstrip("/"),
        {**session.headers, **request.headers},
    )


def _base_url(endpoint: str) -> str:
    return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")


def _who(credentials: Credentials, emulator: str) -> str:
    if emulator:
        return f"the emulator at {masked(_base_url(emulator))}"
    if isinstance(credentials, AnonymousCredentials):
        return "an anonymous user (no Google credentials were found)"
    return (
        getattr(credentials, "service_account_email", None)
        or "the user of the Application Default Credentials"
    )


class _TokenRequest(Request):
    """Requests credentials and tokens with other patience than google-auth's.

    Looks for the metadata server once and briefly, where google-auth looks for 9 to 27 s; on
    Google's own hardware, it counts on that server without an answer. A response without a token is
    a broken connection; google-auth raises KeyError.
    """

    def __call__(self, url: str, method: str = "GET", *args: Any, **options: Any) -> Any:
        path = urlsplit(url).path
        if path in ("", "/"):
            try:
                return super().__call__(
                    url, method, *args, **{**options, "timeout": _PROBE_TIMEOUT_S}
                )
            except TransportError:
                return SimpleNamespace(status=404, headers={})
        response = super().__call__(url, method, *args, **options)
        asks_for_token = method == "POST" or path.endswith("/token")
        if response.status == 200 and asks_for_token and not _TOKEN.search(response.data):
            raise TransportError(f"{masked(url)} answered with no token")
        return response


def _credentials(request: Request) -> Credentials:
    """Application Default Credentials, or anonymous ones where there are none; raises StorageError
    for broken ones.
    """
    try:
        return google.auth.default(scopes=[_SCOPE], request=request)[0]
    except DefaultCredentialsError as error:
        if "default credentials were not found" in str(error):
            return AnonymousCredentials()
        raise StorageError(
            f"Google credentials are broken ({_one_line(str(error))}); {_LOGIN}"
        ) from error
