"""A download goes on where it stopped, and only the right bytes are kept."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.download import download
from shardset.errors import SourceError, TransientError

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT with ranges; `cut_after` bytes of a body it hangs up, `ranges` are those that
    were asked for.
    """

    cut_after: int | None = None
    content = CONTENT

    def __init__(self) -> None:
        self.ranges: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut_after])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_a_whole_download_is_kept_and_not_fetched_again(server, tmp_path):
    path = download(server.url, tmp_path / "file", MD5)
    assert path.read_bytes() == CONTENT
    download(server.url, path, MD5)
    assert server.ranges == [None]


def test_a_download_that_was_cut_goes_on_at_the_byte_reached(server, tmp_path):
    server.cut_after = 1000
    with pytest.raises(TransientError, match="run it again to resume"):
        download(server.url, tmp_path / "file", MD5)
    assert not (tmp_path / "file").exists()
    server.cut_after = None
    assert download(server.url, tmp_path / "file", MD5).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-"]


def test_a_whole_part_file_is_checked_and_kept(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    assert download(server.url, tmp_path / "file", MD5).read_bytes() == CONTENT


def test_other_bytes_than_the_published_ones_are_deleted(server, tmp_path):
    server.content = b"x" * 100
    with pytest.raises(SourceError, match=f"published is {MD5}"):
        download(server.url, tmp_path / "file", MD5)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_server_that_is_not_there_is_an_error_that_says_so(tmp_path):
    with pytest.raises(TransientError, match=r"127\.0\.0\.1:9"):
        download("http://127.0.0.1:9/file", tmp_path / "file", MD5)
