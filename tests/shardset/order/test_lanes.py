"""How a global batch divides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import ConfigError
from shardset.order.lanes import check_world, default_lanes, lanes_of_reader, rank_part, read_factor


@pytest.mark.parametrize(
    ("batch", "world", "lanes"),
    [
        (1, 1, 1),
        (1024, 1, 256),
        (320, 1, 160),
        (257, 1, 1),
        (768, 96, 192),
        (65_536, 32_768, 16_384),
        (96, 5, 96),
    ],
)
def test_lanes_default_to_a_divisor_up_to_256_and_to_a_multiple_of_the_readers(batch, world, lanes):
    assert default_lanes(batch, world) == lanes


@pytest.mark.parametrize(
    ("batch", "lanes"), [(4096, 256), (8192, 512), (32_768, 2048), (1 << 20, 16_384)]
)
def test_lanes_grow_with_the_batch_where_there_is_room_for_them(batch, lanes):
    assert default_lanes(batch) == lanes
    assert default_lanes(batch, wide=lanes - 1) in (lanes // 2, 256)


@pytest.mark.parametrize(
    ("batch", "world", "most"),
    [
        (32_768, 1000, 1.04),
        (4096, 384, 1.0),
        (32_768, 8191, 1.26),
        (1024, 63, 1.0),
        (2048, 511, 1.0),
        (4096, 7, 1.03),
    ],
)
def test_readers_that_do_not_divide_the_batch_read_hardly_more_than_is_stored(batch, world, most):
    lanes = default_lanes(batch, world)
    parts = [rank_part(batch, rank, world) for rank in range(world)]
    read = (
        sum((part[-1] * lanes // batch) - (part[0] * lanes // batch) + 1 for part in parts) / lanes
    )
    assert read == pytest.approx(read_factor(lanes, batch, world))
    assert read <= min(most, 1 + (world - 1) / lanes)


@given(st.integers(1, 3000), st.data())
def test_no_divisor_of_the_batch_is_read_a_tenth_less_than_the_default(batch, data):
    world, most = data.draw(st.integers(1, batch)), data.draw(st.integers(1, 3000))
    lanes = default_lanes(batch, world, most)
    divisors = [number for number in range(1, min(most, batch) + 1) if batch % number == 0]
    assert lanes in divisors
    assert read_factor(lanes, batch, world) <= 1.1 * min(
        read_factor(number, batch, world) for number in divisors
    )


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 300))
def test_no_reader_has_more_lanes_than_it_is_given_room_for(num_lanes, rows, world):
    batch = num_lanes * rows * world
    lanes = default_lanes(batch, world)
    parts = [rank_part(batch, rank, world) for rank in range(world)]
    size = batch // lanes
    assert batch % lanes == 0
    assert max((part[-1] // size) - (part[0] // size) + 1 for part in parts) <= lanes_of_reader(
        lanes, world
    )
    assert all(
        (part[-1] * num_lanes // batch) - (part[0] * num_lanes // batch)
        < lanes_of_reader(num_lanes, world)
        for part in parts
    )


@given(st.integers(1, 9000), st.data())
def test_the_shares_of_any_world_are_the_whole_batch_and_differ_by_at_most_one_sample(batch, data):
    world = data.draw(st.integers(1, min(batch, 300)) | st.just(batch) | st.just(max(1, batch - 1)))
    parts = [rank_part(batch, rank, world) for rank in range(world)]
    assert [slot for part in parts for slot in part] == list(range(batch))
    assert {len(part) for part in parts} <= {batch // world, -(-batch // world)}
    check_world(batch, world - 1, world)


@pytest.mark.parametrize("world", [0, 13])
def test_a_world_in_which_a_replica_would_have_no_sample_is_refused(world):
    with pytest.raises(
        ConfigError, match=f"12 does not have a sample for each of {world} replicas; use 1 to 12"
    ):
        check_world(12, 0, world)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ConfigError, match="expected 0 to 3"):
        check_world(8, rank, 4)
