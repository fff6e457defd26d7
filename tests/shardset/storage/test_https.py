"""A shard set, or any file, read from a web server."""

import traceback
from dataclasses import replace

import pytest

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage
from shardset.storage.retry import RetryPolicy
from shardset.testing import ReadOnlyStorageTests
from tests.faulty_proxy import Fault
from tests.makers.objects import HELLO, Clock, put
from tests.makers.web import WebServer


@pytest.fixture
def server(tmp_path):
    with WebServer(tmp_path) as server:
        yield server


@pytest.fixture
def origin(tmp_path):
    return open_storage(str(tmp_path / "in/side"))


@pytest.fixture
def storage(server):
    return open_storage(f"{server.url}/in/side")


class TestHttpsStorage(ReadOnlyStorageTests):
    @pytest.fixture
    def origin(self, origin: Storage) -> Storage:
        return origin


@pytest.fixture
def scheme():
    return "https"


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, StorageError, "401; .*credentials in SHARDSET_HTTPS_HEADER or ~/.netrc"),
        (410, NotFound, "the server answered 410"),
        (418, StorageError, "the server answered 418"),
        (505, TransientError, "the server answered 505; .*gave up"),
    ],
)
def test_a_refusal_is_said(behind_proxy, proxy, status, kind, said):
    proxy.script = lambda seen: Fault("status", status=status)
    with pytest.raises(kind, match=f"/in/side/a( bytes 3 to 5)?: .*{said}"):
        behind_proxy.read("a")


def test_a_server_without_ranges_is_said_unless_the_whole_file_is_wanted(server, storage, origin):
    put(origin, "a")
    server.has_ranges = False
    assert storage.stat("a").num_bytes == 11
    assert storage.read("a") == storage.read("a", 0, 11) == HELLO
    assert storage.read("a", 0, 3) == HELLO[:3]
    with pytest.raises(
        StorageError, match="/in/side/a bytes 3 to 5: the server sends no byte ranges; copy"
    ):
        storage.read("a", 3, 5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"Content-Range": "bytes 3-4/*"}, "lacks headers, expected Content-Length"),
        ({"Content-Encoding": "gzip"}, r"sends it compressed \(gzip\), though asked not to"),
        ({"ETag": None, "Last-Modified": None}, "lacks headers, .* ETag or Last-Modified"),
    ],
)
def test_an_answer_that_can_not_be_used_is_refused(server, storage, origin, changed, said):
    put(origin, "a")
    server.changed = changed
    with pytest.raises(StorageError, match=f"/in/side/a( bytes 3 to 5)?: .*{said}"):
        storage.read("a", 3, 5)
    assert len(server.seen) == 1


def test_without_a_strong_etag_a_changed_file_is_seen_by_time_and_size(server, storage, origin):
    server.has_etags = False
    put(origin, "a")
    generation = storage.stat("a").generation
    assert storage.read("a", 3, 5, generation=generation) == HELLO[3:5]
    assert all("If-Match" not in headers for _, headers in server.seen)
    put(origin, "a", b"HELLO WORLD")
    with pytest.raises(PreconditionFailed, match="was replaced"):
        storage.read("a", 3, 5, generation=generation)


def test_redirects_are_followed_and_no_credentials_with_them(
    server, storage, origin, tmp_path, monkeypatch
):
    put(origin, "a b")
    monkeypatch.setenv("SHARDSET_HTTPS_HEADER", "127.0.0.1 Authorization: Bearer secret")
    with WebServer(tmp_path) as cdn:
        server.redirect_to = cdn.url.replace("127.0.0.1", "localhost")
        assert storage.read("a b", 3, 5) == HELLO[3:5]
        [(path, headers)] = cdn.seen
        assert path == "/in/side/a%20b?signature=abc"
        assert headers["Range"] == "bytes=3-4"
        assert "Authorization" not in headers
    assert server.seen[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("target", "kind", "said"),
    [
        ("", StorageError, "redirected 5 times"),
        ("http://example.com", ConfigError, "http://example.com is not read"),
        ("http://localhost:1", TransientError, "Connection refused; gave up"),
    ],
)
def test_a_redirect_to_nowhere_ends_and_its_signature_is_not_shown(
    server, storage, target, kind, said
):
    server.redirect_to = target or server.url
    clock = Clock()
    with pytest.raises(kind, match=said) as caught:
        replace(storage, retry=RetryPolicy(clock=clock, sleep=clock.sleep)).read("a")
    assert "abc" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("header", "machine", "sent"),
    [
        ("127.0.0.1 Authorization: Bearer secret", "127.0.0.1", "Bearer secret"),
        ("127.0.0.1 Authorization: Bearer secret", "default", "Bearer secret"),
        ("LOCALHOST X-Other: x", "127.0.0.1", "Basic bWU6c2VjcmV0"),
        (None, "default", None),
    ],
)
def test_credentials_are_sent_to_the_host_that_they_name(
    server, storage, origin, tmp_path, monkeypatch, header, machine, sent
):
    put(origin, "a")
    name = "default" if machine == "default" else f"machine {machine}"
    (tmp_path / "netrc").write_text(f"{name} login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if header:
        monkeypatch.setenv("SHARDSET_HTTPS_HEADER", header)
    assert storage.read("a") == HELLO
    assert server.seen[-1][1].get("Authorization") == sent


def test_the_host_of_the_header_is_compared_in_any_case(server, origin, monkeypatch):
    put(origin, "a")
    monkeypatch.setenv("SHARDSET_HTTPS_HEADER", "LocalHost Authorization: Bearer secret")
    open_storage(f"{server.url.replace('127.0.0.1', 'localHOST')}/in/side").read("a")
    assert server.seen[-1][1]["Authorization"] == "Bearer secret"


NO_HEADERS = "Bearer s3cret", "127.0.0.1 Authorization: s3cret\n", "127.0.0.1 A: s3cret\r\nB: c"


@pytest.mark.parametrize(
    ("header", "netrc", "said"),
    [
        *((header, "", "is not `HOST NAME: VALUE`") for header in NO_HEADERS),
        ("", "s3cret\n", "can't be read as netrc"),
    ],
)
def test_credentials_in_another_form_are_refused_without_them(
    storage, tmp_path, monkeypatch, header, netrc, said
):
    monkeypatch.setenv("SHARDSET_HTTPS_HEADER", header)
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=said) as caught:
        storage.read("a")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_it_is_only_read(storage):
    with pytest.raises(ConfigError, match="can't be listed; name a shard set"):
        storage.list()
    for action in (storage.writer, storage.delete):
        with pytest.raises(
            ConfigError, match="/in/side/a: https:// is only read; write to a folder or a bucket"
        ):
            action("a")


def test_an_address_that_is_not_protected_or_climbs_is_refused():
    with pytest.raises(ConfigError, match="climbs"):
        open_storage("https://host/../x")
    for host in ("example.com", "localhost.example.com"):
        with pytest.raises(
            ConfigError, match="is not read, as it is not this machine; use https://"
        ):
            open_storage(f"http://{host}/set").read("a")


def test_its_address_may_hold_a_port_and_opens_it_again(storage, server, origin):
    put(origin, "a")
    assert open_storage(f"{storage.url}/") == storage
    folder, name = open_file(f"{storage.url}/a")
    assert (folder, name) == (storage, "a")
    assert open_storage("https://host:8443/a/b").url == "https://host:8443/a/b"
