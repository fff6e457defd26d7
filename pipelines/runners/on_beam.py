"""Runs the pipeline of a build on a runner of Beam."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import apache_beam as beam
from apache_beam.metrics.execution import MetricResult
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult, PipelineState

from pipelines.begin import Prepared
from pipelines.pipeline import NAMESPACE, construct
from pipelines.runners import dataflow, errors, local
from shardset.errors import ShardsetError

T = TypeVar("T")
Show = Callable[[str], None]


def run(
    prepared: Prepared,
    beam_options: PipelineOptions,
    show: Show | None = None,
    *,
    dry_run: bool = False,
) -> dict[str, int]:
    """Runs the pipeline and returns its counters; a worker's ShardsetError is raised as itself.

    `show` gets the address of a job on Dataflow.
    """
    start = partial(begin, prepared, beam_options, dry_run=dry_run)
    return counters_of(run_to_end(start, beam_options, show).metrics().query()["counters"])


def for_each(
    work: Callable[[T], None],
    elements: Sequence[T],
    beam_options: PipelineOptions,
    show: Show | None,
) -> None:
    """Calls `work`, which leaves its results at the output, for each element; a call may be
    repeated.
    """
    pipeline = beam.Pipeline(options=beam_options)
    _ = (
        pipeline
        | "Spread the work over workers" >> beam.Create(elements)  # Create itself shuffles
        | "Do the work" >> beam.Map(work)
    )
    run_to_end(pipeline.run, beam_options, show)


def run_to_end(
    start: Callable[[], PipelineResult], beam_options: PipelineOptions, show: Show | None
) -> PipelineResult:
    """Runs the pipeline that `start` starts; a worker's ShardsetError is raised as itself."""
    with local.local_workers(), errors.translated(dataflow.failures(beam_options)):
        result = start()
        if show and dataflow.is_wanted(beam_options):
            show(dataflow.started(beam_options, result))
        state = result.wait_until_finish()
    if state not in (PipelineState.DONE, None):  # some runners return no state after a success
        raise ShardsetError(
            f"the Beam job ended as {state}; see the runner's log; run the same command again to"
            " resume"
        )
    return result


def begin(
    prepared: Prepared, beam_options: PipelineOptions, *, dry_run: bool = False
) -> PipelineResult:
    """Starts the pipeline."""
    pipeline = beam.Pipeline(options=beam_options)
    construct(pipeline, prepared.build, prepared.units.blocks, dry_run=dry_run)
    return pipeline.run()


def counters_of(counters: Iterable[MetricResult]) -> dict[str, int]:
    """Our own counters among a runner's, each the sum over all steps that count it.

    Attempted values from a runner that has no committed ones (Spark).
    """
    sums: Counter[str] = Counter()
    for counter in counters:
        if counter.key.metric.namespace == NAMESPACE:
            sums[counter.key.metric.name] += counter.result or 0
    return dict(sums)
