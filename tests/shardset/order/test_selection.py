"""Orders over some of the ids of a split: exact at any world size, and read with few bytes for
nothing.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError
from shardset.order.blocks import GAP_SHARE
from shardset.order.selection import Selection
from tests.makers.reading import rank_slots
from tests.shardset.order.test_epoch import orders

WORLDS = (1, 2, 3, 8, 64)


@st.composite
def views(draw):
    """An order over a random view of a random split; views keep 1 to 100 % of it."""
    order = draw(orders())
    size = sum(order.shard_sizes)
    share = draw(st.sampled_from([0.01, 0.1, 0.5, 0.9, 0.99, 1]))
    chance = draw(st.randoms(use_true_random=False))
    kept = [id_ for id_ in range(size) if chance.random() < share] or [size - 1]
    return replace(order, view=Selection.from_kept(np.array(kept), size, "digest"))


def ids_of(order):
    return order.view.id_of(np.arange(order.view.num_kept)).tolist()


def parts_of(order, epoch, step, world):
    world = min(world, order.global_batch_size)
    return [rank_slots(order, epoch, step, rank, world) for rank in range(world)]


def check_views(order, world, later_world, stop):
    """Two epochs of a view, resumed once by another world: each sample once, the batches of one
    reader of all.
    """
    kept, position = ids_of(order), (0, stop % order.num_batches)
    other = replace(order, view=replace(order.view))
    for epoch in (0, 1):
        seen = []
        for step in range(order.num_batches):
            if (epoch, step) == position:
                order, world = other, later_world
                assert order.resume(other.state(epoch, step, "m"), "m") == position
            parts, whole = parts_of(order, epoch, step, world), order.batch(epoch, step)
            ids, weights = (
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("ids", "weights")
            )
            assert np.array_equal([ids, weights], [whole.ids, whole.weights])
            seen += ids[weights > 0].tolist()
        assert sorted(seen) == kept


@pytest.mark.parametrize("num_views", [40, pytest.param(2000, marks=pytest.mark.nightly)])
def test_a_view_gives_each_of_its_samples_once_in_the_same_batches_at_any_world_size(num_views):
    worlds = st.sampled_from(WORLDS)
    check = given(views(), worlds, worlds, st.integers(0, 99))(check_views)
    settings(max_examples=num_views, deadline=None)(check)()


@given(views(), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_view_has_one_order_whether_it_holds_what_it_keeps_or_what_it_leaves_out(order, epoch):
    left_out = sorted(set(range(order.view.num_ids)) - set(ids_of(order)))
    kept = order.view.ids if order.view.keeps else np.array(left_out, np.int64)
    other = np.array(left_out if order.view.keeps else ids_of(order), np.int64)
    assert len(kept) <= len(other)
    plain = replace(order, view=Selection(order.view.num_ids, other, not order.view.keeps))
    positions = np.arange(order.num_samples)
    assert np.array_equal(order.ids(epoch, positions), plain.ids(epoch, positions))
    assert np.array_equal(order.batch(epoch, 0).ids, plain.batch(epoch, 0).ids)
    assert np.array_equal(
        order.find(epoch, np.array(ids_of(order))), plain.find(epoch, np.array(ids_of(order)))
    )
    if left_out:
        with pytest.raises(ConfigError, match=f"id {left_out[0]} is not in the view"):
            order.find(epoch, np.array(left_out))


@given(views(), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_the_reads_of_a_view_bring_each_sample_once_and_few_others(order, epoch):
    positions = np.arange(order.num_samples)
    lanes = ((positions + 1) * order.num_lanes - 1) // order.num_samples
    reads, ids = order.reads_of(epoch, lanes, positions), order.ids(epoch, positions)
    shards, within = order.slots_of(ids)
    assert np.array_equal(reads.shard, shards)
    assert ((reads.start <= within) & (within < reads.stop)).all()
    assert ((reads.first <= positions) & (positions < reads.first + reads.num_samples)).all()
    assert (reads.stop <= np.array(order.shard_sizes)[reads.shard]).all()
    assert (reads.stop - reads.start <= order.block_size).all()
    once = np.unique(reads.first, return_index=True)[1]
    assert reads.num_samples[once].sum() == order.num_samples
    assert (reads.stop - reads.start)[once].sum() <= (1 + GAP_SHARE) * order.num_samples
