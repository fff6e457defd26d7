"""A bucket of Cloud Storage in memory, behind the connection of shardset's own client, with faults
by the seed.
"""

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

import requests
import urllib3
from google.auth.credentials import AnonymousCredentials

from shardset.checksum import crc32c_of, crc32c_text
from shardset.storage import gcs_http
from shardset.storage.base import ABSENT
from tests.simulation.baton import Baton, Process

HOST = "simulated"


class Object(NamedTuple):
    """A stored object."""

    data: bytes
    generation: str
    crc32c: str


@dataclass(frozen=True)
class Faults:
    """How often what happens to a request, and how long one takes at least and at most."""

    refused: float = 0.0
    """The server answers 503 before it does anything."""
    unsent: float = 0.0
    """The connection breaks before the request arrives."""
    unanswered: float = 0.0
    """The connection breaks after the request was carried out."""
    late: float = 0.0
    """The client gives up; the request is carried out some time afterwards."""
    damaged: float = 0.0
    """A body is flipped or cut, or a listing has no body, or that of the same request before; never
    twice in a row, which a reader may take for damage of the object.
    """
    seconds: tuple[float, float] = (0.001, 0.3)


CALM = Faults()
STORMY = Faults(refused=0.02, unsent=0.02, unanswered=0.03, late=0.01, damaged=0.03)


@dataclass(eq=False)
class Response:
    """An answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Request(NamedTuple):
    """One request: what it asks, and its body."""

    method: str
    name: str
    params: dict[str, str]
    range_: str
    body: bytes

    def __str__(self) -> str:
        words = [
            f"{key}={self.params[key]}"
            for key in ("ifGenerationMatch", "prefix", "pageToken")
            if key in self.params
        ]
        media = "GET bytes" if self.params.get("alt") == "media" else self.method
        return " ".join(filter(None, [media, self.name, self.range_, *words]))


class Bucket:
    """The objects of all buckets by `bucket/name`.

    `on_change` is told of (name, old, new) after each change, which the process `author` asked for,
    and had given up if it `is_late`.
    """

    def __init__(self, baton: Baton, faults: Faults = CALM) -> None:
        self.objects: dict[str, Object] = {}
        self.on_change: list[Callable[[str, Object | None, Object | None], None]] = []
        self.faults = faults
        self.author, self.is_late = baton.process("nobody"), False
        self._baton, self.generation = baton, 1000
        self._damaged_before: set[tuple[Process, str]] = set()
        self._pages: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
        self._network = baton.process("network")

    @contextmanager
    def reached(self) -> Iterator[None]:
        """A block in which each process has its connection to this bucket."""

        with (
            patch.object(gcs_http._connect, "_make", lambda emulator: (_Session(self), HOST, "it")),
            patch.dict(os.environ, STORAGE_EMULATOR_HOST=HOST),
        ):
            yield

    def put(self, name: str, data: bytes) -> Object:
        """Stores an object at once."""
        self.generation += 1
        old, new = (
            self.objects.get(name),
            Object(data, str(self.generation), crc32c_text(crc32c_of(data))),
        )
        self.objects[name] = new
        self._changed(name, old, new)
        return new

    def names(self, prefix: str) -> list[str]:
        """The names that begin so, in order."""
        return sorted(name for name in self.objects if name.startswith(prefix))

    # --- the network ------------------------------------------------------------------------------

    def send(self, request: Request, patience_s: float) -> Response:
        """The answer to a request, after what the seed does to it."""
        baton, draw, faults = self._baton, self._baton.random, self.faults
        process = baton.running.process
        process.num_requests += 1
        baton.sleep(draw.uniform(*faults.seconds))
        self._meet_fate(process, 0)
        luck = draw.random()
        for name in ("refused", "unsent", "unanswered", "late", "damaged"):
            luck -= getattr(faults, name)
            if luck < 0:
                answer = self._with_fault(name, request, patience_s)
                break
        else:
            answer = self._carry_out(request)
        self._meet_fate(process, 1)
        baton.sleep(draw.uniform(*faults.seconds))
        return answer

    def _meet_fate(self, process: Process, after: int) -> None:
        """Kills or stops the process if the request is the one:
        before or after it is carried out.
        """
        if process.fate and (process.num_requests, after) == divmod(process.fate[0], 2):
            self._baton.note("meets its fate")
            process.fate[1](process)
            self._baton.sleep(0)

    def _with_fault(self, fault: str, request: Request, patience_s: float) -> Response:
        baton, draw = self._baton, self._baton.random
        baton.note(f"{request}: {fault}")
        if fault == "refused":
            return Response(503)
        if fault == "damaged":
            return self._damaged(request)
        if fault == "unanswered":
            self._carry_out(request)
        if fault == "late":
            pause = draw.uniform(0, 3 * patience_s)
            author = baton.running.process
            baton.spawn(
                lambda: (baton.sleep(pause), self._carry_out(request, author)),
                "late",
                self._network,
            )
            baton.sleep(patience_s)
        raise urllib3.exceptions.ProtocolError("the connection broke")

    def _damaged(self, request: Request) -> Response:
        draw, asked = self._baton.random, (self._baton.running.process, str(request))
        if asked in self._damaged_before:
            self._damaged_before.discard(asked)
            return self._carry_out(request)
        self._damaged_before.add(asked)
        if request.method == "POST":
            head, data, tail = _parts(request.body)
            return self._carry_out(
                request._replace(body=head + _flipped(data, draw.randrange) + tail)
            )
        answer = self._carry_out(request)
        if request.params.get("alt") == "media":
            cut = draw.randrange(len(answer.body) + 1)
            answer.body = (
                answer.body[:cut] if draw.random() < 0.5 else _flipped(answer.body, draw.randrange)
            )
        elif "prefix" in request.params:
            answer.body = draw.choice([b"", b"{}", *self._pages[_page_of(request)][-3:]])
        elif request.method == "GET":
            answer.body = draw.choice([b"", b"{}"])
        return answer

    # --- the server -------------------------------------------------------------------------------

    def _carry_out(self, request: Request, author: Process | None = None) -> Response:
        self.author, self.is_late = author or self._baton.running.process, author is not None
        self._baton.note(str(request))
        if request.method == "POST":
            return self._upload(request)
        if "prefix" in request.params:
            return self._list(request)
        item = self.objects.get(request.name)
        if item is None:
            return Response(404)
        wanted = request.params.get("ifGenerationMatch", item.generation)
        if wanted != item.generation:
            return Response(412)
        if request.method == "DELETE":
            del self.objects[request.name]
            self._changed(request.name, item, None)
            return Response(204)
        if request.params.get("alt") == "media":
            return _media(item, request.range_)
        return Response(
            200, body=json.dumps({"kind": "storage#object", **_facts(request.name, item)}).encode()
        )

    def _upload(self, request: Request) -> Response:
        head, data, _ = _parts(request.body)
        facts: dict[str, Any] = json.loads(head.split(b"\r\n")[3])
        name, old = (
            f"{request.name}/{facts['name']}",
            self.objects.get(f"{request.name}/{facts['name']}"),
        )
        if crc32c_text(crc32c_of(data)) != facts["crc32c"]:
            return Response(400, body=b"the crc32c does not match")
        wanted = request.params.get("ifGenerationMatch")
        if wanted is not None and wanted != (old.generation if old else ABSENT):
            return Response(412)
        new = self.put(name, data)
        return Response(
            200, body=json.dumps({"kind": "storage#object", **_facts(name, new)}).encode()
        )

    def _list(self, request: Request) -> Response:
        size, first = self._baton.random.randint(1, 40), request.params.get("pageToken", "")
        found = [
            name
            for name in self.names(f"{request.name}/{request.params['prefix']}")
            if name > first
        ]
        page: dict[str, Any] = {"kind": "storage#objects"}
        page["items"] = [_facts(name, self.objects[name]) for name in found[:size]]
        if len(found) > size:
            page["nextPageToken"] = found[size - 1]
        body = json.dumps(page).encode()
        self._pages[_page_of(request)].append(body)
        return Response(200, body=body)

    def _changed(self, name: str, old: Object | None, new: Object | None) -> None:
        for tell in self.on_change:
            tell(name, old, new)


def _page_of(request: Request) -> tuple[str, str]:
    return request.params["prefix"], request.params.get("pageToken", "")


class _Session:
    """What the client takes for google-auth's session."""

    credentials = AnonymousCredentials()

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def request(
        self,
        method: str,
        url: str,
        *,
        params: dict[str, str],
        data: Iterable[bytes] | None,
        headers: Mapping[str, str],
        timeout: tuple[float, float],
        **options: object,
    ) -> requests.Response:
        bucket, _, name = urlsplit(url).path.partition("/b/")[2].partition("/o")
        body, name = b"".join(data or ()), bucket + unquote(name)
        asked = Request(method, name, dict(params), headers.get("Range", ""), body)
        answer, response = self._bucket.send(asked, timeout[1]), requests.Response()
        response.status_code = answer.status
        response.headers.update(answer.headers)
        response.raw = urllib3.HTTPResponse(io.BytesIO(answer.body), preload_content=False)
        return response


def _parts(body: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before the content of an upload, the content, and what stands after it."""
    size = len(body.partition(b"\r\n")[0]) + len(b"\r\n\r\n--")
    start = body.index(b"\r\n\r\n", body.index(b"\r\n\r\n") + 4) + 4
    return body[:start], body[start:-size], body[-size:]


def _media(item: Object, range_: str) -> Response:
    size = len(item.data)
    headers = {"X-Goog-Generation": item.generation, "X-Goog-Hash": f"crc32c={item.crc32c}"}
    if not range_:
        return Response(200, headers | {"X-Goog-Stored-Content-Length": str(size)}, item.data)
    start, _, last = range_.removeprefix("bytes=").partition("-")
    first, stop = int(start), min(size, int(last) + 1 if last else size)
    if first >= size:
        return Response(416)
    return Response(
        206, headers | {"Content-Range": f"bytes {first}-{stop - 1}/{size}"}, item.data[first:stop]
    )


def _facts(name: str, item: Object) -> dict[str, str]:
    own = name.partition("/")[2]
    return {
        "name": own,
        "size": str(len(item.data)),
        "generation": item.generation,
        "crc32c": item.crc32c,
    }


def _flipped(data: bytes, draw: Callable[[int], int]) -> bytes:
    if not data:
        return data
    at = draw(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw(8)]) + data[at + 1 :]
