"""The order and the memory of one reader of a split, from a budget of bytes.

Pure numbers: `shardset/stream/stream.py` reads by them, `python -m pipelines estimate` shows them in advance. L is
`num_lanes`, q `block_size`, w `window`.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardset.arguments import require_int
from shardset.errors import BudgetTooSmall, ConfigError
from shardset.order.epoch import LastBatch, Order
from shardset.order.lanes import MAX_DEFAULT_LANES, default_lanes, lanes_of_reader

MIB = 1 << 20
BUDGET_BYTES = 4 << 30
"""Not from the memory of the machine, or readers whose machines differ would have different orders (decision 13)."""

READ_BYTES = 4 << 20
DEFAULT_WINDOW = 256
INDEX_BUDGET_BYTES = 256 << 20
INDEX_BYTES = 28
"""Memory for the index of a sample of two fields, without its key, which few readers need."""
MAX_STEPS_AT_ONCE = 64
READ_AHEAD = 8
PREFETCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The most bytes that a stream holds; `str()` is the line that it logs when it starts."""

    raw: int
    decoded: int
    indexes: int
    cache: int
    budget: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.raw + self.decoded + self.indexes + self.cache

    def __str__(self) -> str:
        parts = (f"{getattr(self, name) / 2**20:,.0f} MiB {name}" for name in ("raw", "decoded", "indexes", "cache"))
        return f"memory: {', '.join(parts)}; {self.total / 2**20:,.0f} of {self.budget / 2**20:,.0f} MiB"


def raw_budget(budget_bytes: int) -> int:
    """What is for raw bytes: 9/16, so that four readers of ImageNet's images (116 KB) have the full window."""
    return 9 * budget_bytes // 16


def default_block_size(mean_bytes: float) -> int:
    """q: the samples of a read of about 4 MiB, from 8 to 512."""
    return int(min(512, max(8, READ_BYTES // max(1.0, mean_bytes))))


def fit_lanes(
    mean_bytes: float, *, global_batch_size: int, block_size: int, budget_bytes: int, world_size: int = 1
) -> int:
    """L: the default, or fewer where the blocks of one reader's lanes alone exceed the budget; at least 1.

    Grows with the batch while half of the readers, after a loss, could still hold all lanes with the full window.
    """
    room = int(budget_bytes / max(1.0, mean_bytes))
    most, wide = (world_size * (room // held) for held in (block_size, 2 * (block_size + DEFAULT_WINDOW)))
    return default_lanes(global_batch_size, world_size, min(max(world_size, most), MAX_DEFAULT_LANES), wide)


def fit_window(mean_bytes: float, *, num_lanes: int, block_size: int, budget_bytes: int, world_size: int = 1) -> int:
    """w: 256, or what `budget_bytes` has room for when a reader holds `w + q` samples of each of its lanes."""
    rows = int(budget_bytes / max(1.0, mean_bytes)) // lanes_of_reader(num_lanes, world_size)
    return max(0, min(DEFAULT_WINDOW, rows - block_size))


def held_bytes(mean_bytes: float, *, num_lanes: int, block_size: int, window: int) -> int:
    """About the raw bytes that the reader of `num_lanes` lanes holds at a time."""
    return int(num_lanes * (block_size + window) * mean_bytes)


def steps_at_once(order: Order) -> int:
    """The number of steps that a running reader plans together, to look into each index once for all of them."""
    return max(1, min(order.window // order.rows_per_step, MAX_STEPS_AT_ONCE))


def fit_order(
    shard_sizes: Sequence[int],
    *,
    stored_bytes: int,
    seed: int | None,
    global_batch_size: int,
    world_size: int = 1,
    num_lanes: int | None = None,
    block_size: int | None = None,
    window: int | None = None,
    quarantined: Sequence[int] = (),
    last_batch: LastBatch = "pad",
    augment_repeats: int = 1,
    budget_bytes: int = BUDGET_BYTES,
) -> Order:
    """The order of a split whose tars hold `stored_bytes`; chooses L, q and w by the budget where they are None.

    The budget is that of each of `world_size` equal readers. A split that fits whole into its part for raw bytes needs
    no narrower order. Raises ConfigError where the numbers can't make an order.
    """
    num_lanes, block_size, window = (
        None if given is None else require_int(name, given)
        for name, given in (("num_lanes", num_lanes), ("block_size", block_size), ("window", window))
    )
    for name, given in (("num_lanes", num_lanes), ("block_size", block_size), ("augment_repeats", augment_repeats)):
        if given is not None and given < 1:
            raise ConfigError(f"{name} is {given}, expected at least 1; leave it out for the default")
    raw = raw_budget(budget_bytes)
    raw = raw if stored_bytes > raw else sys.maxsize
    mean_bytes = stored_bytes / max(1, sum(shard_sizes))
    block = block_size or default_block_size(mean_bytes)
    lanes = num_lanes or fit_lanes(
        mean_bytes,
        global_batch_size=max(1, global_batch_size // augment_repeats),
        block_size=block,
        budget_bytes=raw,
        world_size=world_size,
    )
    if window is None and seed is None:
        window = 0
    elif window is None:
        window = fit_window(mean_bytes, num_lanes=lanes, block_size=block, budget_bytes=raw, world_size=world_size)
    return Order(
        shard_sizes=shard_sizes,
        seed=seed,
        global_batch_size=global_batch_size,
        num_lanes=lanes,
        block_size=block,
        window=window,
        quarantined=quarantined,
        last_batch=last_batch,
        augment_repeats=augment_repeats,
    )


def fit_memory(
    order: Order,
    part: range,
    *,
    order_within: Callable[[int], Order],
    stored_bytes: int,
    image_bytes: int,
    cache_bytes: int | None = None,
    prefetch: int = PREFETCH,
    budget_bytes: int = BUDGET_BYTES,
) -> Memory:
    """The memory of the reader of a part of each global batch; raises BudgetTooSmall, which names a sufficient budget.

    `order_within` is `fit_order` as a function of the budget: a larger one makes the order wider. `image_bytes` is the
    size of one decoded image, `cache_bytes` that of all together (None if they can't be kept); they are kept where the
    rest of the budget has room for all.
    """
    batch_size = len(part)
    mean_bytes = stored_bytes / int(order.first_ids[-1])

    def needed(order: Order, budget: int) -> Memory:
        lanes = len(order.part_lanes(part))
        held = held_bytes(mean_bytes, num_lanes=lanes, block_size=order.block_size, window=order.window)
        return Memory(
            raw=min(held, stored_bytes) + int(batch_size * mean_bytes),
            decoded=(prefetch + 2) * batch_size * image_bytes,
            indexes=min(INDEX_BUDGET_BYTES, INDEX_BYTES * int(order.first_ids[-1])),
            cache=0,
            budget=budget,
        )

    memory = needed(order, budget_bytes)
    if memory.total > budget_bytes:
        enough = _enough(budget_bytes, lambda budget: needed(order_within(budget), budget).total <= budget)
        raise BudgetTooSmall(
            f"{memory}; raise budget_bytes to {enough} ({enough // MIB:,} MiB: --set budget_bytes={enough} of a "
            f"run, --budget-bytes {enough} of `estimate`), or lower window, num_lanes, prefetch or the batch size",
            enough,
        )
    ahead = int(READ_AHEAD * batch_size * mean_bytes)
    memory = replace(memory, raw=memory.raw + min(ahead, budget_bytes - memory.total))
    left = budget_bytes - memory.total
    return replace(memory, cache=cache_bytes if cache_bytes is not None and cache_bytes <= left else 0)


def _enough(too_small: int, fits: Callable[[int], bool]) -> int:
    """The smallest budget in whole MiB that fits.

    Doubling ends: the raw bytes of an order take at most 9/16 of a budget, or L, q and w are fixed.
    """
    low, high = too_small // MIB, 2 * max(1, too_small // MIB)
    while not fits(high * MIB):
        low, high = high, 2 * high
    return MIB * bisect_left(range(high), True, lo=low + 1, key=lambda mib: fits(mib * MIB))
