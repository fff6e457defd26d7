"""Thin Beam shells around indexing, assigning, writing and committing."""

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from pipelines import tables
from pipelines.assigning import Twins, assign_units, find_twins, make_plan, plan_shards
from pipelines.committing import commit
from pipelines.indexing import index_unit
from pipelines.job import BuildFile, Job, PlanFile, UnitLine
from pipelines.planning import UnitSummary
from pipelines.writing import ShardRecord, write_shard

NAMESPACE = "shardset"
"""Of our counters; runners have their own beside them."""

MAX_BUCKETS = 1024
_UNITS_PER_BUCKET = 8


def num_buckets(num_units: int) -> int:
    """How many buckets the keys' hashes are grouped in to find those that are wanted twice."""
    return max(1, min(MAX_BUCKETS, num_units // _UNITS_PER_BUCKET))


class IndexUnit(beam.DoFn):
    """UnitLine -> UnitSummary; tagged `keys`: (bucket, (unit, array [n, 2] of (key hash, row)))."""

    def __init__(self, job: Job, buckets: int) -> None:
        self._job, self._buckets = job, buckets

    def process(self, element: UnitLine) -> Iterator[Any]:
        indexed = index_unit(self._job, element)
        _count_indexed(indexed.summary)
        hashes = indexed.key_hashes
        pairs = np.stack([hashes, np.arange(len(hashes), dtype=np.uint64)], axis=1)
        bucket = (hashes % np.uint64(self._buckets)).astype(int)
        for number in np.unique(bucket).tolist():
            yield beam.pvalue.TaggedOutput("keys", (number, (element.number, pairs[bucket == number])))
        yield indexed.summary


class MakePlan(beam.DoFn):
    """All summaries -> PlanFile; tagged `starts`: (batch of units, (unit, where its samples start))."""

    def __init__(self, job: Job, build: BuildFile) -> None:
        self._job, self._build = job, build

    def process(self, element: None, summaries: list[UnitSummary]) -> Iterator[Any]:
        plan, starts = make_plan(self._job, self._build, summaries)
        for unit, start in enumerate(starts):
            yield beam.pvalue.TaggedOutput("starts", (plan.batch_of(unit), (unit, start)))
        yield plan


class FindTwins(beam.DoFn):
    """(bucket, parts) -> (batch of units, (unit, {row: how many hold its key before it}))."""

    def process(
        self, element: tuple[int, Iterable[tuple[int, np.ndarray]]], plan: PlanFile
    ) -> Iterator[tuple[int, tuple[int, Twins]]]:
        for unit, twins in find_twins(element[1]).items():
            yield plan.batch_of(unit), (unit, twins)


class AssignUnits(beam.DoFn):
    """(batch of units, their starts and twins) -> ((split, group), references as Arrow bytes)."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def process(self, element: tuple[int, dict[str, Any]], plan: PlanFile) -> Iterator[tuple[tuple[str, int], bytes]]:
        found = element[1]
        twins: dict[int, Twins] = {}
        for unit, rows in found["twins"]:
            twins.setdefault(unit, {}).update(rows)
        units = [(unit, starts, twins.get(unit, {})) for unit, starts in sorted(found["starts"], key=itemgetter(0))]
        for group, table in assign_units(self._job, plan, units):
            yield group, tables.placed_to_bytes(table)
        tables.release_memory()


class PlanShards(beam.DoFn):
    """((split, group), references) -> (split, shard) for each shard of the group, its references written."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def process(self, element: tuple[tuple[str, int], Iterable[bytes]], plan: PlanFile) -> Iterator[tuple[str, int]]:
        (split, _), parts = element
        for number in plan_shards(self._job, plan.splits[split], map(tables.placed_from_bytes, parts)):
            yield split, number
        tables.release_memory()


class WriteShard(beam.DoFn):
    """(split, shard) -> ShardRecord."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def process(self, element: tuple[str, int], plan: PlanFile) -> Iterator[ShardRecord]:
        split, number = element
        record, written = write_shard(self._job, plan.digest, plan.splits[split], number, len(plan.classes))
        _count_written(record, written)
        yield record


class Commit(beam.DoFn):
    """All records -> the manifest's digest, if all shards are finished."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def process(self, element: None, records: list[ShardRecord], plan: PlanFile) -> Iterator[str]:
        manifest = commit(self._job, plan, records)
        if manifest:
            yield manifest.digest


def _count_indexed(summary: UnitSummary) -> None:
    for count in summary.splits.values():
        Metrics.counter(NAMESPACE, "samples_indexed").inc(count.num_samples)
        Metrics.counter(NAMESPACE, "samples_quarantined").inc(count.num_rejected)
    for fix, number in summary.fixes.items():
        Metrics.counter(NAMESPACE, f"fixed_{fix}").inc(number)


def _count_written(record: ShardRecord, written: bool) -> None:
    Metrics.counter(NAMESPACE, "shards_written" if written else "shards_skipped").inc()
    if written:
        Metrics.counter(NAMESPACE, "samples_written").inc(record.shard.num_samples)
        Metrics.counter(NAMESPACE, "bytes_written").inc(record.shard.num_bytes)
