"""Rows of an index: whole and compared, or by ranges."""

import itertools

import pytest

from shardset.errors import DamagedShard, NotFound
from shardset.format.manifest import Shard
from shardset.format.tar import StoredSample
from shardset.read import indexes
from shardset.read.indexes import read_index, read_rows
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, put, write_shard_set

_counter = itertools.count()


def made() -> tuple[Storage, Shard]:
    storage = open_storage(f"memory://indexes-{next(_counter)}/set")
    manifest = write_shard_set(storage, {"train": png_samples("train", 60, size=4)}, num_shards=1)
    return storage, manifest.split("train").shards[0]


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_rows_are_those_of_the_whole_index_in_the_order_asked_for(small, monkeypatch):
    monkeypatch.setattr(indexes, "SMALL", small)
    storage, shard = made()
    whole = read_index(storage, shard)
    for positions in ([0], [59], [7, 3, 3, 40], list(range(60))):
        assert read_rows(storage, shard, positions).tolist() == whole[positions].tolist()


def test_of_a_large_index_only_the_header_and_the_range_are_read(monkeypatch):
    monkeypatch.setattr(indexes, "SMALL", 0)
    monkeypatch.setattr(indexes, "HEADER", 512)
    storage, shard = made()
    # What is not asked for may be gone: zeros in place of the rows before and after.
    data, item = storage.read(shard.index.path), read_index(storage, shard).itemsize
    first, last = len(data) - 40 * item, len(data) - 37 * item
    wanted = read_rows(storage, shard, [20, 22]).tolist()
    put(storage, shard.index.path, data[:512] + bytes(first - 512) + data[first:last] + bytes(len(data) - last))
    assert read_rows(storage, shard, [20, 22]).tolist() == wanted


def test_rows_of_samples_with_800_fields_are_read_by_ranges_too(monkeypatch):
    monkeypatch.setattr(indexes, "SMALL", 0)
    storage, _ = made()
    fields = [(f"meta{number}.txt", b"x") for number in range(800)]
    samples = [StoredSample(key=f"s{number}", fields=fields, label=-1, source=number) for number in range(3)]
    shard = write_shard_set(storage, {"train": samples}, num_shards=1).split("train").shards[0]
    assert read_rows(storage, shard, [2, 1]).tolist() == read_index(storage, shard)[[2, 1]].tolist()


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize(("place", "value"), [(0, b"X"), (30, b"~")])
def test_a_changed_header_is_damage(small, place, value, monkeypatch):
    monkeypatch.setattr(indexes, "SMALL", small)
    storage, shard = made()
    data = storage.read(shard.index.path)
    put(storage, shard.index.path, data[:place] + value + data[place + 1 :])
    with pytest.raises(DamagedShard, match=r"idx\.npy"):
        read_rows(storage, shard, [3])


def test_a_whole_index_is_compared_with_the_manifest():
    storage, shard = made()
    data = storage.read(shard.index.path)
    put(storage, shard.index.path, data[:-1] + b"~")
    with pytest.raises(DamagedShard, match="CRC32C"):
        read_index(storage, shard)
    storage.delete(shard.index.path)
    with pytest.raises(NotFound, match=r"the index of shard train/train-000000\.tar is missing; restore it, or"):
        read_index(storage, shard)
