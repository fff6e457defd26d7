"""Writes a column: a value for each sample of a set,
in tars with the same keys and shard boundaries.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
from rich.console import Console

from pipelines.config import ColumnConfig
from pipelines.sets import tar_sets
from pipelines.sets.tar_sets import TarRecord, Task, digest_of
from pipelines.sources.values import Value, Values, open_values, refused
from shardset.errors import ChangedInput, ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.columns import NUMBERS, SOURCE, column_url, npy
from shardset.format.manifest import LoadedSet, Split
from shardset.format.shards import Promise
from shardset.format.tar import StoredSample
from shardset.format.write import write_shard
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.open import open_storage


def column(
    config: ColumnConfig, beam_flags: Sequence[str] = (), console: Console | None = None
) -> LoadedSet:
    """Writes the column and returns it, a set with its head; a rerun keeps the shards that are
    finished.

    Raises ConfigError if the values don't fit the set, SourceError if they can't be read.
    """
    _open.cache_clear()
    parent, splits, output, values, digest = _open(config)
    tasks = [
        Task(name, shard.path, digest, number)
        for name, split in splits.items()
        for number, shard in enumerate(split.shards)
    ]
    source = config.source, values.num_bytes
    records = tar_sets.ensure(
        output, SOURCE, tasks, partial(write, config), beam_flags, source, console
    )
    facts = _checked(config, sum(split.num_samples for split in splits.values()), records)
    promises: list[Promise] = ["reproducible"] if parent.manifest.is_own else []
    return tar_sets.publish(
        output, SOURCE, tasks, records, parent.manifest.digest, promises=promises, **facts
    )


def write(config: ColumnConfig, task: Task) -> TarRecord:
    """Writes a shard of a column and its index; runs on a worker."""
    parent, splits, output, values, digest = _open(config)
    if digest != task.digest:
        raise ChangedInput(
            f"{config.set} or {config.source}: changed while it was read; run the same command"
            " again"
        )
    shard, field = splits[task.split].shards[task.source], f"{config.name}.{values.extension}"
    keys = read_index(parent.storage, shard, ["key"])["key"].to_pylist()
    found = values.of(keys, shard.first_id)
    samples = (
        StoredSample(key=key, fields=[(field, _content(value))], label=-1, serial=position)
        for position, (key, value) in enumerate(zip(keys, found, strict=True))
    )
    written, _ = write_shard(shard.path, samples, [field], output.writer)
    kinds = {(value.dtype.str, value.shape) for value in found if isinstance(value, np.ndarray)}
    return TarRecord(
        written=written, num_values=sum(value is not None for value in found), kinds=sorted(kinds)
    )


def _content(value: Value) -> bytes:
    return npy(value) if isinstance(value, np.ndarray) else value or b""


@lru_cache(maxsize=1)
def _open(config: ColumnConfig) -> tuple[LoadedSet, dict[str, Split], Storage, Values, str]:
    """The set, the splits that get values, where these go, the values, and a digest of all; once a
    process.
    """
    parent = manifests.load_whole(config.set)
    splits = (
        {config.split: parent.manifest.split(config.split)}
        if config.split
        else dict(parent.manifest.splits)
    )
    output = open_storage(column_url(parent.storage, config.name))
    values = open_values(config, [split.num_samples for split in splits.values()])
    if not naming.is_field(field := f"{config.name}.{values.extension}"):
        raise ConfigError(
            f"{field!r} can't be a field (lower-case ASCII, at most 16 bytes); use a shorter name"
        )
    return (
        parent,
        splits,
        output,
        values,
        digest_of(parent.manifest.digest, *splits, *values.identity),
    )


def _checked(
    config: ColumnConfig, num_samples: int, records: Sequence[TarRecord]
) -> dict[str, object]:
    """The manifest's words about the values; ConfigError if they don't fit."""
    found = sum(record.num_values for record in records)
    kinds = sorted({kind for one in records for kind in one.kinds})
    if not found:
        raise ConfigError(
            f"{config.source}: no sample of the set has a value there; compare its keys with"
            " `inspect`"
        )
    if not kinds:
        return {"num_values": found}
    dtype, shape = kinds[0]
    if len(kinds) > 1 or not NUMBERS.fullmatch(dtype):
        raise refused(
            config, f"arrays {kinds[:2]} (expected one shape and type, numbers of 1 to 8 bytes)"
        )
    if found < num_samples and "f" not in dtype:
        raise refused(
            config, f"{found} whole numbers for {num_samples} samples; only floats can say NaN"
        )
    return {"num_values": found, "dtype": dtype, "shape": [*shape]}
