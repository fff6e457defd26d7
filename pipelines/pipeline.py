"""The Beam graph of a build and its steps: each hands one element to a function of `plan` or
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
from pipelines.plan.files import ByteRange, PlanFiles
from pipelines.plan.index import index_unit
from pipelines.plan.records import BuildFile, PlanFile
from pipelines.plan.splits import make_plan
from pipelines.plan.summaries import UnitOffsets, read_summaries, unit_offsets
from pipelines.plan.survey import UnitRef, WrittenUnits, units_in
from pipelines.sources.base import Source
from pipelines.write.commit import Committer
from pipelines.write.replace import Kept
from pipelines.write.shard import ShardWriter
from shardset.format.labels import MAX_LABEL
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

    `num_bytes` is the size of the input. `kept` are files of earlier builds that could not be
    removed. A build that `resumes` finds shards that it has finished.
    """

    config: BuildConfig
    source: Source
    files: PlanFiles
    file: BuildFile
    units: WrittenUnits
    num_bytes: int
    kept: Kept
    resumes: bool = False


def construct(pipeline: beam.Pipeline, build: PreparedBuild, *, dry_run: bool = False) -> None:
    """Adds the steps of a build to the pipeline; a dry run ends with the plan.

    Each line names its element type.
    """
    config, files, source = build.config, build.files, build.source
    # A million classes would take longer to travel than the images.
    file = msgspec.structs.replace(build.file, classes=None)
    classes = build.file.classes
    num_classes = MAX_LABEL + 1 if classes is None else len(classes)
    writer = ShardWriter(files, source.input, config.image, file, build.resumes)
    step = partial(Step, files)
    # A shuffle before a step keeps the runner from fusing it with the step before, which would
    # limit its workers.
    indexed = (
        pipeline
        | "List blocks" >> beam.Create(build.units.blocks)  # UnitRef of many
        | "Spread blocks" >> beam.Reshuffle()
        | "List units" >> beam.ParDo(step(partial(units_in, files.output)))  # UnitRef
        | "Spread units" >> beam.Reshuffle()
        | "Index"
        >> beam.ParDo(
            step(partial(index_step, files, source, config, file.appends, num_classes))
        )  # unit
    )
    planned = (
        pipeline
        | "Once all is indexed" >> beam.Create([None])
        | "Plan"  # PlanFile, and (batch, UnitOffsets) tagged `offsets`
        >> beam.ParDo(
            step(partial(plan_step, files, config, file)), beam.pvalue.AsIter(indexed)
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
        | "Spread keys" >> beam.ParDo(step(partial(keys_step, files)), plan)  # (bucket, ByteRange)
        | "Group keys" >> beam.GroupByKey()
        | "Find duplicate keys"
        >> beam.ParDo(step(partial(duplicate_keys_step, files)), plan)  # (batch, ByteRange)
    )
    written = (
        {"offsets": planned.offsets, "duplicate_keys": duplicate_keys}
        | "Join" >> beam.CoGroupByKey()  # (batch, {offsets, duplicate_keys})
        | "Assign"
        >> beam.ParDo(
            step(partial(assign_step, files, config)), plan
        )  # ((split, group), ByteRange)
        | "Group references" >> beam.GroupByKey()
        | "Plan shards"
        >> beam.ParDo(step(partial(group_step, files, file.suffix)), plan)  # (split, shard)
        | "Choose shards" >> beam.Filter(_is_wanted, config.only_shards)
        | "Spread shards" >> beam.Reshuffle()
        | "Write shards" >> beam.ParDo(step(partial(write_step, writer)), plan)  # (split, counts)
        # (split, counts): shards, then samples of each class
        | "Add up" >> beam.CombinePerKey(_sum)
    )
    _ = (
        pipeline
        | "Once all is written" >> beam.Create([None])
        | "Commit"
        >> beam.ParDo(
            step(partial(commit_step, Committer(files, config, file, source.input.url))),
            plan,
            beam.pvalue.AsDict(written),
        )
    )


@dataclass(eq=False, repr=False)
class Step(beam.DoFn):
    """Calls a function for each element; an error that another build caused says so.

    It keeps memory from one element to the next, and frees it for the next step.
    """

    files: PlanFiles
    work: Callable[..., Iterable[Any]]

    def process(self, element: Any, *side_inputs: Any) -> Any:
        with self.files.while_current():
            yield from self.work(element, *side_inputs)

    def finish_bundle(self) -> None:
        tables.release_memory()


def index_step(
    files: PlanFiles,
    source: Source,
    config: BuildConfig,
    addition: Addition | None,
    num_classes: int,
    unit: UnitRef,
) -> list[int]:
    """Writes the table and the summary of a unit."""
    summary = index_unit(files, source, config, unit, addition, num_classes)
    for count in summary.splits.values():
        _count("samples_indexed", count.num_samples)
        _count("samples_quarantined", count.num_rejected)
    for fix, number in summary.fixes.items():
        _count(f"fixed_{fix}", number)
    return [unit.number]


def plan_step(
    files: PlanFiles, config: BuildConfig, file: BuildFile, _: None, indexed: Iterable[int]
) -> Iterator[Any]:
    """Writes the plan once all units are indexed.

    Yields it without classes, and the offsets of each batch of units.
    """
    assert sum(1 for _ in indexed) == file.num_units, "every unit is indexed"
    plan = make_plan(files, config, files.read_record(paths.BUILD, BuildFile))
    yield msgspec.structs.replace(plan, classes=[])
    offsets = unit_offsets(
        read_summaries(files, plan.num_units),
        plan.splits,
        units_per_batch=plan.units_per_batch,
        stratified=config.stratified,
    )
    for batch, offset in enumerate(offsets):
        yield beam.pvalue.TaggedOutput("offsets", (batch, offset))


def keys_step(
    files: PlanFiles, element: tuple[int, UnitOffsets], plan: PlanFile
) -> list[tuple[int, ByteRange]]:
    """Cuts the key hashes of a batch of units by bucket."""
    return _one_at_a_time(files, lambda: spread_keys(files, plan, element[0]))


def duplicate_keys_step(
    files: PlanFiles, element: tuple[int, Iterable[ByteRange]], plan: PlanFile
) -> list[tuple[int, ByteRange]]:
    """Finds the rows of one bucket that want a key that is taken, by batch of units."""
    return _one_at_a_time(files, lambda: find_duplicate_keys(files, plan, *element))


def assign_step(
    files: PlanFiles, config: BuildConfig, element: tuple[int, dict[str, Any]], plan: PlanFile
) -> list[tuple[Group, ByteRange]]:
    """Cuts the references of a batch of units by group of shards."""
    batch, joined = element
    (offsets,) = joined["offsets"]
    assign = partial(assign_batch, seed=config.seed, stratified=config.stratified)
    return _one_at_a_time(
        files, lambda: assign(files, plan, batch, offsets, joined["duplicate_keys"])
    )


def group_step(
    files: PlanFiles, suffix: str, element: tuple[Group, Iterable[ByteRange]], plan: PlanFile
) -> list[Slot]:
    """Writes the references of each shard of a group."""
    (split, _), slices = element
    numbers = _one_at_a_time(
        files, lambda: [*plan_group(files, plan.splits[split], slices, suffix)]
    )
    return [(split, number) for number in numbers]


def write_step(writer: ShardWriter, slot: Slot, plan: PlanFile) -> list[tuple[str, Counts]]:
    """Writes the tar, the index and the record of a shard.

    Returns its split, and 1 and its samples of each class.
    """
    shard, labels, is_new = writer.write(plan, *slot)
    _count("shards_written" if is_new else "shards_skipped", 1)
    if is_new:
        _count("samples_written", shard.num_samples)
        _count("bytes_written", shard.num_bytes)
    return [(slot[0], (1, Counter(labels.tolist())))]


def commit_step(
    committer: Committer, _: None, plan: PlanFile, counts: Mapping[str, Counts]
) -> list[str]:
    """Publishes the manifest once the wanted shards are written, if these are all."""
    class_totals = {split: totals for split, (_, totals) in counts.items()}
    num_finished = sum(num_shards for num_shards, _ in counts.values())
    digest = committer.commit(plan, num_finished, class_totals)
    return [digest] if digest else []


@PerProcess
def _planning(build: str) -> threading.Lock:
    """Held by the thread that plans a batch, bucket or group: a runner may have a dozen threads."""
    return threading.Lock()


def _one_at_a_time(files: PlanFiles, work: Callable[[], T]) -> T:
    """A step that takes 100 to 300 MiB: a process has the memory for one, whatever its threads."""
    with _planning(files.build):
        return work()


def _count(name: str, number: int) -> None:
    Metrics.counter(NAMESPACE, name).inc(number)


def _sum(counts: Iterable[Counts]) -> Counts:
    num_shards, totals = 0, Counter[int]()
    for number, some in counts:
        num_shards += number
        totals.update(some)
    return num_shards, totals


def _is_wanted(slot: Slot, wanted: frozenset[Slot]) -> bool:
    return not wanted or tuple(slot) in wanted
