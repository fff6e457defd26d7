"""The commit of a build: turns the records of all shards into the manifest, which is published
last.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from pipelines.config import BuildConfig
from pipelines.images.encode import libraries
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.append import base_of
from pipelines.plan.files import PlanFiles
from pipelines.plan.records import BuildFile, GroupFile, PlanFile, ShardRecord
from pipelines.write import history, replace
from shardset.errors import ManifestError, NotFound, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Provenance, Quarantine, Split
from shardset.format.shards import pattern_of
from shardset.format.write import WrittenShard, write_split
from shardset.storage.base import ABSENT, Storage
from shardset.version import __version__


@dataclass(frozen=True, slots=True)
class Committer:
    """Publishes the set of a build, or the next version of the one it appends to; pickles.

    `build` travels without its classes; `input` is the folder of the raw objects.
    """

    files: PlanFiles
    config: BuildConfig
    build: BuildFile
    input: str

    def commit(
        self, plan: PlanFile, num_finished: int, class_totals: Mapping[str, Mapping[int, int]]
    ) -> str | None:
        """Publishes the manifest if all shards are finished and returns its digest; None if shards
        are missing.

        `class_totals` are the samples of each label by split. A replaced set stays complete until
        the new manifest is published; then its files are removed, if the storage permits it.
        """
        if num_finished != sum(split.num_shards for split in plan.splits.values()):
            return None
        # `plan` travels without its classes
        complete = self.files.read_record(paths.PLAN, PlanFile)
        if complete.digest != plan.digest:
            raise plan_files.another_build(self.files.output, paths.PLAN)
        base = base_of(self.files, self.build.appends)
        digest = self.write_manifest(complete, class_totals, base)
        replace.remove_replaced(self.files)
        return digest

    def write_manifest(
        self,
        plan: PlanFile,
        class_totals: Mapping[str, Mapping[int, int]],
        base: Manifest | None = None,
    ) -> str:
        """Writes the tables and the manifest of a plan whose shards are all finished, and returns
        its digest.

        With `base` the manifest is the version after it.
        """
        splits = {
            name: self._write_split(
                plan, name, [class_totals[name].get(label, 0) for label in range(plan.num_classes)]
            )
            for name in sorted(plan.splits)
        }
        config = self.config
        manifest = Manifest(
            kind=manifests.KIND,
            version=manifests.VERSION,
            digest="",
            classes=plan.classes,
            splits=splits,
            quarantine=Quarantine(
                count=plan.num_rejected, path=naming.quarantine_path(self.build.suffix)
            ),
            fixes=plan.fixes,
            provenance=Provenance(
                tool=f"shardset {__version__}",
                source=config.source,
                source_digest=plan.source_digest,
                options=config.what_decides_bytes(),
                libraries=libraries(config.image) if config.writes_images(plan.fixes) else {},
                notes=plan.notes,
            ),
        )
        group = GroupFile(
            input=self.input,
            image=config.image,
            build=self.build,
            fields={name: [*split.fields] for name, split in plan.splits.items()},
        )
        self.files.write(paths.group_path(self.files.build), msgspec.json.encode(group))
        sealed = manifests.seal(history.appended(base, manifest) if base else manifest)
        self._publish(sealed, base)
        return sealed.digest

    def _write_split(self, plan: PlanFile, name: str, class_totals: list[int]) -> Split:
        split, folder = plan.splits[name], name + self.build.suffix
        return write_split(
            self.files.writer,
            self._written(plan, name),
            pattern=pattern_of(folder, name, split.num_shards),
            table_path=naming.table_path(folder),
            class_totals=class_totals,
            seed=self.config.seed,
            plan_digest=plan.digest,
            promises=["mixed", "reproducible"],
            num_dropped=split.num_dropped,
            num_repeats=split.num_repeats,
        )

    def _written(self, plan: PlanFile, split: str) -> Iterator[WrittenShard]:
        """The records of a split's shards, in order, read one at a time."""
        numbers = range(plan.splits[split].num_shards)
        names = [paths.record_path(split, number) for number in numbers]
        records = self.files.read_records(names, ShardRecord)
        for name, record in zip(names, records, strict=True):
            if record.plan_digest != plan.digest:
                raise plan_files.another_build(self.files.output, name)
            yield record.written

    def _publish(self, manifest: Manifest, base: Manifest | None) -> None:
        """Writes the manifest while the output belongs to this build; withdraws it if another
        starts meanwhile.
        """
        output, replaces = self.files.output, self.build.replaces or self.build.suffix != ""
        old = self.files.replaceable(naming.MANIFEST) if replaces else ABSENT
        self.files.check_current()
        try:
            if base:
                history.publish(output, base, manifest)
            else:
                output.write(naming.MANIFEST, manifests.to_json(manifest), if_generation=old)
        except PreconditionFailed as error:
            if replaces:  # the step is repeated
                raise
            try:  # it is there, with the checksums of indexes that another version of Arrow wrote
                history.publish(output, manifest, manifest)
            except ManifestError:
                raise ManifestError(_why_not_published(output)) from error
        try:
            self.files.check_current()
        except ManifestError:
            build = plan_files.find_record(output, paths.BUILD, BuildFile)
            # one that builds on it
            if not (build and build.appends and build.appends.base == manifest.digest):
                _withdraw(output, manifest.digest, base)
            raise


def _withdraw(output: Storage, digest: str, base: Manifest | None) -> None:
    """Removes the manifest with this digest, or puts the version before back: another build may
    remove its shards.
    """
    with suppress(NotFound):
        generation = output.stat(naming.MANIFEST).generation
        data = output.read(naming.MANIFEST, generation=generation)
        if manifests.parse(data, naming.MANIFEST).digest == digest:
            if base is None:
                output.delete(naming.MANIFEST, generation=generation)
                return
            output.write(naming.MANIFEST, manifests.to_json(base), if_generation=generation)


def _why_not_published(output: Storage) -> str:
    """Why the manifest could not be published, and what to do about it."""
    where = f"{output.url}/{naming.MANIFEST}"
    try:
        manifests.parse(output.read(naming.MANIFEST), where)
    except ManifestError as damage:
        return f"{damage}; all shards are written: remove it, then run the same command again"
    return (
        f"{where}: another manifest was written there meanwhile; two builds into one place can't"
        " both win: choose another --output, or rerun with --overwrite"
    )
