"""What every storage promises."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shardset.errors import ConfigError
from shardset.storage.local import LocalStorage
from shardset.storage.open import open_file, open_storage
from shardset.testing import StorageTests
from tests.makers.objects import BIG, HELLO, in_child, names, put


class TestStorage(StorageTests):
    """With the fixture `storage` of all tests: of each kind in turn."""


def test_a_checksum_is_known_without_reading(storage):
    put(storage, "a")
    assert storage.stat("a").crc32c == (None if isinstance(storage, LocalStorage) else "yZRlqg==")


@pytest.mark.parametrize("prefix", ["/etc/", "../", "a/../", "./", "a//", "a/./", "a\0/"])
def test_no_prefix_leaves_the_folder(storage, prefix):
    with pytest.raises(ConfigError, match="absolute, empty or climbs"):
        storage.list(prefix)


def test_its_url_opens_it_again(storage):
    put(storage, "train/a")
    assert open_storage(storage.url) == storage
    assert open_storage(storage.url + "/") == storage
    assert names(open_storage(f"{storage.url}/train")) == ["a"]
    folder, name = open_file(f"{storage.url}/train/a")
    assert folder.read(name) == HELLO


@pytest.mark.parametrize(
    "storage", ["memory", "local", pytest.param("gs", marks=pytest.mark.gcs)], indirect=True
)
def test_a_forked_process_reads_while_its_parent_does(storage):
    put(storage, "a", BIG)
    assert storage.read("a", 1, 100) == BIG[1:100]
    spans = [(start, start + 50_000) for start in range(0, 1_000_000, 50_000)]

    def read():
        return [storage.read("a", *span) for span in spans]

    expected = [BIG[start:stop] for start, stop in spans]
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(read)
        assert in_child(lambda: None, lambda: read() == expected) == ("nothing", "True")
        assert ours.result() == expected
