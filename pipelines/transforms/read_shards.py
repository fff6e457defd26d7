"""The samples of a shard set or view as a PCollection."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import PBegin
from apache_beam.typehints import with_input_types, with_output_types

from pipelines.sources.shardset import load_in_worker
from shardset.format import manifest as manifests
from shardset.format.columns import open_column
from shardset.format.rows import numbers
from shardset.read.addresses import columns_of
from shardset.read.query import contents_of, samples_of_shard, shards_of, values_of
from shardset.storage.open import is_absolute


class StoredRow(NamedTuple):
    """One sample of a shard set or view.

    Attributes:
        key: Its name, unique in the set.
        id: Its number in the split of the set.
        label: The number of its class; -1 if it has none. A view may have another one than `cls`.
        fields: Its bytes by field, such as "jpg"; without those that it lacks.
        columns: Its values by column, as in the batches of a Stream: arrays, NaN for a sample
            without a value, or bytes, b"" without one.
    """

    key: str
    id: int
    label: int
    fields: dict[str, bytes]
    columns: dict[str, Any]


@dataclass(eq=False, repr=False)
class ReadShards(beam.PTransform[PBegin, beam.PCollection[StoredRow]]):
    """The samples of a split of a set or view: a PCollection of StoredRow, in any order.

    A worker reads a shard at a time: its index, and ranges of its tar that hold wanted samples,
    about 8 MB each. It compares each sample with its CRC32C, for which it reads all of its fields.
    Memory holds a few ranges. Without fields, no tar is read.

    Args:
        set: The address of a set, `SET@VERSION`, or a view. All workers must be able to read it.
        split: The name of the split.
        fields: The fields to read; None for all, () for none.
        columns: The columns to read.

    Raises:
        ConfigError: There is no such set, split, field or column; names those that exist.
        DamagedShard: On a worker: stored bytes differ from their checksum, also when read again.
        SourceError: On a worker: the set was replaced after the pipeline was made.
    """

    set: str | os.PathLike[str]
    split: str
    fields: Sequence[str] | None = None
    columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        url = os.fspath(self.set)
        if not is_absolute(url):
            url = os.path.abspath(url)
        loaded = manifests.load(url)
        split = loaded.manifest.split(self.split)
        fields = split.fields if self.fields is None else self.fields
        split.check_fields(fields)
        for name in self.columns:
            open_column(loaded, self.split, name)
        self._shards = shards_of(loaded, self.split)
        self._read = ReadRows(url, loaded.digest, self.split, fields, self.columns)

    def expand(self, begin: PBegin) -> beam.PCollection[StoredRow]:
        rows: beam.PCollection[StoredRow] = (
            begin
            | "List the shards" >> beam.Create(self._shards)
            | "Spread the shards" >> beam.Reshuffle()
            | "Read the rows" >> beam.ParDo(self._read)
        )
        return rows


@with_input_types(int)
@with_output_types(StoredRow)
@dataclass(eq=False, repr=False)
class ReadRows(beam.DoFn):
    """The samples of a shard, by its number."""

    set: str
    digest: str
    split: str
    fields: Sequence[str]
    columns: Sequence[str]

    def setup(self) -> None:
        """Opens the set, once in a process."""
        self._loaded = load_in_worker(self.set, self.digest)
        self._columns = [open_column(self._loaded, self.split, name) for name in self.columns]

    def process(self, number: int) -> Iterator[StoredRow]:
        split = self._loaded.manifest.split(self.split)
        rows = samples_of_shard(self._loaded, self.split, [*columns_of(split), "key"], number)
        stored = contents_of(self._loaded.storage, split.shards[number], rows)
        contents = map(dict, stored) if self.fields else repeat(dict[str, bytes](), len(rows))
        positions = numbers(rows, "position")
        columns = [map(each.value, values_of(each, number, positions)) for each in self._columns]
        facts = rows.select(["key", "id", "label"]).to_pylist()
        for fact, found, *values in zip(facts, contents, *columns, strict=True):
            fields = {name: found[name] for name in self.fields if name in found}
            yield StoredRow(
                **fact, fields=fields, columns=dict(zip(self.columns, values, strict=True))
            )
