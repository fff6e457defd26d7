"""The build, top to bottom: survey, index, plan, write, and the manifest last."""

import hashlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import IO, TypeVar

import apache_beam as beam
import msgspec
from apache_beam.metrics.execution import MetricResult
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import PipelineState, create_runner

from pipelines import sources
from pipelines.config import BuildConfig
from pipelines.pipeline import (
    NAMESPACE,
    AssignBatch,
    CommitManifest,
    FindDuplicateKeys,
    IndexUnit,
    MakePlan,
    PlanGroup,
    SpreadKeys,
    WriteShard,
)
from pipelines.plan import files
from pipelines.plan.job import (
    BuildFile,
    Job,
    PlanFile,
    UnitRef,
    describe_build,
    differences,
    read_record,
    record_of,
    write_units,
)
from pipelines.plan.partitions import PIECE
from pipelines.runners import dataflow, errors, forkserver, local
from pipelines.runners.forkserver import ForkServer
from pipelines.runners.progress import BuildProgress, ProgressWatcher
from pipelines.sources.base import Survey
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, NotFound, PreconditionFailed, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.base import ABSENT, Storage, os_errors_as_storage_errors
from shardset.storage.open import open_storage

T = TypeVar("T")

_OF_SURVEY = ("seed", "holdout")
"""The options that decide what a survey says of the same input."""


class _Fixes(msgspec.Struct):
    """What is needed of `plan/plan.json` before it is known whether it is of this version."""

    fixes: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a build did; `published` is the head of its manifest, None after a dry run or of a part of the shards.

    The manifest itself, which lists every shard, is read by `shardset.format.manifest.load`.
    """

    plan: PlanFile
    plan_bytes: int
    published: manifests.Head | None
    counters: dict[str, int]
    seconds: float


def build(
    config: BuildConfig,
    beam_flags: Sequence[str] = (),
    progress: BuildProgress | None = None,
    server: ForkServer | None = None,
) -> Result:
    """Builds the shard set that `config` describes and returns what was done.

    An unfinished build of the same input and options is taken up where it stopped; a finished one is checked and,
    where a shard is missing or damaged, mended. `server` starts the worker processes, if it is running already.
    Raises ShardsetError, with nothing published.
    """
    return _run(config, open_storage(config.output), beam_flags, progress, server, dry_run=False)


def dry_run(
    config: BuildConfig,
    beam_flags: Sequence[str] = (),
    progress: BuildProgress | None = None,
    server: ForkServer | None = None,
) -> Result:
    """The plan of a build, made in a temporary folder; nothing is written to the output."""
    with tempfile.TemporaryDirectory(prefix="shardset-plan-") as folder:
        return _run(config, open_storage(folder), beam_flags, progress, server, dry_run=True)


def _run(
    config: BuildConfig,
    output: Storage,
    beam_flags: Sequence[str],
    progress: BuildProgress | None,
    server: ForkServer | None,
    *,
    dry_run: bool,
) -> Result:
    started = time.monotonic()
    options = beam_options(beam_flags, output)
    if dataflow.is_wanted(options):
        dataflow.check(options, source=config.input, output=output.url)
    _check_job_server(options)
    _check_flags_of_beam(options)
    job, file, lines = prepare(config, output)
    with ProgressWatcher(output, len(lines), progress):
        counters = run_pipeline(
            options,
            lambda pipeline: construct(pipeline, job, file, lines, dry_run=dry_run),
            progress.say if progress else None,
            server,
        )
    with job.in_place():
        remove_parts(job)
        plan = record_of(output, naming.PLAN, job.read(naming.PLAN), PlanFile)
    published = None if dry_run else _published(output, plan)
    plan_bytes = sum(found.num_bytes for found in output.list(naming.PLAN_FOLDER))
    return Result(
        plan=plan, plan_bytes=plan_bytes, published=published, counters=counters, seconds=time.monotonic() - started
    )


def construct(pipeline: beam.Pipeline, job: Job, file: BuildFile, lines: Sequence[UnitRef], *, dry_run: bool) -> None:
    """The pipeline, with the element type between the steps."""
    indexed = (
        pipeline
        | "List units" >> beam.Create(lines)  # UnitLine
        | "Spread units" >> beam.Reshuffle()
        | "Index" >> beam.ParDo(IndexUnit(job))  # unit
        | "Count units" >> beam.combiners.Count.Globally()
    )
    planned = (
        pipeline
        | "Once all is indexed" >> beam.Create([None])
        | "Plan"
        >> beam.ParDo(MakePlan(job, file), beam.pvalue.AsSingleton(indexed)).with_outputs("starts", main="plan")
    )
    if dry_run:
        return
    # BundleBasedDirectRunner gives an empty side input for one of several outputs, hence a step of its own.
    plan = beam.pvalue.AsSingleton(planned.plan | "The plan" >> beam.Map(_same))  # PlanFile
    twins = (
        planned.starts
        | "Spread batches" >> beam.Reshuffle()
        | "Spread keys" >> beam.ParDo(SpreadKeys(job), plan)  # (bucket, Part)
        | "Gather keys" >> beam.GroupByKey()
        | "Find twins" >> beam.ParDo(FindDuplicateKeys(job), plan)  # (batch, Part)
    )
    shards = (
        {"starts": planned.starts, "twins": twins}
        | "Join" >> beam.CoGroupByKey()  # (batch, {starts, twins})
        | "Assign places" >> beam.ParDo(AssignBatch(job), plan)  # ((split, group), Part)
        | "Gather references" >> beam.GroupByKey()
        | "Plan shards" >> beam.ParDo(PlanGroup(job), plan)  # (split, shard)
        | "Choose shards" >> beam.Filter(_is_wanted, job.config.only_shards)
        | "Spread shards" >> beam.Reshuffle()
    )
    finished = (
        shards
        | "Write shards" >> beam.ParDo(WriteShard(job), plan)  # (split, shard)
        | "Count shards" >> beam.combiners.Count.Globally()
    )
    (
        pipeline
        | "Once all is written" >> beam.Create([None])
        | "CommitManifest" >> beam.ParDo(CommitManifest(job), beam.pvalue.AsSingleton(finished), plan)  # str
    )


def remove_parts(job: Job) -> None:
    """Removes what the steps left for each other: a run that is over needs none."""
    replacing.remove_all(job.output, naming.PARTITIONS, job.check_place)


def prepare(config: BuildConfig, output: Storage) -> tuple[Job, BuildFile, list[UnitRef]]:
    """Surveys the input and lays down (or finds again) what the workers start from."""
    source = sources.open_source(config)
    if folder := sources.folder_of(config):
        replacing.refuse_among_raw(open_storage(config.output), folder)
    survey = source.survey()
    with (
        os_errors_as_storage_errors(f"the temporary folder {tempfile.gettempdir()}"),
        tempfile.TemporaryFile() as units,
    ):
        digest, lines = write_units(survey, units)
        file = describe_build(config, survey, digest, suffix="")
        build, file = _begin(config, output, file, units, (source.input, survey))
    return Job(config=config, source=source, output=output, suffix=file.suffix, build=build), file, lines


def _begin(
    config: BuildConfig, output: Storage, file: BuildFile, units: IO[bytes], read: tuple[Storage, Survey]
) -> tuple[str, BuildFile]:
    """Lays down the survey and what is built, unless a build of the same stands there; its digest, and it as it stands.

    What an earlier build left unfinished goes; a set that is to be replaced stays. ConfigError, with nothing removed,
    if any of it is `read` by this build, whose input and survey that are, or what it writes would be by the next.
    """
    generation = files.generation_of(output, naming.BUILD)
    found = files.find(output, naming.BUILD)
    old: BuildFile | None = record_of(output, naming.BUILD, found.content, BuildFile) if found else None
    changed = _changes(config, output, old, file) if old else []
    before = files.generation_of(output, naming.MANIFEST)
    output.sweep()
    if found and found.build and old and not changed and old.ready:
        file = msgspec.structs.replace(file, suffix=old.suffix, notes=old.notes)
        if file != old:  # other libraries, on which no byte depends so far
            _put_build(output, found.build, file, generation)
        return found.build, file
    _refuse_what_stands(config, output, before != ABSENT, begun=old is not None, changed=changed)
    replaced = replacing.manifest_at(output, naming.MANIFEST)
    left = replacing.left_behind(output) - replacing.files_of(replaced)
    source, survey = read
    replacing.refuse_input(output, replacing.files_of(replaced) | left, source, survey.objects)
    if survey.all_tars:
        replacing.refuse_inside(output, source)
    suffix = _suffix(file, replaced.digest) if replaced else ""
    suffixes = sorted({old.suffix, *old.before}) if old else []
    file = msgspec.structs.replace(file, suffix=suffix, ready=False, before=suffixes)
    build = file.digest
    # From here on the output is this build's: others see that when they look next, and a manifest that one of them
    # wrote since it looked is seen below.
    _put_build(output, build, file, generation)
    generation = files.generation_of(output, naming.BUILD)

    def check_place() -> None:
        found = files.find(output, naming.BUILD)
        if found is None or found.build != build:
            raise files.another_build(output, naming.BUILD)

    if files.generation_of(output, naming.MANIFEST) != before:
        raise files.another_build(output, naming.MANIFEST)
    replacing.remove(output, left, check_place)
    doomed = {one.name for one in output.list(naming.PLAN_FOLDER) if naming.is_plan(one.name)} - {naming.BUILD}
    replacing.remove(output, doomed, check_place)
    if replaced:
        files.put(output, naming.REPLACED, build, manifests.to_json(replaced))
    with output.writer(naming.SURVEY) as out:
        units.seek(0)
        shutil.copyfileobj(units, out, PIECE)
    check_place()
    file = msgspec.structs.replace(file, ready=True, before=[])
    _put_build(output, build, file, generation)
    return build, file


def _changes(config: BuildConfig, output: Storage, old: BuildFile, file: BuildFile) -> list[str]:
    """In which words this build differs from the one that stands there."""
    return differences(old, _surveyed_as(config, old, file), writes_images=config.writes_images(_fixes(output)))


def _surveyed_as(config: BuildConfig, old: BuildFile, file: BuildFile) -> BuildFile:
    """The build with the survey that the options of the old one give: so only another input makes another survey."""
    if old.survey == file.survey:
        return file
    if old.options.get("source") != file.options["source"]:
        return msgspec.structs.replace(file, survey=old.survey, classes=old.classes)
    asked = {name: old.options[name] for name in _OF_SURVEY if name in old.options}
    if asked == {name: file.options[name] for name in _OF_SURVEY}:
        return file
    survey = sources.open_source(replace(config, **asked)).survey()
    with tempfile.TemporaryFile() as units:
        digest, _ = write_units(survey, units)
    return msgspec.structs.replace(file, survey=digest, classes=survey.classes)


def _put_build(output: Storage, build: str, file: BuildFile, generation: str) -> None:
    """Writes `plan/build.json` in place of that generation; ManifestError if another build was faster."""
    data = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
    try:
        files.put(output, naming.BUILD, build, data, if_generation=generation)
    except PreconditionFailed as error:
        raise files.another_build(output, naming.BUILD) from error


def _fixes(output: Storage) -> dict[str, int]:
    """The fixes of the build whose plan stands there; none before it is planned."""
    plan: _Fixes | None = read_record(output, naming.PLAN, _Fixes)
    return plan.fixes if plan else {}


def _suffix(file: BuildFile, replaced: str) -> str:
    """What keeps a build's folders apart from those of the set that it replaces, which may be of the same options."""
    return "-" + hashlib.sha256(msgspec.json.encode([file, replaced])).hexdigest()[:8]


def beam_options(flags: Sequence[str], output: Storage) -> PipelineOptions:
    """Beam's options: by default FnApiRunner on all cores; the mode that loses elements is refused."""
    options = PipelineOptions(list(flags))
    given = {flag.split("=")[0] for flag in flags}
    if options.get_all_options().get("direct_running_mode") == "multi_threading":
        raise ConfigError(
            "--direct_running_mode=multi_threading loses elements after a GroupByKey (Beam 2.77): "
            "use multi_processing or in_memory"
        )
    _check_runner(options.view_as(StandardOptions).runner)
    if "--runner" not in given:
        options.view_as(StandardOptions).runner = "FnApiRunner"
        _set_workers(options.view_as(DirectOptions), given, in_memory=not output.is_shared)
    options.view_as(SetupOptions).pickle_library = "cloudpickle"
    return options


def _check_runner(name: str | None) -> None:
    """ConfigError if Beam has no such runner: it would say so with a traceback, after the input was surveyed."""
    if name is None:
        return
    try:
        create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"--runner {name}: {error}; leave it out to build here") from error


def _check_job_server(options: PipelineOptions) -> None:
    """ConfigError if nobody listens where the job is to be sent: Beam would wait there for five minutes."""
    endpoint = options.view_as(PortableOptions).job_endpoint or ""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():  # none is given, or another kind of address
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"--job_endpoint {endpoint}: nobody listens there ({error}); start the job server (docs/flink.md)"
        ) from error


def _check_flags_of_beam(options: PipelineOptions) -> None:
    """ConfigError if Beam refuses a flag: it would say so with a traceback, after the survey was laid down."""
    runner = create_runner(options.view_as(StandardOptions).runner)
    refusals = PipelineOptionsValidator(options, runner).validate()
    if refusals:
        raise ConfigError(f"a flag of Apache Beam: {'; '.join(refusals)}")


def _set_workers(options: DirectOptions, given: set[str], *, in_memory: bool) -> None:
    """A process a core, or as many as asked for, unless the mode is given; Beam's own default is one thread in all."""
    if "--direct_running_mode" in given or in_memory:
        return
    if options.direct_num_workers < 0:
        raise ConfigError(f"--direct_num_workers is {options.direct_num_workers}, expected a number from 1, or 0: all")
    if "--direct_num_workers" not in given or not options.direct_num_workers:
        options.direct_num_workers = forkserver.num_cores()
    if options.direct_num_workers > 1:
        options.direct_running_mode = "multi_processing"


def run_pipeline(
    options: PipelineOptions,
    fill: Callable[[beam.Pipeline], None],
    say: Callable[[str], None] | None = None,
    server: ForkServer | None = None,
) -> dict[str, int]:
    """Runs what `fill` puts into a pipeline and returns its counters; a worker's ShardsetError is raised as itself.

    `say` is told where a job on Dataflow can be watched.
    """
    pipeline = beam.Pipeline(options=options)
    fill(pipeline)
    with local.watched(server), errors.translated(dataflow.failures(options)):
        result = pipeline.run()
        if say and dataflow.is_wanted(options):
            say(f"the job runs on at {dataflow.page_of(options, result)}")
        state = result.wait_until_finish()
    if state not in (PipelineState.DONE, None):
        raise ShardsetError(f"the Beam job ended as {state}; see the runner's log; a rerun goes on where it stopped")
    return counters_of(result.metrics().query()["counters"])


def counters_of(found: Iterable[MetricResult]) -> dict[str, int]:
    """Our own counters among a runner's; of a runner that knows no committed values (Spark), the attempted ones."""
    ours = (counter for counter in found if counter.key.metric.namespace == NAMESPACE)
    return {counter.key.metric.name: counter.result or 0 for counter in ours}


def _published(output: Storage, plan: PlanFile) -> manifests.Head | None:
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    return head if head.plan_digest == plan.digest else None


def _same(element: T) -> T:
    return element


def _is_wanted(slot: tuple[str, int], wanted: frozenset[tuple[str, int]]) -> bool:
    return not wanted or tuple(slot) in wanted


def _refuse_what_stands(
    config: BuildConfig, output: Storage, stands: bool, *, begun: bool, changed: Sequence[str]
) -> None:
    why = f" ({'; '.join(changed)})" if changed else ""
    if stands and not config.overwrite:
        raise ConfigError(
            f"{output.url}: another shard set stands there{why}; give another --output, or --overwrite to replace it"
        )
    if changed and not config.overwrite:
        raise ConfigError(
            f"{output.url}: an unfinished build stands there{why}; finish it with its own options, "
            "give another --output, or --overwrite to start over"
        )
    if stands or begun:
        return
    foreign = next((found.name for found in output.list() if naming.is_shard_file(found.name)), None)
    if foreign:
        raise ConfigError(
            f"{output.url}: {foreign} stands there without a manifest or plan, so whose it is can't be told; "
            "move such files away or give another --output (--overwrite leaves them alone)"
        )
