"""What the address of a storage may be."""

import pytest

from shardset.errors import ConfigError
from shardset.storage.local import LocalStorage
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_file, open_storage
from tests.makers.objects import HELLO, names, put


@pytest.mark.parametrize("url", ["abfs://bucket/x", "file:///tmp/x", "gcs://bucket/x", "://x"])
def test_an_unknown_scheme_is_refused_by_name(url):
    scheme = url.partition(":")[0]
    with pytest.raises(
        ConfigError, match=f"'{scheme}' is not known; use a local path, gs://bucket/prefix, s3://"
    ):
        open_storage(url)


@pytest.mark.parametrize(
    "url", ["gs:/bucket/x", "gs:bucket", "s3:/bucket", "https:/host/x", "memory:/name/x"]
)
def test_an_address_without_its_slashes_is_not_taken_for_a_folder_here(url):
    with pytest.raises(ConfigError, match=f"{url}: .* two slashes.*{url.partition(':')[0]}://"):
        open_storage(url)
    assert open_storage(f"./{url}").url.endswith(url)


@pytest.mark.parametrize("url", ["~", "~/shards"])
def test_a_home_folder_that_no_shell_put_in_is_not_made_here(url):
    with pytest.raises(ConfigError, match=f"^{url}: ~ is not your home folder here"):
        open_storage(url)
    assert open_storage(f"./{url}").url.endswith(url)
    assert open_storage("~old/shards").url.endswith("~old/shards")


@pytest.mark.parametrize(
    "url", ["", "gs://", "gs:///x", "memory://", "gs://bucket/../x", "memory://m//x", "gs://b//x"]
)
def test_a_url_that_names_no_folder_is_refused(url):
    with pytest.raises(ConfigError):
        open_storage(url)


@pytest.mark.parametrize(
    "url", ["", "gs://bucket", "gs://bucket/", "memory://m", "folder/", "/", ".", "a/.", "/a/.."]
)
def test_a_url_that_names_no_file_is_refused(url):
    with pytest.raises(ConfigError, match=rf"^'{url}' names a folder, expected a file in it$"):
        open_file(url)


def test_a_relative_path_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage, name = open_file("manifest.json")
    deeper = open_storage("a/b")
    monkeypatch.chdir("/")
    put(storage, name)
    put(deeper, "c")
    assert (tmp_path / "manifest.json").read_bytes() == (tmp_path / "a/b/c").read_bytes() == HELLO


def test_the_root_folder_can_be_opened():
    assert open_file("/etc/hosts") == (LocalStorage("/etc"), "hosts")
    assert open_file("/hosts") == (LocalStorage("/"), "hosts")


def test_memories_of_different_names_are_apart():
    put(open_storage("memory://one/a"), "x")
    assert names(open_storage("memory://two/a")) == []
    assert names(MemoryStorage("one")) == ["a/x"]


@pytest.mark.parametrize("scheme", ["gs", "memory", "s3"])
@pytest.mark.parametrize("password", ["s3cret", "s3/cret", "s3@cret"])
def test_an_address_with_a_password_is_refused_without_it(scheme, password):
    with pytest.raises(ConfigError) as caught:
        open_storage(f"{scheme}://user:{password}@bucket/x")
    assert "cret" not in str(caught.value)
