"""How a global batch divides over lanes and replicas."""

from shardset.errors import ConfigError


def default_lanes(global_batch_size: int, most: int = 256) -> int:
    """L: the largest divisor of the global batch size that is at most `most`, which is at least 1."""
    return next(lanes for lanes in range(min(global_batch_size, most), 0, -1) if global_batch_size % lanes == 0)


def check_world(global_batch_size: int, rank: int, world_size: int) -> None:
    """Raises ConfigError unless `world_size` divides the global batch size and `rank` is in [0, world_size)."""
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size is {global_batch_size}, expected at least 1")
    if world_size < 1 or global_batch_size % world_size:
        divisors = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
        nearest = sorted(sorted(divisors, key=lambda size: abs(size - world_size))[:4])
        raise ConfigError(
            f"a global batch of {global_batch_size} does not divide over {world_size} replicas; "
            f"use {', '.join(map(str, nearest))} replicas, or a global batch size that is a multiple of {world_size}"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}; give each replica its own")


def rank_part(global_batch_size: int, rank: int, world_size: int) -> range:
    """The slots of one replica or host in a global batch; `check_world` says which worlds are possible."""
    size = global_batch_size // world_size
    return range(rank * size, (rank + 1) * size)
