"""The order and the memory of one reader of a split, from the options of a stream.

Pure numbers: `shardset/stream` reads by them, `shardset estimate` shows them in advance.
L is `num_lanes`, q `block_size`, w `window`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin

from shardset.errors import BudgetTooSmall, ConfigError, require_int
from shardset.order.epoch import LastBatch, Order
from shardset.order.lanes import MAX_DEFAULT_LANES, default_lanes, lanes_of_reader
from shardset.order.selection import Selection

MIB = 1 << 20
BUDGET_BYTES = 4 << 30
"""Not from the memory of the machine, or readers whose machines differ would have different orders
(decision 13).
"""

READ_BYTES = 4 << 20
DEFAULT_WINDOW = 256
INDEX_BUDGET_BYTES = 256 << 20
INDEX_BYTES = 28
"""Memory for the index of a sample of two fields, without its key, which few readers need."""
MAX_STEPS_AT_ONCE = 64
READ_AHEAD = 8
PREFETCH = 2
_LEAST = {"num_lanes": 1, "block_size": 1, "window": 0, "augment_repeats": 1, "num_threads": 1}
_LEAST["prefetch"] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """What the order of a split follows from, besides its shards; the same for all of `world_size`
    equal readers.

    `budget_bytes` is the memory of each of them; it chooses `num_lanes`, `block_size` and `window`
    (L, q and w of docs/explanation/order.md) if they are None. `Order` explains the others.
    """

    global_batch_size: int
    seed: int | None
    world_size: int = 1
    num_lanes: int | None = None
    block_size: int | None = None
    window: int | None = None
    last_batch: LastBatch = "pad"
    augment_repeats: int = 1
    budget_bytes: int = BUDGET_BYTES

    def __post_init__(self) -> None:
        """Checks numbers and choices, also of subclasses."""
        for name, kind in ((each.name, each.type) for each in fields(self)):
            value = getattr(self, name)
            if kind is int or (kind == int | None and value is not None):
                value = require_int(name, value)
                object.__setattr__(self, name, value)
                if value < _LEAST.get(name, value):
                    raise ConfigError(
                        f"{name} is {value}, expected at least {_LEAST[name]}; leave it out for the"
                        " default"
                    )
            elif get_origin(kind) is Literal and value not in get_args(kind):
                raise ConfigError(f"{name} is {value!r}, expected {' or '.join(get_args(kind))}")


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
        parts = (
            f"{getattr(self, name) / 2**20:,.0f} MiB {name}"
            for name in ("raw", "decoded", "indexes", "cache")
        )
        return (
            f"memory: {', '.join(parts)}; {self.total / 2**20:,.0f} of"
            f" {self.budget / 2**20:,.0f} MiB"
        )


def held_bytes(mean_bytes: float, *, num_lanes: int, block_size: int, window: int) -> int:
    """About the raw bytes that the reader of `num_lanes` lanes holds at a time."""
    return int(num_lanes * (block_size + window) * mean_bytes)


def steps_at_once(order: Order) -> int:
    """The number of steps that a running reader plans together, to look into each index once for
    all of them.
    """
    return max(1, min(order.window // order.rows_per_step, MAX_STEPS_AT_ONCE))


def fit_order(
    shard_sizes: Sequence[int],
    options: OrderOptions,
    *,
    stored_bytes: int,
    view: Selection | None = None,
) -> Order:
    """The order of a split whose tars hold `stored_bytes`; chooses L, q and w by the budget where
    they are None.

    L and w suit a split of any size that fits into the budget for raw bytes,
    which is 9/16 of the budget, so that four readers of ImageNet's images (116 KB) have the full
    window. q makes reads of about 4 MiB. Raises ConfigError where the numbers can't make an order.
    """
    raw_bytes = 9 * options.budget_bytes // 16
    mean_bytes = max(1.0, stored_bytes / max(1, sum(shard_sizes)))
    room = int((raw_bytes if stored_bytes > raw_bytes else sys.maxsize) / mean_bytes)
    block_size = options.block_size or int(min(512, max(8, READ_BYTES // mean_bytes)))
    num_lanes = options.num_lanes or _fit_lanes(room, block_size, options)
    window = options.window
    if window is None:
        rows = room // lanes_of_reader(num_lanes, options.world_size)
        window = 0 if options.seed is None else max(0, min(DEFAULT_WINDOW, rows - block_size))
    return Order(
        shard_sizes=shard_sizes,
        seed=options.seed,
        global_batch_size=options.global_batch_size,
        num_lanes=num_lanes,
        block_size=block_size,
        window=window,
        view=view,
        last_batch=options.last_batch,
        augment_repeats=options.augment_repeats,
    )


def fit_memory(
    order: Order,
    options: OrderOptions,
    part: range,
    *,
    stored_bytes: int,
    image_bytes: int,
    cache_bytes: int | None = None,
    prefetch: int = PREFETCH,
) -> Memory:
    """The memory of the reader of a part of each global batch; raises BudgetTooSmall, which names a
    sufficient budget.

    `image_bytes` is the size of one decoded image, `cache_bytes` of all together (None if they
    can't be kept); they are kept where the rest of the budget has room for all.
    """
    num_samples, budget = int(order.first_ids[-1]), options.budget_bytes
    mean_bytes = stored_bytes / num_samples

    def needed(order: Order) -> Memory:
        lanes = len(order.part_lanes(part))
        held = held_bytes(
            mean_bytes, num_lanes=lanes, block_size=order.block_size, window=order.window
        )
        return Memory(
            raw=min(held, stored_bytes) + int(len(part) * mean_bytes),
            decoded=(prefetch + 2) * len(part) * image_bytes,
            indexes=min(INDEX_BUDGET_BYTES, INDEX_BYTES * num_samples),
            cache=0,
            budget=budget,
        )

    memory = needed(order)
    if memory.total > budget:
        enough, wider = budget, memory
        # Ends: the raw bytes of an order take at most 9/16 of a budget, or L, q and w are fixed.
        while wider.total > enough:
            enough = MIB * -(-wider.total // MIB)
            changed = replace(options, budget_bytes=enough)
            wider = needed(fit_order(order.shard_sizes, changed, stored_bytes=stored_bytes))
        raise BudgetTooSmall(
            f"{memory}; raise budget_bytes to {enough} ({enough // MIB:,} MiB: --set"
            f" budget_bytes={enough} of a run, --budget-bytes {enough} of `estimate`), or lower"
            " window, num_lanes, prefetch or the batch size",
            enough,
        )
    ahead = int(READ_AHEAD * len(part) * mean_bytes)
    memory = replace(memory, raw=memory.raw + min(ahead, budget - memory.total))
    if cache_bytes is not None and cache_bytes <= budget - memory.total:
        return replace(memory, cache=cache_bytes)
    return memory


def _fit_lanes(room: int, block_size: int, options: OrderOptions) -> int:
    """L: the default, or fewer where the blocks of one reader's lanes are more than the samples it
    has room for.

    Grows with the batch while half of the readers, after a loss, could still hold all lanes with
    the full window.
    """
    world_size = options.world_size
    size = max(1, options.global_batch_size // options.augment_repeats)
    most, wide = (
        world_size * (room // held) for held in (block_size, 2 * (block_size + DEFAULT_WINDOW))
    )
    return default_lanes(size, world_size, min(max(world_size, most), MAX_DEFAULT_LANES), wide)
