"""Sets of tars that are written or found one by one, each with a record:
adopted sets and columns.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from pipelines.plan import files as plan_files
from pipelines.plan.tables import QuarantineEntry
from pipelines.sources.base import class_infos
from pipelines.sources.webdataset import LOOKED_FOR
from pipelines.terminal import say_beam
from pipelines.write import history
from pipelines.write.shard import is_stored
from shardset.errors import ChangedInput, ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.labels import NO_LABEL, notes_on
from shardset.format.manifest import LoadedSet, Manifest, Provenance, Quarantine, Split
from shardset.format.shards import Promise
from shardset.format.write import WrittenShard, write_split
from shardset.prepared import prepared
from shardset.storage.base import ABSENT, Storage
from shardset.version import __version__

_TOOL = f"shardset {__version__}"
_NAME = re.compile(r"([^{}\\]*?)([0-9]{1,9})((?:-of-[0-9]+|[^0-9{}\\]*)\.tar)", re.ASCII)


class Task(NamedTuple):
    """A tar whose record is wanted, a digest of all that decides on it,
    and what it is made from.
    """

    split: str
    path: str
    digest: str
    source: Any

    @property
    def name(self) -> tuple[str, str, int, int]:
        """The text before and after the number in the name of the tar, the digits and the value of
        the number.
        """
        found = _NAME.fullmatch(self.path)
        if found is None or not self.path.isascii() or not naming.is_relative(self.path):
            raise ConfigError(
                f"{self.path!r}: a manifest can't name this tar; call it in ASCII with a number:"
                " t-0.tar"
            )
        return found[1], found[3], len(found[2]), int(found[2])


@prepared
class TarRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/tars/...`: a tar with its index, the samples of each label, and its lines of the
    quarantine list.

    `fields` come from `count_fields`; a column needs neither labels nor fields. `num_values` are
    the samples that have a value in a column, `kinds` the dtypes and shapes of its arrays.
    """

    written: WrittenShard
    labels: dict[int, int] = {}
    fields: dict[str, int] = {}
    rejected: list[QuarantineEntry] = []
    num_values: int = 0
    kinds: list[tuple[str, tuple[int, ...]]] = []


def digest_of(*parts: object) -> str:
    """A digest of what decides on a tar, or on a set."""
    return hashlib.sha256(repr((_TOOL, *parts)).encode()).hexdigest()


def ensure(
    output: Storage,
    verb: str,
    tasks: Sequence[Task],
    make: Callable[[Task], TarRecord],
    flags: Sequence[str],
    source: tuple[str, int],
    console: Console | None,
) -> list[TarRecord]:
    """The record of each tar of a set that a verb makes; workers `make` those that are missing.

    `source` is what they read, and its size in bytes. Raises ConfigError where the output holds
    another set.
    """
    done, find = _published(output, verb), partial(_find, output)
    found = [*plan_files.in_order(output, tasks, find)]
    if missing := [task for task, record in zip(tasks, found, strict=True) if record is None]:
        if done:
            raise _other(output)
        say_beam(console)
        from pipelines.build import for_each
        from pipelines.runners import options

        beam_options = options.prepare(flags, source=source[0], output=output)
        options.limit_workers(beam_options, flags, len(missing), source[1])
        for_each(
            partial(_ensure, output, make),
            missing,
            beam_options,
            console.print if console else None,
        )
        found = [*plan_files.in_order(output, tasks, find)]
    if None in found:
        raise ChangedInput(f"{source[0]}: changed while it was read; run the same command again")
    return [record for record in found if record]


def publish(
    output: Storage,
    verb: str,
    tasks: Sequence[Task],
    records: Sequence[TarRecord],
    source_digest: str,
    *,
    promises: Sequence[Promise],
    **options: Any,
) -> LoadedSet:
    """Writes the tables, the quarantine list and last the manifest; returns the set with its head.

    The classes are the numbers up to the largest label. Raises ConfigError or PreconditionFailed
    where another set is.
    """
    totals = Counter[int]()
    for record in records:
        totals.update(record.labels)
    num_classes = 1 + max(totals, default=NO_LABEL)
    notes = notes_on(output.url, totals, num_classes - 1, LOOKED_FOR)
    made = Provenance(
        tool=_TOOL,
        source=verb,
        source_digest=source_digest,
        options=options,
        libraries={},
        notes=notes,
    )
    if done := _published(output, verb):
        if done.provenance != made:
            raise _other(output)
        return LoadedSet(done, output)
    splits: dict[str, list[Split]] = {}
    for split, pattern, group in _groups(tasks, records):
        parts = splits.setdefault(split, [])
        part = write_split(
            output.writer,
            [record.written for record in group],
            pattern=pattern,
            table_path=naming.table_path(f"{split}/{len(parts)}" if parts else split),
            class_totals=[
                sum(record.labels.get(label, 0) for record in group) for label in range(num_classes)
            ],
            plan_digest=source_digest,
            promises=promises,
        )
        parts.append(part)
    rejected = [entry for record in records for entry in record.rejected]
    output.write(naming.quarantine_path(), b"".join(entry.line for entry in rejected))
    manifest = Manifest(
        kind=manifests.KIND,
        version=manifests.VERSION,
        digest="",
        classes=class_infos(list(map(str, range(num_classes)))),
        splits={name: history.joined(parts, num_classes) for name, parts in splits.items()},
        quarantine=Quarantine(count=len(rejected), path=naming.quarantine_path()),
        fixes={},
        provenance=made,
    )
    sealed = manifests.seal(manifest)
    output.write(naming.MANIFEST, manifests.to_json(sealed), if_generation=ABSENT)
    return LoadedSet(sealed, output)


def _groups(
    tasks: Sequence[Task], records: Sequence[TarRecord]
) -> Iterator[tuple[str, str, list[TarRecord]]]:
    """The tars of each split, in runs that a brace pattern names."""

    def run(at: int) -> tuple[Any, ...]:
        before, after, width, number = tasks[at].name
        return tasks[at].split, before, after, width, number - at

    for (split, before, after, width, first), group in groupby(range(len(tasks)), run):
        ats = [*group]
        pattern = f"{before}{{{first + ats[0]:0{width}d}..{first + ats[-1]:0{width}d}}}{after}"
        yield split, pattern, [records[at] for at in ats]


def _ensure(output: Storage, make: Callable[[Task], TarRecord], task: Task) -> None:
    if _find(output, task) is None:
        record = msgspec.json.encode(make(task))
        plan_files.write(output, _record_path(task), task.digest[:16], record)


def _find(output: Storage, task: Task) -> TarRecord | None:
    """The record of a tar, if it was made from the same and the index exists."""
    file = plan_files.find(output, _record_path(task))
    if not file or file.build != task.digest[:16]:
        return None
    record = plan_files.decode_record(output, _record_path(task), file.content, TarRecord)
    return record if is_stored(output, record.written.shard.index) else None


def _record_path(task: Task) -> str:
    return f"{naming.PLAN_FOLDER}tars/{task.path}.json"


def _published(output: Storage, verb: str) -> Manifest | None:
    """The head of the manifest at the output, None if there is none; ConfigError if another verb
    made it.
    """
    try:
        head = manifests.read_head(output)
    except NotFound:
        return None
    if head.provenance.source != verb:
        raise ConfigError(
            f"{output.url}/{naming.MANIFEST}: another shard set is there already; leave it as it is"
        )
    return head


def _other(output: Storage) -> ConfigError:
    return ConfigError(
        f"{output.url}: finished before, from other input; remove {naming.MANIFEST} there to"
        " replace it"
    )
