"""The tables of a plan as compressed Arrow IPC streams: a row for each raw sample of a unit, then
for each sample of a shard, its reference.

A row has the columns of an index that say what a sample is and where it comes from, the latter for
each of its fields.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.plan import paths
from pipelines.plan.files import START_OVER, PlanFiles
from pipelines.sources.base import UNREAD, Extent
from shardset.errors import ConfigError, NotFound
from shardset.format import naming
from shardset.format.images import is_image_field
from shardset.format.rows import FACTS, STREAMED
from shardset.order.permutation import hash_text
from shardset.prepared import prepared
from shardset.storage.many import in_order

_ORIGIN = {name: FACTS[name] for name in ("object", "generation", "object_offset", "object_bytes")}
_FIELD = pa.struct(
    {"field": pa.string()} | _ORIGIN | {"crc32c": STREAMED["crc32c"], "content": pa.binary()}
)
"""A stored field: where its bytes are, and their CRC32C if they have been read, or its content."""

_SAMPLE = {
    "split": pa.string(),
    "name": FACTS["name"],
    "key": FACTS["key"],
    "label": STREAMED["label"],
    "fix": FACTS["fix"],
    "image": pa.string(),
    "fields": pa.list_(_FIELD),
    "occurrence": pa.int32(),
}

UNIT = pa.schema(
    _SAMPLE | {"draw": pa.uint64(), "image_number": pa.uint64(), "key_hash": pa.uint64()}
)
"""The columns of a unit's table: a SampleRow, and the hash of its key."""

REFERENCE = pa.schema(_SAMPLE | {name: FACTS[name] for name in ("serial", "copy")})
"""The columns of the references of a shard: a SampleRow, its serial and the number of this copy."""

_NULLS = {"object_offset": 0, "object_bytes": 0, "crc32c": UNREAD}
_REJECTED = b"rejected"


@prepared
class QuarantineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the quarantine list.

    The fields after `reason` are None if the bytes have no extent.
    """

    name: str
    split: str
    reason: str
    object: str | None = None
    offset: int | None = None
    num_bytes: int | None = None
    sha256: str | None = None

    @property
    def line(self) -> bytes:
        """The entry as JSON."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True).encode() + b"\n"


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """One raw sample of a unit, or of a shard.

    `key` is the key that it wants, and `occurrence` the number of samples before it that want the
    same. `fix` is what the build repairs in its image, "" if nothing, and `image` the field of its
    image, "" if there is none. `fields` are the stored fields in member order, each with the extent
    of its content, or with the content itself if that is small.

    `draw` is the hash of its key that decides on a holdout, `image_number` a number that equal
    images share; 0 without a holdout.
    """

    split: str
    name: str
    key: str
    label: int
    fix: str
    image: str
    fields: list[tuple[str, Extent | bytes]]
    occurrence: int = 0
    draw: int = 0
    image_number: int = 0

    @property
    def raw_image(self) -> Extent | bytes:
        """The content of the first image before it is encoded; b"" if there is none."""
        images = (content for field, content in self.fields if is_image_field(field))
        return next(images, b"")

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(
            len(content) if isinstance(content, bytes) else content.num_bytes
            for _, content in self.fields
        )

    def stored_key(self, copy: int) -> str:
        """The key of a copy of this sample: the wanted one, or a short one if that can't be a key
        or is taken.

        The short key depends on the wanted one too, because samples with different keys may share a
        name; it does not on the split.
        """
        key = self.key
        if self.occurrence or not naming.is_key(key):
            key = naming.short_key(f"{self.name}\0{key}", self.occurrence)
        return naming.copy_key(key, copy)


def unit_table(rows: Sequence[SampleRow], rejected: Sequence[QuarantineEntry]) -> pa.RecordBatch:
    """The table of a unit; its metadata holds the rejected samples."""
    columns: dict[str, Any] = {
        name: [getattr(row, name) for row in rows] for name in UNIT.names if name != "key_hash"
    }
    columns["fields"] = [[_packed(*field) for field in row.fields] for row in rows]
    columns["key_hash"] = hash_keys(columns["key"])
    metadata = {_REJECTED: msgspec.json.encode(rejected)}
    return pa.RecordBatch.from_pydict(columns, UNIT.with_metadata(metadata))


def rejected_of(table: pa.RecordBatch) -> list[QuarantineEntry]:
    """The rejected samples that `unit_table` was given."""
    return msgspec.json.decode(table.schema.metadata[_REJECTED], type=list[QuarantineEntry])


def rows_of(table: pa.RecordBatch) -> list[SampleRow]:
    """The rows of a table of a unit or of references."""
    lists = table["fields"]
    parts = lists.flatten()
    names = [field.name for field in _FIELD]
    unpacked = map(_unpacked, *(values(parts.field(name), _NULLS.get(name)) for name in names))
    fields = [list(islice(unpacked, size)) for size in values(lists.value_lengths())]
    columns = (
        fields if name == "fields" else values(table[name])
        for name in SampleRow.__struct_fields__
        if name in table.schema.names
    )
    return list(map(SampleRow, *columns))


def values(column: pa.Array, null: int | None = None) -> list[Any]:
    """A column as Python values; `null` stands for a number that is null."""
    if null is not None:
        column = pc.fill_null(column.cast(pa.int64()), null)
    python_values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return python_values


def concat(tables: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all tables, which must have the same columns."""
    columns = zip(*(table.columns for table in tables), strict=True)
    return pa.RecordBatch.from_arrays(
        list(map(pa.concat_arrays, map(list, columns))), schema=tables[0].schema
    )


def take(table: pa.RecordBatch, row: np.ndarray) -> pa.RecordBatch:
    """The rows with these numbers, in this order; the numbers are not checked."""
    return pc.take(table, pa.array(row), boundscheck=False)


def with_columns(
    table: pa.RecordBatch, columns: dict[str, Any], schema: pa.Schema
) -> pa.RecordBatch:
    """The table with some columns added or replaced, in the order of the schema."""
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else table[field.name]
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def runs_of(values: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(value, start, stop) of each run of equal values."""
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for start, stop in pairwise(bounds if len(values) else ()):
        yield int(values[start]), start, stop


def to_bytes(table: pa.RecordBatch) -> memoryview:
    """The file of a table."""
    sink = pa.BufferOutputStream()
    # No threads: each of the many small columns would wait for one longer than its compression
    # takes.
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    return memoryview(sink.getvalue())


def from_bytes(
    data: bytes | memoryview, schema: pa.Schema, columns: Sequence[str] = ()
) -> pa.RecordBatch:
    """The table, or only these columns, which leaves the others compressed; ConfigError if it is
    malformed.

    Its checksum must have been compared: Arrow follows offsets that a flipped bit has changed.
    """
    try:
        with pa.ipc.open_stream(data) as reader:
            if not reader.schema.equals(schema):
                names, expected = (", ".join(each.names) for each in (reader.schema, schema))
                raise ValueError(f"it has the columns {names}, expected {expected}")
        wanted = [schema.get_field_index(name) for name in columns or schema.names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        return pa.ipc.open_stream(data, options=options).read_next_batch()
    except ValueError as error:
        raise ConfigError(
            f"a table of the plan can't be read ({error}): it is damaged; {START_OVER}"
        ) from error


def read_units(files: PlanFiles, units: Iterable[int], *columns: str) -> Iterator[pa.RecordBatch]:
    """The stored tables of units, or these columns of them, in order; ConfigError if one is missing
    or malformed.
    """
    try:
        for data in in_order(files.output.reads_at_once, map(paths.unit_path, units), files.read):
            yield from_bytes(data, UNIT, columns)
    except NotFound as error:
        raise ConfigError(f"a table of the plan is missing ({error}): {START_OVER}") from error


def release_memory() -> None:
    """Returns the memory of freed tables, which Arrow would keep, to the system; halves the peak of
    a worker.
    """
    pa.default_memory_pool().release_unused()


def digest_of(rows: Iterable[SampleRow]) -> str:
    """The SHA-256 of the samples in the rows; it does not cover the extents of their bytes."""
    hasher = hashlib.sha256()
    for row in rows:
        fields = [
            (field, content if isinstance(content, bytes) else content.num_bytes)
            for field, content in row.fields
        ]
        sample = (row.split, row.name, row.key, row.label, row.fix, row.image, fields)
        hasher.update(_encode(sample))
    return hasher.hexdigest()


def hash_keys(keys: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash of each key, to find equal keys."""
    return np.array([hash_text(key, key=0) for key in keys], np.uint64)


_encode = msgspec.msgpack.Encoder().encode


def _packed(field: str, content: Extent | bytes) -> tuple[Any, ...]:
    if isinstance(content, bytes):
        return field, None, None, None, None, None, content
    crc32c = None if content.crc32c == UNREAD else content.crc32c
    extent = content.object, content.generation, content.offset, content.num_bytes
    return field, *extent, crc32c, None


def _unpacked(
    field: str,
    name: str | None,
    generation: str,
    offset: int,
    num_bytes: int,
    crc32c: int,
    content: bytes | None,
) -> tuple[str, Extent | bytes]:
    if name is None:
        return field, content or b""
    return field, Extent(name, generation, offset, num_bytes, crc32c)
