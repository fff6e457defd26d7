"""The Beam pipeline of a build: four transforms, whose steps hand each element to a function of
`plan` or `write`.

Image bytes never pass through the runner. A step leaves its results in files below `plan/`; the
elements between two steps are only the names of these files.
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.metrics.metric import Metrics
from apache_beam.pvalue import AsDict, AsIter, AsSingleton, PBegin
from apache_beam.typehints import with_input_types, with_output_types
from apache_beam.utils.shared import Shared

from pipelines import build_steps
from pipelines.build_steps import Counts, Finished
from pipelines.plan import tables
from pipelines.plan.plan_records import Build, PlanFile
from pipelines.plan.planner import make_plan
from pipelines.plan.references import Group, Slot, groups_of, write_references
from pipelines.plan.survey import UnitRef, units_in

NAMESPACE = "shardset"
"""The namespace of our counters; runners have their own."""


def construct(
    pipeline: beam.Pipeline, build: Build, blocks: Sequence[UnitRef], *, dry_run: bool = False
) -> None:
    """Adds the steps of a build to the pipeline; a dry run ends with the plan.

    `blocks` are the units of the survey.
    """
    units = pipeline | "Index the input" >> IndexInput(build, blocks)  # number of each unit
    plan = units | "Plan the shards" >> PlanShards(build, build.file.num_units)
    if not dry_run:
        publish(build, plan)


def publish(build: Build, plan: beam.PCollection[PlanFile]) -> beam.PCollection[str]:
    """Adds the steps after the plan; the one element is the digest of the manifest."""
    shards = plan | "Write the shards" >> FillShards(build)
    digest: beam.PCollection[str] = shards | "Publish the set" >> PublishSet(build, plan)
    return digest


# A shuffle before a step keeps the runner from fusing it with the step before, which would limit
# its workers.


@dataclass(eq=False, repr=False)
class IndexInput(beam.PTransform[PBegin, beam.PCollection[int]]):
    """Writes the table and the summary of each unit; its elements are their numbers."""

    build: Build
    blocks: Sequence[UnitRef]

    def expand(self, begin: PBegin) -> beam.PCollection[int]:
        units: beam.PCollection[int] = (
            begin
            | "Spread the blocks over workers" >> beam.Create(self.blocks)  # Create itself shuffles
            | "List the units of each block" >> beam.ParDo(ListUnits(self.build))
            | "Spread the units over workers" >> beam.Reshuffle()
            | "Index each unit" >> beam.ParDo(IndexUnit(self.build))
        )
        return units


@dataclass(eq=False, repr=False)
class PlanShards(beam.PTransform[beam.PCollection[int], beam.PCollection[PlanFile]]):
    """Writes the plan once all units are indexed; its one element is the plan without classes."""

    build: Build
    num_units: int | AsSingleton

    def expand(self, units: beam.PCollection[int]) -> beam.PCollection[PlanFile]:
        plan: beam.PCollection[PlanFile] = (
            units.pipeline
            | "Begin" >> beam.Create([None])
            | "Plan once all units are indexed"
            >> beam.ParDo(MakePlan(self.build), AsIter(units), self.num_units)
        )
        return plan


@dataclass(eq=False, repr=False)
class FillShards(beam.PTransform[beam.PCollection[PlanFile], beam.PCollection[Finished]]):
    """Writes each wanted shard of a plan."""

    build: Build

    def expand(self, plan: beam.PCollection[PlanFile]) -> beam.PCollection[Finished]:
        the_plan = AsSingleton(plan)
        shards: beam.PCollection[Finished] = (
            plan
            | "List the groups of shards" >> beam.ParDo(ListGroups(self.build))
            | "Spread the groups over workers" >> beam.Reshuffle()
            | "Write the references of each group"
            >> beam.ParDo(WriteReferences(self.build), the_plan)
            | "Spread the shards over workers" >> beam.Reshuffle()
            | "Write each shard" >> beam.ParDo(WriteShard(self.build), the_plan)
        )
        return shards


@dataclass(eq=False, repr=False)
class PublishSet(beam.PTransform[beam.PCollection[Finished], beam.PCollection[str]]):
    """Publishes the manifest once the wanted shards are written, if these are all."""

    build: Build
    plan: beam.PCollection[PlanFile]

    def expand(self, shards: beam.PCollection[Finished]) -> beam.PCollection[str]:
        records = shards | "Take the record of each shard" >> beam.MapTuple(_record)
        counts = shards | "Take the labels of each shard" >> beam.MapTuple(_counts)
        totals = counts | "Count the labels of each split" >> beam.CombinePerKey(_sum)
        digest: beam.PCollection[str] = (
            shards.pipeline
            | "Begin" >> beam.Create([None])
            | "Publish once all shards are written"
            >> beam.ParDo(
                Commit(self.build), AsSingleton(self.plan), AsIter(records), AsDict(totals)
            )
        )
        return digest


@dataclass(eq=False, repr=False)
class Step(beam.DoFn, ABC):
    """A step of a build: an error that another build caused says so.

    It keeps memory from one element to the next, and frees it for the next step.
    """

    build: Build

    def process(self, element: Any, *side_inputs: Any) -> Iterator[Any]:
        with self.build.files.while_current():
            yield from self.work(element, *side_inputs)

    @abstractmethod
    def work(self, element: Any, *side_inputs: Any) -> Iterable[Any]:
        """The results of one element."""

    def finish_bundle(self) -> None:
        tables.release_memory()


@with_input_types(UnitRef)
@with_output_types(UnitRef)
class ListUnits(Step):
    """The units of a block of the survey."""

    def work(self, block: UnitRef) -> Iterable[UnitRef]:
        return units_in(self.build.files.output, block)


@with_input_types(UnitRef)
@with_output_types(int)
class IndexUnit(Step):
    """Writes the table and the summary of a unit."""

    def work(self, unit: UnitRef) -> Iterable[int]:
        build_steps.index(self.build, unit, count)
        return [unit.number]


@with_output_types(PlanFile)
class MakePlan(Step):
    """Writes the plan."""

    def work(self, _: None, units: Iterable[int], num_units: int) -> Iterable[PlanFile]:
        assert sum(1 for _ in units) == num_units, "every unit is indexed"
        return [msgspec.structs.replace(make_plan(self.build, num_units), classes=[])]


@with_input_types(PlanFile)
@with_output_types(Group)
class ListGroups(Step):
    """The groups of shards."""

    def work(self, plan: PlanFile) -> Iterable[Group]:
        return groups_of(self.build, plan)


@with_input_types(Group)
@with_output_types(Slot)
@dataclass(eq=False, repr=False)
class WriteReferences(Step):
    """Writes the references of each shard of a group.

    A process gathers one group after the other: it has the memory for one, and a runner may have a
    dozen threads.
    """

    shared_lock: Shared = field(default_factory=Shared)

    def setup(self) -> None:
        self.lock = self.shared_lock.acquire(threading.Lock)

    def work(self, group: Group, plan: PlanFile) -> Iterable[Slot]:
        with self.lock:
            return write_references(self.build, plan, group)


@with_input_types(Slot)
@with_output_types(Finished)
class WriteShard(Step):
    """Writes the tar, the index and the record of a shard; counts its samples by label."""

    def work(self, slot: Slot, plan: PlanFile) -> Iterable[Finished]:
        return [build_steps.write(self.build, plan, slot, count)]


@with_output_types(str)
class Commit(Step):
    """Publishes the manifest, if all shards are written."""

    def work(
        self,
        _: None,
        plan: PlanFile,
        records: Iterable[tuple[str, int, bytes]],
        class_totals: Mapping[str, Counts],
    ) -> Iterable[str]:
        digest = build_steps.publish(self.build, plan, records, class_totals)
        return [digest] if digest else []


def count(name: str, number: int) -> None:
    """Adds to the counter of that name."""
    Metrics.counter(NAMESPACE, name).inc(number)


def _record(split: str, finished: tuple[int, bytes, Counts]) -> tuple[str, int, bytes]:
    number, record, _ = finished
    return split, number, record


def _counts(split: str, finished: tuple[int, bytes, Counts]) -> tuple[str, Counts]:
    return split, finished[2]


def _sum(counts: Iterable[Counts]) -> Counts:
    totals = Counter[int]()
    for some in counts:
        totals.update(some)
    return totals
