"""Publishes sets of tars that were written or found one by one, each with a record: adopted sets and columns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipelines.plan import files as plan_files
from pipelines.write.shard import is_stored
from shardset.errors import ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, Manifest, Provenance, Quarantine, Shard, Split
from shardset.format.shards import Promise
from shardset.format.write import WrittenShard, joined, write_split
from shardset.prepared import prepared
from shardset.storage.base import ABSENT, Storage
from shardset.version import __version__

TOOL = f"shardset {__version__}"


@prepared
class TarRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/tars/...`: a tar with its index, and what they were made from, which a rerun compares.

    `shard` is None for a tar that can't be in the set. `labels` counts the samples of each class, `num_values` those of
    a column that have a value, `kinds` are the headers and sizes of its arrays; `rejected` are names and reasons.
    """

    made_from: list[str]
    shard: Shard | None = None
    fields: list[str] = []
    num_content_bytes: int = 0
    labels: dict[int, int] = {}
    num_values: int = 0
    kinds: list[tuple[str, int]] = []
    rejected: list[tuple[str, str]] = []


class TarGroup(NamedTuple):
    """Tars that one brace pattern names, in its order."""

    pattern: str
    records: Sequence[TarRecord]


def find(output: Storage, path: str, made_from: Sequence[str]) -> TarRecord | None:
    """The record of a tar, if it and the index exist and were made from the same; None if they are to be made."""
    record = plan_files.find_record(output, _record_path(path), TarRecord)
    if record is None or record.made_from != [*made_from]:
        return None
    return record if record.shard is None or is_stored(output, record.shard.index) else None


def put(output: Storage, path: str, record: TarRecord) -> TarRecord:
    """Writes the record of a tar, after its index."""
    plan_files.write(output, _record_path(path), "", msgspec.json.encode(record))
    return record


def provenance_of(source: str, source_digest: str, **options: Any) -> Provenance:
    """Where such a set comes from."""
    return Provenance(
        tool=TOOL, source=source, source_digest=source_digest, options=options, libraries={}, notes=[]
    )  # fmt: skip


def published(output: Storage, source: str) -> Manifest | None:
    """The head of the manifest at the output, None if there is none; ConfigError if it is no set of that source."""
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    if head.provenance.source != source:
        raise ConfigError(f"{output.url}/{naming.MANIFEST}: another shard set is there already; leave it as it is")
    return head


def publish(
    output: Storage,
    groups: Mapping[str, Sequence[TarGroup]],
    provenance: Provenance,
    *,
    promises: Sequence[Promise],
    rejected: Sequence[Mapping[str, Any]] = (),
) -> Manifest:
    """Writes the tables, the quarantine list and last the manifest; PreconditionFailed if there is one by then.

    `groups` are those of each split. The classes are the numbers up to the largest label.
    """
    labels = [
        label for parts in groups.values() for part in parts for record in part.records for label in record.labels
    ]
    num_classes = max(labels, default=-1) + 1

    def written(group: TarGroup, table: str) -> Split:
        shards = [WrittenShard(each.shard, each.fields, each.num_content_bytes) for each in group.records if each.shard]
        totals = [sum(record.labels.get(label, 0) for record in group.records) for label in range(num_classes)]
        with output.writer(table) as out:
            return write_split(
                out, shards, pattern=group.pattern, table_path=table, num_shards=len(shards), class_totals=totals,
                seed=0, plan_digest=provenance.source_digest, promises=promises,
            )  # fmt: skip

    splits = {
        name: joined(
            [written(part, naming.table_path(f"{name}/{at}" if at else name)) for at, part in enumerate(parts)]
        )
        for name, parts in groups.items()
    }
    put_rejected(output, rejected)
    manifest = Manifest(
        kind=manifests.KIND,
        version=manifests.VERSION,
        digest="",
        classes=[ClassInfo(label=label, name=str(label)) for label in range(num_classes)],
        splits=splits,
        quarantine=Quarantine(count=len(rejected), path=naming.quarantine_path()),
        fixes={},
        provenance=provenance,
    )
    sealed = manifests.seal(manifest)
    with output.writer(naming.MANIFEST, if_generation=ABSENT) as out:
        out.write(manifests.to_json(sealed))
    return sealed


def put_rejected(output: Storage, rejected: Sequence[Mapping[str, Any]]) -> None:
    """Writes the quarantine list."""
    with output.writer(naming.quarantine_path()) as out:
        out.write("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in rejected).encode())


def _record_path(path: str) -> str:
    return f"{naming.PLAN_FOLDER}tars/{path}.json"
