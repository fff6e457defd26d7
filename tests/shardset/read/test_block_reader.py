"""Samples cut out of blocks of a remote shard."""

import functools
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import TransientError
from shardset.format.manifest import load
from shardset.read.block_reader import BlockSampleReader
from shardset.read.indexes import ShardTable
from shardset.read.remote import RemoteReader
from tests.makers.reading import addresses_of, order_of, rank_slots, read_epoch
from tests.makers.shardset import new_set, png_samples


@functools.cache
def small_set():
    url = new_set(png_samples("train", 30, size=2), num_shards=2)
    manifest, storage, _ = load(url)
    return storage, manifest.split("train")


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(0, 40),
    st.sampled_from([1, 2, 6]),
    st.integers(0, 9),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_any_order_can_be_read_from_any_step_by_any_world_and_nothing_is_kept(
    block_size, window, lanes, start, epoch, world
):
    storage, split = small_set()
    table, contents = ShardTable(storage, split), {}
    order = order_of(split, block_size=block_size, window=window, num_lanes=lanes)
    start = min(start, order.num_batches)
    for rank in range(world):
        reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
        place = {"epoch": epoch, "start": start, "rank": rank, "world": world}
        contents |= read_epoch(reads, table, order, **place)
        reads._close_passed(epoch + 1, 0)
        assert reads.held_bytes == 0
        assert not reads._open
        reads.close()
    steps = range(start, order.num_batches)
    assert set(contents) == {int(id_) for step in steps for id_ in order.batch(epoch, step).ids}
    assert all(label == b"%d" % (id_ % 10) for id_, (_, label) in contents.items())


def test_before_a_readers_first_batch_only_its_own_samples_and_the_indexes_of_their_shards_are_read(
    recorded, table, reader
):
    storage, split = recorded
    order = order_of(split)
    reads = BlockSampleReader(order, table, reader, 1 << 20)
    slots = rank_slots(order, 0, 0, 0, 3)
    addresses = addresses_of(table, order, slots.ids)
    pending = reads.read_step(0, slots, addresses)
    assert len(list(pending.contents(0, len(slots.ids)))) == len(slots.ids)
    touched = {address.shard for address in addresses}
    assert 0 < len(touched) < len(split.shards)
    in_shards = [(start, stop) for name, start, stop, _ in storage.reads if name.endswith(".tar")]
    assert sorted(in_shards) == sorted(address[2:] for address in addresses)
    assert len(storage.reads) == len(in_shards) + len(touched)


def test_what_blocks_hold_counts_against_the_budget_until_it_is_taken(table, reader):
    order = order_of(table.split)
    reads = BlockSampleReader(order, table, reader, 1)
    assert reads.within_budget()
    slots = order.batch(0, 0)
    addresses = addresses_of(table, order, slots.ids)
    sizes = [address.stop - address.start for address in addresses]
    pending = reads.read_step(0, slots, addresses)
    assert not reads.within_budget()
    assert list(pending.contents(2, 2)) == []
    assert reads.held_bytes == sum(sizes)
    with closing(pending.contents(0, 4)) as part:
        next(part), next(part)
    assert reads.held_bytes == sum(sizes[2:])
    list(pending.contents(2, len(slots.ids)))
    assert reads.within_budget()


def test_an_error_of_storage_is_raised_with_shard_key_and_offset(recorded, table, reader):
    order = order_of(table.split)

    def fail(number, name):
        if name.endswith(".tar"):
            raise TransientError("no answer after 5 tries")

    recorded[0].before = fail
    reads = BlockSampleReader(order, table, reader, 1 << 20)
    with pytest.raises(
        TransientError, match=r"train-00000\d.tar: sample 'train-0000\d\d' at byte \d+: no answer"
    ):
        read_epoch(reads, table, order)
