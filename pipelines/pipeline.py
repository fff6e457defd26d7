"""Thin Beam shells around indexing, assigning, writing and committing."""

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.metrics import Metrics

from pipelines.plan import tables
from pipelines.plan.assign import (
    Group,
    UnitOffsets,
    assign_batch,
    find_duplicate_keys,
    make_plan,
    plan_group,
    spread_keys,
    unit_offsets_of,
)
from pipelines.plan.index import index_unit
from pipelines.plan.job import BuildFile, Job, PlanFile, UnitRef
from pipelines.plan.layout import UnitSummary
from pipelines.plan.partitions import ByteRange
from pipelines.write.commit import commit
from pipelines.write.shard import ShardRecord, write_shard

NAMESPACE = "shardset"
"""Of our counters; runners have their own beside them."""


class BuildStep(beam.DoFn):
    """A step of a build; what it needed of memory is kept from one element to the next, not for the next step."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def finish_bundle(self) -> None:
        tables.release_memory()


class IndexUnit(BuildStep):
    """UnitLine -> unit, its index and its summary written."""

    def process(self, element: UnitRef) -> Iterator[int]:
        with self._job.in_place():
            _count_indexed(index_unit(self._job, element))
        yield element.number


class MakePlan(BuildStep):
    """Once all units are indexed -> PlanFile, its classes left out.

    Tagged `starts`: (batch of units, where its samples start).
    """

    def __init__(self, job: Job, build: BuildFile) -> None:
        super().__init__(job)
        self._build = build

    def process(self, element: None, num_indexed: int) -> Iterator[Any]:
        assert num_indexed == self._build.num_units, "every unit is indexed"
        with self._job.in_place():
            plan = make_plan(self._job, self._build)
            yield msgspec.structs.replace(plan, classes=[])
            for batch, starts in enumerate(unit_offsets_of(self._job, plan)):
                yield beam.pvalue.TaggedOutput("starts", (batch, starts))


class SpreadKeys(BuildStep):
    """(batch of units, starts) -> (bucket, where the batch's key hashes of that bucket stand)."""

    def process(self, element: tuple[int, UnitOffsets], plan: PlanFile) -> Iterator[tuple[int, ByteRange]]:
        with self._job.in_place():
            found = spread_keys(self._job, plan, element[0])
        yield from found


class FindDuplicateKeys(BuildStep):
    """(bucket, parts) -> (batch of units, where the rows of it stand whose wanted key is taken)."""

    def process(self, element: tuple[int, Iterable[ByteRange]], plan: PlanFile) -> Iterator[tuple[int, ByteRange]]:
        with self._job.in_place():
            found = find_duplicate_keys(self._job, plan, *element)
        yield from found


class AssignBatch(BuildStep):
    """(batch of units, its starts and twins) -> ((split, group), where the batch's references of that group stand)."""

    def process(self, element: tuple[int, dict[str, Any]], plan: PlanFile) -> Iterator[tuple[Group, ByteRange]]:
        batch, found = element
        (starts,) = found["starts"]
        with self._job.in_place():
            parts = assign_batch(self._job, plan, batch, starts, found["twins"])
        yield from parts


class PlanGroup(BuildStep):
    """((split, group), parts) -> (split, shard) for each shard of the group, its references written."""

    def process(self, element: tuple[Group, Iterable[ByteRange]], plan: PlanFile) -> Iterator[tuple[str, int]]:
        (split, _), parts = element
        with self._job.in_place():
            for number in plan_group(self._job, plan.splits[split], parts):
                yield split, number


class WriteShard(BuildStep):
    """(split, shard) -> the same, its tar, index and record written."""

    def process(self, element: tuple[str, int], plan: PlanFile) -> Iterator[tuple[str, int]]:
        split, number = element
        with self._job.in_place():
            record, written = write_shard(self._job, plan.digest, plan.splits[split], number, plan.num_classes)
        _count_written(record, written)
        yield element


class CommitManifest(BuildStep):
    """Once the wanted shards are written -> the manifest's digest, if these are all."""

    def process(self, element: None, num_finished: int, plan: PlanFile) -> Iterator[str]:
        with self._job.in_place():
            digest = commit(self._job, plan, num_finished)
        if digest:
            yield digest


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
