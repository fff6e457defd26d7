"""The Beam graph of a build and its DoFns: each DoFn hands one element to a function of `plan` or
`write`.

Image bytes never pass through the runner. A step leaves its results in files below `plan/`; the
elements between two steps are only the names of these files, or the byte ranges that a receiver has
to read.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import apache_beam as beam
import msgspec
from apache_beam.metrics.metric import Metrics

from pipelines.config import BuildConfig
from pipelines.plan import paths, tables
from pipelines.plan.append import Addition
from pipelines.plan.assign import Group, assign_batch, plan_group
from pipelines.plan.duplicate_keys import find_duplicate_keys, spread_keys
from pipelines.plan.files import PlanFiles
from pipelines.plan.index import index_unit
from pipelines.plan.records import BuildFile, PlanFile
from pipelines.plan.slices import ByteRange
from pipelines.plan.splits import make_plan
from pipelines.plan.summaries import UnitOffsets, read_summaries, unit_offsets
from pipelines.plan.survey import UnitRef, WrittenUnits, units_in
from pipelines.sources.base import Source
from pipelines.write.commit import Committer
from pipelines.write.shard import ShardWriter
from shardset.per_process import PerProcess

T = TypeVar("T")

Slot = tuple[str, int]
"""A split and the number of one of its shards."""

Counts = tuple[int, dict[int, int]]
"""A number of shards, and their samples by label."""

NAMESPACE = "shardset"
"""The namespace of our counters; runners have their own."""


@dataclass(frozen=True, kw_only=True)
class PreparedBuild:
    """A build that is ready to run: what was asked for, what was surveyed, and where its plan files
    are.

    `num_bytes` is the size of the input.
    """

    config: BuildConfig
    source: Source
    files: PlanFiles
    file: BuildFile
    units: WrittenUnits
    num_bytes: int


def construct(pipeline: beam.Pipeline, build: PreparedBuild, *, dry_run: bool = False) -> None:
    """Adds the steps of a build to the pipeline; a dry run ends with the plan.

    Each line names its element type.
    """
    config, files, suffix, replaces = (
        build.config,
        build.files,
        build.file.suffix,
        build.file.replaces,
    )
    appends = build.file.appends
    writer = ShardWriter(files, build.source.input, config.image, suffix, replaces, appends)
    committer = Committer(files, config, suffix, replaces, is_append=appends is not None)
    # A shuffle before a step keeps the runner from fusing it with the step before, which would
    # limit its workers.
    indexed = (
        pipeline
        | "List blocks" >> beam.Create(build.units.blocks)  # UnitRef of many
        | "Spread blocks" >> beam.Reshuffle()
        | "List units" >> beam.FlatMap(partial(_units_in, files))  # UnitRef
        | "Spread units" >> beam.Reshuffle()
        | "Index" >> beam.ParDo(IndexUnit(files, build.source, config, appends))  # unit
    )
    planned = (
        pipeline
        | "Once all is indexed" >> beam.Create([None])
        | "Plan"  # PlanFile, and (batch, UnitOffsets) tagged `offsets`
        >> beam.ParDo(
            MakePlan(files, config, msgspec.structs.replace(build.file, classes=None)),
            beam.pvalue.AsIter(indexed),
        ).with_outputs("offsets", main="plan")
    )
    if dry_run:
        return
    # BundleBasedDirectRunner gives an empty side input for one of several outputs, hence a step of
    # its own. PlanFile
    plan = beam.pvalue.AsSingleton(planned.plan | "The plan" >> beam.Map(lambda plan: plan))
    duplicate_keys = (
        planned.offsets
        | "Spread batches" >> beam.Reshuffle()
        | "Spread keys" >> beam.ParDo(SpreadKeys(files), plan)  # (bucket, ByteRange)
        | "Group keys" >> beam.GroupByKey()
        | "Find duplicate keys" >> beam.ParDo(FindDuplicateKeys(files), plan)  # (batch, ByteRange)
    )
    written = (
        {"offsets": planned.offsets, "duplicate_keys": duplicate_keys}
        | "Join" >> beam.CoGroupByKey()  # (batch, {offsets, duplicate_keys})
        | "Assign" >> beam.ParDo(AssignBatch(files, config), plan)  # ((split, group), ByteRange)
        | "Group references" >> beam.GroupByKey()
        | "Plan shards" >> beam.ParDo(PlanGroup(files, suffix), plan)  # (split, shard)
        | "Choose shards" >> beam.Filter(_is_wanted, config.only_shards)
        | "Spread shards" >> beam.Reshuffle()
        | "Write shards" >> beam.ParDo(WriteShard(files, writer), plan)  # (split, counts)
        # (split, counts): shards, then samples of each class
        | "Add up" >> beam.CombinePerKey(_sum)
    )
    _ = (
        pipeline
        | "Once all is written" >> beam.Create([None])
        | "Commit"  # the manifest's digest
        >> beam.ParDo(CommitManifest(files, committer), plan, beam.pvalue.AsDict(written))
    )


@dataclass(eq=False, repr=False)
class BuildStep(beam.DoFn):
    """A step of a build.

    It keeps memory from one element to the next, and frees it for the next step.
    """

    files: PlanFiles

    def finish_bundle(self) -> None:
        tables.release_memory()


@dataclass(eq=False, repr=False)
class IndexUnit(BuildStep):
    """Writes the table and the summary of a unit."""

    source: Source
    config: BuildConfig
    addition: Addition | None

    def process(self, element: UnitRef) -> Iterator[int]:
        work = partial(index_unit, self.files, self.source, self.config, element, self.addition)
        summary = self.files.step(work)
        for count in summary.splits.values():
            _count("samples_indexed", count.num_samples)
            _count("samples_quarantined", count.num_rejected)
        for fix, number in summary.fixes.items():
            _count(f"fixed_{fix}", number)
        yield element.number


@dataclass(eq=False, repr=False)
class MakePlan(BuildStep):
    """Writes the plan once all units are indexed.

    Yields it without classes, and the offsets of each batch of units.

    `file` travels without classes too: a million of them would take longer than the images.
    """

    config: BuildConfig
    file: BuildFile

    def process(self, element: None, indexed: Iterable[int]) -> Iterator[Any]:
        assert sum(1 for _ in indexed) == self.file.num_units, "every unit is indexed"
        files = self.files
        plan = files.step(
            lambda: make_plan(files, self.config, files.read_record(paths.BUILD, BuildFile))
        )
        with self.files.while_current():
            yield msgspec.structs.replace(plan, classes=[])
            summaries, size = read_summaries(self.files, plan.num_units), plan.units_per_batch
            offsets = unit_offsets(
                summaries, plan.splits, units_per_batch=size, stratified=self.config.stratified
            )
            for batch, offset in enumerate(offsets):
                yield beam.pvalue.TaggedOutput("offsets", (batch, offset))


class SpreadKeys(BuildStep):
    """Cuts the key hashes of a batch of units by bucket."""

    def process(
        self, element: tuple[int, UnitOffsets], plan: PlanFile
    ) -> Iterable[tuple[int, ByteRange]]:
        return _one_at_a_time(self.files, lambda: spread_keys(self.files, plan, element[0]))


class FindDuplicateKeys(BuildStep):
    """Finds the rows of one bucket that want a key that is taken, by batch of units."""

    def process(
        self, element: tuple[int, Iterable[ByteRange]], plan: PlanFile
    ) -> Iterable[tuple[int, ByteRange]]:
        return _one_at_a_time(self.files, lambda: find_duplicate_keys(self.files, plan, *element))


@dataclass(eq=False, repr=False)
class AssignBatch(BuildStep):
    """Cuts the references of a batch of units by group of shards."""

    config: BuildConfig

    def process(
        self, element: tuple[int, dict[str, Any]], plan: PlanFile
    ) -> Iterable[tuple[Group, ByteRange]]:
        batch, joined = element
        (offsets,) = joined["offsets"]
        assign = partial(assign_batch, seed=self.config.seed, stratified=self.config.stratified)
        duplicate_keys = joined["duplicate_keys"]
        return _one_at_a_time(
            self.files, lambda: assign(self.files, plan, batch, offsets, duplicate_keys)
        )


@dataclass(eq=False, repr=False)
class PlanGroup(BuildStep):
    """Writes the references of each shard of a group."""

    suffix: str

    def process(self, element: tuple[Group, Iterable[ByteRange]], plan: PlanFile) -> Iterable[Slot]:
        (split, _), slices = element
        numbers = _one_at_a_time(
            self.files, lambda: [*plan_group(self.files, plan.splits[split], slices, self.suffix)]
        )
        return [(split, number) for number in numbers]


@dataclass(eq=False, repr=False)
class WriteShard(BuildStep):
    """Writes the tar, the index and the record of a shard.

    Yields its split, and 1 and its samples of each class.
    """

    writer: ShardWriter

    def process(self, element: Slot, plan: PlanFile) -> Iterator[tuple[str, Counts]]:
        record, labels, is_new = self.files.step(lambda: self.writer.write(plan, *element))
        _count("shards_written" if is_new else "shards_skipped", 1)
        if is_new:
            _count("samples_written", record.shard.num_samples)
            _count("bytes_written", record.shard.num_bytes)
        yield element[0], (1, Counter(labels.tolist()))


@dataclass(eq=False, repr=False)
class CommitManifest(BuildStep):
    """Publishes the manifest once the wanted shards are written, if these are all."""

    committer: Committer

    def process(self, element: None, plan: PlanFile, counts: Mapping[str, Counts]) -> Iterator[str]:
        class_totals = {split: totals for split, (_, totals) in counts.items()}
        num_finished = sum(num_shards for num_shards, _ in counts.values())
        digest = self.files.step(lambda: self.committer.commit(plan, num_finished, class_totals))
        if digest:
            yield digest


@PerProcess
def _planning(build: str) -> threading.Lock:
    """Held by the thread that plans a batch, bucket or group: a runner may have a dozen threads."""
    return threading.Lock()


def _one_at_a_time(files: PlanFiles, work: Callable[[], T]) -> T:
    """`files.step` for one that takes 100 to 300 MiB: a process has the memory for one, whatever
    its threads.
    """
    with _planning(files.build):
        return files.step(work)


def _units_in(files: PlanFiles, block: UnitRef) -> Iterator[UnitRef]:
    with files.while_current():
        yield from units_in(files.output, block)


def _count(name: str, number: int) -> None:
    Metrics.counter(NAMESPACE, name).inc(number)


def _sum(counts: Iterable[Counts]) -> Counts:
    """The sum, in the time that the smaller ones take: of a million classes a shard has a few."""
    *others, (num_shards, most) = sorted(counts, key=lambda count: len(count[1]))
    totals = Counter(most)
    for number, some in others:
        num_shards += number
        totals.update(some)
    return num_shards, totals


def _is_wanted(slot: Slot, wanted: frozenset[Slot]) -> bool:
    return not wanted or tuple(slot) in wanted
