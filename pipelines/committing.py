"""The commit: every shard's record becomes one manifest, written last and at once."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pipelines.encoding import ImageOptions, libraries
from pipelines.job import Job, PlanFile, put
from pipelines.parts import Part, read_parts
from pipelines.planning import SplitPlan
from pipelines.writing import ShardRecord
from shardset import manifest as manifests
from shardset import naming
from shardset.errors import ManifestError, NotFound, PreconditionFailed
from shardset.manifest import Manifest, Provenance, Quarantine, Shard, Split
from shardset.permutation import ORDER_VERSION
from shardset.storage import ABSENT
from shardset.version import __version__


def commit(job: Job, plan: PlanFile, num_finished: int) -> Manifest | None:
    """Publishes the manifest if that many are all shards; None if only some were asked for.

    A set that this one replaces stays whole until the new manifest stands; then its files go.
    """
    if num_finished != sum(split.num_shards for split in plan.splits.values()):
        return None
    manifest = make_manifest(job, plan, {name: read_records(job, plan, name) for name in plan.splits})
    put(job.output, manifest.quarantine.path, job.output.read(naming.REJECTED))
    _publish(job, manifest)
    if job.suffix:
        _remove_replaced(job, manifest)
    return manifest


def read_records(job: Job, plan: PlanFile, split: str) -> Iterator[ShardRecord]:
    """The records of all shards of a split, in order, each read when it is asked for."""
    names = (naming.record_path(split, number) for number in range(plan.splits[split].num_shards))
    for data in read_parts(job.output, map(Part, names)):
        record = msgspec.json.decode(data, type=ShardRecord)
        assert record.plan_digest == plan.digest, "a finished shard is one of this plan"
        yield record


def make_manifest(job: Job, plan: PlanFile, records: Mapping[str, Iterable[ShardRecord]]) -> Manifest:
    """The sealed manifest of a plan whose shards are all finished."""
    config = job.config
    encodes = plan.spooled or plan.fixes or config.image != ImageOptions(max_pixels=config.image.max_pixels)
    return manifests.seal(
        Manifest(
            kind=manifests.KIND,
            version=manifests.VERSION,
            digest="",
            plan_digest=plan.digest,
            seed=config.seed,
            order_version=ORDER_VERSION,
            remainder=config.remainder,
            classes=plan.classes,
            splits={name: _split(split, records[name]) for name, split in sorted(plan.splits.items())},
            quarantine=Quarantine(count=plan.num_rejected, path=naming.quarantine_path(job.suffix)),
            fixes=plan.fixes,
            provenance=Provenance(
                tool=f"shardset {__version__}",
                source=config.source,
                source_digest=plan.source_digest,
                options=config.what_decides_bytes(),
                libraries=libraries(config.image) if encodes else {},
                notes=plan.notes,
            ),
        )
    )


def _split(plan: SplitPlan, records: Iterable[ShardRecord]) -> Split:
    num_content_bytes, first_id = 0, 0
    fields: dict[str, None] = {}
    shards: list[Shard] = []
    for record in records:
        num_content_bytes += record.num_content_bytes
        fields.update(dict.fromkeys(record.fields))
        shards.append(msgspec.structs.replace(record.shard, first_id=first_id))
        first_id += record.shard.num_samples
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


def _publish(job: Job, manifest: Manifest) -> None:
    data = manifests.to_json(manifest)
    try:
        condition = job.output.stat(naming.MANIFEST).generation if job.suffix else ABSENT
    except NotFound:
        condition = ABSENT
    try:
        put(job.output, naming.MANIFEST, data, if_generation=condition)
    except PreconditionFailed as error:
        raise ManifestError(
            f"{job.output.url}/{naming.MANIFEST}: another manifest was written there meanwhile; two builds into one "
            "place can't both win: choose another --output, or rerun with --overwrite"
        ) from error


def _remove_replaced(job: Job, manifest: Manifest) -> None:
    job.output.delete(naming.REPORT)  # it is about the old set
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    keep = {manifest.quarantine.path, *(path for shard in shards for path in (shard.path, shard.index.path))}
    for found in list(job.output.list()):
        ours = naming.is_shard_file(found.name) or naming.is_quarantine(found.name)
        if ours and found.name not in keep:
            job.output.delete(found.name)
