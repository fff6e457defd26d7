"""The build, top to bottom: survey, index, plan, write, and the manifest last."""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import apache_beam as beam
from apache_beam.metrics.execution import MetricResult
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult, PipelineState

from pipelines.begin import Prepared, note_failure, prepare
from pipelines.config import BuildConfig
from pipelines.export.stale import STALE, stale
from pipelines.pipeline import NAMESPACE, construct
from pipelines.plan import paths
from pipelines.plan.plan_records import PlanFile
from pipelines.plan.summaries import MAX_REASONS
from pipelines.report.catalog import leaks
from pipelines.runners import beam_options as options
from pipelines.runners import dataflow, errors, local
from pipelines.runners.progress import BuildProgress, watched
from pipelines.write import history
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, NotFound, ShardsetError, SourceError, TooManyBad
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.base import Storage
from shardset.storage.open import open_storage

T = TypeVar("T")
Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a build; `published` is the head of its manifest, None after a dry run or a
    build of some shards.

    `notes` say which images several splits share, which files could not be removed, and which side
    files are of an older version. `rejected` holds the first rejected samples and why, if they are
    few or after a dry run.

    `shardset.format.manifest.load` reads the manifest itself, which lists every shard.
    """

    plan: PlanFile
    rejected: list[str]
    notes: list[str]
    published: Manifest | None
    counters: dict[str, int]
    seconds: float


def build(
    config: BuildConfig, beam_flags: Sequence[str] = (), progress: BuildProgress | None = None
) -> Result:
    """Builds the shard set that `config` describes, and returns its plan and counters.

    Resumes an unfinished build of the same input and options; checks a finished one and repairs
    missing or damaged shards. Raises ShardsetError, with nothing published.
    """
    return _run(config, open_storage(config.output), beam_flags, progress, dry_run=False)


def dry_run(
    config: BuildConfig, beam_flags: Sequence[str] = (), progress: BuildProgress | None = None
) -> Result:
    """The plan of a build, made in a temporary folder; writes nothing to the output."""
    with tempfile.TemporaryDirectory(prefix="shardset-plan-") as folder:
        return _run(config, open_storage(folder), beam_flags, progress, dry_run=True)


def submit(config: BuildConfig, beam_flags: Sequence[str] = ()) -> str:
    """Starts a build as a job on Dataflow, which publishes the set by itself; returns where to
    watch it; ConfigError for any other runner.
    """
    output = open_storage(config.output)
    beam_options = options.prepare(beam_flags, source=config.input, output=output)
    if not dataflow.is_wanted(beam_options):
        raise ConfigError(
            "--no-wait is for --runner DataflowRunner: elsewhere a build ends with this command"
        )
    prepared = prepare(config, output)
    with errors.translated(dataflow.failures(beam_options)):
        return dataflow.started(beam_options, _begin(prepared, beam_options, dry_run=False))


def _run(
    config: BuildConfig,
    output: Storage,
    beam_flags: Sequence[str],
    progress: BuildProgress | None,
    *,
    dry_run: bool,
) -> Result:
    started = time.monotonic()
    beam_options = options.prepare(beam_flags, source=config.input, output=output)
    prepared = prepare(config, output)
    options.limit_workers(beam_options, beam_flags, prepared.units.num_units, prepared.num_bytes)
    files = prepared.build.files
    try:
        with watched(output, prepared.units.num_units, progress, writes=not dry_run):
            counters = run(
                prepared, beam_options, progress.print if progress else None, dry_run=dry_run
            )
    except (ConfigError, SourceError, TooManyBad):  # of the input or the options
        note_failure(files)
        raise
    with files.while_current():
        kept = {**prepared.kept}
        plan = files.read_record(paths.PLAN, PlanFile)
        published = None if dry_run else _published(output, plan)
        if published:  # what the commit could not remove
            kept |= replacing.remove_replaced(files)
    notes = replacing.note_on(kept)
    if published and len(published.splits) > 1:
        notes += leaks(output.url)
    if published and (config.append or config.overwrite):
        notes += [f"{name} {STALE}" for name in stale(output, published)]
    path = naming.quarantine_path() if dry_run else ""
    # an append's list also has the entries of earlier builds
    if published and 0 < plan.num_rejected == published.quarantine.count <= MAX_REASONS:
        path = published.quarantine.path
    listed = output.read(path).splitlines() if path else []
    first_rejected = map(json.loads, listed[:MAX_REASONS])
    return Result(
        plan=plan,
        rejected=[f"{entry['name']}: {entry['reason']}" for entry in first_rejected],
        notes=notes,
        published=published,
        counters=counters,
        seconds=time.monotonic() - started,
    )


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
    begin = partial(_begin, prepared, beam_options, dry_run=dry_run)
    return counters_of(run_to_end(begin, beam_options, show).metrics().query()["counters"])


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
    begin: Callable[[], PipelineResult], beam_options: PipelineOptions, show: Show | None
) -> PipelineResult:
    """Runs the pipeline that `begin` starts; a worker's ShardsetError is raised as itself."""
    with local.local_workers(), errors.translated(dataflow.failures(beam_options)):
        result = begin()
        if show and dataflow.is_wanted(beam_options):
            show(dataflow.started(beam_options, result))
        state = result.wait_until_finish()
    if state not in (PipelineState.DONE, None):  # some runners return no state after a success
        raise ShardsetError(
            f"the Beam job ended as {state}; see the runner's log; run the same command again to"
            " resume"
        )
    return result


def _begin(prepared: Prepared, beam_options: PipelineOptions, *, dry_run: bool) -> PipelineResult:
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


def _published(output: Storage, plan: PlanFile) -> Manifest | None:
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    return head if history.has_shards_of(head, plan) else None
