"""The commit: every shard's record becomes one manifest, written last and at once."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import IO

import msgspec

from pipelines.images.encode import libraries
from pipelines.plan import files as planfiles
from pipelines.plan import paths
from pipelines.plan.job import Job, PlanFile, record_of
from pipelines.plan.layout import SplitPlan
from pipelines.plan.partitions import copy_part, in_order
from pipelines.write import replace
from pipelines.write.shard import ShardRecord
from shardset.errors import ManifestError, NotFound, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Provenance, Quarantine, Split
from shardset.order.permutation import ORDER_VERSION
from shardset.storage.base import ABSENT, Storage, os_errors_as_storage_errors
from shardset.version import __version__


def commit(job: Job, plan: PlanFile, num_finished: int) -> str | None:
    """Publishes the manifest if that many are all shards, and returns its digest; None if only some were asked for.

    A set that this one replaces stays whole until the new manifest stands; then its files go.
    """
    if num_finished != sum(split.num_shards for split in plan.splits.values()):
        return None
    whole = record_of(job.output, paths.PLAN, job.read(paths.PLAN), PlanFile)  # `plan` travels without its classes
    if whole.digest != plan.digest:
        raise planfiles.another_build(job.output, paths.PLAN)
    list_rejected(job, whole)
    digest = write_manifest(job, whole, {name: read_records(job, plan, name) for name in plan.splits})
    _remove_replaced(job)
    return digest


def list_rejected(job: Job, plan: PlanFile) -> None:
    """Lays the list of rejected samples beside the shards."""
    name = naming.quarantine_path(job.suffix)
    copy_part(job.output, plan.rejected, name, job.condition_of(name))


def read_records(job: Job, plan: PlanFile, split: str) -> Iterator[ShardRecord]:
    """The records of all shards of a split, in order, each read when it is asked for."""
    names = [paths.record_path(split, number) for number in range(plan.splits[split].num_shards)]
    for name, data in zip(names, in_order(job.output, names, job.read), strict=True):
        record = record_of(job.output, name, data, ShardRecord)
        if record.plan_digest != plan.digest:
            raise planfiles.another_build(job.output, name)
        yield record


def write_manifest(job: Job, plan: PlanFile, records: Mapping[str, Iterable[ShardRecord]]) -> str:
    """Writes the manifest of a plan whose shards are all finished, and returns its digest; holds one shard at a time.

    Between the records and the manifest, which says their sums and its digest first, the shards wait on the disk.
    """
    with os_errors_as_storage_errors(f"the temporary folder {tempfile.gettempdir()}"), ExitStack() as stack:
        files = {name: stack.enter_context(tempfile.TemporaryFile()) for name in plan.splits}
        splits = {name: _split(split, records[name], files[name]) for name, split in sorted(plan.splits.items())}
        digest, pieces = manifests.json_of_entries(_manifest(job, plan, splits), lambda split: _lines(files[split]))
        _publish(job, digest, pieces)
    return digest


def _manifest(job: Job, plan: PlanFile, splits: dict[str, Split]) -> Manifest:
    config = job.config
    return Manifest(
        kind=manifests.KIND,
        version=manifests.VERSION,
        digest="",
        plan_digest=plan.digest,
        seed=config.seed,
        order_version=ORDER_VERSION,
        remainder=config.remainder,
        classes=plan.classes,
        splits=splits,
        quarantine=Quarantine(count=plan.num_rejected, path=naming.quarantine_path(job.suffix)),
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


def _split(plan: SplitPlan, records: Iterable[ShardRecord], file: IO[bytes]) -> Split:
    """What is said of a split besides its shards, which go into `file`, a line each."""
    num_content_bytes, first_id = 0, 0
    fields: dict[str, None] = {}
    for record in records:
        num_content_bytes += record.num_content_bytes
        fields.update(dict.fromkeys(record.fields))
        file.write(manifests.entry_of(msgspec.structs.replace(record.shard, first_id=first_id)) + b"\n")
        first_id += record.shard.num_samples
    return Split(
        num_samples=plan.num_stored,
        num_shards=plan.num_shards,
        num_source_samples=plan.num_source,
        num_dropped=plan.num_dropped,
        num_repeats=plan.num_repeats,
        num_content_bytes=num_content_bytes,
        fields=list(fields),
        shards=[],
    )


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    for line in file:
        yield line.removesuffix(b"\n")


def _publish(job: Job, digest: str, pieces: Iterable[bytes]) -> None:
    """Writes the manifest while the output is this build's; takes it back if another began there in that moment."""
    stands = job.condition_of(naming.MANIFEST)
    try:
        with job.output.writer(naming.MANIFEST, if_generation=stands if job.suffix else ABSENT) as out:
            for piece in pieces:
                out.write(piece)
    except PreconditionFailed as error:
        raise ManifestError(_what_stands(job.output)) from error
    try:
        job.check_place()
    except ManifestError:
        _take_back(job.output, digest)
        raise


def _take_back(output: Storage, digest: str) -> None:
    """Removes a manifest whose shards another build may remove; that build's own has another digest and stays."""
    with suppress(NotFound):
        generation = output.stat(naming.MANIFEST).generation
        data = output.read(naming.MANIFEST, generation=generation)
        if manifests.parse(data, naming.MANIFEST).digest == digest:
            output.delete(naming.MANIFEST, generation=generation)


def _what_stands(output: Storage) -> str:
    """What stands where the manifest was to be published, and what to do about it."""
    where = f"{output.url}/{naming.MANIFEST}"
    try:
        manifests.parse(output.read(naming.MANIFEST), where)
    except ManifestError as damage:
        return f"{damage}; all shards are written: remove it, then run the same command again"
    return (
        f"{where}: another manifest was written there meanwhile; two builds into one place can't both win: "
        "choose another --output, or rerun with --overwrite"
    )


def _remove_replaced(job: Job) -> None:
    """Removes the files of the set that this one replaced; what is to be removed is forgotten last, so a rerun can."""
    data = job.find(paths.REPLACED)
    if data is not None:
        old = manifests.parse(bytes(data), f"{job.output.url}/{paths.REPLACED}")
        doomed = [naming.REPORT, *replace.files_of(old)]  # the report is about the old set
        replace.remove(job.output, doomed, job.check_place)
        job.output.delete(paths.REPLACED)
