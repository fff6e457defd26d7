"""Writes a column: a value for each sample of a set, in tars with the keys and the cuts of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np

from pipelines.config import ColumnConfig
from pipelines.plan.files import in_order
from pipelines.runners.each import Show, for_each
from pipelines.sources.values import Value, Values, open_values, refuse
from pipelines.write import tar_sets
from pipelines.write.tar_sets import TarGroup, TarRecord
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format.columns import SOURCE, array_header, column_url
from shardset.format.manifest import LoadedSet, Manifest, Split
from shardset.format.tar import StoredSample
from shardset.format.write import write_shard
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.open import open_storage


@dataclass(frozen=True)
class _Opened:
    """A column that is being written. `dtype` and `shape` are those of arrays, None and () of bytes."""

    parent: LoadedSet
    splits: dict[str, Split]
    output: Storage
    values: Values
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]

    @property
    def made_from(self) -> list[str]:
        return [tar_sets.TOOL, self.parent.manifest.digest, *self.values.identity]

    def content(self, value: Value | None) -> bytes:
        """The member of a value; raises ConfigError for an array that is not like the others."""
        if value is None or isinstance(value, bytes):
            return value or b""
        if self.dtype is None or (value.dtype.newbyteorder("="), value.shape) != (self.dtype, self.shape):
            refuse(self.values.where, f"{value.dtype} {value.shape} among {self.dtype} {self.shape}")
        return array_header(self.dtype, self.shape) + value.astype(self.dtype).tobytes()


def column(config: ColumnConfig, beam_flags: Sequence[str] = (), show: Show | None = None) -> Manifest:
    """Writes the column and returns the head of its manifest; a rerun keeps the shards that are finished.

    Raises ConfigError if the values don't fit the set, SourceError if they can't be read.
    """
    opened = _opened(config)
    output, values = opened.output, opened.values
    shards = [(name, number) for name, split in opened.splits.items() for number in range(split.num_shards)]
    for_each(
        partial(write, config), shards, beam_flags, output, source=config.source, num_bytes=values.num_bytes, show=show
    )
    paths = [opened.splits[name].shards[number].path for name, number in shards]
    records = [*in_order(output, paths, partial(_record, opened))]
    num_values = _checked_number(opened, records)
    options = {} if opened.dtype is None else {"dtype": opened.dtype.str, "shape": list(opened.shape)}
    provenance = tar_sets.provenance_of(
        SOURCE, opened.parent.manifest.digest, identity=values.identity, num_values=num_values, **options
    )
    if done := tar_sets.published(output, provenance, "remove its folder, or choose another name"):
        return done
    rest = iter(records)
    groups = {
        name: [TarGroup(group.shards, [*islice(rest, group.num_shards)]) for group in split.groups]
        for name, split in opened.splits.items()
    }
    return tar_sets.publish(output, groups, provenance, promises=["reproducible"])


def write(config: ColumnConfig, shard_of_split: tuple[str, int]) -> None:
    """Writes a shard of a column, its index and its record, unless they are there; runs on a worker."""
    opened, (split, number) = _opened(config), shard_of_split
    shard = opened.splits[split].shards[number]
    if tar_sets.find(opened.output, shard.path, opened.made_from):
        return
    keys = [key.decode("ascii") for key in read_index(opened.parent.storage, shard)["key"].tolist()]
    values = opened.values.of(keys, shard.first_id)
    field = f"{config.name}.{opened.values.extension}"
    samples = (
        StoredSample(key=key, fields=[(field, opened.content(value))], label=-1, source=id_)
        for id_, (key, value) in enumerate(zip(keys, values, strict=True), shard.first_id)
    )
    (written, fields, num_content_bytes), _ = write_shard(shard.path, samples, [field], opened.output.writer)
    record = TarRecord(
        made_from=opened.made_from,
        shard=written,
        fields=list(fields),
        num_content_bytes=num_content_bytes,
        num_values=sum(value is not None for value in values),
    )
    tar_sets.put(opened.output, shard.path, record)


@lru_cache(maxsize=4)
def _opened(config: ColumnConfig) -> _Opened:
    """Opened once in a process: the keys of all values are in memory."""
    parent = manifests.load(config.set)
    splits = {config.split: parent.manifest.split(config.split)} if config.split else dict(parent.manifest.splits)
    output = open_storage(column_url(parent.storage, config.name))
    values = open_values(config, {name: split.num_samples for name, split in splits.items()})
    if values.extension != "npy":
        return _Opened(parent, splits, output, values, None, ())
    example = np.asarray(values.example())
    if example.dtype.kind not in "fiub" or example.dtype.itemsize > 8:
        refuse(values.where, f"arrays of {example.dtype}")
    return _Opened(parent, splits, output, values, example.dtype.newbyteorder("<"), example.shape)


def _record(opened: _Opened, path: str) -> TarRecord:
    record = tar_sets.find(opened.output, path, opened.made_from)
    if record is None:
        raise SourceError(f"{opened.output.url}/{path}: the set or the values changed meanwhile; run it again")
    return record


def _checked_number(opened: _Opened, records: Sequence[TarRecord]) -> int:
    """The number of samples that have a value."""
    values, found = opened.values, sum(record.num_values for record in records)
    missing = sum(split.num_samples for split in opened.splits.values()) - found
    if not found:
        raise ConfigError(f"{values.where}: no sample of the set has a value there; compare its keys with `inspect`")
    if values.num_values is not None and found > values.num_values:
        refuse(values.where, f"{values.num_values} values for {found} samples, because keys of the set repeat")
    if missing and opened.dtype is not None and opened.dtype.kind != "f":
        refuse(values.where, f"no value for {missing} samples, which {opened.dtype} can't say but floats can")
    return found
