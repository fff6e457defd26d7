import itertools
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError
from shardset.order.epoch import Order, slot_key
from shardset.order.lanes import rank_part
from shardset.order.permutation import hash64
from shardset.order.selection import Selection
from shardset.order.state import OrderState, state_from_values, values_of_state
from tests.makers.reading import rank_slots

FROZEN_0 = [
    [23, 24, 8, 17, 21, 20, 1, 0],
    [25, 16, 18, 19, 22, 5, 2, 12],
    [6, 7, 13, 14, 3, 4, 10, 9],
    [7, 7, 15, 15, 4, 4, 11, 11],
]
FROZEN_3 = [
    [12, 22, 15, 25, 11, 10, 18, 3],
    [13, 23, 16, 1, 7, 8, 4, 20],
    [14, 24, 0, 2, 6, 17, 5, 19],
    [24, 24, 9, 9, 17, 17, 21, 21],
]
FROZEN_KEYS = [2668788385113505816, 15062172196196036488]
FROZEN_MANY = [3951895, 2042337, 1121624, 2249035, 9729714, 1021240, 4296351, 7713276]


def make(sizes, **options):
    choices = {
        "seed": 7,
        "global_batch_size": 8,
        "num_lanes": 4,
        "block_size": 3,
        "window": 4,
    } | options
    return Order(shard_sizes=sizes, **choices)


def without(num_ids, left_out):
    return Selection(num_ids, np.array(sorted(left_out), np.int64))


def kept_of(order):
    return set(order.selection.id_of(np.arange(order.num_samples)).tolist())


@st.composite
def orders(draw):
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    lanes, items = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    seed = draw(st.one_of(st.none(), st.integers(-(2**63), 2**64)))
    bad = draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=min(5, sum(sizes) - 1)))
    return Order(
        shard_sizes=sizes,
        seed=seed,
        global_batch_size=lanes * items,
        num_lanes=lanes,
        block_size=draw(st.integers(1, 20)),
        window=0 if seed is None else draw(st.integers(0, 70)),
        view=without(sum(sizes), bad),
    )


def plain_sequence(order, epoch):
    """Blocks and their order as the rules say them, one sample at a time."""
    blocks, kept = [], kept_of(order)
    for shard, size in enumerate(order.shard_sizes):
        phase = 0 if order.seed is None else hash64(order.seed, epoch, 1, shard) % order.block_size
        cuts = sorted({0, size, *range(order.block_size - phase, size, order.block_size)})
        for block, (start, stop) in enumerate(itertools.pairwise(cuts)):
            rank = 0 if order.seed is None else hash64(order.seed, epoch, 2, shard, block)
            ids = range(int(order.first_ids[shard]) + start, int(order.first_ids[shard]) + stop)
            blocks.append((rank, shard, block, [id_ for id_ in ids if id_ in kept]))
    return [id_ for block in sorted(blocks) for id_ in block[3]]


def plain_lane(order, epoch, lane):
    ids = plain_sequence(order, epoch)
    mine = ids[len(ids) * lane // order.num_lanes : len(ids) * (lane + 1) // order.num_lanes]
    if order.seed is None:
        return mine
    keys = [
        (p << 32) + (hash64(order.seed, epoch, 3, lane, p) >> 32) * order.window
        for p in range(len(mine))
    ]
    return [mine[p] for p in sorted(range(len(mine)), key=lambda p: keys[p])]


def range_reads(order, epoch, start, stop):
    """The reads of the positions [start, stop) of the sequence, each once, for a single reader of
    all of them.
    """
    reads = order._layout(epoch).reads_of(
        np.arange(start, stop), np.array([start]), np.array([stop])
    )
    once = np.unique(reads.first, return_index=True)[1]
    return type(reads)(*(column[once] for column in reads))


def epoch_of(order, epoch):
    slots = order.slots(epoch, range(order.num_batches), 0, order.global_batch_size)
    return slots.ids, slots.weights


def test_order_is_frozen():
    # The order of every existing run. To change these numbers, raise ORDER_VERSION.
    order = make([9, 8, 9])
    assert [order.batch(0, step).ids.tolist() for step in range(4)] == FROZEN_0
    assert [order.batch(3, step).ids.tolist() for step in range(4)] == FROZEN_3
    assert slot_key(7, 1, np.array([0, 5]), np.array([2, 3]), 1).tolist() == FROZEN_KEYS


def test_order_over_many_blocks_is_frozen():
    order = make(
        [2000] * 5000, seed=1, global_batch_size=1024, num_lanes=256, block_size=8, window=256
    )
    assert order.batch(2, 5000).ids[:1024:128].tolist() == FROZEN_MANY


@given(orders(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_slot_is_what_the_rules_say(order, epoch):
    lanes = [plain_lane(order, epoch, lane) for lane in range(order.num_lanes)]
    for step in range(order.num_batches):
        slots = order.batch(epoch, step)
        for slot, (id_, weight) in enumerate(zip(slots.ids, slots.weights, strict=True)):
            lane, row = (
                slot // order.rows_per_step,
                step * order.rows_per_step + slot % order.rows_per_step,
            )
            assert (slots.lanes[slot], slots.rows[slot]) == (lane, row)
            assert weight == (row < len(lanes[lane]))
            # a pad repeats the last of its lane
            assert id_ in kept_of(order)
            assert not lanes[lane] or id_ == lanes[lane][min(row, len(lanes[lane]) - 1)]
    assert sorted(itertools.chain(*lanes)) == sorted(kept_of(order))


@given(orders(), st.integers(1, 4), st.integers(1, 512))
@settings(max_examples=100, deadline=None)
def test_repeats_are_the_slots_of_the_plain_order_several_times_in_any_world(
    order, augment_repeats, wish
):
    repeated = replace(
        order,
        augment_repeats=augment_repeats,
        global_batch_size=augment_repeats * order.global_batch_size,
    )
    assert repeated.num_batches == order.num_batches
    world = min(wish, repeated.global_batch_size)
    for step in {0, order.num_batches - 1}:
        plain, whole = order.batch(1, step), repeated.batch(1, step)
        parts = [rank_slots(repeated, 1, step, rank, world) for rank in range(world)]
        for name in ("ids", "weights", "lanes", "rows", "positions"):
            expected = np.repeat(getattr(plain, name), augment_repeats)
            assert np.array_equal(getattr(whole, name), expected)
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), expected)
        assert np.concatenate([part.repeats for part in parts]).tolist() == [
            *range(augment_repeats)
        ] * len(plain.ids)
        for rank, part in enumerate(parts):
            lanes = repeated.part_lanes(rank_part(repeated.global_batch_size, rank, world))
            assert set(part.lanes.tolist()) == set(lanes)
    assert repeated.state(1, 2, "m") == order.state(1, 2, "m")


@given(orders(), st.integers(0, 3))
@settings(deadline=None)
def test_every_sample_is_found_where_the_epoch_gives_it(order, epoch):
    slots = [order.batch(epoch, step) for step in range(order.num_batches)]
    there = {
        id_: (row, lane)
        for batch in slots
        for id_, weight, row, lane in zip(
            batch.ids, batch.weights, batch.rows, batch.lanes, strict=True
        )
        if weight
    }
    wanted = np.array(sorted(there))
    assert set(wanted.tolist()) == kept_of(order)
    rows, lanes = order.find(epoch, wanted)
    assert list(zip(rows.tolist(), lanes.tolist(), strict=True)) == [
        there[id_] for id_ in wanted.tolist()
    ]


@given(
    st.integers(0, 2**20),
    st.integers(0, 10**6),
    st.sampled_from([8, 38, 512]),
    st.sampled_from([0, 19, 256]),
)
@settings(deadline=None, max_examples=20)
def test_a_sample_among_millions_is_found_without_its_epoch_being_listed(
    seed, id_, block_size, window
):
    numbers = {"num_lanes": 256, "global_batch_size": 1024, "block_size": block_size}
    order = make([1001] * 1000, seed=seed, window=window, **numbers)
    rows, lanes = order.find(2, np.array([id_, 7]))
    for wanted, row, lane in zip([id_, 7], rows.tolist(), lanes.tolist(), strict=True):
        batch = order.batch(2, row // order.rows_per_step)
        slot = lane * order.rows_per_step + row % order.rows_per_step
        assert (batch.ids[slot], batch.weights[slot]) == (wanted, 1)


@pytest.mark.parametrize("seed", [None, 7])
def test_an_epoch_gone_through_gives_what_a_step_asked_for_alone_gives(seed):
    options = {
        "seed": seed,
        "window": 0 if seed is None else 40,
        "global_batch_size": 64,
        "num_lanes": 16,
    }
    options |= {"block_size": 2, "view": without(90_000, range(0, 90_000, 101))}
    gone_through = make([300] * 300, **options)
    slots = [
        gone_through.slots(1, range(step, step + 5), 8, 40)[0]
        for step in range(0, gone_through.num_batches, 5)
    ]
    for number in (0, 1, len(slots) // 2, len(slots) - 1):
        alone = make([300] * 300, **options).slots(1, range(5 * number, 5 * number + 1), 8, 40)[0]
        assert np.array_equal(alone.ids, slots[number].ids)
        reads = [
            order.reads_of(1, alone.lanes, alone.positions).start.tolist()
            for order in (gone_through, make([300] * 300, **options))
        ]
        assert reads[0] == reads[1]


def test_an_epoch_of_millions_of_blocks_takes_few_bytes_a_block():
    order = make([2000] * 10_000, global_batch_size=64, num_lanes=16, block_size=8, window=256)
    order.first_ids  # noqa: B018 - the sizes of the shards are no part of what an epoch takes
    tracemalloc.start()
    try:
        order.batch(0, 1000)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_blocks = 20_000_000 / 8
    assert held < 3 * num_blocks
    assert peak < 8 * num_blocks


@pytest.mark.parametrize("ids", [[-1], [26], [3, 5]])
def test_a_sample_of_no_epoch_is_not_found(ids):
    order = make([8, 9, 9], view=without(26, [5]))
    with pytest.raises(ConfigError, match=f"id {ids[-1]} is not in the view or not 0 to 25"):
        order.find(0, np.array(ids))


@given(orders())
@settings(max_examples=60, deadline=None)
def test_lanes_read_the_stored_samples_once_and_cut_at_most_one_block_each(order):
    cuts = order.lane_starts(np.arange(order.num_lanes + 1)).tolist()
    lanes = [range_reads(order, 2, start, stop) for start, stop in itertools.pairwise(cuts)]
    assert sum(int(lane.num_samples.sum()) for lane in lanes) == order.num_samples
    whole = len(range_reads(order, 2, 0, order.num_samples).shard)
    assert sum(len(lane.shard) for lane in lanes) <= whole + order.num_lanes - 1


def test_drop_leaves_out_the_last_rows_instead_of_padding():
    ids, weights = epoch_of(make([50, 51], last_batch="drop"), 0)
    assert (weights == 1).all()
    assert ids.size == 96


@given(orders(), st.integers(0, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_a_state_survives_json_and_says_where_to_go_on(order, epoch, data):
    step = data.draw(st.integers(0, order.num_batches))
    state = order.state(epoch, step, "abc")
    there = order.resume(state_from_values(values_of_state(state), OrderState), "abc")
    assert there == ((epoch, step) if step < order.num_batches else (epoch + 1, 0))


def test_a_state_goes_on_with_another_batch_size_at_a_row_border():
    state = make([900]).state(1, 6, "abc")
    assert make([900], global_batch_size=16).resume(state, "abc") == (1, 3)
    with pytest.raises(ConfigError, match="row 12 is inside a batch of 5 rows"):
        make([900], global_batch_size=20).resume(state, "abc")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seed": 8}, "seed is 8 here and was 7 there"),
        ({"block_size": 4}, "block_size is 4 here and was 3"),
        ({"window": 5}, "window is 5"),
        ({"num_lanes": 2}, "num_lanes is 2"),
    ],
)
def test_a_state_of_another_order_is_refused_with_the_difference_named(options, name):
    with pytest.raises(ConfigError, match=name):
        make([90], **options).resume(make([90]).state(0, 1, "abc"), "abc")
    with pytest.raises(ConfigError, match="manifest is 'new' here and was 'old' there"):
        make([90]).resume(make([90]).state(0, 1, "old"), "new")


@pytest.mark.parametrize(
    "options",
    [
        {"num_lanes": 3},
        {"seed": None},
        {"view": without(20, range(20))},
    ],
)
def test_numbers_that_make_no_order_are_refused(options):
    with pytest.raises(ConfigError):
        make([20], **options)


def test_threads_may_ask_for_many_epochs_at_a_time():
    order, positions = make([30] * 3), np.arange(90)
    expected = [make([30] * 3).ids(epoch, positions) for epoch in range(6)]

    def ask(first):
        for number in range(300):
            epoch = (first + number) % 6
            assert np.array_equal(order.ids(epoch, positions), expected[epoch])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
    finally:
        sys.setswitchinterval(interval)
