"""Writes a column: a value for each sample of a set,
in tars with the same keys and shard boundaries.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console

from pipelines.config import ColumnConfig
from pipelines.sets import tar_sets
from pipelines.sets.tar_sets import TarRecord, Task, digest_of
from pipelines.sources.values import Value, Values, open_values, refused
from shardset.errors import ChangedInput, ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.columns import NUMBERS, SOURCE, column_url, npy, num_shared_groups
from shardset.format.manifest import LoadedSet, Manifest, Shard, Split
from shardset.format.shards import Group, Promise
from shardset.format.tar import StoredSample
from shardset.format.write import write_shard, write_split
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.open import open_storage

_Group = tuple[str, Group, list[Shard]]
"""A group of the set with its split and its shards."""


def column(
    config: ColumnConfig, beam_flags: Sequence[str] = (), console: Console | None = None
) -> LoadedSet:
    """Writes the column and returns it, a set with its head; a rerun keeps the shards that are
    finished, and after an append it writes the groups that the column lacks.

    Raises ConfigError if the values don't fit the set, SourceError if they can't be read.
    """
    _values.cache_clear()
    parent = manifests.load_whole(config.set)
    names = [config.split] if config.split else [*parent.manifest.splits]
    splits = {name: parent.manifest.split(name) for name in names}
    sizes = tuple(split.num_samples for split in splits.values())
    output, values = open_storage(column_url(parent.storage, config.name)), _values(config, sizes)
    base = tar_sets.published(output, SOURCE)
    if not naming.is_field(field := f"{config.name}.{values.extension}"):
        raise ConfigError(
            f"{field!r} can't be a field (lower-case ASCII, at most 16 bytes); use a shorter name"
        )
    for split in base.splits.values() if base else ():
        if split.fields != [field]:
            raise refused(config, f"a value for {field} (the column has {split.fields})")
    column = LoadedSet(base, output) if base else None
    lacking = [*_lacking(splits, column)]
    if base and not lacking:
        tasks = _tasks(values, _lacking(splits, None))
        if not any(tar_sets.find(output, task) for task in reversed(tasks)):
            raise tar_sets.other_input(output)
        return LoadedSet(base, output)
    tasks = _tasks(values, lacking)
    records = tar_sets.ensure(
        output,
        tasks,
        partial(write, config, sizes, parent.storage, output),
        is_finished=False,
        flags=beam_flags,
        source=(config.source, values.num_bytes),
        console=console,
    )
    facts = _checked(config, base, records)
    promises: list[Promise] = ["reproducible"] if parent.manifest.is_own else []
    written: dict[str, list[Split]] = {}
    remaining = iter(records)
    for name, group, shards in lacking:
        part = write_split(
            output.writer,
            [record.written for record in islice(remaining, len(shards))],
            pattern=group.shards,
            table_path=group.table,
            plan_digest=group.tars_sha256,
            promises=promises,
        )
        written.setdefault(name, []).append(part)
    digest = parent.manifest.digest
    return tar_sets.publish(output, SOURCE, written, source_digest=digest, options=facts, base=base)


def write(
    config: ColumnConfig, sizes: tuple[int, ...], parent: Storage, output: Storage, task: Task
) -> TarRecord:
    """Writes a shard of a column and its index; runs on a worker."""
    values, shard = _values(config, sizes), task.source
    if digest_of(shard, *values.identity) != task.digest:
        raise ChangedInput(
            f"{config.source}: changed while it was read; run the same command again"
        )
    keys = read_index(parent, shard, ["key"])["key"].to_pylist()
    contents, field = values.values_of(keys, shard.first_id), f"{config.name}.{values.extension}"
    samples = (
        StoredSample(key=key, fields=[(field, _content(value))], label=-1, serial=position)
        for position, (key, value) in enumerate(zip(keys, contents, strict=True))
    )
    written, _ = write_shard(shard.path, samples, [field], output.writer)
    arrays = [value for value in contents if isinstance(value, np.ndarray)]
    kinds = {(value.dtype.str, value.shape) for value in arrays}
    num_values = sum(value is not None for value in contents)
    return TarRecord(written=written, num_values=num_values, kinds=sorted(kinds))


def _content(value: Value) -> bytes:
    return npy(value) if isinstance(value, np.ndarray) else value or b""


_values = lru_cache(maxsize=1)(open_values)
"""The values for splits of these sizes; opened once a process."""


def _lacking(splits: Mapping[str, Split], column: LoadedSet | None) -> Iterator[_Group]:
    """The groups of splits that a column lacks."""
    for name, split in splits.items():
        shards = iter(split.shards)
        groups = [(name, group, [*islice(shards, group.num_shards)]) for group in split.groups]
        yield from groups[num_shared_groups(column, name, split) if column else 0 :]


def _tasks(values: Values, groups: Iterable[_Group]) -> list[Task]:
    return [
        Task(name, shard.path, digest_of(shard, *values.identity), shard)
        for name, _, shards in groups
        for shard in shards
    ]


def _checked(
    config: ColumnConfig, base: Manifest | None, records: Sequence[TarRecord]
) -> dict[str, Any]:
    """The manifest's words about the values; ConfigError if they don't fit each other, or those
    that the column has.
    """
    num_values = sum(record.num_values for record in records)
    num_samples = sum(record.written.shard.num_samples for record in records)
    kinds = {kind for record in records for kind in record.kinds}
    if not num_values:
        raise ConfigError(
            f"{config.source}: no sample of the set has a value there; compare its keys with"
            " `inspect`"
        )
    stored = base.provenance.options if base else {}
    if "dtype" in stored:
        kinds.add((stored["dtype"], tuple(stored["shape"])))
    if not kinds:
        return {"num_values": num_values}
    dtype, shape = min(kinds)
    if len(kinds) > 1 or not NUMBERS.fullmatch(dtype):
        raise refused(
            config,
            f"arrays {sorted(kinds)[:2]} (expected one shape and type, numbers of 1 to 8 bytes)",
        )
    if num_values < num_samples and "f" not in dtype:
        raise refused(
            config, f"{num_values} whole numbers for {num_samples} samples; only floats can say NaN"
        )
    return {"num_values": num_values, "dtype": dtype, "shape": [*shape]}
