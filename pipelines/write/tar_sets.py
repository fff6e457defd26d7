"""Sets of tars that are written or found one by one, each with a record: adopted sets and columns."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipelines.plan import files as plan_files
from pipelines.runners import options
from pipelines.runners.each import Show, for_each
from pipelines.write.shard import is_stored
from shardset.errors import ChangedInput, ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, Manifest, Provenance, Quarantine, Split
from shardset.format.shards import Promise
from shardset.format.write import WrittenShard, write_split
from shardset.prepared import prepared
from shardset.storage.base import ABSENT, Storage
from shardset.version import __version__

_TOOL = f"shardset {__version__}"


class Task(NamedTuple):
    """A tar whose record is wanted, a digest of all that decides on it, and what it is made from."""

    path: str
    digest: str
    source: Any


@prepared
class TarRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/tars/...`: a tar with its index; None if it can't be in the set.

    `labels` counts the samples of each class; `rejected` are names and reasons; `num_values` counts the samples with a
    value in a column, `headers` are those of its arrays.
    """

    written: WrittenShard | None
    labels: dict[int, int] = {}
    rejected: list[tuple[str, str]] = []
    num_values: int = 0
    headers: list[str] = []


Groups = Sequence[tuple[str, Sequence[TarRecord]]]
"""Brace patterns, and the tars that each of them names."""


def digest_of(*parts: object) -> str:
    """A digest of what decides on a tar, or on a set."""
    return hashlib.sha256(repr((_TOOL, *parts)).encode()).hexdigest()


def ensure(
    output: Storage, name: str, tasks: Sequence[Task], make: Callable[[Task], TarRecord], flags: Sequence[str],
    *, source: str, num_bytes: int, show: Show | None,
) -> list[TarRecord]:  # fmt: skip
    """The record of each tar of a set made by the verb `name`; workers `make` those that are missing, with their tars.

    Raises ConfigError where the output holds another set.
    """
    done = _published(output, name)
    found = [*plan_files.in_order(output, tasks, partial(_find, output))]
    if missing := [task for task, record in zip(tasks, found, strict=True) if record is None]:
        if done:
            raise _other(output)
        beam_options = options.prepare(flags, source=source, output=output)
        options.limit_workers(beam_options, flags, len(missing), num_bytes)
        for_each(partial(_ensure, output, make), missing, beam_options, show)
        found = [*plan_files.in_order(output, tasks, partial(_find, output))]
    records = [record for record in found if record]
    if len(records) < len(tasks):
        raise ChangedInput(f"{source}: changed while it was read; run the same command again")
    return records


def put(output: Storage, task: Task, record: TarRecord) -> TarRecord:
    """Writes the record of a tar, after its index."""
    plan_files.write(output, _record_path(task), task.digest[:16], msgspec.json.encode(record))
    return record


def publish(
    output: Storage, name: str, groups: Mapping[str, Groups], source_digest: str, options: dict[str, Any],
    *, promises: Sequence[Promise] = (), num_rejected: int = 0,
) -> Manifest:  # fmt: skip
    """Writes the tables and last the manifest, of which it returns the head; PreconditionFailed if there is another.

    `groups` are those of each split. The classes are the numbers up to the largest label.
    """
    provenance = Provenance(
        tool=_TOOL, source=name, source_digest=source_digest, options=options, libraries={}, notes=[]
    )  # fmt: skip
    if done := _published(output, name):
        if done.provenance != provenance:
            raise _other(output)
        return done
    parts = [part for several in groups.values() for part in several]
    num_classes = 1 + max((label for _, records in parts for record in records for label in record.labels), default=-1)

    def written(folder: str, pattern: str, records: Sequence[TarRecord]) -> Split:
        table, labels = naming.table_path(folder), Counter[int]()
        for record in records:
            labels.update(record.labels)
        with output.writer(table) as out:
            return write_split(
                out, [record.written for record in records if record.written], pattern=pattern, table_path=table,
                num_shards=len(records), class_totals=[labels[label] for label in range(num_classes)], seed=0,
                plan_digest=source_digest, promises=promises,
            )  # fmt: skip

    splits = {
        split: _joined([written(f"{split}/{at}" if at else split, *part) for at, part in enumerate(several)])
        for split, several in groups.items()
    }
    sealed = manifests.seal(
        Manifest(
            kind=manifests.KIND,
            version=manifests.VERSION,
            digest="",
            classes=[ClassInfo(label=label, name=str(label)) for label in range(num_classes)],
            splits=splits,
            quarantine=Quarantine(count=num_rejected, path=naming.quarantine_path()),
            fixes={},
            provenance=provenance,
        )
    )
    with output.writer(naming.MANIFEST, if_generation=ABSENT) as out:
        out.write(manifests.to_json(sealed))
    return sealed


def put_rejected(output: Storage, rejected: Sequence[Mapping[str, Any]]) -> None:
    """Writes the quarantine list."""
    with output.writer(naming.quarantine_path()) as out:
        out.write("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in rejected).encode())


def _joined(parts: Sequence[Split]) -> Split:
    """One split of the groups of several, in their order."""
    added = ("num_samples", "num_source_samples", "num_content_bytes", "num_tar_bytes")
    groups: Any = [group for part in parts for group in part.groups]
    return msgspec.structs.replace(
        parts[0],
        **{name: sum(getattr(part, name) for part in parts) for name in added},
        **{name: max(getattr(part, name) for part in parts) for name in ("max_tar_bytes", "max_index_bytes")},
        class_totals=[sum(counts) for counts in zip(*(part.class_totals for part in parts), strict=True)],
        shards=groups,
    )


def _ensure(output: Storage, make: Callable[[Task], TarRecord], task: Task) -> None:
    if _find(output, task) is None:
        put(output, task, make(task))


def _find(output: Storage, task: Task) -> TarRecord | None:
    """The record of a tar whose index exists, and which was made from the same."""
    path = _record_path(task)
    file = plan_files.find(output, path)
    if not file or file.build != task.digest[:16]:
        return None
    record = plan_files.decode_record(output, path, file.content, TarRecord)
    return record if not record.written or is_stored(output, record.written.shard.index) else None


def _record_path(task: Task) -> str:
    return f"{naming.PLAN_FOLDER}tars/{task.path}.json"


def _published(output: Storage, name: str) -> Manifest | None:
    """The head of the manifest at the output, None if there is none; ConfigError if another verb made it."""
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    if head.provenance.source != name:
        raise ConfigError(f"{output.url}/{naming.MANIFEST}: another shard set is there already; leave it as it is")
    return head


def _other(output: Storage) -> ConfigError:
    return ConfigError(
        f"{output.url}: finished before, from another input; to make it again from this one, remove {naming.MANIFEST} "
        "there first"
    )
