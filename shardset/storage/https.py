"""A folder of a web server, read-only: a published set, or the `resolve` address of a Hugging Face
repository.

Credentials come from the variable SHARDSET_HTTPS_HEADER, for one host, such as
`huggingface.co Authorization: Bearer hf_...`, or from the host's own entry in ~/.netrc.
"""

import os
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from netrc import NetrcParseError, netrc
from typing import ClassVar
from urllib.parse import quote, urljoin, urlsplit

import requests

from shardset.errors import ConfigError, StorageError, TransientError
from shardset.per_process import PerProcess
from shardset.storage.base import ObjectWriter, Stat
from shardset.storage.retry import RetryPolicy, kind_of, refusal
from shardset.storage.served import (
    Answer,
    ServedFolder,
    keep_connections,
    pieces_of,
    range_header,
    reason_of,
    span_of,
)

HEADER = "SHARDSET_HTTPS_HEADER"
_HEADER_FORM = re.compile(r"([!-~]+) ([\w-]+): *([!-~][ -~]*)", re.ASCII)
_MAX_REDIRECTS = 5


@dataclass(frozen=True, slots=True)
class HttpsStorage(ServedFolder):
    """The files of a web server below an address; `bucket` is host and port. Can't list or write.

    A generation is the ETag; where that is weak or missing, the time of the last change and the
    size.
    """

    scheme: ClassVar[str] = "https"

    @contextmanager
    def request(
        self,
        where: str,
        name: str,
        start: int,
        stop: int | None,
        generation: str | None,
    ) -> Iterator[Answer]:
        self._full(name)
        url = f"{self.url}/{quote(name)}"
        headers = {"Accept-Encoding": "identity"} | range_header(start, stop)
        if generation and generation.startswith('"'):
            headers["If-Match"] = generation

        try:
            with _response(self.retry, url, headers, where) as response:
                first, stat = _facts(response, name, start, where)
                yield Answer(stat=stat, first=first, pieces=pieces_of(response))
        except ValueError as error:  # no address
            raise StorageError(f"{where}: no answer: {reason_of(error)}") from None

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        raise ConfigError(
            f"{self.url}: a web server can't be listed; name a shard set, or copy the files to a"
            " folder"
        )

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        raise ConfigError(
            f"{self.url}/{name}: https:// is only read; write to a folder or a bucket and publish"
            " that"
        )

    def _delete(self, name: str, generation: str | None) -> None:
        self.writer(name)


@dataclass(frozen=True, slots=True)
class HttpStorage(HttpsStorage):
    """The same of this machine, where no one on the way reads or changes what is sent."""

    scheme: ClassVar[str] = "http"


def _response(
    policy: RetryPolicy, url: str, headers: dict[str, str], where: str
) -> requests.Response:
    """The answer to a request, its body unread, after redirects; raises the error for a refusal."""
    timeouts = policy.connect_timeout_s, policy.stall_timeout_s
    for _ in range(_MAX_REDIRECTS + 1):
        parts = urlsplit(url)
        if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1"):
            raise ConfigError(
                f"{where}: http://{parts.hostname} is not read, as it is not this machine; use"
                " https://"
            )
        sent = headers | _credentials(parts.hostname or "")
        response = _session().get(
            url, headers=sent, stream=True, allow_redirects=False, timeout=timeouts
        )
        status = response.status_code
        if status < 300:
            return response
        with closing(response):
            if status == 416 and "Range" in headers:  # it starts at the end or after it
                headers = {name: value for name, value in headers.items() if name != "Range"}
            elif response.is_redirect:
                _ = response.content  # read, so that the connection is used again
                url = urljoin(url, response.headers["Location"])
            else:
                kind = kind_of(status)
                advice = f"; check the address, and your credentials in {HEADER} or ~/.netrc"
                if issubclass(kind, TransientError):
                    advice = ""
                raise refusal(
                    kind, f"{where}: the server answered {status}{advice}", response.headers
                )
    raise StorageError(f"{where}: redirected {_MAX_REDIRECTS} times; check the address")


def _facts(response: requests.Response, name: str, start: int, where: str) -> tuple[int, Stat]:
    """The first byte and the facts about the file, from the headers; raises StorageError."""
    headers = response.headers
    if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
        raise StorageError(
            f"{where}: the server sends it compressed ({encoding}), though asked not to; turn"
            " that off"
        )
    e_tag = headers.get("ETag", "")
    try:
        first, num_bytes = span_of(response.status_code, headers)
        generation = e_tag if e_tag.startswith('"') else f"{headers['Last-Modified']} {num_bytes}"
    except (KeyError, ValueError):
        if headers.get("Content-Length") == "0":
            raise TransientError(f"{where}: the answer is empty") from None
        expected = "Content-Length, or Content-Range of a range, and ETag or Last-Modified"
        raise StorageError(
            f"{where}: the answer lacks headers, expected {expected}; use another server"
        ) from None
    if response.status_code != 206 and 0 < start < num_bytes:
        raise StorageError(f"{where}: the server sends no byte ranges; copy the set to another one")
    return first, Stat(name=name, num_bytes=num_bytes, generation=generation, crc32c=None)


def _credentials(host: str) -> dict[str, str]:
    """The header of the environment if it is for this host, else what netrc has for it by name."""
    if text := os.environ.get(HEADER):
        if not (match := _HEADER_FORM.fullmatch(text)):
            expected = (
                "`HOST NAME: VALUE` in one line of ASCII, such as `huggingface.co Authorization:"
                " Bearer hf_...`"
            )
            raise ConfigError(f"{HEADER} is not {expected}")
        if match[1].lower() == host:
            return {match[2]: match[3]}
    file = os.path.expanduser(os.environ.get("NETRC", "~/.netrc"))
    try:
        login = netrc(file).hosts.get(host) if os.path.exists(file) else None
    except (OSError, UnicodeDecodeError, NetrcParseError) as error:
        raise ConfigError(
            f"{file}: can't be read as netrc ({type(error).__name__}); mend or remove it"
        ) from None
    user, _, password = login or ("", "", "")
    if not password:
        return {}
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}


@PerProcess
def _session() -> requests.Session:
    """The connections of this process."""
    session = requests.Session()
    # else requests sends netrc's `default` to every host, over any header
    session.auth = lambda request: request
    keep_connections(session)
    return session
