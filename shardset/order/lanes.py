"""How a global batch divides over lanes and replicas."""

import numpy as np

from shardset.errors import ConfigError

DEFAULT_LANES = 256
MAX_DEFAULT_LANES = 16_384
"""Planning a step costs time by lane, so that a larger world shares lanes and reads some bytes more
than once.
"""
ROWS_PER_STEP = 16
"""A lane's samples of a batch, at most, where memory allows: stored neighbours meet in a batch as
this grows.
"""
LITTLE_MORE = 1.1


def default_lanes(
    global_batch_size: int,
    world_size: int = 1,
    most: int = MAX_DEFAULT_LANES,
    wide: int = MAX_DEFAULT_LANES,
) -> int:
    """L: of the divisors of the global batch size up to `most`, one with which `world_size` readers
    read least.

    The best up to 256, or up to a 16th of the batch where `wide` is as large; of equals, the
    largest. Any other divisor only where that reads over 10 % more.
    """
    divisors = [
        lanes
        for lanes in range(1, min(global_batch_size, max(1, most)) + 1)
        if global_batch_size % lanes == 0
    ]
    factors = {lanes: read_factor(lanes, global_batch_size, world_size) for lanes in divisors}
    usual = max(DEFAULT_LANES, min(wide, global_batch_size // ROWS_PER_STEP))
    narrow = min(
        (lanes for lanes in divisors if lanes <= usual), key=lambda lanes: (factors[lanes], -lanes)
    )
    least = min(divisors, key=lambda lanes: (factors[lanes], lanes))
    return narrow if factors[narrow] <= LITTLE_MORE * factors[least] else least


def read_factor(num_lanes: int, global_batch_size: int, world_size: int) -> float:
    """The lanes that all readers read together for each lane of the order: their bytes for each
    byte, at most.
    """
    cuts = global_batch_size * np.arange(1, world_size) // world_size
    return 1 + int(np.count_nonzero(cuts % (global_batch_size // num_lanes))) / num_lanes


def lanes_of_reader(num_lanes: int, world_size: int) -> int:
    """The number of lanes that one of `world_size` equal readers takes samples from, at most."""
    whole, rest = divmod(num_lanes, world_size)
    return min(num_lanes, whole + 2) if rest else whole


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; `most` is at least 1."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def check_world(global_batch_size: int, rank: int, world_size: int) -> None:
    """Raises ConfigError unless every replica has a sample in each global batch and `rank` is in
    [0, world_size).
    """
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size is {global_batch_size}, expected at least 1")
    if not 1 <= world_size <= global_batch_size:
        raise ConfigError(
            f"a global batch of {global_batch_size} does not have a sample for each of {world_size}"
            f" replicas; use 1 to {global_batch_size} replicas, or a larger global batch"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank is {rank}, expected 0 to {world_size - 1}; give each replica its own"
        )


def rank_part(global_batch_size: int, rank: int, world_size: int) -> range:
    """The slots of one replica or host in a global batch: consecutive, and at most one more than
    another one has.
    """
    return range(
        global_batch_size * rank // world_size, global_batch_size * (rank + 1) // world_size
    )
