"""Makes a shard set of tars that others made, where they are: an index next to each tar, and a
manifest.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from rich.console import Console

from pipelines.config import AdoptConfig
from pipelines.holdout import REST
from pipelines.plan.tables import QuarantineEntry
from pipelines.sets import tar_sets
from pipelines.sets.tar_index import index_tar
from pipelines.sets.tar_sets import TarRecord, Task, digest_of, name_of, runs
from pipelines.sources.tar_fields import checked_fields
from pipelines.sources.webdataset import LOOKED_FOR, find_tars, split_in, tars_below, tars_named
from shardset.errors import ConfigError, SourceError
from shardset.format import naming
from shardset.format.labels import NO_LABEL, notes_on
from shardset.format.manifest import LoadedSet, Split
from shardset.format.write import write_index, write_split
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice
from shardset.storage.open import open_storage

VERB: Final = "adopt"


def adopt(
    config: AdoptConfig, beam_flags: Sequence[str] = (), console: Console | None = None
) -> LoadedSet:
    """Indexes the tars and publishes their manifest; returns the set with its head; a rerun keeps
    finished indexes.

    `quarantine.jsonl` lists everything that isn't a sample. Raises SourceError for a tar that can't
    be read to its end, and for fields that are parts of keys.
    """
    storage, tasks = _find(config)
    done = tar_sets.published(storage, VERB)
    records = tar_sets.ensure(
        storage,
        tasks,
        partial(index, storage),
        is_finished=done is not None,
        flags=beam_flags,
        source=(config.input, sum(task.source.num_bytes for task in tasks)),
        console=console,
    )
    digest = digest_of(
        [
            (task.split, task.path, record.written.shard.sha256)
            for task, record in zip(tasks, records, strict=True)
        ]
    )
    fields, labels = Counter[str](), Counter[int]()
    for record in records:
        fields.update(record.fields)
        labels.update(record.labels)
    checked_fields(config.input, fields)
    num_classes = 1 + max(labels, default=NO_LABEL)
    if done:
        if done.provenance.source_digest != digest:
            raise tar_sets.other_input(storage)
        return LoadedSet(done, storage)
    splits: dict[str, list[Split]] = {}
    for pattern, places in runs([task.path for task in tasks], [task.split for task in tasks]):
        split, group = tasks[places.start].split, records[places.start : places.stop]
        parts = splits.setdefault(split, [])
        part = write_split(
            storage.writer,
            [record.written for record in group],
            pattern=pattern,
            table_path=naming.table_path(f"{split}/{len(parts)}" if parts else split),
            class_totals=[
                sum(record.labels.get(label, 0) for record in group) for label in range(num_classes)
            ],
            plan_digest=digest,
            promises=[],
        )
        parts.append(part)
    rejected = [entry for record in records for entry in record.rejected]
    return tar_sets.publish(
        storage,
        VERB,
        splits,
        source_digest=digest,
        options={},
        notes=notes_on(storage.url, labels, num_classes - 1, LOOKED_FOR),
        num_classes=num_classes,
        rejected=rejected,
    )


def index(storage: Storage, task: Task) -> TarRecord:
    """Writes the index of a tar; runs on a worker.

    Raises SourceError if the tar is damaged or holds no sample.
    """
    builder, fields, odd = read_twice(lambda: index_tar(storage, task.source))
    rows = builder.take_index()
    if not len(rows):
        why = f" ({odd[0][0]}: {odd[0][1]})" if odd else ""
        raise SourceError(
            f"{storage.url}/{task.path}: holds no sample{why}; leave it out of --input"
        )
    return TarRecord(
        written=write_index(task.path, builder, rows, storage.writer),
        labels=Counter(rows["label"].to_pylist()),
        fields=fields,
        rejected=[
            QuarantineEntry(
                name=f"{task.path}/{name}", split=task.split, reason=reason, object=task.path
            )
            for name, reason in odd
        ],
    )


def _find(config: AdoptConfig) -> tuple[Storage, list[Task]]:
    """Where the manifest goes, and the tars in the order of their splits and numbers."""
    folder, names = find_tars(config.input)
    output = open_storage(config.output) if config.output else folder
    if not f"{folder.url}/".startswith(f"{output.url}/"):
        raise ConfigError(
            f"--output {config.output}: a manifest names tars in its own folder and below; give"
            f" {folder.url}, a folder above it, or none; `build --source webdataset` copies tars to"
            " another place"
        )
    tasks = []
    tars = tars_named(folder, names) if names else tars_below(folder, config.allow_missing_parts)
    for tar in tars:
        split = config.split or split_in(tar.name) or REST
        if tar.name.startswith(naming.COLUMNS_FOLDER):
            continue
        if not naming.is_split(split):
            raise ConfigError(
                f"{split!r} can't name a split ({naming.SPLIT_NAMES}); give one by --split"
            )
        path = f"{folder.url}/{tar.name}"[len(output.url) + 1 :]
        digest = digest_of(split, tar.generation, tar.num_bytes)
        tasks.append(Task(split, path, digest, msgspec.structs.replace(tar, name=path)))
    if not tasks:
        raise SourceError(
            f"{folder.url}: holds only tars of columns; give the folder of the set's tars"
        )
    return output, sorted(tasks, key=lambda task: (task.split, name_of(task.path)))
