"""Objects that are compared with what is listed, and asked for a second time."""

import itertools

import pytest

from shardset.errors import ManifestError
from shardset.format import manifest as manifests
from shardset.read.indexes import read_index, read_rows
from shardset.storage.checked import DamagedObject, facts_of, read_object, read_twice
from shardset.storage.open import open_storage
from tests.makers.once import DamagesOnce
from tests.makers.shardset import png_samples, put, write_shard_set

CONTENT = b"hello world"


@pytest.mark.parametrize(("fitting", "found"), [(0, 0), (1, 1), (7, 1)])
def test_what_does_not_fit_is_read_twice_and_no_more(fitting, found):
    numbers = itertools.count()
    assert read_twice(lambda: next(numbers), lambda number: number == fitting) == found
    assert next(numbers) == found + 1


@pytest.fixture
def storage(request):
    return DamagesOnce(open_storage(f"memory://checked-{request.node.name}/set"))


def test_an_object_that_is_damaged_once_is_read_again(storage):
    put(storage, "a", CONTENT)
    assert read_object(storage, "a", *facts_of(CONTENT), "rebuild it") == CONTENT
    assert storage.num_reads == 2


def test_an_object_that_is_damaged_where_it_stands_is_an_error_that_holds_its_bytes(storage):
    put(storage, "a", b"hallo")
    with pytest.raises(
        DamagedObject, match=r"/a: 5 bytes with crc32c .*, expected 11 with .*; rebuild it"
    ) as caught:
        read_object(storage, "a", *facts_of(CONTENT), "rebuild it")
    assert caught.value.data == b"hallo"


def test_an_index_that_is_damaged_once_is_read_again(storage):
    manifest = write_shard_set(
        storage.inner, {"train": png_samples("train", 60, size=4)}, num_shards=1
    )
    split = manifest.split("train")
    whole = read_index(storage.inner, split.shards[0])
    assert read_index(storage, split.shards[0]).tolist() == whole.tolist()
    for at in (0, -1):
        again = DamagesOnce(storage.inner, at=at)
        assert (
            read_rows(again, split.shards[0], split.fields, [20, 22]).tolist()
            == whole[[20, 22]].tolist()
        )
        assert again.damaged


def test_a_manifest_that_is_damaged_once_is_read_again(storage, monkeypatch):
    written = write_shard_set(
        storage.inner, {"train": png_samples("train", 6, size=4)}, num_shards=1
    )
    monkeypatch.setattr(manifests, "open_storage", lambda url: storage)
    assert manifests.load(storage.url)[0] == written
    assert storage.damaged
    put(storage, "manifest.json", b"{}")
    with pytest.raises(ManifestError):
        manifests.load(storage.url)
