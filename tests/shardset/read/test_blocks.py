"""Samples cut out of blocks of a remote shard."""

import functools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import TransientError
from shardset.format.manifest import load
from shardset.read.blocks import BlockSampleReader
from shardset.read.indexes import ShardTable
from shardset.read.remote import RemoteReader
from tests.makers.reading import NUM_SAMPLES, addresses_of, order_of, rank_slots, read_epoch
from tests.makers.shardset import new_set, png_samples


@pytest.mark.parametrize("lanes", [1, 2, 6])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_blocks_bring_every_sample_and_end_up_empty(recorded, lanes, world):
    storage, split = recorded
    table, order = ShardTable(storage, split), order_of(split, num_lanes=lanes)
    contents = {}
    for rank in range(world):
        reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
        contents |= read_epoch(reads, table, order, rank=rank, world=world)
        reads._close_passed(1, 0)
        assert reads.held_bytes == 0
        assert not reads._open
        reads.close()
    assert sorted(contents) == list(range(NUM_SAMPLES))
    assert all(
        image.startswith(b"\x89PNG") and label == str(id_ % 10).encode()
        for id_, (image, label) in contents.items()
    )


@functools.cache
def small_set():
    url = new_set(png_samples("train", 30, size=2), num_shards=2)
    manifest, storage, _ = load(url)
    return storage, manifest.split("train")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 9), st.integers(0, 3))
def test_any_order_can_be_read_from_any_step(block_size, window, start, epoch):
    storage, split = small_set()
    table = ShardTable(storage, split)
    order = order_of(split, block_size=block_size, window=window)
    reads = BlockSampleReader(order, table, RemoteReader(table, 2), 1 << 20)
    start = min(start, order.num_batches)
    contents = read_epoch(reads, table, order, epoch=epoch, start=start)
    reads._close_passed(epoch + 1, 0)
    assert reads.held_bytes == 0
    reads.close()
    wanted = {
        int(id_) for step in range(start, order.num_batches) for id_ in order.batch(epoch, step).ids
    }
    assert set(contents) == wanted


def test_before_a_readers_first_batch_only_its_own_samples_and_the_indexes_of_their_shards_are_read(
    recorded,
):
    storage, split = recorded
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    slots = rank_slots(order, 0, 0, 0, 3)
    addresses = addresses_of(table, order, slots.ids)
    pending = reads.read_step(0, slots, addresses)
    assert len(list(pending.contents(0, len(slots.ids)))) == len(slots.ids)
    touched = {address.shard for address in addresses}
    assert 0 < len(touched) < len(split.shards)
    in_shards = [(start, stop) for name, start, stop, _ in storage.reads if name.endswith(".tar")]
    assert sorted(in_shards) == sorted(address[2:] for address in addresses)
    assert len(storage.reads) == len(in_shards) + len(touched)
    reads.close()


def test_what_blocks_hold_is_counted_against_the_budget(recorded):
    storage, split = recorded
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1)
    assert reads.within_budget()
    slots = order.batch(0, 0)
    pending = reads.read_step(0, slots, addresses_of(table, order, slots.ids))
    assert not reads.within_budget()
    assert len(list(pending.contents(0, len(slots.ids)))) == len(slots.ids)
    assert reads.within_budget()
    reads.close()


@pytest.mark.parametrize("block_size", [2, 5, 20])
def test_steps_may_be_asked_for_again(recorded, block_size):
    storage, split = recorded
    table = ShardTable(storage, split)
    order = order_of(split, block_size=block_size, window=2, num_lanes=1)
    reads, labels = BlockSampleReader(order, table, RemoteReader(table), 1 << 20), []
    for step in (0, 1, 2, 1, 1, 0, 2):
        slots = order.batch(0, step)
        pending = reads.read_step(0, slots, addresses_of(table, order, slots.ids))
        labels.append(pending.addresses.labels.tolist())
        read = threading.Thread(
            target=lambda pending=pending: list(pending.contents(0, 6)), daemon=True
        )
        read.start()
        read.join(300)
        assert not read.is_alive()
    assert labels[1] == labels[3] == labels[4]
    reads.close()


def test_what_a_part_of_a_step_took_from_its_blocks_counts_and_the_rest_does_not(recorded):
    storage, split = recorded
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    slots = order.batch(0, 0)
    addresses = addresses_of(table, order, slots.ids)
    sizes = [address.stop - address.start for address in addresses]
    pending = reads.read_step(0, slots, addresses)
    assert list(pending.contents(2, 2)) == []
    assert reads.held_bytes == sum(sizes)
    part = pending.contents(0, 4)
    next(part), next(part)
    part.close()
    assert reads.held_bytes == sum(sizes[2:])
    reads.close()


def test_an_error_of_storage_is_raised_with_shard_key_and_offset(recorded):
    storage, split = recorded
    table, order = ShardTable(storage, split), order_of(split)

    def fail(number, name):
        if name.endswith(".tar"):
            raise TransientError("no answer after 5 tries")

    storage.before = fail
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    with pytest.raises(
        TransientError, match=r"train-00000\d.tar: sample 'train-0000\d\d' at byte \d+: no answer"
    ):
        read_epoch(reads, table, order)
    reads.close()
