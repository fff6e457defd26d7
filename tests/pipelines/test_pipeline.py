"""The pipeline's shape: what a runner may scale is cut off from what feeds it."""

import tempfile

import apache_beam as beam
import pytest
from apache_beam.internal import cloudpickle_pickler
from apache_beam.pipeline import PipelineVisitor

from pipelines.config import BuildConfig
from pipelines.pipeline import construct
from pipelines.plan.files import PlanFiles
from pipelines.plan.plan_records import Build, BuildFile
from pipelines.plan.survey import write_units
from pipelines.sources.folder import Folder
from shardset.storage.memory import MemoryStorage

PLAN, PUBLISH = "Plan once all units are indexed", "Publish once all shards are written"
OURS = {
    "Index each unit",
    PLAN,
    "Write the references of each group",
    "Write each shard",
    PUBLISH,
}
JOB_LIMIT_BYTES = 20 * 2**20
"""Dataflow refuses a larger job."""


class Steps(PipelineVisitor):
    """Every step of ours by its label, as Beam holds it."""

    def __init__(self):
        self.by_label = {}

    def visit_transform(self, step):
        if label_of(step) in OURS:
            self.by_label[label_of(step)] = step


def label_of(step):
    """The label of a step that calls a function; Beam makes an inner step of each."""
    is_call = isinstance(step.transform, beam.ParDo)
    return step.full_label.split("/")[1] if is_call else ""


def pipeline_of(num_units):
    output = MemoryStorage("graph")
    config = BuildConfig(source="folder", input="raw", output=output.url)
    file = BuildFile(
        tool="", options={}, survey="", num_units=num_units, suffix="", classes=None, notes=[]
    )
    pipeline = beam.Pipeline(runner="FnApiRunner")
    tars = (
        {
            "tar": {"name": f"train/{n:07d}.tar", "generation": str(n), "num_bytes": n},
            "split": "train",
        }
        for n in range(num_units)
    )
    with tempfile.TemporaryFile() as lines:
        units = write_units(tars, lines)
    assert units.num_units == num_units
    build = Build(
        config=config, source=Folder(output), files=PlanFiles(output, file.digest), file=file
    )
    construct(pipeline, build, units.blocks)
    return pipeline


@pytest.fixture(scope="module")
def steps():
    visitor = Steps()
    pipeline_of(3).visit(visitor)
    return visitor.by_label


def what_feeds(step):
    """The nearest step upstream of ours, or the shuffle or start that stands between."""
    (source,) = step.main_inputs.values()
    producer = source.producer
    if isinstance(producer.transform, beam.GroupByKey | beam.Impulse):
        return type(producer.transform).__name__
    if label_of(producer) in OURS:
        return label_of(producer)
    return what_feeds(producer)


def test_every_step_of_ours_is_in_the_pipeline(steps):
    assert set(steps) == OURS


@pytest.mark.parametrize("name", sorted(OURS - {PLAN, PUBLISH}))
def test_a_shuffle_between_two_steps_frees_each_from_the_workers_of_the_one_before(steps, name):
    assert what_feeds(steps[name]) == "GroupByKey"


@pytest.mark.parametrize("name", [PLAN, PUBLISH])
def test_the_two_barriers_take_what_is_before_them_as_a_side_input(steps, name):
    assert what_feeds(steps[name]) == "Impulse"
    assert len(steps[name].side_inputs) == {PLAN: 1, PUBLISH: 3}[name]


def test_no_step_needs_the_main_session_of_the_launcher(steps):
    for step in steps.values():
        assert b"__main__" not in cloudpickle_pickler.dumps(step.transform.fn, use_zlib=False)


@pytest.mark.slow
def test_the_job_does_not_grow_with_the_units_of_input():
    # 21 bytes for each 4 MiB of the survey: two million tars are 200 MB of it.
    small, large = (
        pipeline_of(num_units).to_runner_api().ByteSize() for num_units in (60_000, 180_000)
    )
    assert large < small + 1000 < JOB_LIMIT_BYTES // 4
