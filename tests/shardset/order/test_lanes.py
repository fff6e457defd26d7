"""How a global batch divides."""

import pytest

from shardset.errors import ConfigError
from shardset.order.lanes import check_world, default_lanes


@pytest.mark.parametrize(("batch", "lanes"), [(1, 1), (256, 256), (1024, 256), (320, 160), (257, 1), (96, 96)])
def test_lanes_default_to_the_largest_divisor_up_to_256(batch, lanes):
    assert default_lanes(batch) == lanes


def test_a_world_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="12 does not divide over 5 replicas; use 2, 3, 4, 6 replicas"):
        check_world(12, 0, 5)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ConfigError, match="expected 0 to 3"):
        check_world(8, rank, 4)
