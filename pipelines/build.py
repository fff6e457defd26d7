"""The build, top to bottom: survey, index, plan, write, and the manifest last."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from pipelines.begin import note_failure, prepare
from pipelines.config import BuildConfig
from pipelines.export.stale import STALE, stale
from pipelines.plan import paths
from pipelines.plan.plan_records import PlanFile
from pipelines.plan.summaries import MAX_REASONS
from pipelines.report.catalog import leaks
from pipelines.runners import fork_server, in_process
from pipelines.runners.progress import BuildProgress, watched
from pipelines.worker_output import say_beam
from pipelines.write import history
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, NotFound, SourceError, TooManyBad
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.base import Storage
from shardset.storage.open import open_storage

if TYPE_CHECKING:  # Beam takes a second, and a small build needs none of it
    from apache_beam.options.pipeline_options import PipelineOptions


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
    from pipelines.runners import dataflow, errors, on_beam

    output = open_storage(config.output)
    beam_options = _beam_options(config, output, beam_flags)
    if not dataflow.is_wanted(beam_options):
        raise ConfigError(
            "--no-wait is for --runner DataflowRunner: elsewhere a build ends with this command"
        )
    prepared = prepare(config, output)
    with errors.translated(dataflow.failures(beam_options)):
        return dataflow.started(beam_options, on_beam.begin(prepared, beam_options))


def _run(
    config: BuildConfig,
    output: Storage,
    beam_flags: Sequence[str],
    progress: BuildProgress | None,
    *,
    dry_run: bool,
) -> Result:
    started = time.monotonic()
    beam_options = None
    if beam_flags:  # wrong ones are refused before the survey
        beam_options = _beam_options(config, output, beam_flags, progress)
    prepared = prepare(config, output)
    size = prepared.units.num_units, prepared.num_bytes
    if not beam_options and output.is_shared and in_process.num_workers(*size) > 1:
        beam_options = _beam_options(config, output, beam_flags, progress)
    if beam_options:
        from pipelines.runners import beam_options as options
        from pipelines.runners import on_beam

        options.limit_workers(beam_options, beam_flags, *size)
        show = progress.print if progress else None
        run = partial(on_beam.run, prepared, beam_options, show)
    else:
        run = partial(in_process.run, prepared.build, prepared.units.blocks)
    files = prepared.build.files
    try:
        with watched(output, prepared.units.num_units, progress, writes=not dry_run):
            counters = run(dry_run=dry_run)
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


def _beam_options(
    config: BuildConfig,
    output: Storage,
    flags: Sequence[str],
    progress: BuildProgress | None = None,
) -> "PipelineOptions":
    """Imports Beam, here and for worker processes, and makes its options."""
    say_beam(progress.console if progress else None)
    if fork_server.may_be_needed(flags):
        fork_server.begin()
    import_module("pipelines.runners.preloaded")  # first, because it imports fastest
    from pipelines.runners import beam_options

    return beam_options.prepare(flags, source=config.input, output=output)


def _published(output: Storage, plan: PlanFile) -> Manifest | None:
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    return head if history.has_shards_of(head, plan) else None
