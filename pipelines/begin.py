"""How a build begins: the survey of its input, what it finds at its output, and the files that
workers start from.
"""

import hashlib
import json
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from enum import Enum, auto
from typing import IO

import msgspec

from pipelines import sources
from pipelines.config import BuildConfig, Known
from pipelines.images.encode import libraries
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.append import Addition, extended_classes, write_known
from pipelines.plan.files import PlanFiles
from pipelines.plan.plan_records import PLAN_VERSION, Build, BuildFile, PlanFile
from pipelines.plan.survey import WrittenUnits, write_units
from pipelines.sources.base import Source, Survey
from pipelines.write import history
from pipelines.write import replace as replacing
from pipelines.write.set_files import SetFiles, is_shard, listed_by
from shardset.errors import ConfigError, PreconditionFailed, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest
from shardset.program import some_of
from shardset.storage.base import Storage, os_errors_as_storage_errors
from shardset.storage.checked import PIECE_BYTES
from shardset.storage.open import open_storage
from shardset.version import __version__


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A build that is ready to run, its units as they were surveyed, and the size of its input.

    `kept` are files of earlier builds that could not be removed.
    """

    build: Build
    units: WrittenUnits
    num_bytes: int
    kept: replacing.Kept


def prepare(config: BuildConfig, output: Storage) -> Prepared:
    """Surveys the input, then writes the files that workers start from, or finds the files of an
    earlier build.
    """
    source = sources.open_source(config)
    if folder := sources.input_folder(config):
        replacing.refuse_inside(
            open_storage(config.output), folder, "so the tars would be among the raw files"
        )
    return prepare_from(source, config, output)


def prepare_from(source: Source, config: BuildConfig, output: Storage) -> Prepared:
    """The same for an opened source."""
    survey = source.survey()
    if config.holdout and len({*survey.splits}) > 1:
        raise ConfigError(
            f"{config.input}: --holdout with splits already ({some_of(sorted(survey.splits), 5)});"
            " leave --holdout out, or name one of them as input"
        )
    if survey.refusal and not config.append:  # a set may have the other labels
        raise SourceError(survey.refusal)
    with (
        os_errors_as_storage_errors(f"the temporary folder {tempfile.gettempdir()}"),
        tempfile.TemporaryFile() as lines,
    ):
        units = write_units(survey.units, lines)
        target = open_storage(config.output)
        start = _Start(config, target, output, source, survey)
        build, kept = start.begin(_describe(config, survey, units), lines)
    num_bytes = survey.num_bytes or sum(survey.objects.values())
    return Prepared(build=build, units=units, num_bytes=num_bytes, kept=kept)


def note_failure(files: PlanFiles) -> None:
    """Lets any build follow one that failed before its first shard."""
    output = files.output
    left = replacing.existing(output, SetFiles(output).unfinished())
    if any(is_shard(stat.name) for stat in left):
        return
    generation = plan_files.generation_of(output, paths.BUILD)
    file = files.read_record(paths.BUILD, BuildFile)
    _write_build(files, msgspec.structs.replace(file, failed=True), generation)


class _State(Enum):
    """What a build meets at its output."""

    THIS_BUILD = auto()
    ANOTHER_SET = auto()
    UNFINISHED = auto()
    """Another build that has not failed before its first shard."""
    FOREIGN = auto()
    """Shards without a manifest or a plan."""
    FREE = auto()


@dataclass(frozen=True, kw_only=True)
class _Existing:
    """What is at the output of the build `file`: the build `old`, whose files have the digest
    `build`, and the `changes` since; the set to be `replaced`, or the version `base` to which the
    build appends.

    `generation` belongs to `plan/build.json`, `manifest_generation` to the manifest.
    """

    file: BuildFile
    build: str
    old: BuildFile | None
    base: Manifest | None
    replaced: Manifest | None
    changes: list[str]
    resumes: bool
    generation: str
    manifest_generation: str


@dataclass(frozen=True)
class _Start:
    """Decides whether a build resumes, begins or replaces another one, and prepares the output for
    it.

    `target` is where the set is or will be; a dry run has another `output`.
    """

    config: BuildConfig
    target: Storage
    output: Storage
    source: Source
    survey: Survey

    def begin(self, file: BuildFile, lines: IO[bytes]) -> tuple[Build, replacing.Kept]:
        """Writes `plan/build.json` and the survey's `lines`, unless the same build has already
        begun there.

        Removes what another build left unfinished, and returns what it could not remove, but keeps
        a finished set until it is replaced. Raises ConfigError, with nothing removed, if this build
        reads any of those files, or if a rerun would read what this one writes.
        """
        existing, url = self._look(file), self.output.url
        self.output.sweep()
        why = f" ({'; '.join(existing.changes)})" if existing.changes else ""
        match self._state(existing):
            case _State.THIS_BUILD:
                return self._resume(existing), {}
            case _State.ANOTHER_SET if not self.config.overwrite:
                raise ConfigError(
                    f"{url}: already holds another shard set{why}; give another --output, or"
                    " --overwrite to replace it"
                )
            case _State.UNFINISHED if not self.config.overwrite:
                elsewhere = "" if existing.base else "give another --output, "
                raise ConfigError(
                    f"{url}: already holds an unfinished build{why}; finish it with its own"
                    f" options, {elsewhere}or --overwrite to start over"
                )
            case _State.FOREIGN:
                raise ConfigError(
                    f"{url}: holds {self._foreign_shard()} without a manifest or plan, so it is"
                    " unclear whose file it is; move such files away or give another --output"
                    " (--overwrite leaves them alone)"
                )
        return self._take(existing, lines)

    def _look(self, file: BuildFile) -> _Existing:
        output = self.output
        generation = plan_files.generation_of(output, paths.BUILD)
        stored, old, base = plan_files.find(output, paths.BUILD), None, None
        if stored:
            old = plan_files.decode_record(output, paths.BUILD, stored.content, BuildFile)
        is_readable = old is not None and old.tool == file.tool
        plan = plan_files.find_record(output, paths.PLAN, PlanFile) if is_readable else None
        if self.config.append:
            file, base = self._appending(old, file, self.config.append, plan)
        changes = self._changes(old, file, plan) if old else []
        resumes = old is not None and old.ready and not changes
        manifest_generation = plan_files.generation_of(output, naming.MANIFEST)
        return _Existing(
            file=file,
            build=stored.build if stored else "",
            old=old,
            base=base,
            replaced=None if resumes else replacing.manifest_at(output, naming.MANIFEST),
            changes=changes,
            resumes=resumes,
            generation=generation,
            manifest_generation=manifest_generation,
        )

    def _state(self, existing: _Existing) -> _State:
        old, base = existing.old, existing.base
        if existing.resumes:
            return _State.THIS_BUILD
        if existing.replaced and not base:
            return _State.ANOTHER_SET
        is_unfinished = not base or history.has_unfinished_plan(self.output, base)
        if old and existing.changes and is_unfinished and not old.failed:
            return _State.UNFINISHED
        if not (existing.replaced or old) and self._foreign_shard():
            return _State.FOREIGN
        return _State.FREE

    def _foreign_shard(self) -> str | None:
        return next((stat.name for stat in self.output.list() if is_shard(stat.name)), None)

    def _resume(self, existing: _Existing) -> Build:
        old = existing.old
        assert old, "it is the same build"
        file = msgspec.structs.replace(
            existing.file, suffix=old.suffix, notes=old.notes, before=old.before, claim=old.claim
        )
        files = PlanFiles(self.output, existing.build)
        if file != old:  # other libraries, on which no byte depends so far
            _write_build(files, file, existing.generation)
        return self._build(files, file, resumes=True)

    def _build(self, files: PlanFiles, file: BuildFile, *, resumes: bool) -> Build:
        return Build(
            config=self.config,
            source=self.source,
            files=files,
            file=msgspec.structs.replace(file, classes=None),
            num_classes=None if file.classes is None else len(file.classes),
            resumes=resumes,
        )

    def _take(self, existing: _Existing, lines: IO[bytes]) -> tuple[Build, replacing.Kept]:
        """Makes the output this build's."""
        output, old, replaced = self.output, existing.old, existing.replaced
        set_files = SetFiles(output)
        unfinished = set_files.unlisted(set_files.unfinished())
        removed = unfinished
        if replaced and not existing.base:
            removed = unfinished | listed_by(replaced, *manifests.older(output))
        replacing.refuse_input(output, removed, self.source.input, self.survey.objects)
        if self.survey.all_tars:
            why = "whose tars are the input, and a rerun would read the shards too"
            replacing.refuse_inside(output, self.source.input, why)
        # The replaced set may have the same options; readers still use its folders, so these need
        # other names.
        identity = [existing.file, replaced.digest if replaced else ""]
        digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()
        suffix = f"-{digest[:8]}" if replaced else ""
        # One that was stopped before it was ready has written no shard.
        before = sorted({*old.before, *([old.suffix] if old.ready else [])}) if old else []
        file = msgspec.structs.replace(
            existing.file, suffix=suffix, ready=False, before=before, claim=uuid.uuid4().hex
        )
        files = PlanFiles(output, file.digest, file.claim)
        # From here on the output belongs to this build: other builds notice at their next step.
        _write_build(files, file, existing.generation)
        generation = plan_files.generation_of(output, paths.BUILD)
        if plan_files.generation_of(output, naming.MANIFEST) != existing.manifest_generation:
            raise plan_files.another_build(output, naming.MANIFEST)
        with files.while_current():
            kept = self._lay_out(files, unfinished, existing, lines)
        file = msgspec.structs.replace(
            file, ready=True, before=[suffix] if suffix in before else []
        )
        _write_build(files, file, generation)
        return self._build(PlanFiles(output, file.digest), file, resumes=False), kept

    def _lay_out(
        self, files: PlanFiles, unfinished: set[str], existing: _Existing, lines: IO[bytes]
    ) -> replacing.Kept:
        """Removes the files of earlier builds, then writes the files that workers start from;
        returns what it could not remove.

        A version to which the build appends stays, with what repairs its shards.
        """
        base = existing.base
        listed = listed_by(base) if base else set[str]()
        kept = replacing.remove(files, unfinished)
        kept |= replacing.remove(files, SetFiles(files.output).plan(listed) - {paths.BUILD})
        if base:
            files.write(paths.BASE, manifests.to_json(base))
            write_known(files, base, self.target)
        elif existing.replaced:
            files.write(paths.REPLACED, manifests.to_json(existing.replaced))
        with files.writer(paths.SURVEY) as out:
            lines.seek(0)
            shutil.copyfileobj(lines, out, PIECE_BYTES)
        files.check_current()
        return kept

    def _appending(
        self, old: BuildFile | None, file: BuildFile, known: Known, plan: PlanFile | None
    ) -> tuple[BuildFile, Manifest]:
        """The build as an append to the newest version, or to the one before if the old build has
        done that.
        """
        newest = replacing.manifest_at(self.target, naming.MANIFEST)
        if newest is None:
            raise ConfigError(
                f"{self.output.url}: no finished shard set there to append to; `build` makes one"
            )
        last = next(manifests.older(self.target), None)
        if last and last.number >= newest.number and last.digest != newest.digest:
            raise ConfigError(
                f"{self.output.url}: {versions.FOLDER} is still of a set that `build --overwrite`"
                " replaced before it was stopped; give the command of that build again, which"
                " removes it"
            )
        before = None
        if newest.number > 1 and not history.has_unfinished_plan(self.target, newest):
            before = replacing.manifest_at(self.target, versions.path(newest.number - 1))
        for base in filter(None, (before, newest)):
            classes, labels, categories = extended_classes(base.classes, file.classes)
            sizes = {name: split.num_source_samples for name, split in base.splits.items()}
            addition = Addition(
                base=base.digest,
                labels=labels,
                categories=categories,
                num_classes=len(base.classes),
                num_source_samples=sizes,
                known=known,
                by_name=base.has_names,
            )
            appending = msgspec.structs.replace(file, classes=classes, appends=addition)
            if old and not self._changes(old, appending, plan):
                break
        return appending, base

    def _changes(self, old: BuildFile, file: BuildFile, plan: PlanFile | None) -> list[str]:
        """The differences between this build and the one at the output, in words."""
        writes_images = self.config.writes_images(plan.fixes if plan else {})
        return file.differences_from(old, writes_images=writes_images)


def _describe(config: BuildConfig, survey: Survey, units: WrittenUnits) -> BuildFile:
    """The content of `plan/build.json`."""
    return BuildFile(
        tool=f"shardset {__version__}, plan {PLAN_VERSION}",
        libraries=libraries(config.image),
        options=json.loads(json.dumps(config.what_decides_plan())),
        survey=units.digest,
        num_units=units.num_units,
        suffix="",
        classes=survey.classes,
        notes=list(survey.notes),
        looked_for=survey.looked_for,
    )


def _write_build(files: PlanFiles, file: BuildFile, generation: str) -> None:
    """Replaces that generation of `plan/build.json`; ManifestError if another build was faster."""
    content = plan_files.encode_record(file)
    try:
        plan_files.write(files.output, paths.BUILD, files.build, content, if_generation=generation)
    except PreconditionFailed as error:
        raise plan_files.another_build(files.output, paths.BUILD) from error
