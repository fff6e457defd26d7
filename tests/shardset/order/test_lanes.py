"""How a global batch divides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert batch % lanes == 0
    size = batch // lanes
    counts = [part[-1] // size - part[0] // size + 1 for part in parts]
    assert max(counts) <= lanes_of_reader(lanes, world)
    assert sum(counts) / lanes == pytest.approx(read_factor(lanes, batch, world))
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
