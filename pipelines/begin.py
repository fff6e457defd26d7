"""How a build begins: the survey of its input, what it finds at its output, and the files that
workers start from.
"""

import hashlib
import json
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from typing import IO

import msgspec

from pipelines import sources
from pipelines.config import BuildConfig, Known
from pipelines.images.encode import libraries
from pipelines.pipeline import PreparedBuild
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.append import Addition, extended_classes, write_known
from pipelines.plan.files import PlanFiles
from pipelines.plan.records import PLAN_VERSION, BuildFile, PlanFile
from pipelines.plan.survey import WrittenUnits, write_units
from pipelines.sources.base import Survey
from pipelines.write import history
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, PreconditionFailed, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest
from shardset.program import some_of
from shardset.storage.base import Storage, os_errors_as_storage_errors
from shardset.storage.checked import PIECE_BYTES
from shardset.storage.open import open_storage
from shardset.version import __version__


def prepare(config: BuildConfig, output: Storage) -> PreparedBuild:
    """Surveys the input, then writes the files that workers start from, or finds the files of an
    earlier build.
    """
    source = sources.open_source(config)
    if folder := sources.input_folder(config):
        replacing.refuse_inside(
            open_storage(config.output), folder, "so the tars would be among the raw files"
        )
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
        start = _Start(config, output, source.input, survey)
        files, file, kept, resumes = start.begin(_describe(config, survey, units), lines)
    num_bytes = survey.num_bytes or sum(survey.objects.values())
    return PreparedBuild(
        config=config,
        source=source,
        files=files,
        file=file,
        units=units,
        num_bytes=num_bytes,
        kept=kept,
        resumes=resumes,
    )


@dataclass(frozen=True)
class _Start:
    """Decides whether a build resumes, begins or replaces another one, and prepares the output for
    it.
    """

    config: BuildConfig
    output: Storage
    input: Storage
    survey: Survey

    def begin(
        self, file: BuildFile, lines: IO[bytes]
    ) -> tuple[PlanFiles, BuildFile, replacing.Kept, bool]:
        """Writes `plan/build.json` and the survey's `lines`, unless the same build has already
        begun there, which it says last.

        Removes what another build left unfinished, and returns what it could not remove, but keeps
        a finished set until it is replaced. Raises ConfigError, with nothing removed, if this build
        reads any of those files, or if a rerun would read what this one writes.
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
            return files, file, {}, True
        manifest_generation = plan_files.generation_of(output, naming.MANIFEST)
        replaced = replacing.manifest_at(output, naming.MANIFEST)
        why = f" ({'; '.join(changes)})" if changes else ""
        if not self.config.overwrite:
            if replaced and not base:
                raise ConfigError(
                    f"{output.url}: already holds another shard set{why}; give another --output, or"
                    " --overwrite to replace it"
                )
            if changes and (not base or history.has_unfinished_plan(output, base)):
                elsewhere = "" if base else "give another --output, "
                raise ConfigError(
                    f"{output.url}: already holds an unfinished build{why}; finish it with its own"
                    f" options, {elsewhere}or --overwrite to start over"
                )
        if not (replaced or old):
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
        with files.while_current():
            kept = _lay_out(files, unfinished, replaced, lines, known=self.config.append)
        file = msgspec.structs.replace(
            file, ready=True, before=[suffix] if suffix in before else []
        )
        _write_build(files, file, generation)
        return PlanFiles(output, file.digest), file, kept, False

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
            classes, labels, categories = extended_classes(base.classes, file.classes)
            sizes = {name: split.num_source_samples for name, split in base.splits.items()}
            addition = Addition(
                base=base.digest,
                labels=labels,
                categories=categories,
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


def _lay_out(
    files: PlanFiles,
    unfinished: set[str],
    old: Manifest | None,
    lines: IO[bytes],
    *,
    known: Known | None,
) -> replacing.Kept:
    """Removes the files of earlier builds, then writes the files that workers start from; returns
    what it could not remove.

    `old` is the set there, which stays if the build appends to it: then the original names of its
    samples stay too.
    """
    listed = manifests.files_of(old) if old and known else set[str]()
    kept = replacing.remove(files, unfinished)
    kept |= replacing.remove(files, replacing.planned(files.output, listed) - {paths.BUILD})
    if old:
        files.write(paths.BASE if known else paths.REPLACED, manifests.to_json(old))
    if old and known:
        write_known(files, old)
    with files.writer(paths.SURVEY) as out:
        lines.seek(0)
        shutil.copyfileobj(lines, out, PIECE_BYTES)
    files.check_current()
    return kept
