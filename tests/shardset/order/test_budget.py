import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError
from shardset.order.budget import BUDGET_BYTES, READ_AHEAD, OrderOptions, fit_memory, fit_order
from shardset.order.lanes import rank_part

SHARD_SIZES, STORED_BYTES = [1252] * 1024, 1024 * 1252 * 111_000


def options_of(**changes):
    return OrderOptions(**{"seed": 1, "global_batch_size": 4096, **changes})


def order(*, shard_sizes=SHARD_SIZES, stored_bytes=STORED_BYTES, **changes):
    return fit_order(shard_sizes, options_of(**changes), stored_bytes=stored_bytes)


def memory_of(
    *, world=1, image_bytes=150_528, cache_bytes=None, stored_bytes=STORED_BYTES, **changes
):
    fitted = order(world_size=world, stored_bytes=stored_bytes, **changes)
    changes.pop("shard_sizes", None)
    part = rank_part(fitted.global_batch_size, 0, world)
    sizes = {"stored_bytes": stored_bytes, "image_bytes": image_bytes, "cache_bytes": cache_bytes}
    return fit_memory(fitted, options_of(world_size=world, **changes), part, **sizes)


def test_a_budget_lowers_the_window_before_the_lanes_and_never_the_block():
    wide, usual, tight = (order(budget_bytes=size) for size in (1 << 34, BUDGET_BYTES, 1 << 28))
    assert (wide.num_lanes, wide.block_size, wide.window) == (256, 37, 256)
    assert (usual.num_lanes, usual.block_size, usual.window) == (256, 37, 48)
    assert (tight.num_lanes, tight.block_size, tight.window) == (32, 37, 5)


@pytest.mark.parametrize("world", [4, 8, 64, 256])
def test_a_pod_reads_imagenet_with_the_full_window(world):
    fitted = order(world_size=world)
    assert (fitted.num_lanes, fitted.block_size, fitted.window) == (256, 37, 256)
    assert memory_of(world=world).total <= BUDGET_BYTES


@pytest.mark.parametrize(
    ("world", "lanes"), [(1, 256), (8, 256), (16, 512), (64, 2048), (1000, 16_384)]
)
def test_lanes_grow_with_the_batch_while_half_of_the_readers_could_hold_them_with_the_full_window(
    world, lanes
):
    fitted = order(global_batch_size=32_768, world_size=world)
    assert fitted.num_lanes == lanes
    assert fitted.window == (48 if world == 1 else 256)
    half = (
        order(global_batch_size=32_768, world_size=world // 2, num_lanes=lanes)
        if world > 8
        else fitted
    )
    assert half.window == fitted.window


def test_a_split_that_fits_the_budget_needs_no_narrower_order():
    small = order(shard_sizes=[100] * 4, stored_bytes=400 * 111_000, budget_bytes=1 << 27)
    assert (small.num_lanes, small.window) == (256, 256)


def test_numbers_that_are_given_are_not_changed():
    fitted = order(num_lanes=16, block_size=9, window=3, budget_bytes=1 << 20)
    assert (fitted.num_lanes, fitted.block_size, fitted.window) == (16, 9, 3)


@settings(deadline=None)
@given(world=st.sampled_from([1, 2, 4, 8, 32, 64]), budget=st.integers(1 << 29, 1 << 34))
def test_what_a_reader_holds_is_within_its_budget_or_refused(world, budget):
    try:
        memory = memory_of(world=world, budget_bytes=budget)
    except ConfigError:
        assert world < 32
    else:
        assert 0 < memory.total <= budget


def test_what_the_budget_leaves_is_read_ahead():
    mean = STORED_BYTES / sum(SHARD_SIZES)
    roomy, tight = (memory_of(world=8, budget_bytes=size, window=3) for size in (1 << 40, 1 << 30))
    held = 256 // 8 * (37 + 3) * mean
    assert roomy.raw == pytest.approx(held + (1 + READ_AHEAD) * 4096 // 8 * mean, rel=0.01)
    assert held < tight.raw <= roomy.raw


@pytest.mark.parametrize(
    ("name", "least"),
    [("num_lanes", 1), ("block_size", 1), ("window", 0), ("augment_repeats", 1)],
)
def test_a_number_that_no_order_has_is_refused(name, least):
    with pytest.raises(ConfigError, match=f"{name} is {least - 1}, expected at least {least}"):
        options_of(**{name: least - 1})
    with pytest.raises(ConfigError, match="seed is '7', expected a whole number"):
        options_of(seed="7")


@pytest.mark.parametrize(("cache", "kept"), [(None, 0), (1 << 20, 1 << 20), (BUDGET_BYTES, 0)])
def test_decoded_images_are_kept_where_there_is_room_for_all(cache, kept):
    small = {"shard_sizes": [100] * 4, "stored_bytes": 400 * 3000, "global_batch_size": 64}
    memory = memory_of(**small, image_bytes=3072, cache_bytes=cache)
    assert memory.cache == kept


@settings(deadline=None)
@given(
    batch=st.sampled_from([64, 1536, 4096, 16384]),
    world=st.sampled_from([1, 2, 8]),
    budget=st.integers(1, 1 << 33),
    given_order=st.sampled_from(
        [{}, {"window": 256}, {"num_lanes": 64, "block_size": 37, "window": 100}]
    ),
)
def test_the_budget_that_a_refusal_names_is_enough_and_a_mib_less_is_not(
    batch, world, budget, given_order
):
    numbers = {"world": world, "global_batch_size": batch, **given_order}
    try:
        memory_of(**numbers, budget_bytes=budget)
    except ConfigError as error:
        (enough,) = {
            int(text) for text in re.findall(r"budget[-_]bytes[ =](?:to )?(\d+)", str(error))
        }
        assert enough > budget
        assert memory_of(**numbers, budget_bytes=enough).total <= enough
        if enough - (1 << 20) > budget:
            with pytest.raises(ConfigError):
                memory_of(**numbers, budget_bytes=enough - (1 << 20))


@pytest.mark.parametrize(("mean", "size"), [(2_500, 512), (110_000, 38), (9_000_000, 8), (0, 512)])
def test_a_block_is_about_4_mib(mean, size):
    assert order(stored_bytes=1024 * 1252 * mean).block_size == size


@pytest.mark.parametrize(
    ("budget", "lanes", "window"),
    [(1 << 30, 64, 256), (1_800_000, 64, 7), (530_000, 32, 1), (1, 1, 0)],
)
def test_a_budget_for_small_samples_lowers_the_window_and_then_the_lanes(budget, lanes, window):
    fitted = order(
        shard_sizes=[5000],
        stored_bytes=5_000_000,
        global_batch_size=64,
        block_size=8,
        budget_bytes=budget,
    )
    assert (fitted.num_lanes, fitted.window) == (lanes, window)
