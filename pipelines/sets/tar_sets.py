"""Tars that are written or found one by one: their records, their names, and the sets that they
make.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from pipelines.plan import files as plan_files
from pipelines.plan.tables import QuarantineEntry
from pipelines.sources.base import class_infos
from pipelines.worker_output import say_beam
from pipelines.write import history
from pipelines.write.shard import is_stored
from shardset.errors import ChangedInput, ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import LoadedSet, Manifest, Provenance, Quarantine, Split
from shardset.format.write import WrittenShard
from shardset.prepared import prepared
from shardset.storage.base import ABSENT, Storage
from shardset.storage.many import in_order
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


def runs(paths: Sequence[str], owners: Sequence[object]) -> Iterator[tuple[str, range]]:
    """The tars of the same owner in runs that a brace pattern names: the pattern, and their places
    in `paths`.
    """
    names = [name_of(path) for path in paths]

    def run(place: int) -> tuple[Any, ...]:
        before, after, width, number = names[place]
        return owners[place], before, after, width, number - place

    for (_, before, after, width, first), group in groupby(range(len(paths)), run):
        places = [*group]
        start, last = places[0], places[-1]
        pattern = f"{before}{{{first + start:0{width}d}..{first + last:0{width}d}}}{after}"
        yield pattern, range(start, last + 1)


def name_of(path: str) -> tuple[str, str, int, int]:
    """The text before and after the number in the name of a tar, the digits and the value of the
    number.
    """
    parts = _NAME.fullmatch(path)
    if parts is None or not path.isascii() or not naming.is_relative(path):
        raise ConfigError(
            f"{path!r}: a manifest can't name this tar; call it in ASCII with a number: t-0.tar"
        )
    return parts[1], parts[3], len(parts[2]), int(parts[2])


def published(output: Storage, verb: str) -> Manifest | None:
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


def other_input(output: Storage) -> ConfigError:
    """The error for a finished set whose input isn't what the verb was given now."""
    return ConfigError(
        f"{output.url}: finished before, from other input; remove {naming.MANIFEST} there to"
        " replace it"
    )


def ensure(
    output: Storage,
    tasks: Sequence[Task],
    make: Callable[[Task], TarRecord],
    *,
    is_finished: bool,
    flags: Sequence[str],
    source: tuple[str, int],
    console: Console | None,
) -> list[TarRecord]:
    """The record of each tar of a set; workers `make` those that are missing.

    `source` is what they read, and its size in bytes. Raises ConfigError if any is missing though
    the set is finished.
    """
    records = [*in_order(output.reads_at_once, tasks, partial(find, output))]
    if missing := [task for task, record in zip(tasks, records, strict=True) if record is None]:
        if is_finished:
            raise other_input(output)
        say_beam(console)
        from pipelines.runners import beam_options as options
        from pipelines.runners.on_beam import for_each

        beam_options = options.prepare(flags, source=source[0], output=output)
        options.limit_workers(beam_options, flags, len(missing), source[1])
        for_each(
            partial(_ensure, output, make),
            missing,
            beam_options,
            console.print if console else None,
        )
        records = [*in_order(output.reads_at_once, tasks, partial(find, output))]
    if None in records:
        raise ChangedInput(f"{source[0]}: changed while it was read; run the same command again")
    return [record for record in records if record]


def publish(
    output: Storage,
    verb: str,
    splits: Mapping[str, list[Split]],
    *,
    source_digest: str,
    options: dict[str, Any],
    notes: Sequence[str] = (),
    num_classes: int = 0,
    rejected: Sequence[QuarantineEntry] = (),
    base: Manifest | None = None,
) -> LoadedSet:
    """Writes the quarantine list and last the manifest of splits in parts; returns the set with its
    head.

    The classes are numbers. With `base`, which it replaces, the groups of that come first.
    """
    output.write(naming.quarantine_path(), b"".join(entry.line for entry in rejected))
    manifest = Manifest(
        kind=manifests.KIND,
        version=manifests.VERSION,
        digest="",
        classes=class_infos(list(map(str, range(num_classes)))),
        splits={name: history.joined(parts, num_classes) for name, parts in splits.items()},
        quarantine=Quarantine(count=len(rejected), path=naming.quarantine_path()),
        fixes={},
        provenance=Provenance(
            tool=_TOOL,
            source=verb,
            source_digest=source_digest,
            options=options,
            libraries={},
            notes=[*notes],
        ),
    )
    if base:
        manifest = manifests.seal(history.appended(base, manifest))
        history.publish(output, base, manifest)
    else:
        manifest = manifests.seal(manifest)
        output.write(naming.MANIFEST, manifests.to_json(manifest), if_generation=ABSENT)
    return LoadedSet(manifest, output)


def _ensure(output: Storage, make: Callable[[Task], TarRecord], task: Task) -> None:
    if find(output, task) is None:
        record = msgspec.json.encode(make(task))
        plan_files.write(output, _record_path(task), task.digest[:16], record)


def find(output: Storage, task: Task) -> TarRecord | None:
    """The record of a tar, if it was made from the same and the index exists."""
    file = plan_files.find(output, _record_path(task))
    if not file or file.build != task.digest[:16]:
        return None
    record = plan_files.decode_record(output, _record_path(task), file.content, TarRecord)
    return record if is_stored(output, record.written.shard.index) else None


def _record_path(task: Task) -> str:
    return f"{naming.PLAN_FOLDER}tars/{task.path}.json"
