"""The commit of a build: turns the records of all shards into the manifest, which is published
last.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from pipelines.images.encode import libraries
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.append import base_of
from pipelines.plan.plan_records import Build, BuildFile, GroupFile, PlanFile
from pipelines.write import history, replace
from shardset.errors import ManifestError, NotFound, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Provenance, Quarantine, Split
from shardset.format.shards import pattern_of
from shardset.format.write import WrittenShard, write_split
from shardset.storage.base import ABSENT, Storage
from shardset.version import __version__


def commit(
    build: Build,
    plan: PlanFile,
    records: Mapping[str, Mapping[int, bytes]],
    class_totals: Mapping[str, Mapping[int, int]],
) -> str | None:
    """Publishes the set of a build, or the next version of the one it appends to, if all shards are
    finished; returns the digest of the manifest, None if shards are missing.

    `records` are of the finished shards by split and number, `class_totals` the samples of each
    label by split. A replaced set stays complete until the
    new manifest is published; then its files are removed, if the storage permits it.
    """
    if any(len(records[name]) < split.num_shards for name, split in plan.splits.items()):
        return None
    # `plan` travels without its classes
    complete = build.files.read_record(paths.PLAN, PlanFile)
    if complete.digest != plan.digest:
        raise plan_files.another_build(build.files.output, paths.PLAN)
    written = {name: _in_order(numbered) for name, numbered in records.items()}
    digest = write_manifest(build, complete, written, class_totals)
    replace.remove_replaced(build.files)
    return digest


def write_manifest(
    build: Build,
    plan: PlanFile,
    written: Mapping[str, Iterable[WrittenShard]],
    class_totals: Mapping[str, Mapping[int, int]],
) -> str:
    """Writes the tables and the manifest of a plan whose shards are all finished, and returns its
    digest.
    """
    config, file, base = build.config, build.file, base_of(build.files, build.file.appends)
    splits = {
        name: _write_split(
            build,
            plan,
            name,
            written[name],
            [class_totals[name].get(label, 0) for label in range(plan.num_classes)],
        )
        for name in sorted(plan.splits)
    }
    manifest = Manifest(
        kind=manifests.KIND,
        version=manifests.VERSION,
        digest="",
        classes=plan.classes,
        splits=splits,
        quarantine=Quarantine(count=plan.num_rejected, path=naming.quarantine_path(file.suffix)),
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
        input=build.source.input.url,
        image=config.image,
        build=file,
        fields={name: [*split.fields] for name, split in plan.splits.items()},
    )
    build.files.write(paths.group_path(build.files.build), msgspec.json.encode(group))
    sealed = manifests.seal(history.appended(base, manifest) if base else manifest)
    _publish(build, sealed, base)
    return sealed.digest


def _write_split(
    build: Build,
    plan: PlanFile,
    name: str,
    written: Iterable[WrittenShard],
    class_totals: list[int],
) -> Split:
    split, folder = plan.splits[name], name + build.file.suffix
    return write_split(
        build.files.writer,
        written,
        pattern=pattern_of(folder, name, split.num_shards),
        table_path=naming.table_path(folder),
        class_totals=class_totals,
        seed=build.config.seed,
        plan_digest=plan.digest,
        promises=["mixed", "reproducible"],
        num_dropped=split.num_dropped,
        num_repeats=split.num_repeats,
    )


def _in_order(records: Mapping[int, bytes]) -> Iterator[WrittenShard]:
    """The shards of a split in order, each made when it is needed."""
    return (msgspec.json.decode(records[number], type=WrittenShard) for number in sorted(records))


def _publish(build: Build, manifest: Manifest, base: Manifest | None) -> None:
    """Writes the manifest while the output belongs to this build; withdraws it if another
    starts meanwhile.
    """
    output, replaces = build.files.output, build.file.replaces or build.file.suffix != ""
    old = build.files.replaceable(naming.MANIFEST) if replaces else ABSENT
    build.files.check_current()
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
        build.files.check_current()
    except ManifestError:
        newest = plan_files.find_record(output, paths.BUILD, BuildFile)
        # one that builds on it
        if not (newest and newest.appends and newest.appends.base == manifest.digest):
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
