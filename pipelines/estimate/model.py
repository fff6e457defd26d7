"""Pure: what it takes to build and read a shard set, from its sizes and the way in which it will be read.

Nothing is estimated that the runtime computes: sizes are those of `layout`, order and steps of `shardset.order`,
memory of `shardset.order.budget`. What can only be estimated says "about" where it is shown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pipelines.estimate.prices import Prices
from pipelines.plan.layout import SplitPlan, samples_at_once
from shardset.errors import ConfigError
from shardset.format.tar import BLOCK
from shardset.order.budget import (
    BUDGET_BYTES,
    DEFAULT_WINDOW,
    INDEX_BUDGET_BYTES,
    INDEX_BYTES,
    Memory,
    fit_memory,
    fit_order,
    held_bytes,
    steps_at_once,
)
from shardset.order.epoch import LastBatch, Order
from shardset.order.lanes import check_world, default_lanes, rank_part

Strategy = Literal["spmd", "replica", "ddp", "single"]

UPLOADS_PER_SHARD = 4
"""The tar, its index, the references of the plan, the record of the finished shard."""
UPLOADS_PER_BUILD = 7
"""plan/build.json twice, survey.jsonl, plan.json, rejected.jsonl; the quarantine list and the manifest."""
UPLOADS_PER_UNIT = 2
"""Its index and its summary."""
UPLOADS_PER_BATCH = 2
"""The keys and the references of some hundred thousand samples, for the next step."""
LISTS_PER_BUILD = 9
LOOKS_PER_SHARD = 7
"""Its references, the record (not there yet, then for the manifest), what stands where tar and index will be, and twice
whose the output is."""
LOOKS_PER_UNIT = 9
"""Whose the output is, its line, its index and summary that are not there yet, the summary three times, keys and
references."""
LOOKS_PER_BUILD = 38
LISTED_AT_ONCE = 1000

NUM_MEASURED, MEASURED_EVERY = 11, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSplit:
    """One split as it stands or will stand: its plan, and of each shard the samples and the bytes of tar and index."""

    plan: SplitPlan
    shard_sizes: Sequence[int]
    tar_bytes: Sequence[int]
    index_bytes: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Of all tars."""
        return sum(self.tar_bytes)

    @property
    def mean_bytes(self) -> float:
        """Of a sample in its tar, headers and padding included."""
        return self.num_bytes / self.plan.num_stored


@dataclass(frozen=True, slots=True)
class Assumption:
    """A sentence on what was not looked at, and about what: how many samples there are, how large, or their classes."""

    about: Literal["samples", "bytes", "classes"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """What a build reads before it stores anything: `num_reads` from samples or archives, units, listed files.

    `num_looks` are at images whose sizes no listing tells, `unit_lists` those that units ask for again.
    """

    num_reads: int
    num_units: int
    num_files: int
    num_looks: int = 0
    unit_lists: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """A shard set; `raw` is None where it stands already. Without `assumptions` all numbers were counted."""

    title: str
    splits: Mapping[str, StoredSplit]
    manifest_bytes: int
    num_classes: int
    raw: Raw | None
    assumptions: Sequence[Assumption] = ()

    @property
    def assumed(self) -> frozenset[str]:
        """What is assumed: `samples`, `bytes`, `classes`."""
        return frozenset(assumption.about for assumption in self.assumptions)

    @property
    def num_bytes(self) -> int:
        """Tars, indexes and manifest."""
        return self.manifest_bytes + sum(one.num_bytes + sum(one.index_bytes) for one in self.splits.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a split is read. L, q and w that are None are what the trainer takes; `num_workers` is of plain readers.

    `crop_padding` is that of PadCrop: with it images are kept decoded where they fit. `image_size` 0 decodes nothing.
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
        for name in ("global_batch_size", "num_replicas", "num_hosts", "num_lanes", "block_size", "num_workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{_FLAGS[name]} is {value}, expected a whole number from 1")
        for name in ("image_size", "crop_padding"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, expected pixels from 0")

    @property
    def num_readers(self) -> int:
        """Streams that share the reading: hosts under spmd, one for each replica under replica and ddp."""
        return {"spmd": self.num_hosts, "single": 1}.get(self.strategy, self.num_replicas)


_FLAGS = {
    "global_batch_size": "--global-batch-size",
    "num_replicas": "--world",
    "num_hosts": "--hosts",
    "num_lanes": "--num-lanes",
    "block_size": "--block-size",
    "num_workers": "--workers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Of an epoch: global batches; real samples and repeats of weight 0 in the last; samples that `drop` leaves out."""

    num_steps: int
    num_last: int
    num_pads: int
    num_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEstimate:
    """What all readers together ask of a bucket.

    `block_gets` are the ranged reads of an epoch; the samples of a run's first batch and the pads of each epoch's last
    are asked for one by one. Manifests, indexes and `looks` (for a shard's generation) come once a run; indexes in
    every epoch if they do not fit the memory. `amplification` is bytes read by bytes stored; `num_bytes` are of samples
    in the first epoch.
    """

    num_readers: int
    block_gets: int
    first_batch_gets: int
    pad_gets: int
    index_gets: int
    looks: int
    manifest_gets: int
    num_bytes: int
    index_bytes: int
    amplification: float
    indexes_fit: bool

    @property
    def first_gets(self) -> int:
        """All requests of a run's first epoch."""
        once = self.first_batch_gets + self.looks + self.manifest_gets + self.index_gets
        return self.block_gets + self.pad_gets + once

    @property
    def later_gets(self) -> int:
        """All requests of an epoch after it."""
        return self.block_gets + self.pad_gets + (0 if self.indexes_fit else self.index_gets)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """Before the first batch, all readers together: the manifest, the indexes of the shards in it, its samples."""

    manifest_bytes: int
    index_bytes: int
    sample_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.manifest_bytes + self.index_bytes + self.sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Classes in a batch (mean): if samples were stored class by class, and if every sample could come from anywhere.

    The first is measured on the order, as in docs/order.md; a build stores samples permuted, so that real batches
    are near the second.
    """

    num_classes: int
    worst: float
    uniform: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Operations of a build, by class."""

    class_a: int
    class_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What `plan` shows. `reads`, `cold` and `memory` are None where the numbers are refused, which `refusals` says."""

    stored: StoredSet
    split: str
    reading: Reading
    prices: Prices
    order: Order = field(repr=False)
    steps: Steps
    mixing: Mixing | None
    reads: ReadEstimate | None
    cold: ColdStart | None
    memory: Memory | None
    build: Requests | None
    advice: list[str]
    refusals: list[str]

    @property
    def readers_per_host(self) -> int:
        """How many streams share the memory of a host."""
        return max(1, self.reading.num_readers // self.reading.num_hosts)


def forecast(stored: StoredSet, split: str, reading: Reading, prices: Prices) -> Forecast:
    """All numbers of one split; raises ConfigError where they make no order at all."""
    found = stored.splits[split]
    order = order_of(found, reading)
    steps = steps_of(order)
    refusals = refusals_of(reading)
    memory = None
    if not refusals:
        try:
            memory = memory_of(found, order, reading)
        except ConfigError as error:
            refusals = [str(error)]
    reads = None if refusals else reads_of(found, order, reading.num_readers, steps)
    return Forecast(
        stored=stored,
        split=split,
        reading=reading,
        prices=prices,
        order=order,
        steps=steps,
        mixing=mixing_of(order, stored.num_classes) if stored.num_classes > 1 else None,
        reads=reads,
        cold=None if refusals else cold_start(stored, split, order, reading.num_readers),
        memory=memory,
        build=build_requests(stored) if stored.raw else None,
        advice=[*advice_on_sizes(found), *advice_on_reading(found, order, reading, steps, reads)],
        refusals=refusals,
    )


def order_of(stored: StoredSplit, reading: Reading) -> Order:
    """The order in which the trainer would read; raises ConfigError where the numbers make none."""
    return fit_order(
        stored.shard_sizes,
        stored_bytes=stored.num_bytes,
        seed=reading.seed,
        global_batch_size=reading.global_batch_size,
        num_lanes=reading.num_lanes,
        block_size=reading.block_size,
        window=reading.window,
        last_batch=reading.last_batch,
        budget_bytes=reading.budget_bytes,
    )


def steps_of(order: Order) -> Steps:
    """The steps of an epoch, and what is not a full batch at its end."""
    places = order.num_batches * order.global_batch_size
    pads = max(0, places - order.num_samples)
    return Steps(
        num_steps=order.num_batches,
        num_last=order.global_batch_size - pads if order.num_batches else 0,
        num_pads=pads,
        num_left_out=max(0, order.num_samples - places),
    )


def refusals_of(reading: Reading) -> list[str]:
    """The sentences with which a run of these numbers would end before it began."""
    if reading.num_replicas % reading.num_hosts:
        near = nearest_divisors(reading.num_replicas, reading.num_hosts)
        return [
            f"{reading.num_replicas} replicas do not divide over {reading.num_hosts} hosts; "
            f"use {_or(near)} hosts, or {_or(nearest_multiples(reading.num_hosts, reading.num_replicas))} replicas"
        ]
    try:
        check_world(reading.global_batch_size, 0, reading.num_replicas)
        check_world(reading.global_batch_size, 0, reading.num_readers)
    except ConfigError as error:
        return [str(error)]
    return []


def memory_of(stored: StoredSplit, order: Order, reading: Reading) -> Memory:
    """What one reader holds; raises ConfigError if that is more than its budget."""
    cache = None
    if reading.crop_padding is not None and reading.image_size:
        cache = 3 * stored.plan.num_stored * (reading.image_size + 2 * reading.crop_padding) ** 2
    return fit_memory(
        order,
        rank_part(order.global_batch_size, 0, reading.num_readers),
        order_within=lambda budget: order_of(stored, replace(reading, budget_bytes=budget)),
        stored_bytes=stored.num_bytes,
        image_bytes=3 * reading.image_size**2,
        cache_bytes=cache,
        budget_bytes=reading.budget_bytes,
    )


def reads_of(stored: StoredSplit, order: Order, num_readers: int, steps: Steps) -> ReadEstimate:
    """The requests and bytes of a run's first epoch, all readers together."""
    shared = sum(len(order.rank_lanes(rank, num_readers)) for rank in range(num_readers)) / order.num_lanes
    num_shards = len(stored.shard_sizes)
    first_batch = order.global_batch_size if steps.num_steps else 0
    kept = min(1.0, INDEX_BUDGET_BYTES / (INDEX_BYTES * order.num_samples))
    index_gets = num_shards * num_readers
    if kept < 1:
        together = min(steps_at_once(order), order.num_batches)
        touched = sum(len(shards) for shards in _shards_of_first(order, num_readers, together))
        index_gets = max(index_gets, math.ceil(steps.num_steps / together * touched * (1 - kept)))
    alone = (first_batch + steps.num_pads) * (stored.mean_bytes - BLOCK)  # without the sample's first header
    return ReadEstimate(
        num_readers=num_readers,
        block_gets=math.ceil(order.num_reads(0) * shared),
        first_batch_gets=first_batch,
        pad_gets=steps.num_pads,
        index_gets=index_gets,
        looks=num_shards * num_readers,
        manifest_gets=num_readers,
        num_bytes=math.ceil(stored.num_bytes * shared + alone),
        index_bytes=math.ceil(index_gets * sum(stored.index_bytes) / num_shards),
        amplification=shared,
        indexes_fit=kept == 1,
    )


def cold_start(stored: StoredSet, split: str, order: Order, num_readers: int) -> ColdStart:
    """What has to arrive before the first batch of a run."""
    found = stored.splits[split]
    sizes = np.asarray(found.index_bytes, dtype=np.int64)
    return ColdStart(
        manifest_bytes=stored.manifest_bytes * num_readers,
        index_bytes=sum(int(sizes[shards].sum()) for shards in _shards_of_first(order, num_readers, 1)),
        sample_bytes=math.ceil(order.global_batch_size * (found.mean_bytes - BLOCK)),
    )


def _shards_of_first(order: Order, num_readers: int, num_steps: int) -> list[np.ndarray]:
    """The shards from which each reader takes samples in the first steps of a run."""
    if not order.num_batches:
        return [np.zeros(0, np.int64)] * num_readers
    ids = order.slots(0, range(num_steps), 0, order.global_batch_size).ids
    shards = np.searchsorted(order.first_ids, ids, side="right") - 1
    return [np.unique(part) for part in np.array_split(shards, num_readers, axis=1)]


def mixing_of(order: Order, num_classes: int) -> Mixing:
    """How many classes meet in a batch; the mean of eleven batches, 100 steps apart in epochs of 1,200 or more."""
    every = max(1, min(MEASURED_EVERY, order.num_batches // (NUM_MEASURED + 1)))
    steps = [step for step in range(every, (NUM_MEASURED + 1) * every, every) if step < order.num_batches] or [0]
    batches = (order.batch(0, step) for step in steps)
    return Mixing(
        num_classes=num_classes,
        worst=classes_in((slots.ids[slots.weights > 0] for slots in batches), order.num_samples, num_classes),
        uniform=classes_expected(order.num_samples, min(order.global_batch_size, order.num_samples), num_classes),
    )


def classes_in(batches: Iterable[np.ndarray], num_samples: int, num_classes: int) -> float:
    """Mean number of classes in batches of ids, where the samples are stored class by class, all classes alike."""
    return float(np.mean([len(np.unique(ids * num_classes // num_samples)) for ids in batches]))


def classes_expected(num_samples: int, batch_size: int, num_classes: int) -> float:
    """The same for batches drawn from all samples without putting back: classes x (1 - chance to miss one)."""
    others = num_samples - num_samples / num_classes
    if batch_size > others:
        return float(num_classes)
    log = math.lgamma
    missed = log(others + 1) - log(others - batch_size + 1) - log(num_samples + 1) + log(num_samples - batch_size + 1)
    return num_classes * (1 - math.exp(missed))


def build_requests(stored: StoredSet) -> Requests:
    """The operations of a build from a bucket into a bucket: writes and lists, reads and looks; about."""
    assert stored.raw is not None
    raw, num_shards = stored.raw, sum(len(split.shard_sizes) for split in stored.splits.values())
    num_stored = sum(split.plan.num_stored for split in stored.splits.values())
    num_batches = math.ceil(num_stored / samples_at_once(num_stored))
    lists = math.ceil(raw.num_files / LISTED_AT_ONCE) + raw.unit_lists + LISTS_PER_BUILD
    return Requests(
        class_a=UPLOADS_PER_SHARD * num_shards
        + UPLOADS_PER_UNIT * raw.num_units
        + UPLOADS_PER_BATCH * num_batches
        + UPLOADS_PER_BUILD
        + lists,
        class_b=raw.num_reads
        + raw.num_looks
        + num_stored
        + LOOKS_PER_SHARD * num_shards
        + LOOKS_PER_UNIT * raw.num_units
        + num_batches * (num_batches + sum(split.plan.num_groups for split in stored.splits.values()))
        + LOOKS_PER_BUILD,
    )


# What does not divide, and what would.


def advice_on_sizes(stored: StoredSplit) -> list[str]:
    """Samples over shards."""
    total, count = stored.plan.num_stored, stored.plan.num_shards
    small, left = divmod(total, count)
    if not left:
        return []
    divisors = nearest_divisors(total, count)
    prime = set(divisors) <= {1, total}
    why = f"{total:,} is prime" if prime else f"{_or(divisors)} shards divide it"
    return [
        f"{total:,} samples over {count:,} shards: {left:,} of {small + 1:,} and {count - left:,} of {small:,} "
        f"({why}). This trainer does not mind. For equal shards --remainder drop leaves out {left:,} "
        f"({total - left:,} = {count:,} x {small:,}), --remainder pad repeats {count - left:,} "
        f"({total + count - left:,} = {count:,} x {small + 1:,})."
    ]


def advice_on_reading(
    stored: StoredSplit, order: Order, reading: Reading, steps: Steps, reads: ReadEstimate | None
) -> list[str]:
    """Samples over batches, lanes over readers, shards over plain readers; what the budget narrows."""
    return [
        *_advice_on_batches(order, steps),
        *_advice_on_lanes(order, reads),
        *_advice_on_plain_readers(stored, reading),
        *_advice_on_window(stored, order, reading),
        *_advice_on_indexes(order, reads),
    ]


def _advice_on_batches(order: Order, steps: Steps) -> list[str]:
    size = order.global_batch_size
    if steps.num_left_out:
        return [
            f"{steps.num_left_out:,} samples are left out of each epoch, others each time, because "
            f"{order.num_samples:,} is no multiple of {size:,} (--last-batch drop)."
        ]
    if not steps.num_pads:
        return []
    fits = [n for n in nearest_divisors(order.num_samples, size) if size / 2 <= n <= 2 * size]
    also = f" Batches of {_or(fits)} would divide." if fits else ""
    return [
        f"{order.num_samples:,} samples over batches of {size:,}: the last batch has {steps.num_last:,}, and "
        f"{steps.num_pads:,} repeats of weight 0, which count nowhere.{also}"
    ]


def _advice_on_lanes(order: Order, reads: ReadEstimate | None) -> list[str]:
    if reads is None or reads.amplification <= 1:
        return []
    fits = nearest_divisors(order.num_lanes, reads.num_readers)
    lanes = [n for n in range(1, order.global_batch_size + 1) if order.global_batch_size % n == 0]
    better = [n for n in lanes if n % reads.num_readers == 0 and n <= max(order.num_lanes, reads.num_readers)]
    also = f", or --num-lanes {better[-1]}" if better else ""
    return [
        f"{order.num_lanes} lanes over {reads.num_readers} readers: some lanes are read by several, so "
        f"{reads.amplification:.2f} times the stored bytes are read. {_or(fits)} readers share none{also}."
    ]


def _advice_on_plain_readers(stored: StoredSplit, reading: Reading) -> list[str]:
    if reading.num_workers is None:
        return []
    shards, readers = len(stored.shard_sizes), reading.num_replicas * reading.num_workers
    who = f"{reading.num_replicas} replicas x {reading.num_workers} workers"
    if shards % readers == 0:
        return [f"{shards:,} shards over {who}: {shards // readers} for each plain tar reader."]
    each = f"{shards // readers} or {shards // readers + 1}" if shards > readers else "0 or 1"
    per_replica, left = divmod(shards, reading.num_replicas)
    workers = [] if left else nearest_divisors(per_replica, reading.num_workers)
    also = f", or {_or(workers)} workers" if workers else ""
    return [
        f"{shards:,} shards over {who} = {readers:,} plain tar readers (webdataset, one shard at a time): {each} "
        f"each, so their epochs differ in length. {_or(nearest_multiples(readers, shards))} shards{also} would "
        "divide. This trainer's stream cuts by sample and is not concerned."
    ]


def _advice_on_window(stored: StoredSplit, order: Order, reading: Reading) -> list[str]:
    wanted = default_lanes(order.global_batch_size)
    narrowed = reading.window is None and order.window < DEFAULT_WINDOW and reading.num_lanes is None
    if not narrowed:
        return []
    needed = 2 * held_bytes(stored.mean_bytes, num_lanes=wanted, block_size=order.block_size, window=DEFAULT_WINDOW + 1)
    lanes = f" and L from {wanted} to {order.num_lanes}" if order.num_lanes < wanted else ""
    return [
        f"The budget of {reading.budget_bytes / 2**30:.3g} GiB a reader lowers w from {DEFAULT_WINDOW} to "
        f"{order.window}{lanes}: neighbours in a shard stay together. {needed / 2**30:.1f} GiB are enough for the "
        f"default (--budget-bytes {needed}; of a run --set budget_bytes={needed}), or store smaller images."
    ]


def _advice_on_indexes(order: Order, reads: ReadEstimate | None) -> list[str]:
    if reads is None or reads.indexes_fit:
        return []
    return [
        f"The indexes of {order.num_samples:,} samples take about {INDEX_BYTES * order.num_samples / 2**30:.1f} GiB in "
        f"memory and a reader keeps {INDEX_BUDGET_BYTES >> 20} MiB of them: the readers read indexes again and again, "
        f"about {reads.index_gets:,} times in an epoch, {reads.index_bytes / 1e12:,.2f} TB."
    ]


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The largest divisor of `number` up to `wish` and the smallest above it, as far as there are any."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return [n for n in (_last(n for n in divisors if n <= wish), _first(n for n in divisors if n > wish)) if n]


def nearest_multiples(number: int, wish: int) -> list[int]:
    """The largest multiple of `number` up to `wish`, from 1 time on, and the smallest above it."""
    below = wish // number * number
    return [n for n in (below, below + number) if n]


def _first(numbers: Iterable[int]) -> int | None:
    return next(iter(numbers), None)


def _last(numbers: Iterable[int]) -> int | None:
    return max(numbers, default=None)


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)
