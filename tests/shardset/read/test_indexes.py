"""Indexes of shards: whole and compared, or by groups of rows, and those that a table keeps.

Of large ones a few groups are read: the same rows, few bytes, and no damage gets through.
"""

import pickle
import random
import threading
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import DamagedShard, TransientError
from shardset.format.manifest import load
from shardset.format.rows import GROUP_ROWS, schema_of
from shardset.format.shards import StoredShards
from shardset.format.tar import StoredSample
from shardset.order.budget import INDEX_BYTES
from shardset.read.addresses import columns_of
from shardset.read.block_reader import BlockSampleReader
from shardset.read.indexes import ShardTable, read_footer, read_groups, read_index
from shardset.read.remote import RemoteReader
from shardset.storage.open import open_storage
from tests.makers.objects import flipped, put
from tests.makers.once import DamagesOnce
from tests.makers.reading import RecordingStorage, addresses_of, order_of, rank_slots
from tests.makers.shardset import new_set
from tests.shardset.read.conftest import at


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
    storage, threads = table.storage, set()
    storage.before = lambda number, name: threads.add(threading.get_ident())
    monkeypatch.setattr("shardset.read.indexes.MAX_GROUPS_IN_FLIGHT", 1)
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
        match=r"train-000001.parquet: .* the index of shard train/train-000001.tar is damaged",
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


# --- large indexes --------------------------------------------------------------------------------

NUM_GROUPS = 8
SIZE = NUM_GROUPS * GROUP_ROWS - 100


@pytest.fixture(scope="module")
def shared():
    """A set of three shards with large indexes, for tests that change nothing."""
    samples = [
        StoredSample(
            key=f"train-{number:06d}",
            fields=(("bin", number.to_bytes(8, "little")), ("cls", b"%d" % (number % 10))),
            label=number % 10,
            serial=number,
        )
        for number in range(3 * SIZE)
    ]
    manifest, storage, _ = load(new_set(samples, num_shards=3))
    return RecordingStorage(storage), manifest.split("train")


@pytest.fixture
def large(shared):
    """The indexes of a copy of that set, to be damaged."""
    storage, split = shared
    copy = open_storage(f"memory://{uuid.uuid4().hex}/set")
    for stat in storage.inner.list():
        put(copy, stat.name, storage.inner.read(stat.name))
    recording: Any = RecordingStorage(copy)
    return ShardTable(recording, split)


def shards_read(table):
    """The shard of each read of an index."""
    paths = [shard.index.path for shard in table.split.shards]
    return [paths.index(name) for name, *_ in table.storage.reads if name in paths]


BORDERS = [0, GROUP_ROWS - 1, GROUP_ROWS, 2 * GROUP_ROWS, SIZE - SIZE % GROUP_ROWS, SIZE - 1]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(BORDERS) | st.integers(0, SIZE - 1)),
        min_size=1,
    )
)
def test_rows_read_alone_are_those_of_whole_indexes(shared, wanted):
    storage, split = shared
    shards, positions = (np.array(column) for column in zip(*wanted, strict=True))
    few, whole = (
        ShardTable(storage, split, with_keys=True, by_rows=by_rows) for by_rows in (True, False)
    )
    # what is held before, and what is not
    for half in (slice(0, (len(wanted) + 1) // 2), slice(None)):
        found, expected = (table.addresses(shards[half], positions[half]) for table in (few, whole))
        assert found.rows.tobytes() == expected.rows.tobytes()
        assert (found.keys, list(found)) == (expected.keys, list(expected))


def test_a_group_takes_one_request_and_the_footer_another(large):
    slots = np.full(100, 1), np.arange(GROUP_ROWS, GROUP_ROWS + 100)
    large.addresses(*slots)
    index = large.split.shards[1].index
    footer, group = ((start, stop) for _, start, stop, _ in large.storage.reads)
    assert footer == (index.num_bytes - index.footer_bytes, index.num_bytes)
    assert group[1] - group[0] < (index.num_bytes - index.footer_bytes) / NUM_GROUPS
    large.addresses(*slots)
    assert shards_read(large) == [1, 1]
    at(large, (1, 5), (0, SIZE - 1))
    assert sorted(shards_read(large)[2:]) == [0, 0, 1]


def test_from_a_quarter_of_its_rows_on_an_index_is_read_whole(large):
    for group in range(NUM_GROUPS):
        at(large, (0, group * GROUP_ROWS))
    assert shards_read(large) == 4 * [0]
    assert [stop is None for *_, stop, _ in large.storage.reads] == [False, False, False, True]


def test_rows_beyond_the_budget_are_read_again(large):
    table = ShardTable(large.storage, large.split, budget_bytes=4)
    for shard in (0, 0, 1, 0):
        at(table, (shard, 5))
    assert shards_read(table) == [0, 0, 1, 1, 0, 0]


def test_a_flipped_bit_of_a_large_index_is_an_error_that_names_it_and_other_groups_are_read(shared):
    storage, split = shared
    shard, groups, draw = split.shards[1], range(NUM_GROUPS), random.Random(0)
    data, footer = storage.inner.read(shard.index.path), read_footer(storage, shard)
    columns = [columns_of(split), schema_of(split.fields).names]
    ranges = {(group, n): footer.byte_range(group, columns[n]) for group in groups for n in (0, 1)}
    good = {
        (group, n): read_groups(storage, shard, footer, [group], columns[n]) for group, n in ranges
    }
    footer_start = len(data) - shard.index.footer_bytes
    # the mark, headers of pages, the footer, and anything
    places = [0, footer_start, len(data) - 5, *(start + 2 for start, _ in ranges.values())]
    places += draw.sample(range(footer_start, len(data)), 20) + draw.sample(range(len(data)), 60)
    for place in places:
        inner = open_storage(f"memory://{uuid.uuid4().hex}/set")
        put(inner, shard.index.path, flipped(data, place, 1 << draw.randrange(8)))
        damaged = DamagesOnce(inner, turn=99)  # keeps no checksums, as a disk or a web server

        def refuses(read, *arguments, storage=damaged):
            with pytest.raises(
                DamagedShard, match=r"000001.parquet: .*/train-000001.tar is damaged"
            ):
                read(storage, shard, *arguments)

        refuses(read_index)
        if place >= footer_start:
            refuses(read_footer)
            continue
        found = read_footer(damaged, shard)
        for group, n in ranges:
            # pyarrow 17 leaves bytes between the columns that nothing reads
            chunks = (found._chunks[number] for number in found._numbers(group, columns[n]))
            if any(start <= place < stop for start, stop in chunks):
                refuses(read_groups, found, [group], columns[n])
            else:
                rows = read_groups(damaged, shard, found, [group], columns[n])
                assert rows.equals(good[group, n])


@pytest.mark.parametrize("what", ["cut", "gone", "longer", "flipped"])
def test_an_index_that_is_not_the_one_of_the_manifest_is_an_error(large, what):
    storage, name = large.storage.inner, large.split.shards[1].index.path
    data = storage.read(name)
    if what == "gone":
        storage.delete(name)
    else:
        put(storage, name, {"cut": data[:300], "longer": data + b"x"}.get(what, flipped(data, 9)))
    with pytest.raises(
        DamagedShard, match=r"000001.parquet: .*the index of shard train/train-000001.tar is"
    ):
        at(large, (1, 7))


def test_a_copy_in_another_process_reads_for_itself(large):
    large.storage = large.storage.inner
    found, again = (
        at(one, (1, 3), (0, 4), (2, 2100)) for one in (large, pickle.loads(pickle.dumps(large)))
    )
    assert found.rows.tobytes() == again.rows.tobytes()


def test_a_bucket_that_does_not_answer_is_no_damage(large):
    def fail(number, read):
        if read == large.split.shards[1].index.path:
            raise TransientError("no answer after 5 tries")

    large.storage.before = fail
    with pytest.raises(TransientError):
        at(large, (1, 7))


def test_the_rows_of_blocks_are_read_together_after_the_first_batch(large):
    order = order_of(large.split, block_size=512, window=256)
    reader = RemoteReader(large)
    reads = BlockSampleReader(order, large, reader, 1 << 30)
    for step in (0, 1):
        slots = rank_slots(order, 0, step, 0, 1)
        reads.prepare(0, slots)
        before = shards_read(large)
        addresses = addresses_of(large, order, slots.ids)
        contents = list(reads.read_step(0, slots, addresses).contents(0, len(slots.ids)))
        assert [int.from_bytes(each[0], "little") for each in contents] == slots.ids.tolist()
    assert shards_read(large) == before
    reader.close()
