"""The tables of a plan as Arrow IPC files: first a row for each raw sample, then a row for each
stored sample.

A unit's table lists the samples of the unit. A shard's table, its references, lists the sample at
each position and the extents of its bytes. Each row is one binary value next to the numbers that
planning needs: rows are moved three times between the two tables, and text columns would make that
slow.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.plan import paths
from pipelines.plan.files import START_OVER, PlanFiles, in_order
from pipelines.plan.frames import REFERENCE, Original, table_from_bytes, table_to_bytes
from pipelines.sources.base import Extent
from shardset.errors import ConfigError, NotFound
from shardset.format.images import is_image_field
from shardset.order.permutation import hash_text
from shardset.prepared import prepared

UNIT = pa.schema(
    [
        ("split", pa.string()),
        ("label", pa.int64()),
        ("key_hash", pa.uint64()),
        ("draw", pa.uint64()),
        ("image", pa.uint64()),
        ("row", pa.binary()),
    ]
)
"""`row` is a UnitRow as MessagePack; the other columns repeat the values that planning needs."""

PLACEMENT = pa.schema([*REFERENCE, ("shard", pa.int32()), ("rank", pa.uint64())])
"""A reference on its way to its shard."""

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


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The contents of a sample.

    `image` is the field of its image, "" if there is none. `fields` are the stored fields in member
    order, each with the extent of its content, or with the content itself if that is small.
    """

    image: str
    fields: list[tuple[str, Extent | bytes]]

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


class UnitRow(Original, frozen=True, array_like=True, gc=False):
    """One raw sample of a unit's table.

    `draw` is the hash of its key that decides on a holdout, `image` a number that equal images
    share; 0 without a holdout.
    """

    label: int
    content: Content
    draw: int = 0
    image: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UnitRow).decode


def unit_table(rows: Sequence[UnitRow], rejected: Sequence[QuarantineEntry]) -> pa.RecordBatch:
    """The table of a unit; its metadata holds the rejected samples."""
    columns = {
        "split": [row.split for row in rows],
        "label": [row.label for row in rows],
        "key_hash": hash_keys([row.key for row in rows]),
        "draw": [row.draw for row in rows],
        "image": [row.image for row in rows],
        "row": list(map(_encode, rows)),
    }
    metadata = {_REJECTED: msgspec.json.encode(rejected)}
    return pa.RecordBatch.from_pydict(columns, UNIT.with_metadata(metadata))


def rejected_of(table: pa.RecordBatch) -> list[QuarantineEntry]:
    """The rejected samples that `unit_table` was given."""
    return msgspec.json.decode(table.schema.metadata[_REJECTED], type=list[QuarantineEntry])


def rows_of(table: pa.RecordBatch) -> list[UnitRow]:
    """The rows of a table of a unit or of references."""
    return list(map(_decode, values(table["row"])))


def concat(tables: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all tables, which must have the same columns."""
    columns = zip(*(table.columns for table in tables), strict=True)
    return pa.RecordBatch.from_arrays(
        list(map(pa.concat_arrays, map(list, columns))), schema=tables[0].schema
    )


def take(table: pa.RecordBatch, row: np.ndarray) -> pa.RecordBatch:
    """The rows with these numbers, in this order; the numbers are not checked."""
    return pc.take(table, pa.array(row), boundscheck=False)


def runs_of(values: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(value, start, stop) of each run of equal values."""
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for start, stop in pairwise(bounds if len(values) else ()):
        yield int(values[start]), start, stop


def unit_to_bytes(table: pa.RecordBatch) -> memoryview:
    """The bytes of a unit's table, compressed."""
    return table_to_bytes(table, "lz4")


def read_units(files: PlanFiles, units: Iterable[int], *columns: str) -> Iterator[pa.RecordBatch]:
    """The stored tables of units, or these columns of them, in order; ConfigError if one is missing
    or malformed.
    """
    try:
        for data in in_order(files.output, map(paths.unit_path, units), files.read):
            yield unit_from_bytes(data, *columns)
    except NotFound as error:
        raise ConfigError(f"a table of the plan is missing ({error}): {START_OVER}") from error


def unit_from_bytes(data: bytes | memoryview, *columns: str) -> pa.RecordBatch:
    """A unit's table, or only these columns, which leaves the others compressed; ConfigError if it
    is malformed.
    """
    return _read(data, UNIT, columns)


def references_to_bytes(table: pa.RecordBatch) -> memoryview:
    """The bytes of a shard's references, not compressed."""
    # Compression would save about 110 bytes per sample and take a quarter of the time of planning.
    return table_to_bytes(table)


def references_from_bytes(data: bytes | memoryview) -> pa.RecordBatch:
    """A shard's references; ConfigError if they are malformed."""
    return _read(data, REFERENCE)


def placements_to_bytes(table: pa.RecordBatch) -> memoryview:
    """The bytes of placed references, not compressed: they are read once, and soon."""
    return memoryview(table.serialize())


def placements_from_bytes(data: bytes) -> pa.RecordBatch:
    """The inverse of `placements_to_bytes`."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), PLACEMENT)


def release_memory() -> None:
    """Returns the memory of freed tables, which Arrow would keep, to the system; halves the peak of
    a worker.
    """
    pa.default_memory_pool().release_unused()


def digest_of(rows: Iterable[UnitRow]) -> str:
    """The SHA-256 of the samples in the rows; it does not cover the extents of their bytes."""
    hasher = hashlib.sha256()
    for row in rows:
        fields = [
            (field, content if isinstance(content, bytes) else content.num_bytes)
            for field, content in row.content.fields
        ]
        hasher.update(
            _encode((row.split, row.name, row.key, row.label, row.fix, row.content.image, fields))
        )
    return hasher.hexdigest()


def hash_keys(keys: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash of each key, to find equal keys."""
    return np.array([hash_text(key, key=0) for key in keys], np.uint64)


def values(column: pa.Array) -> list[Any]:
    """A column as Python values."""
    python_values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return python_values


def _read(
    data: bytes | memoryview, schema: pa.Schema, columns: Sequence[str] = ()
) -> pa.RecordBatch:
    try:
        return table_from_bytes(data, schema, columns)
    except ValueError as error:
        raise ConfigError(
            f"a table of the plan can't be read ({error}): it is damaged; {START_OVER}"
        ) from error
