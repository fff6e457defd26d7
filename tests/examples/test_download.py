"""A download goes on where it stopped, and only the right bytes are kept."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.download import download
from shardset.errors import SourceError, TransientError
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_read
from tests.makers.web import WebServer

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    (tmp_path / "web").mkdir()
    (tmp_path / "web/file").write_bytes(CONTENT)
    return tmp_path / "web/file"


@pytest.fixture
def server(published: Path) -> Iterator[FaultyProxy]:
    with WebServer(published.parent) as web, FaultyProxy(web.url) as proxy:
        yield proxy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept/file"


def test_a_download_that_was_cut_goes_on_at_the_byte_reached_and_is_not_fetched_again(server, path):
    server.script = in_turn(Fault("truncate", at=1000), when=is_read)
    with pytest.raises(TransientError, match="run it again to resume"):
        download(f"{server.url}/file", path, MD5)
    assert not path.exists()
    for _ in range(2):
        assert download(f"{server.url}/file", path, MD5).read_bytes() == CONTENT
    assert [seen.headers.get("range") for seen in server.seen] == [None, "bytes=1000-"]


def test_a_whole_part_file_is_checked_and_kept(server, path):
    path.with_name("file.part").write_bytes(CONTENT)
    assert download(f"{server.url}/file", path, MD5).read_bytes() == CONTENT


def test_other_bytes_than_the_published_ones_are_deleted(server, published, path):
    published.write_bytes(b"x" * 100)
    with pytest.raises(SourceError, match=f"published is {MD5}"):
        download(f"{server.url}/file", path, MD5)
    assert list(path.parent.iterdir()) == []


def test_a_server_that_is_not_there_is_an_error_that_says_so(path):
    with pytest.raises(TransientError, match=r"127\.0\.0\.1:9"):
        download("http://127.0.0.1:9/file", path, MD5)
