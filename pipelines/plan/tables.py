"""The durable tables of a plan, as Arrow IPC files: one row a raw sample, later one row a stored sample.

A unit's table lists what the unit holds; a shard's table (its references) lists what stands at which position and
where its bytes are. A row is one binary value, beside the few numbers that planning looks at: rows are moved three
times between the two, and it is columns of texts that make that slow.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.plan.files import START_OVER
from pipelines.sources.base import Extent
from shardset.errors import ConfigError
from shardset.format import arrow
from shardset.format.originals import REFERENCE, Origin
from shardset.order.permutation import hash64

UNIT = pa.schema([("split", pa.string()), ("label", pa.int64()), ("key_hash", pa.uint64()), ("row", pa.binary())])
"""`row` is a Row as MessagePack; the others say of it what planning needs."""

PLACEMENT = pa.schema([*REFERENCE, ("shard", pa.int32()), ("rank", pa.uint64())])
"""A reference on its way to its shard."""

_REJECTED = b"rejected"
_WORD_BYTES = 8


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a sample is made of.

    `image` is the field whose content is examined ("" if none). `fields` are those that are stored, in member order,
    with where each content is, or a small one itself.
    """

    image: str
    fields: list[tuple[str, Extent | bytes]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields."""
        total = 0
        for _, content in self.fields:  # in half the time of sum()
            total += len(content) if isinstance(content, bytes) else content.num_bytes
        return total


class UnitRow(Origin, frozen=True, array_like=True, gc=False):
    """One raw sample of a unit's table."""

    label: int
    content: Content


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UnitRow).decode


def unit_table(rows: Sequence[UnitRow], rejected: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """The table of a unit; what was rejected travels in its metadata."""
    metadata = {_REJECTED: json.dumps(list(rejected), sort_keys=True).encode()}
    columns = {
        "split": [row.split for row in rows],
        "label": [row.label for row in rows],
        "key_hash": hash_keys(pa.array([row.key for row in rows], pa.string())),
        "row": list(map(_encode, rows)),
    }
    return from_columns(UNIT.with_metadata(metadata), columns)


def rejected_of(table: pa.RecordBatch) -> list[dict[str, Any]]:
    """What `unit_table` was given as rejected."""
    return json.loads(table.schema.metadata[_REJECTED])


def rows_of(table: pa.RecordBatch) -> list[UnitRow]:
    """The rows that `unit_table` was given; a table of references has them too."""
    return list(map(_decode, values(table["row"])))


def concat(tables: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows of all tables, which have the same columns."""
    columns = zip(*(table.columns for table in tables), strict=True)
    return pa.RecordBatch.from_arrays(list(map(pa.concat_arrays, map(list, columns))), schema=tables[0].schema)


def take(table: pa.RecordBatch, row: np.ndarray) -> pa.RecordBatch:
    """The rows with these numbers, in this order."""
    return pc.take(table, pa.array(row), boundscheck=False)


def slices(table: pa.RecordBatch, bounds: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """The rows between each two neighbours of `bounds`, without a copy."""
    return (table.slice(start, stop - start) for start, stop in pairwise(bounds))


def from_columns(schema: pa.Schema, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """A table of that schema, from lists or arrays."""
    return pa.RecordBatch.from_arrays([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def unit_to_bytes(table: pa.RecordBatch) -> memoryview:
    """A unit's table as the bytes of a file."""
    return arrow.to_bytes(table, "lz4")


def unit_from_bytes(data: bytes | memoryview, *columns: str) -> pa.RecordBatch:
    """A unit's table, or these columns of it, the others left compressed; ConfigError if it is none."""
    return _read(data, UNIT, columns)


def references_to_bytes(table: pa.RecordBatch) -> memoryview:
    """A shard's references as the bytes of a file.

    Not compressed, which would take a quarter of all the time of planning to save about 110 bytes a sample.
    """
    return arrow.to_bytes(table)


def references_from_bytes(data: bytes | memoryview) -> pa.RecordBatch:
    """A shard's references; ConfigError if these are none."""
    return _read(data, REFERENCE)


def placements_to_bytes(table: pa.RecordBatch) -> memoryview:
    """Placed references on their way between two steps, not compressed: they are read once, and soon."""
    return memoryview(table.serialize())


def placements_from_bytes(data: bytes) -> pa.RecordBatch:
    """The inverse of `part_to_bytes`."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), PLACEMENT)


def release_memory() -> None:
    """Gives back what Arrow keeps of freed tables: half of a worker's peak, if tables of another step follow."""
    pa.default_memory_pool().release_unused()


def digest_of(rows: Iterable[UnitRow]) -> str:
    """SHA-256 over what the rows say of the samples, not over where their bytes happen to be."""
    hasher = hashlib.sha256()
    for row in rows:
        fields = [
            (field, content if isinstance(content, bytes) else content.num_bytes)
            for field, content in row.content.fields
        ]
        hasher.update(_encode((row.split, row.name, row.key, row.label, row.fix, row.content.image, fields)))
    return hasher.hexdigest()


def hash_keys(key: pa.Array) -> np.ndarray:
    """A 64-bit hash of each key, to find equal ones."""
    if not len(key):
        return np.zeros(0, np.uint64)
    num_bytes = pc.binary_length(key).to_numpy()
    num_words = max(1, -(-int(num_bytes.max()) // _WORD_BYTES))
    padded = pc.ascii_rpad(key, num_words * _WORD_BYTES, "\0")
    start = padded.offset * num_words
    words = np.frombuffer(padded.buffers()[2], np.uint64)[start : start + len(key) * num_words]
    total = np.zeros(len(key), np.uint64)
    for place, word in enumerate(words.reshape(len(key), num_words).T):
        total += hash64(place, word) * (word != 0)  # what pads a key must not count: others may be longer elsewhere
    return hash64(num_bytes, total)


def values(column: pa.Array) -> list[Any]:
    """A column as Python values."""
    return column.to_numpy(zero_copy_only=False).tolist()


def _read(data: bytes | memoryview, schema: pa.Schema, columns: Sequence[str] = ()) -> pa.RecordBatch:
    try:
        return arrow.from_bytes(data, schema, columns)
    except ValueError as error:
        raise ConfigError(f"a table of the plan can't be read ({error}): it is damaged; {START_OVER}") from error
