"""Objects that are compared with what is listed, and asked for a second time."""

import itertools

import pytest

from shardset.errors import DamagedShard, ManifestError
from shardset.format import manifest as manifests
from shardset.read.indexes import read_index, read_rows
from shardset.storage.checked import DamagedObject, facts_of, read_object, read_twice
from shardset.storage.open import open_storage
from tests.makers.once import DamagesOnce
from tests.makers.shardset import png_samples, put, write_shard_set

CONTENT = b"hello world"


def test_what_fits_is_read_once():
    numbers = itertools.count()
    assert read_twice(lambda: next(numbers), lambda number: number == 0) == 0
    assert next(numbers) == 1


def test_what_does_not_fit_is_read_twice_and_no_more():
    numbers = itertools.count()
    assert read_twice(lambda: next(numbers), lambda number: number == 7) == 1
    assert next(numbers) == 2


@pytest.fixture
def storage(request):
    return DamagesOnce(open_storage(f"memory://checked-{request.node.name}/set"))


def test_an_object_that_is_damaged_once_is_read_again(storage):
    put(storage, "a", CONTENT)
    assert read_object(storage, "a", *facts_of(CONTENT), "rebuild it") == CONTENT
    assert storage.num_reads == 2


def test_an_object_that_is_damaged_where_it_stands_is_an_error_that_holds_its_bytes(storage):
    put(storage, "a", b"hallo")
    with pytest.raises(DamagedObject, match=r"/a: 5 bytes with crc32c .*, expected 11 with .*; rebuild it") as caught:
        read_object(storage, "a", *facts_of(CONTENT), "rebuild it")
    assert caught.value.data == b"hallo"


def test_an_index_that_is_damaged_once_is_read_again(storage):
    manifest = write_shard_set(storage.inner, {"train": png_samples("train", 60, size=4)}, num_shards=1)
    split = manifest.split("train")
    whole = read_index(storage.inner, split.shards[0])
    assert read_index(storage, split.shards[0]).tolist() == whole.tolist()
    for at in (0, -1):
        again = DamagesOnce(storage.inner, at=at)
        assert read_rows(again, split.shards[0], split.fields, [20, 22]).tolist() == whole[[20, 22]].tolist()
        assert again.damaged


def test_an_index_that_stays_damaged_is_named(storage):
    manifest = write_shard_set(storage.inner, {"train": png_samples("train", 6, size=4)}, num_shards=1)
    shard = manifest.split("train").shards[0]
    put(storage, shard.index.path, storage.inner.read(shard.index.path)[:-1] + b"~")
    with pytest.raises(DamagedShard, match=r"idx\.npy: .*CRC32C"):
        read_index(storage, shard)


def test_a_manifest_that_is_damaged_once_is_read_again(storage, monkeypatch):
    written = write_shard_set(storage.inner, {"train": png_samples("train", 6, size=4)}, num_shards=1)
    monkeypatch.setattr(manifests, "open_storage", lambda url: storage)
    assert manifests.load(storage.url)[0] == written
    assert storage.damaged
    put(storage, "manifest.json", b"{}")
    with pytest.raises(ManifestError):
        manifests.load(storage.url)
