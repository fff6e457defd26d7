"""Rows of large indexes, read a few at a time: the same rows, few bytes, and no damage gets
through.
"""

import pickle
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import DamagedShard, TransientError
from shardset.format.manifest import Split, load
from shardset.format.table import ROWS_AT_ONCE
from shardset.format.tar import StoredSample
from shardset.read.blocks import BlockSampleReader
from shardset.read.indexes import ShardTable
from shardset.storage.open import open_storage
from tests.makers.objects import flipped, put
from tests.makers.once import DamagesOnce
from tests.makers.reading import RecordingStorage, addresses_of, order_of, rank_slots
from tests.makers.shardset import new_set
from tests.shardset.read.conftest import at

SIZE = 2200
ROW_BYTES = 84


def samples_of(num_samples):
    return [
        StoredSample(
            key=f"train-{number:06d}",
            fields=(("bin", number.to_bytes(8, "little")), ("cls", b"%d" % (number % 10))),
            label=number % 10,
            source=number,
        )
        for number in range(num_samples)
    ]


@pytest.fixture(scope="module")
def shared():
    """A set of three shards with large indexes, for tests that change nothing."""
    manifest, storage, _ = load(new_set(samples_of(3 * SIZE), num_shards=3))
    return RecordingStorage(storage), manifest.split("train")


@pytest.fixture
def recorded(shared) -> tuple[RecordingStorage, Split]:
    """A copy of that set, to be damaged, in place of the small one."""
    storage, split = shared
    copy = open_storage(f"memory://{uuid.uuid4().hex}/set")
    for stat in storage.inner.list():
        put(copy, stat.name, storage.inner.read(stat.name))
    return RecordingStorage(copy), split


def names(storage: RecordingStorage) -> list[str]:
    return [name for name, *_ in storage.reads]


BORDERS = [
    0,
    ROWS_AT_ONCE - 1,
    ROWS_AT_ONCE,
    2 * ROWS_AT_ONCE,
    SIZE - SIZE % ROWS_AT_ONCE,
    SIZE - 1,
]


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


def test_the_rows_of_a_block_take_one_request(recorded, table):
    storage, split = recorded
    shards, positions = np.full(100, 1), np.arange(60, 160)
    table.addresses(shards, positions)
    [(name, start, stop, _)] = storage.reads
    assert name == split.shards[1].index.path
    assert stop - start == 3 * ROWS_AT_ONCE * ROW_BYTES < split.shards[1].index.num_bytes / 10
    table.addresses(shards, positions)
    assert len(storage.reads) == 1
    table.addresses(shards - 1, positions)
    assert names(storage)[1:] == [split.shards[0].index.path]


def test_from_a_quarter_of_its_rows_on_an_index_is_read_whole(recorded, table):
    storage, split = recorded
    for group in range(12):
        at(table, (0, 3 * group * ROWS_AT_ONCE))
    assert names(storage) == 9 * [split.shards[0].index.path]
    assert [stop for _, _, stop, _ in storage.reads].count(None) == 1
    assert storage.reads[-1][2] is None


def test_rows_beyond_the_budget_are_read_again(recorded):
    storage, split = recorded
    table = ShardTable(storage, split, budget_bytes=4)
    for shard in (0, 0, 1, 0):
        at(table, (shard, 5))
    assert names(storage) == [split.shards[shard].index.path for shard in (0, 1, 0)]


@pytest.mark.parametrize("place", [3 * ROWS_AT_ONCE * ROW_BYTES, 4 * ROWS_AT_ONCE * ROW_BYTES - 1])
def test_a_damaged_row_is_an_error_of_its_index_and_its_neighbours_are_read(recorded, table, place):
    storage, split = recorded
    name = split.shards[1].index.path
    data = storage.inner.read(name)
    put(storage.inner, name, flipped(data, len(data) - ROW_BYTES * SIZE + place, 4))
    with pytest.raises(DamagedShard, match=r"000001.idx.npy: crc32c is"):
        at(table, (1, 3))
    # a storage that keeps no checksums, as a disk or a web server
    table.storage = DamagesOnce(storage.inner, turn=99)
    assert len(at(table, (1, 3 * ROWS_AT_ONCE - 1), (1, 4 * ROWS_AT_ONCE))) == 2
    with pytest.raises(
        DamagedShard,
        match=r"000001.idx.npy: row [0-9]+ .* the index of shard train/train-000001.tar is",
    ):
        at(table, (1, 3 * ROWS_AT_ONCE + 5))


@pytest.mark.parametrize("what", ["cut", "gone", "another"])
def test_an_index_that_is_not_the_one_of_the_manifest_is_an_error(recorded, table, what):
    storage, split = recorded
    name = split.shards[1].index.path
    if what == "gone":
        storage.inner.delete(name)
    else:
        data = storage.inner.read(name)
        put(storage.inner, name, data[:300] if what == "cut" else data + b"x")
    with pytest.raises(
        DamagedShard, match=r"000001.idx.npy: .*the index of shard train/train-000001.tar is"
    ):
        at(table, (1, 7))


def test_a_copy_in_another_process_reads_for_itself(table):
    table.storage = table.storage.inner
    found, again = (
        at(one, (1, 3), (0, 4), (2, 2100)) for one in (table, pickle.loads(pickle.dumps(table)))
    )
    assert found.rows.tobytes() == again.rows.tobytes()


def test_a_bucket_that_does_not_answer_is_no_damage(recorded, table):
    storage, split = recorded

    def fail(number, read):
        if read == split.shards[1].index.path:
            raise TransientError("no answer after 5 tries")

    storage.before = fail
    with pytest.raises(TransientError):
        at(table, (1, 7))


def test_the_rows_of_blocks_are_read_together_after_the_first_batch(recorded, table, reader):
    storage, split = recorded
    order = order_of(split, block_size=512, window=256)
    reads = BlockSampleReader(order, table, reader, 1 << 30)
    for step in (0, 1):
        slots = rank_slots(order, 0, step, 0, 1)
        reads.prepare(0, slots)
        num_read = sum(name.endswith(".npy") for name in names(storage))
        addresses = addresses_of(table, order, slots.ids)
        contents = list(reads.read_step(0, slots, addresses).contents(0, len(slots.ids)))
        assert [int.from_bytes(each[0], "little") for each in contents] == slots.ids.tolist()
    assert sum(name.endswith(".npy") for name in names(storage)) == num_read
