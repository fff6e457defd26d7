"""How a split is read: the order, steps and memory that the trainer would choose.

`shardset.order` does the arithmetic here and in a run, so these numbers are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.estimate.divisors import nearest_divisors, nearest_multiples, or_list
from pipelines.estimate.stored import StoredSplit
from shardset.errors import ConfigError
from shardset.order.budget import BUDGET_BYTES, Memory, fit_memory, fit_order
from shardset.order.epoch import LastBatch, Order
from shardset.order.lanes import check_world, rank_part

Strategy = Literal["spmd", "replica", "ddp", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Who reads a split, and how. Where L, q or w is None, the trainer's default applies.

    `num_workers` counts plain tar readers for each replica. `image_size` 0 decodes nothing. `crop_padding` is that of
    PadCrop: with it, decoded images stay in memory where they fit.
    """

    global_batch_size: int = 256
    num_replicas: int = 1
    num_hosts: int = 1
    strategy: Strategy = "spmd"
    num_lanes: int | None = None
    block_size: int | None = None
    window: int | None = None
    seed: int = 0
    last_batch: LastBatch = "pad"
    image_size: int = 224
    crop_padding: int | None = None
    budget_bytes: int = BUDGET_BYTES
    num_workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("image_size", "crop_padding"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, expected pixels from 0")

    @property
    def num_readers(self) -> int:
        """Number of streams that share the reading: hosts with spmd, replicas with replica and ddp."""
        return {"spmd": self.num_hosts, "single": 1}.get(self.strategy, self.num_replicas)

    @property
    def readers_per_host(self) -> int:
        """Number of streams that share the memory of a host."""
        return max(1, self.num_readers // self.num_hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of an epoch.

    The last one has `num_last` samples and `num_pads` repeats of weight 0; `drop` leaves out `num_left_out` samples.
    """

    num_steps: int
    num_last: int
    num_pads: int
    num_left_out: int


def order_of(stored: StoredSplit, reading: Reading) -> Order:
    """The order in which the trainer would read; raises ConfigError if the numbers make no order."""
    return fit_order(
        stored.shard_sizes,
        stored_bytes=stored.num_bytes,
        seed=reading.seed,
        global_batch_size=reading.global_batch_size,
        world_size=reading.num_readers,
        num_lanes=reading.num_lanes,
        block_size=reading.block_size,
        window=reading.window,
        last_batch=reading.last_batch,
        budget_bytes=reading.budget_bytes,
    )


def steps_of(order: Order) -> Steps:
    """The steps of an epoch, and the samples of its incomplete last batch."""
    room = order.num_batches * order.global_batch_size
    pads = max(0, room - order.num_samples)
    return Steps(
        num_steps=order.num_batches,
        num_last=order.global_batch_size - pads if order.num_batches else 0,
        num_pads=pads,
        num_left_out=max(0, order.num_samples - room),
    )


def refusals_of(reading: Reading) -> list[str]:
    """The errors with which a run of these numbers would stop before its first step."""
    if reading.num_replicas % reading.num_hosts:
        hosts = nearest_divisors(reading.num_replicas, reading.num_hosts)
        replicas = nearest_multiples(reading.num_hosts, reading.num_replicas)
        return [
            f"{reading.num_replicas} replicas do not divide over {reading.num_hosts} hosts; "
            f"use {or_list(hosts)} hosts, or {or_list(replicas)} replicas"
        ]
    try:
        check_world(reading.global_batch_size, 0, reading.num_replicas)
        check_world(reading.global_batch_size, 0, reading.num_readers)
    except ConfigError as error:
        return [str(error)]
    return []


def memory_of(stored: StoredSplit, order: Order, reading: Reading) -> Memory:
    """The memory of one reader; raises ConfigError if it exceeds the budget."""
    cache_bytes = None  # without PadCrop, nothing is kept decoded
    if reading.crop_padding is not None and reading.image_size:
        cache_bytes = 3 * stored.plan.num_stored * (reading.image_size + 2 * reading.crop_padding) ** 2
    return fit_memory(
        order,
        rank_part(order.global_batch_size, reading.num_readers - 1, reading.num_readers),  # the largest share
        order_within=lambda budget: order_of(stored, replace(reading, budget_bytes=budget)),
        stored_bytes=stored.num_bytes,
        image_bytes=3 * reading.image_size**2,
        cache_bytes=cache_bytes,
        budget_bytes=reading.budget_bytes,
    )


def default_split(names: Sequence[str], wanted: str | None) -> str:
    """The split to read: the one asked for, else `train`, else the only one."""
    if wanted is None and "train" not in names and len(names) > 1:
        raise ConfigError(f"which split is read? there are {', '.join(names)}; name one with --split")
    name = wanted or ("train" if "train" in names else names[0])
    if name not in names:
        raise ConfigError(f"no split {name!r}; there are {', '.join(names)}")
    return name
