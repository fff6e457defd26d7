"""How a global batch divides over lanes and replicas."""

from shardset.errors import ConfigError

DEFAULT_LANES = 256
MAX_DEFAULT_LANES = 16_384
"""Planning a step costs time by lane, so that a larger world shares lanes and reads some bytes more than once."""


def default_lanes(global_batch_size: int, world_size: int = 1, most: int = MAX_DEFAULT_LANES) -> int:
    """L: the largest divisor of the global batch size that is at most 256, or at most `world_size` if that is more.

    A multiple of `world_size` where it divides the batch and is at most `most`, so that no two replicas share a lane.
    """
    limit = max(1, min(most, max(DEFAULT_LANES, world_size)))
    step = world_size if global_batch_size % world_size == 0 and world_size <= limit else 1
    return step * largest_divisor(global_batch_size // step, limit // step)


def lanes_of_reader(num_lanes: int, world_size: int) -> int:
    """The number of lanes that one of `world_size` equal readers takes samples from, at most."""
    whole, rest = divmod(num_lanes, world_size)
    return min(num_lanes, whole + 2) if rest else whole


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; `most` is at least 1."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def check_world(global_batch_size: int, rank: int, world_size: int) -> None:
    """Raises ConfigError unless every replica has a sample in each global batch and `rank` is in [0, world_size)."""
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size is {global_batch_size}, expected at least 1")
    if not 1 <= world_size <= global_batch_size:
        raise ConfigError(
            f"a global batch of {global_batch_size} does not have a sample for each of {world_size} replicas; use 1 to "
            f"{global_batch_size} replicas, or a larger global batch"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}; give each replica its own")


def rank_part(global_batch_size: int, rank: int, world_size: int) -> range:
    """The slots of one replica or host in a global batch: consecutive, and at most one more than another one has."""
    return range(global_batch_size * rank // world_size, global_batch_size * (rank + 1) // world_size)
