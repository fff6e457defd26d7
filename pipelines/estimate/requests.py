"""Requests to a bucket and bytes from it: during a build, before the first batch, and in an epoch."""

import math
from dataclasses import dataclass

import numpy as np

from pipelines.estimate.index_reads import index_bytes_for, index_range_gets
from pipelines.estimate.reading import Steps
from pipelines.estimate.stored import StoredSet, StoredSplit
from pipelines.plan.layout import batch_size
from shardset.format.tar import BLOCK
from shardset.order.budget import INDEX_BUDGET_BYTES, INDEX_BYTES, steps_at_once
from shardset.order.epoch import Order
from shardset.order.lanes import rank_part, read_factor

# A build in a bucket, counted request by request at an emulator (tests/test_plan_recorded.py).
UPLOADS_PER_SHARD = 4
"""The tar, its index, the references of the plan, the record of the finished shard."""
UPLOADS_PER_BUILD = 7
"""plan/build.json twice, survey.jsonl, plan.json, rejected.jsonl; the quarantine list and the manifest."""
UPLOADS_PER_UNIT = 2
"""Its index and its summary."""
UPLOADS_PER_BATCH = 2
"""The keys and the references of some hundred thousand samples, for the next step."""
LISTS_PER_BUILD = 9
STATS_PER_SHARD = 9
"""Its references, its record (absent before the write, read for the manifest), the names of its four files before the
writes, and twice the owner of the output."""
STATS_PER_UNIT = 11
"""The owner of the output, its line, its index and summary before they are indexed and before they are written, the
summary three times, keys and references."""
STATS_PER_BATCH = 4
"""The names of its two files, twice before the writes."""
STATS_PER_BUILD = 44
LISTED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEstimate:
    """Requests of all readers together.

    `block_gets` are the range reads of an epoch. Readers read the samples of a run's first batch and the pads of each
    epoch's last batch one by one; manifests and indexes once per run; indexes that do not fit in memory again
    in every epoch. `amplification` is bytes read over bytes stored; `num_bytes` counts the samples of the first epoch.
    """

    num_readers: int
    block_gets: int
    first_batch_gets: int
    pad_gets: int
    index_gets: int
    manifest_gets: int
    num_bytes: int
    index_bytes: int
    amplification: float
    indexes_fit: bool

    @property
    def first_gets(self) -> int:
        """All requests of a run's first epoch."""
        once = self.first_batch_gets + self.manifest_gets + self.index_gets
        return self.block_gets + self.pad_gets + once

    @property
    def later_gets(self) -> int:
        """All requests of each later epoch."""
        return self.block_gets + self.pad_gets + (0 if self.indexes_fit else self.index_gets)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """Bytes before the first batch, all readers together: the manifest, the indexes of its shards, its samples."""

    manifest_bytes: int
    index_bytes: int
    sample_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.manifest_bytes + self.index_bytes + self.sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequests:
    """Operations of a build, by price class: A is writes and lists, B is reads and stats."""

    class_a: int
    class_b: int


def reads_of(stored: StoredSplit, order: Order, num_readers: int, steps: Steps) -> ReadEstimate:
    """Requests and bytes of a run's first epoch, all readers together."""
    amplification = read_factor(order.num_lanes, order.global_batch_size, num_readers)
    num_shards = len(stored.shard_sizes)
    first_batch = order.global_batch_size if steps.num_steps else 0
    # The share of the indexes that stays in memory.
    kept = min(1.0, INDEX_BUDGET_BYTES / (INDEX_BYTES * order.num_samples))
    index_gets = max(num_shards * num_readers, _index_gets(order, num_readers, steps, kept) if kept < 1 else 0)
    whole_gets = index_gets
    index_gets += index_range_gets(stored, order.block_size, num_readers)
    single_bytes = (first_batch + steps.num_pads) * (stored.mean_bytes - BLOCK)  # without the sample's first header
    return ReadEstimate(
        num_readers=num_readers,
        block_gets=math.ceil(order.num_reads(0) * amplification),
        first_batch_gets=first_batch,
        pad_gets=steps.num_pads,
        index_gets=index_gets,
        manifest_gets=num_readers,
        num_bytes=math.ceil(stored.num_bytes * amplification + single_bytes),
        index_bytes=math.ceil(whole_gets * sum(stored.index_bytes) / num_shards),
        amplification=amplification,
        indexes_fit=kept == 1,
    )


def _index_gets(order: Order, num_readers: int, steps: Steps, kept: float) -> int:
    """Reads of indexes in an epoch, if memory keeps the fraction `kept` of them."""
    together = min(steps_at_once(order), order.num_batches)
    touched = sum(len(np.unique(_shards_of(order, ids))) for ids in _ids_of_first(order, num_readers, together))
    return math.ceil(steps.num_steps / together * touched * (1 - kept))


def cold_start(stored: StoredSet, split: str, order: Order, num_readers: int) -> ColdStart:
    """The bytes that a run reads before its first batch."""
    stored_split = stored.splits[split]
    return ColdStart(
        manifest_bytes=stored.manifest_bytes * num_readers,
        index_bytes=sum(
            index_bytes_for(stored_split, shards := _shards_of(order, ids), ids - order.first_ids[shards])
            for ids in _ids_of_first(order, num_readers, 1)
        ),
        sample_bytes=math.ceil(order.global_batch_size * (stored_split.mean_bytes - BLOCK)),
    )


def _ids_of_first(order: Order, num_readers: int, num_steps: int) -> list[np.ndarray]:
    """The ids that each reader needs for the first steps of a run."""
    if not order.num_batches:
        return [np.zeros(0, np.int64)] * num_readers
    # Each reader takes a contiguous part of every batch.
    ids = order.slots(0, range(num_steps), 0, order.global_batch_size).ids
    cuts = [rank_part(order.global_batch_size, rank, num_readers).start for rank in range(1, num_readers)]
    return [columns.ravel() for columns in np.split(ids, cuts, axis=1)]


def _shards_of(order: Order, ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(order.first_ids, ids, side="right") - 1


def build_requests(stored: StoredSet) -> BuildRequests | None:
    """The approximate number of operations of a build from a bucket into a bucket; None for an existing set."""
    if stored.raw is None:
        return None
    raw, num_shards = stored.raw, sum(len(split.shard_sizes) for split in stored.splits.values())
    num_stored = sum(split.plan.num_stored for split in stored.splits.values())
    num_batches = math.ceil(num_stored / batch_size(num_stored))
    num_groups = sum(split.plan.num_groups for split in stored.splits.values())
    return BuildRequests(
        class_a=UPLOADS_PER_SHARD * num_shards
        + UPLOADS_PER_UNIT * raw.num_units
        + UPLOADS_PER_BATCH * num_batches
        + UPLOADS_PER_BUILD
        + math.ceil(raw.num_files / LISTED_AT_ONCE)
        + raw.unit_lists
        + LISTS_PER_BUILD,
        class_b=raw.num_reads
        + raw.num_stats
        + num_stored
        + STATS_PER_SHARD * num_shards
        + STATS_PER_UNIT * raw.num_units
        + num_batches * (num_batches + num_groups + STATS_PER_BATCH)
        + STATS_PER_BUILD,
    )
