"""Indexes of shards: whole and compared, or by ranges, and those that a table keeps."""

import itertools
import threading

import msgspec
import numpy as np
import pytest

from shardset.errors import DamagedShard, NotFound
from shardset.format.manifest import Shard
from shardset.format.shards import StoredShards
from shardset.order.budget import INDEX_BYTES
from shardset.read.indexes import ShardTable, read_index, read_rows
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.objects import flipped, put
from tests.makers.once import DamagesOnce
from tests.makers.shardset import png_samples, write_shard_set
from tests.shardset.read.conftest import at

_counter = itertools.count()


def made() -> tuple[Storage, Shard]:
    storage = open_storage(f"memory://indexes-{next(_counter)}/set")
    manifest = write_shard_set(storage, {"train": png_samples("train", 60, size=4)}, num_shards=1)
    return storage, manifest.split("train").shards[0]


def test_only_the_rows_that_are_asked_for_are_read_and_in_their_order():
    storage, shard = made()
    whole = read_index(storage, shard)
    # What is not asked for may be gone: zeros in place of the header and the rows before and after.
    data, item = storage.read(shard.index.path), whole.itemsize
    first, last = len(data) - 40 * item, len(data) - 37 * item
    put(storage, shard.index.path, bytes(first) + data[first:last] + bytes(len(data) - last))
    found = read_rows(DamagesOnce(storage, turn=9), shard, ["png", "cls"], [22, 20, 20])
    assert found.tolist() == whole[[22, 20, 20]].tolist()
    with pytest.raises(DamagedShard, match="crc32c is"):
        read_rows(storage, shard, ["png", "cls"], [20, 22])


@pytest.mark.parametrize("fields", [["png"], ["png", "cls", "json"]])
def test_an_index_of_another_size_than_its_fields_make_is_told_to_be_built_again(fields):
    storage, shard = made()
    with pytest.raises(
        DamagedShard,
        match=r"train-000000.idx.npy: (no index of 60 samples .* build the set again|row 3 does)",
    ):
        read_rows(storage, shard, fields, [3])


@pytest.mark.parametrize("place", [0, 30, -1], ids=["header", "fields", "row"])
def test_a_whole_index_is_compared_with_the_manifest(place):
    storage, shard = made()
    data = storage.read(shard.index.path)
    put(storage, shard.index.path, flipped(data, place % len(data)))
    with pytest.raises(DamagedShard, match=r"idx\.npy: .* with crc32c .*, expected"):
        read_index(storage, shard)
    storage.delete(shard.index.path)
    with pytest.raises(
        NotFound, match=r"the index of shard train/train-000000\.tar is missing; restore it, or"
    ):
        read_index(storage, shard)


def test_a_table_knows_every_sample(recorded):
    storage, split = recorded
    addresses = at(ShardTable(storage, split, with_keys=True), (1, 4), (0, 7))
    assert (addresses.keys, addresses.labels.tolist()) == (["train-000024", "train-000007"], [4, 7])
    address = addresses[0]
    data = storage.read(split.shards[1].path, address.start, address.stop)
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"4")


def test_a_table_names_a_sample_though_it_keeps_no_keys(table):
    addresses = at(table, (1, 4))
    assert addresses.keys is None
    [address] = addresses
    shard = f"{table.storage.url}/train/train-000001.tar"
    assert table.describe(address) == f"{shard}: sample 'train-000024' at byte {address.start}"


def test_an_index_holds_four_bytes_a_number_and_eight_where_they_are_needed(recorded, monkeypatch):
    storage, split = recorded
    small = ShardTable(storage, split).index(0)
    assert small.num_bytes == INDEX_BYTES * 20
    large = msgspec.structs.replace(split.shards[0], num_bytes=1 << 40)
    monkeypatch.setattr(StoredShards, "_shard", lambda shards, number: large)
    wide_split = msgspec.structs.replace(split, max_tar_bytes=1 << 40)
    wide = ShardTable(storage, wide_split).index(0)
    assert wide.num_bytes == 48 * 20
    assert all(
        wide.rows[name].tolist() == small.rows[name].tolist() for name in small.rows.dtype.names
    )


def test_an_index_is_read_once_while_it_fits_its_budget(recorded, table):
    storage, split = recorded
    for _ in range(3):
        for shard in range(3):
            table.index(shard)
    assert len(storage.reads) == 3
    small = ShardTable(storage, split, budget_bytes=1)
    for shard in (0, 0, 1, 0):
        small.index(shard)
    assert len(storage.reads) == 6


def test_indexes_that_are_missing_are_asked_for_once_and_at_the_same_time(recorded):
    storage, split = recorded
    together = threading.Barrier(3)
    storage.before = lambda number, name: together.wait(30)
    table = ShardTable(storage, split, budget_bytes=1)
    addresses = table.addresses(np.arange(60) % 3, np.arange(60) // 3)
    assert len(storage.reads) == 3
    assert [address[:2] for address in addresses] == [
        (number % 3, number // 3) for number in range(60)
    ]
    assert addresses.labels.tolist() == [
        (20 * (number % 3) + number // 3) % 10 for number in range(60)
    ]


def test_indexes_that_are_large_together_are_read_one_after_the_other(table, monkeypatch):
    storage, split = table.storage, table.split
    threads = set()
    storage.before = lambda number, name: threads.add(threading.get_ident())
    monkeypatch.setattr(
        "shardset.read.indexes.MAX_BYTES_IN_FLIGHT", 2 * split.shards[0].index.num_bytes - 1
    )
    at(table, (2, 0), (0, 0), (1, 0))
    assert len(threads) == 1
    assert len(storage.reads) == 3


def test_of_several_indexes_the_damaged_one_is_named_and_no_thread_is_left(table):
    storage, split = table.storage, table.split
    before = set(threading.enumerate())
    name = split.shards[1].index.path
    put(storage.inner, name, storage.inner.read(name)[:-1] + b"x")
    with pytest.raises(
        DamagedShard,
        match=r"train-000001.idx.npy: .* the index of shard train/train-000001.tar is damaged",
    ):
        at(table, (0, 0), (1, 0), (2, 0))
    assert set(threading.enumerate()) <= before
    assert len(storage.reads) == 4  # the damaged one a second time


def test_a_sample_whose_index_is_gone_is_named_by_its_number(table):
    [address] = at(table, (1, 4))
    table.storage.inner.delete(table.split.shards[1].index.path)
    assert table.describe(address).endswith(
        f"train-000001.tar: sample number 4 at byte {address.start}"
    )
