"""One request to Google Cloud Storage: credentials, what its answers mean, refusals in plain words.

The only import of google-cloud-storage and google-auth: the client knows where the API is,
google-auth supplies credentials and a session of requests. The bodies of objects are read from its
connections: the client's own download takes three times the processor time, and can't go on at the
byte reached.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import google.auth
import msgspec
import requests
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import (
    DefaultCredentialsError,
    GoogleAuthError,
    InvalidOperation,
    TransportError,
)
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud.storage import Client

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
from shardset.storage.served import keep_connections, reason_of

T = TypeVar("T")

_PROBE_TIMEOUT_S = 1.0
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
    body: Iterable[bytes] | None = None,
) -> requests.Response:
    """The response to one request, its body unread; raises TransientError if another try may help,
    or StorageError.

    `body` has a length, and can be iterated again if a token has expired.
    """
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    session, url, who = _connect(emulator)
    # pays where the bucket has the requester pay
    if payer := os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT"):
        params = {**params, "userProject": payer}
    try:
        response: requests.Response = session.request(
            method,
            url + path,
            params=params,
            data=body,
            headers=dict(headers),
            timeout=(policy.connect_timeout_s, policy.stall_timeout_s),
            stream=True,
            allow_redirects=False,
        )
    except InvalidOperation as error:  # anonymous credentials, asked for another token
        raise _refusal(401, "", where, who, {}) from error
    except TransportError as error:
        raise TransientError(f"{where}: {reason_of(error)}") from error
    except GoogleAuthError as error:
        kind = TransientError if error.retryable else StorageError
        raise kind(
            f"{where}: {who} could not authenticate ({_one_line(str(error))}); {_LOGIN}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{url} is not the address of a server ({_one_line(str(error))}); {_CHECK_ENVIRONMENT}"
        ) from None
    if response.status_code < 300 or (response.status_code == 416 and "Range" in headers):
        return response
    text = response.content.decode(errors="replace")
    raise _refusal(response.status_code, text, where, who, response.headers)


def read_json(response: requests.Response, where: str, kind: type[T]) -> T:
    """The JSON object of an answer; TransientError unless it is of that kind.

    Accepts numbers in strings: Google sends 64-bit numbers so.
    """
    try:
        return msgspec.json.decode(response.content, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransientError(
            f"{where}: the answer is not what was asked for ({error}):"
            f" {len(response.content)} bytes, {response.content[:60]!r}"
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
    status: int, text: str, where: str, who: str, headers: Mapping[str, str]
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
        message = f"{status}: {who} may not do this{why}; {_NEEDED}; {_LOGIN}"
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


_OF_NOTHING = "AAAAAA=="
"""The CRC32C of an empty object, of which some emulators leave the size out."""


@prepared
class StoredObject(msgspec.Struct, frozen=True):
    """An object as the server describes it."""

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
class ListingPage(msgspec.Struct, frozen=True, rename="camel"):
    kind: Literal["storage#objects"]
    items: list[StoredObject] = []
    next_page_token: str = ""


@prepared
class BucketFacts(msgspec.Struct, frozen=True):
    location: str = "unknown"


@PerProcess
def _connect(emulator: str) -> tuple[AuthorizedSession, str, str]:
    """This process's connections to the emulator, or to Google if none is named; its address, and
    who asks.
    """
    token_request = _TokenRequest()
    credentials = AnonymousCredentials() if emulator else _credentials(token_request)
    address = Client(project="none", credentials=credentials).api_endpoint
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    session = AuthorizedSession(credentials, auth_request=token_request)
    keep_connections(session)
    # once, not for each request; without what ~/.netrc has for all hosts
    settings = session.merge_environment_settings(url, {}, None, None, None)
    session.proxies, session.verify = settings["proxies"], settings["verify"]
    session.trust_env = False
    return session, url, f"the emulator at {masked(url)}" if emulator else _who(credentials)


def _who(credentials: Credentials) -> str:
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
