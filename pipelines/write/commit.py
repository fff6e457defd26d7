"""The commit of a build: turns the records of all shards into the manifest, which is published last."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any, Literal

import msgspec

from pipelines.config import BuildConfig
from pipelines.images.encode import libraries
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.plan.layout import SplitPlan
from pipelines.plan.records import PlanFile, ShardRecord
from pipelines.plan.slices import copy_range
from pipelines.write import replace
from pipelines.write.pages import PagePart, PageWriter, read_records
from shardset.errors import ManifestError, NotFound, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Provenance, Quarantine, Split
from shardset.order.permutation import ORDER_VERSION
from shardset.storage.base import ABSENT, Storage, os_errors_as_storage_errors
from shardset.version import __version__


@dataclass(frozen=True, slots=True)
class Committer:
    """Publishes the set of a build; pickles. `suffix` keeps its files apart from those of a replaced set.

    If `replaces`, another build may have written into the same folders before.
    """

    files: PlanFiles
    config: BuildConfig
    suffix: str
    replaces: bool = False

    @property
    def page_writer(self) -> PageWriter:
        """What writes the pages of a manifest of version 2."""
        return PageWriter(self.files, self.suffix)

    def pages(self, plan: PlanFile, num_finished: int) -> list[tuple[str, int]]:
        """The split and the number of each page to write before `commit`; none if `manifest.json` lists the shards."""
        num_shards = sum(split.num_shards for split in plan.splits.values())
        is_paged = num_finished == num_shards > self.config.max_listed_shards
        return [*self.page_writer.numbers(plan)] if is_paged else []

    def commit(self, plan: PlanFile, num_finished: int, parts: Iterable[PagePart] = ()) -> str | None:
        """Publishes the manifest if all shards are finished and returns its digest; None if shards are missing.

        `parts` are the written `pages`. A replaced set stays complete until the new manifest is published; then its
        files are removed.
        """
        if num_finished != sum(split.num_shards for split in plan.splits.values()):
            return None
        complete = self.files.read_record(paths.PLAN, PlanFile)  # `plan` travels without its classes
        if complete.digest != plan.digest:
            raise plan_files.another_build(self.files.output, paths.PLAN)
        quarantine = naming.quarantine_path(self.suffix)
        copy_range(self.files, complete.rejected, quarantine)
        if pages := self.pages(plan, num_finished):
            found = sorted(parts, key=lambda part: (part.split, part.number))
            assert [(part.split, part.number) for part in found] == sorted(pages), "every page is written once"
            digest = self.write_head(complete, found)
        else:
            digest = self.write_manifest(complete, {name: self.read_records(plan, name) for name in plan.splits})
        self._remove_replaced()
        return digest

    def read_records(self, plan: PlanFile, split: str) -> Iterator[ShardRecord]:
        """The records of all shards of a split, in order, read one at a time."""
        return read_records(self.files, plan, split, range(plan.splits[split].num_shards))

    def write_head(self, plan: PlanFile, parts: Iterable[PagePart], pages: PageWriter | None = None) -> str:
        """Writes the manifest of a plan whose shards are in pages, and returns its digest."""
        by_split = {name: [part for part in parts if part.split == name] for name in sorted(plan.splits)}
        writer = pages or self.page_writer
        splits = {
            name: _split_of(
                plan.splits[name],
                sum(part.num_content_bytes for part in found),
                dict.fromkeys(field for part in found for field in part.fields),
                writer.pages_of(name, found),
            )
            for name, found in by_split.items()
        }
        manifest = manifests.seal(self._manifest(plan, splits, manifests.PAGED))
        self._publish(manifest.digest, [manifests.to_json(manifest)])
        return manifest.digest

    def write_manifest(self, plan: PlanFile, records: Mapping[str, Iterable[ShardRecord]]) -> str:
        """Writes the manifest of a plan whose shards are all finished and returns its digest."""
        # The manifest begins with sums and a digest over all shards, so their entries wait in temporary files.
        with os_errors_as_storage_errors(f"the temporary folder {tempfile.gettempdir()}"), ExitStack() as stack:
            lines = {name: stack.enter_context(tempfile.TemporaryFile()) for name in plan.splits}
            splits = {name: _split(split, records[name], lines[name]) for name, split in sorted(plan.splits.items())}
            manifest = self._manifest(plan, splits, manifests.LISTED)
            digest, pieces = manifests.json_of_entries(manifest, lambda split: _read_lines(lines[split]))
            self._publish(digest, pieces)
        return digest

    def _manifest(self, plan: PlanFile, splits: dict[str, Split], version: Literal[1, 2]) -> Manifest:
        config = self.config
        return Manifest(
            kind=manifests.KIND,
            version=version,
            digest="",
            plan_digest=plan.digest,
            seed=config.seed,
            order_version=ORDER_VERSION,
            remainder=config.remainder,
            classes=plan.classes,
            splits=splits,
            quarantine=Quarantine(count=plan.num_rejected, path=naming.quarantine_path(self.suffix)),
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

    def _publish(self, digest: str, pieces: Iterable[bytes]) -> None:
        """Writes the manifest while the output belongs to this build; removes it if another build starts meanwhile."""
        output, replaces = self.files.output, self.replaces or self.suffix != ""
        old = self.files.replaceable(naming.MANIFEST) if replaces else ABSENT
        self.files.check_current()
        try:
            with output.writer(naming.MANIFEST, if_generation=old) as out:
                for piece in pieces:
                    out.write(piece)
        except PreconditionFailed as error:
            if replaces:  # the step is repeated
                raise
            raise ManifestError(_why_not_published(output)) from error
        try:
            self.files.check_current()
        except ManifestError:
            _withdraw(output, digest)
            raise

    def _remove_replaced(self) -> None:
        """Removes the files of the replaced set, and last the file that names them, so that a rerun can continue."""
        generation = self.files.replaceable(paths.REPLACED)
        content = self.files.find(paths.REPLACED)
        if content is not None:
            output = self.files.output
            old = manifests.parse(bytes(content), f"{output.url}/{paths.REPLACED}")
            replace.remove(self.files, [naming.REPORT, *replace.files_of(old)])  # the report is about the old set
            output.delete(paths.REPLACED, generation=generation)  # a build that has begun since may have its own


def _split(plan: SplitPlan, records: Iterable[ShardRecord], file: IO[bytes]) -> Split:
    """A split of the manifest without its shards, which are written to `file`, one on each line."""
    num_content_bytes, first_id = 0, 0
    fields: dict[str, None] = {}
    for record in records:
        num_content_bytes += record.num_content_bytes
        fields.update(dict.fromkeys(record.fields))
        file.write(manifests.entry_of(msgspec.structs.replace(record.shard, first_id=first_id)) + b"\n")
        first_id += record.shard.num_samples
    return _split_of(plan, num_content_bytes, fields, [])


def _split_of(plan: SplitPlan, num_content_bytes: int, fields: Iterable[str], shards: Any) -> Split:
    return Split(
        num_samples=plan.num_stored,
        num_shards=plan.num_shards,
        num_source_samples=plan.num_source,
        num_dropped=plan.num_dropped,
        num_repeats=plan.num_repeats,
        num_content_bytes=num_content_bytes,
        fields=list(fields),
        shards=shards,
    )


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    for line in file:
        yield line.removesuffix(b"\n")


def _withdraw(output: Storage, digest: str) -> None:
    """Removes the manifest with this digest, because another build may remove its shards."""
    with suppress(NotFound):
        generation = output.stat(naming.MANIFEST).generation
        data = output.read(naming.MANIFEST, generation=generation)
        if manifests.parse(data, naming.MANIFEST).digest == digest:
            output.delete(naming.MANIFEST, generation=generation)


def _why_not_published(output: Storage) -> str:
    """Why the manifest could not be published, and what to do about it."""
    where = f"{output.url}/{naming.MANIFEST}"
    try:
        manifests.parse(output.read(naming.MANIFEST), where)
    except ManifestError as damage:
        return f"{damage}; all shards are written: remove it, then run the same command again"
    return (
        f"{where}: another manifest was written there meanwhile; two builds into one place can't both win: "
        "choose another --output, or rerun with --overwrite"
    )
