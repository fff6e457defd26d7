"""An HTTP proxy that breaks exactly the requests it is told to: put it in front of the server of a
bucket.

    with FaultyProxy(emulator_url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.script = in_turn(Fault("status", status=503), None,
        Fault("truncate", at=1000), when=is_media)
        ...
        assert len(proxy.seen) == 3

`script` gets each request as a `Seen` and returns a Fault, or None to pass it on untouched. It runs
under a lock, so it may keep state. `in_turn` makes one from a list; a script of one's own can break
every n-th or random requests. `delay_s` makes every answer late (a far-away bucket).

Kinds of faults (`at` counts bytes of the answer's body, or of the request's body for the two about
uploads):

    status        answers `status` at once, with `put` and `headers`; the request is not passed on
    reset         not passed on; the connection is reset
    lose          passed on and carried out, but the answer is lost: the connection is reset
    shorten       the answer's body ends after `at` bytes, and its headers say so
    truncate      the answer's headers are whole, its body ends after `at` bytes, the connection is
                  closed
    reset_at      the same, with a reset
    stall         the same, with `seconds` of silence before the connection is closed
    drip          the answer's body comes `at` bytes at a time, each `seconds` after the last
    flip          one bit of byte `at` of the answer's body is flipped
    replace       `find` becomes `put` in the answer's headers and body (of equal lengths)
    flip_upload   one bit of byte `at` of the request's body is flipped on its way
    cut_upload    the server sees the request's body end after `at` bytes; the client sees a reset
"""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.makers.objects import flipped

_STARTS_WITH = 1 << 10
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break one request; see the top of this file."""

    kind: str
    at: int = 0
    status: int = 503
    seconds: float = 30.0
    find: bytes = b""
    put: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived: its number (from 0), method, path with query, headers (lower-case
    names).

    `start` is the beginning of the body, in which an upload names its object.
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    start: bytes = b""


Script = Callable[[Seen], Fault | None]


def is_media(seen: Seen) -> bool:
    """Whether a request asks for an object's bytes."""
    return seen.method == "GET" and "alt=media" in seen.path


def is_read(seen: Seen) -> bool:
    """Whether a request asks for an object's bytes, of a server of any kind."""
    is_other = "list" in seen.path or seen.path.startswith("/storage/")
    return is_media(seen) or (seen.method == "GET" and not is_other)


def is_upload(seen: Seen) -> bool:
    """Whether a request carries an object's bytes."""
    return seen.method in ("POST", "PUT")


def is_listing(seen: Seen) -> bool:
    """Whether a request asks for the names of objects."""
    path, _, query = seen.path.partition("?")
    return seen.method == "GET" and (path.endswith("/o") or "list" in query)


def in_turn(*faults: Fault | None, when: Callable[[Seen], bool] = lambda seen: True) -> Script:
    """A script that gives the first fault to the first request that `when` picks, and so on;
    nothing afterwards.
    """
    left = iter(faults)
    return lambda seen: next(left, None) if when(seen) else None


class FaultyProxy:
    """A proxy on a free local port; `url` is what clients use. Use it as a context manager."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.script: Script = lambda seen: None
        self.seen: list[Seen] = []
        self.delay_s = 0.0
        self.num_connections = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def decide(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Fault | None:
        """Notes a request and asks the script about it."""
        with self._lock:
            seen = Seen(len(self.seen), method, path, headers, body[:_STARTS_WITH])
            self.seen.append(seen)
            return self.script(seen)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    proxy: FaultyProxy

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], address: object
    ) -> None:
        self.proxy.num_connections += 1
        super().process_request(request, address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        self.close_request(request)  # without the polite end that would come before a reset

    def handle_error(self, *_: object) -> None:
        """Clients hang up on us all the time; that is what we are for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    upstream: http.client.HTTPConnection | None = None

    def log_message(self, *_: object) -> None:
        """Silent: `seen` is the log."""

    def handle_any(self) -> None:
        """One request, whole or broken as the script says."""
        proxy = self.server.proxy
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        fault = proxy.decide(self.command, self.path, headers, body) or Fault("none")
        time.sleep(proxy.delay_s)
        if fault.kind == "status":
            self._answer(fault.status, list(fault.headers), fault.put)
        elif fault.kind == "reset":
            self._reset()
        elif fault.kind == "cut_upload":
            self._cut_upload(headers, body[: fault.at])
        else:
            self._pass_on(
                headers, flipped(body, fault.at) if fault.kind == "flip_upload" else body, fault
            )

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = do_HEAD = handle_any  # noqa: N815

    def _pass_on(self, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=60)
        # with the host or the date
        is_signed = headers.get("authorization", "").startswith(("AWS4", "SharedKey"))
        dropped = _HOP_BY_HOP - {"date"} if is_signed else {"host", *_HOP_BY_HOP}
        sent = {
            name: value
            for name, value in headers.items()
            if name not in {"content-length", *dropped}
        }
        self.upstream.request(
            self.command, self.path, body or None, {**sent, "Content-Length": str(len(body))}
        )
        answer = self.upstream.getresponse()
        found = [pair for pair in answer.getheaders() if pair[0].lower() not in _HOP_BY_HOP]
        data = answer.read()
        if fault.kind == "lose":
            self._reset()
        elif fault.kind == "shorten":
            self._answer(answer.status, found, data[: fault.at])
        elif fault.kind == "replace":
            put, find = fault.put.decode(), fault.find.decode()
            found = [(name, value.replace(find, put)) for name, value in found]
            self._answer(answer.status, found, data.replace(fault.find, fault.put))
        elif fault.kind == "flip":
            self._answer(answer.status, found, flipped(data, fault.at))
        elif fault.kind in ("truncate", "reset_at", "stall"):
            self._answer(answer.status, found, data, until=fault.at)
            self._end(fault)
        elif fault.kind == "drip":
            self._answer(answer.status, found, data, until=0)
            for start in range(0, len(data), fault.at):
                self.wfile.write(data[start : start + fault.at])
                self.server.proxy.closing.wait(fault.seconds)
        else:
            self._answer(answer.status, found, data)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, until: int | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(
                    name,
                    value.replace(
                        self.server.proxy.upstream, urlsplit(self.server.proxy.url).netloc
                    ),
                )
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(memoryview(body)[:until])

    def _end(self, fault: Fault) -> None:
        if fault.kind == "stall":
            self.server.proxy.closing.wait(fault.seconds)
        if fault.kind == "reset_at":
            time.sleep(0.05)  # a reset overtakes bytes that the client has not read yet
            self._reset()
        self.close_connection = True

    def _cut_upload(self, headers: dict[str, str], body: bytes) -> None:
        host, _, port = self.server.proxy.upstream.partition(":")
        lines = [f"{self.command} {self.path} HTTP/1.1", f"Host: {self.server.proxy.upstream}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if name != "host"]
        with socket.create_connection((host, int(port))) as upstream:
            upstream.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._reset()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


FAULTS = [
    *(Fault("status", status=status) for status in (408, 500, 503)),
    Fault("reset"),
    Fault("lose"),
    Fault("truncate", at=0),
    Fault("reset_at", at=100_000),
    Fault("stall", at=100_000),
]


def names_of_faults(fault):
    return f"{fault.kind}-{fault.status if fault.kind == 'status' else fault.at}"
