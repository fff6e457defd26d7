"""The build, top to bottom: survey, index, plan, write, and the manifest last."""

import hashlib
import json
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import IO, TypeVar

import apache_beam as beam
import msgspec
from apache_beam.metrics.execution import MetricResult
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult, PipelineState

from pipelines import sources
from pipelines.config import BuildConfig, Known
from pipelines.images.encode import libraries
from pipelines.pipeline import NAMESPACE, PreparedBuild, construct
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.append import Addition, extended_classes, write_known
from pipelines.plan.files import PlanFiles
from pipelines.plan.records import PLAN_VERSION, BuildFile, PlanFile
from pipelines.plan.summaries import MAX_REASONS
from pipelines.plan.survey import write_units
from pipelines.runners import dataflow, errors, local, options
from pipelines.runners.progress import BuildProgress, watched
from pipelines.sources.base import Survey
from pipelines.write import history
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, NotFound, PreconditionFailed, ShardsetError, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest
from shardset.storage.base import Storage, os_errors_as_storage_errors
from shardset.storage.checked import PIECE_BYTES
from shardset.storage.open import open_storage
from shardset.version import __version__

T = TypeVar("T")
Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a build did; `published` is the head of its manifest, None after a dry run or a build of
    some shards.

    After a dry run, which leaves no list, `rejected` holds the first rejected samples and why.

    `shardset.format.manifest.load` reads the manifest itself, which lists every shard.
    """

    plan: PlanFile
    plan_bytes: int
    rejected: list[str]
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
    watch it.

    Raises ConfigError for any other runner: its build ends with this process.
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
    with watched(output, prepared.units.num_units, progress, writes=not dry_run):
        counters = run(
            prepared, beam_options, progress.print if progress else None, dry_run=dry_run
        )
    files = prepared.files
    with files.while_current():
        replacing.remove_slices(files)
        plan = files.read_record(paths.PLAN, PlanFile)
    listed = output.read(naming.quarantine_path()).splitlines() if dry_run else []
    first_rejected = map(json.loads, listed[:MAX_REASONS])
    return Result(
        plan=plan,
        plan_bytes=sum(stat.num_bytes for stat in output.list(naming.PLAN_FOLDER)),
        rejected=[f"{entry['name']}: {entry['reason']}" for entry in first_rejected],
        published=None if dry_run else _published(output, plan),
        counters=counters,
        seconds=time.monotonic() - started,
    )


def run(
    prepared: PreparedBuild,
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
        | "List" >> beam.Create(elements)
        | "Spread" >> beam.Reshuffle()
        | "Work" >> beam.Map(work)
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


def _begin(
    prepared: PreparedBuild, beam_options: PipelineOptions, *, dry_run: bool
) -> PipelineResult:
    pipeline = beam.Pipeline(options=beam_options)
    construct(pipeline, prepared, dry_run=dry_run)
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


def prepare(config: BuildConfig, output: Storage) -> PreparedBuild:
    """Surveys the input, then writes the files that workers start from, or finds those of an
    earlier build.
    """
    source = sources.open_source(config)
    if folder := sources.input_folder(config):
        replacing.refuse_inside(
            open_storage(config.output), folder, "so the tars would be among the raw files"
        )
    survey = source.survey()
    if survey.refusal and not config.append:  # a set may have the other labels
        raise SourceError(survey.refusal)
    with (
        os_errors_as_storage_errors(f"the temporary folder {tempfile.gettempdir()}"),
        tempfile.TemporaryFile() as lines,
    ):
        units = write_units(survey.units, lines)
        start = _Start(config, output, source.input, survey)
        files, file = start.begin(_describe(config, survey, units.digest), lines)
    num_bytes = survey.num_bytes or sum(survey.objects.values())
    return PreparedBuild(
        config=config, source=source, files=files, file=file, units=units, num_bytes=num_bytes
    )


class _Found(StrEnum):
    """What a build that begins finds at its output."""

    VERSION = "the version to append to, and no unfinished build"
    SET = "another shard set"
    BUILD = "another unfinished build"
    UNREADY = "this build, stopped before it was ready"
    NOTHING = "neither a manifest nor a plan"


@dataclass(frozen=True)
class _Start:
    """Decides whether a build resumes, begins or replaces another one, and prepares the output for
    it.
    """

    config: BuildConfig
    output: Storage
    input: Storage
    survey: Survey

    def begin(self, file: BuildFile, lines: IO[bytes]) -> tuple[PlanFiles, BuildFile]:
        """Writes `plan/build.json` and the survey's `lines`, unless the same build has already
        begun there.

        Removes what another build left unfinished, but keeps a finished set until it is replaced.
        Raises ConfigError, with nothing removed, if this build reads any of those files, or if a
        rerun would read what this one writes.
        """
        output = self.output
        generation = plan_files.generation_of(output, paths.BUILD)
        stored = plan_files.find(output, paths.BUILD)
        old = (
            plan_files.decode_record(output, paths.BUILD, stored.content, BuildFile)
            if stored
            else None
        )
        base = None
        if self.config.append:
            file, base = self._appending(old, file, self.config.append)
        changes = self._changes(old, file) if old else []
        output.sweep()
        if stored and old and old.ready and not changes:
            files = PlanFiles(output, stored.build)
            file = msgspec.structs.replace(
                file, suffix=old.suffix, notes=old.notes, before=old.before, claim=old.claim
            )
            if file != old:  # other libraries, on which no byte depends so far
                _write_build(files, file, generation)
            return files, file
        manifest_generation = plan_files.generation_of(output, naming.MANIFEST)
        replaced = replacing.manifest_at(output, naming.MANIFEST)
        why = f" ({'; '.join(changes)})" if changes else ""
        match self._found(old, base, replaced, changes):
            case _Found.SET if not self.config.overwrite:
                raise ConfigError(
                    f"{output.url}: already holds another shard set{why}; give another --output, or"
                    " --overwrite to replace it"
                )
            case _Found.BUILD if not self.config.overwrite:
                elsewhere = "" if base else "give another --output, "
                raise ConfigError(
                    f"{output.url}: already holds an unfinished build{why}; finish it with its own"
                    f" options, {elsewhere}or --overwrite to start over"
                )
            case _Found.NOTHING:
                self._refuse_foreign()
        unfinished = history.unlisted(output, replacing.unfinished_files(output))
        removed = unfinished
        if replaced and not base:
            removed = unfinished | manifests.files_of(replaced, *manifests.older(output))
        replacing.refuse_input(output, removed, self.input, self.survey.objects)
        if self.survey.all_tars:
            replacing.refuse_inside(
                output,
                self.input,
                "whose tars are the input, and a rerun would read the shards too",
            )
        # The replaced set may have the same options; readers still use its folders, so these need
        # other names.
        identity = [file, replaced.digest if replaced else ""]
        suffix = (
            "-" + hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:8] if replaced else ""
        )
        # One that was stopped before it was ready has written no shard.
        before = sorted({*old.before, *([old.suffix] if old.ready else [])}) if old else []
        file = msgspec.structs.replace(
            file, suffix=suffix, ready=False, before=before, claim=uuid.uuid4().hex
        )
        files = PlanFiles(output, file.digest, file.claim)
        # From here on the output belongs to this build: other builds notice at their next step.
        _write_build(files, file, generation)
        generation = plan_files.generation_of(output, paths.BUILD)
        if plan_files.generation_of(output, naming.MANIFEST) != manifest_generation:
            raise plan_files.another_build(output, naming.MANIFEST)
        files.step(lambda: _lay_out(files, unfinished, replaced, lines, known=self.config.append))
        file = msgspec.structs.replace(
            file, ready=True, before=[suffix] if suffix in before else []
        )
        _write_build(files, file, generation)
        return PlanFiles(output, file.digest), file

    def _found(
        self,
        old: BuildFile | None,
        base: Manifest | None,
        manifest: Manifest | None,
        changes: list[str],
    ) -> _Found:
        if base and not history.has_unfinished_plan(self.output, base):
            return _Found.VERSION
        if manifest and not base:
            return _Found.SET
        if changes:
            return _Found.BUILD
        return _Found.UNREADY if old else _Found.NOTHING

    def _refuse_foreign(self) -> None:
        url = self.output.url
        for stat in self.output.list():
            if naming.is_shard_file(stat.name):
                raise ConfigError(
                    f"{url}: holds {stat.name} without a manifest or plan, so it is unclear whose"
                    " file it is; move such files away or give another --output (--overwrite"
                    " leaves them alone)"
                )

    def _appending(
        self, old: BuildFile | None, file: BuildFile, known: Known
    ) -> tuple[BuildFile, Manifest]:
        """The build as an append to the newest version, or to the one before if the old build has
        done that.
        """
        newest = replacing.manifest_at(self.output, naming.MANIFEST)
        if newest is None:
            raise ConfigError(
                f"{self.output.url}: no finished shard set there to append to; `build` makes one"
            )
        last = next(manifests.older(self.output), None)
        if last and last.number >= newest.number and last.digest != newest.digest:
            raise ConfigError(
                f"{self.output.url}: {versions.FOLDER} is still of a set that `build --overwrite`"
                " replaced before it was stopped; give the command of that build again, which"
                " removes it"
            )
        before = None
        if newest.number > 1 and not history.has_unfinished_plan(self.output, newest):
            before = replacing.manifest_at(self.output, versions.path(newest.number - 1))
        for base in filter(None, (before, newest)):
            classes, labels = extended_classes(base.classes, file.classes)
            sizes = {name: split.num_source_samples for name, split in base.splits.items()}
            addition = Addition(
                base=base.digest,
                labels=labels,
                num_classes=len(base.classes),
                num_source_samples=sizes,
                known=known,
            )
            appending = msgspec.structs.replace(file, classes=classes, appends=addition)
            if old and not self._changes(old, appending):
                break
        return appending, base

    def _changes(self, old: BuildFile, file: BuildFile) -> list[str]:
        """The differences between this build and the one at the output, in words."""
        is_readable = old.tool == file.tool
        plan = plan_files.find_record(self.output, paths.PLAN, PlanFile) if is_readable else None
        writes_images = self.config.writes_images(plan.fixes if plan else {})
        return file.differences_from(old, writes_images=writes_images)


def _describe(config: BuildConfig, survey: Survey, digest: str) -> BuildFile:
    """What this build writes into `plan/build.json`; `digest` is that of the survey's units."""
    return BuildFile(
        tool=f"shardset {__version__}, plan {PLAN_VERSION}",
        libraries=libraries(config.image),
        options=json.loads(json.dumps(config.what_decides_plan())),
        survey=digest,
        num_units=len(survey.units),
        suffix="",
        classes=survey.classes,
        notes=list(survey.notes),
        looked_for=survey.looked_for,
    )


def _lay_out(
    files: PlanFiles,
    unfinished: set[str],
    old: Manifest | None,
    lines: IO[bytes],
    *,
    known: Known | None,
) -> None:
    """Removes the files of earlier builds, then writes the files that workers start from.

    `old` is the set there, which stays if the build appends to it: then the original names of its
    samples stay too.
    """
    replacing.remove(files, unfinished)
    kept = manifests.files_of(old) if old and known else set[str]()
    replacing.remove(files, replacing.planned(files.output, kept) - {paths.BUILD})
    if old:
        files.write(paths.BASE if known else paths.REPLACED, manifests.to_json(old))
    if old and known:
        write_known(files, old)
    with files.writer(paths.SURVEY) as out:
        lines.seek(0)
        shutil.copyfileobj(lines, out, PIECE_BYTES)
    files.check_current()


def _write_build(files: PlanFiles, file: BuildFile, generation: str) -> None:
    """Replaces that generation of `plan/build.json`; ManifestError if another build was faster."""
    content = plan_files.encode_record(file)
    try:
        plan_files.write(files.output, paths.BUILD, files.build, content, if_generation=generation)
    except PreconditionFailed as error:
        raise plan_files.another_build(files.output, paths.BUILD) from error


def _published(output: Storage, plan: PlanFile) -> Manifest | None:
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    return head if history.has_shards_of(head, plan) else None
