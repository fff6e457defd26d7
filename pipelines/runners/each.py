"""Runs a pipeline to its end; and the smallest one, which calls a function for each of some elements."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import apache_beam as beam
from apache_beam.metrics.metric import MetricResults
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult, PipelineState

from pipelines.runners import dataflow, errors, local
from shardset.errors import ShardsetError

T = TypeVar("T")
Show = Callable[[str], None]


def for_each(work: Callable[[T], None], elements: Sequence[T], options: PipelineOptions, show: Show | None) -> None:
    """Calls `work`, which leaves its results at the output, for each element; a call may be repeated."""
    pipeline = beam.Pipeline(options=options)
    _ = pipeline | "List" >> beam.Create(elements) | "Spread" >> beam.Reshuffle() | "Work" >> beam.Map(work)
    run_to_end(pipeline.run, options, show)


def run_to_end(begin: Callable[[], PipelineResult], options: PipelineOptions, show: Show | None) -> MetricResults:
    """Runs a pipeline; a worker's ShardsetError is raised as itself. `show` gets the address of a job on Dataflow."""
    with local.local_workers(), errors.translated(dataflow.failures(options)):
        result = begin()
        if show and dataflow.is_wanted(options):
            show(dataflow.started(options, result))
        state = result.wait_until_finish()
    if state not in (PipelineState.DONE, None):  # some runners return no state after a success
        raise ShardsetError(
            f"the Beam job ended as {state}; see the runner's log; run the same command again to resume"
        )
    metrics: MetricResults = result.metrics()
    return metrics
