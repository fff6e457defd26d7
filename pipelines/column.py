"""Writes a column: a value for each sample of a set, in tars with the keys and the cuts of its own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice

from pipelines.config import ColumnConfig
from pipelines.plan.files import in_order
from pipelines.runners.each import Show, for_each
from pipelines.sources.values import Values, open_values
from pipelines.write import tar_sets
from pipelines.write.tar_sets import TarGroup, TarRecord
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.columns import SOURCE, array_kind, column_url, header_of
from shardset.format.manifest import LoadedSet, Manifest, Split
from shardset.format.tar import StoredSample
from shardset.format.write import write_shard
from shardset.read.indexes import read_index
from shardset.storage.base import Storage, stat_or_none
from shardset.storage.open import open_storage


@dataclass(frozen=True)
class _Opened:
    """A column that is being written."""

    parent: LoadedSet
    splits: dict[str, Split]
    output: Storage
    values: Values

    def find(self, path: str) -> TarRecord | None:
        return tar_sets.find(self.output, path, self.made_from)

    @property
    def made_from(self) -> tuple[str, ...]:
        return tar_sets.TOOL, self.parent.manifest.digest, *self.values.identity


def column(config: ColumnConfig, beam_flags: Sequence[str] = (), show: Show | None = None) -> Manifest:
    """Writes the column and returns the head of its manifest; a rerun keeps the shards that are finished.

    Raises ConfigError if the values don't fit the set, SourceError if they can't be read.
    """
    opened = _open(config)
    output, values = opened.output, opened.values
    done = tar_sets.published(output, SOURCE)
    shards = [(name, number) for name, split in opened.splits.items() for number in range(split.num_shards)]
    paths = [opened.splits[name].shards[number].path for name, number in shards]
    new = [shard for shard, found in zip(shards, in_order(output, paths, opened.find), strict=True) if not found]
    work = partial(write, config, opened.made_from)
    for_each(work, new, beam_flags, output, source=config.source, num_bytes=values.num_bytes, show=show)
    records = [record for record in in_order(output, paths, opened.find) if record and record.shard]
    if len(records) != len(shards):
        raise _changed(config)
    digest = hashlib.sha256("".join(record.shard.sha256 for record in records if record.shard).encode()).hexdigest()
    provenance = tar_sets.provenance_of(
        SOURCE, opened.parent.manifest.digest, values=digest, **_checked(opened, records)
    )
    if done and done.provenance == provenance:
        return done
    rest = iter(records)
    groups = {
        name: [TarGroup(group.shards, [*islice(rest, group.num_shards)]) for group in split.groups]
        for name, split in opened.splits.items()
    }
    return tar_sets.publish(output, groups, provenance, promises=["reproducible"])


def write(config: ColumnConfig, made_from: tuple[str, ...], shard_of_split: tuple[str, int]) -> None:
    """Writes a shard of a column, its index and its record, unless they are there; runs on a worker."""
    opened, (split, number) = _opened(config, made_from), shard_of_split
    shard = opened.splits[split].shards[number]
    if opened.find(shard.path):
        return
    if stat_or_none(opened.output, naming.MANIFEST):
        raise ConfigError(
            f"{opened.output.url}: a column of other values, or for another version of the set; remove its folder, or "
            "choose another name"
        )
    keys = [key.decode("ascii") for key in read_index(opened.parent.storage, shard)["key"].tolist()]
    contents = opened.values.of(keys, shard.first_id)
    field = f"{config.name}.{opened.values.extension}"
    samples = (
        StoredSample(key=key, fields=[(field, content)], label=-1, source=id_)
        for id_, (key, content) in enumerate(zip(keys, contents, strict=True), shard.first_id)
    )
    (written, fields, num_content_bytes), _ = write_shard(shard.path, samples, [field], opened.output.writer)
    stored = [content for content in contents if content]
    kinds = {(header_of(content), len(content)) for content in stored} if field.endswith(".npy") else ()
    record = TarRecord(
        made_from=list(made_from),
        shard=written,
        fields=list(fields),
        num_content_bytes=num_content_bytes,
        num_values=len(stored),
        kinds=[(header.decode("latin-1"), size) for header, size in kinds],
    )
    tar_sets.put(opened.output, shard.path, record)


def _open(config: ColumnConfig) -> _Opened:
    parent = manifests.load(config.set)
    splits = {config.split: parent.manifest.split(config.split)} if config.split else dict(parent.manifest.splits)
    output = open_storage(column_url(parent.storage, config.name))
    values = open_values(config, {name: split.num_samples for name, split in splits.items()})
    return _Opened(parent, splits, output, values)


@lru_cache(maxsize=4)
def _opened(config: ColumnConfig, made_from: tuple[str, ...]) -> _Opened:
    """Opened once in a process, because the keys of all values are in memory."""
    opened = _open(config)
    if opened.made_from != made_from:
        raise _changed(config)
    return opened


def _changed(config: ColumnConfig) -> SourceError:
    return SourceError(f"{config.set} or {config.source}: changed while it was read; run the same command again")


def _checked(opened: _Opened, records: Sequence[TarRecord]) -> dict[str, object]:
    """What the manifest says about the values: how many, and the header of arrays; ConfigError if they don't fit."""
    values, found = opened.values, sum(record.num_values for record in records)
    missing = sum(split.num_samples for split in opened.splits.values()) - found
    if not found:
        raise ConfigError(f"{values.where}: no sample of the set has a value there; compare its keys with `inspect`")
    if values.num_values is not None and found > values.num_values:
        values.refuse(f"{values.num_values} values for {found} samples, because keys of the set repeat")
    if values.extension != "npy":
        return {"num_values": found}
    headers = {header for record in records for header, _ in record.kinds}
    kinds = [array_kind(header.encode("latin-1"), values.where) for header in sorted(headers)]
    if len({kind for record in records for kind in record.kinds}) > 1:
        values.refuse(f"arrays of several kinds: {', '.join(f'{dtype} {shape}' for dtype, shape in kinds)}")
    if missing and kinds[0][0].kind != "f":
        values.refuse(f"no value for {missing} samples, which {kinds[0][0]} can't say but floats can")
    return {"num_values": found, "header": headers.pop()}
