"""The durable tables of a plan, as Arrow IPC files: one row a raw sample, later one row a stored sample.

A unit's table lists what the unit holds; a shard's table (its references) lists what stands at which position and
where its bytes are.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset import naming

_EXTENT = pa.struct(
    [
        ("field", pa.string()),
        ("object", pa.string()),
        ("generation", pa.string()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),
        ("data", pa.binary()),
    ]
)
UNIT = pa.schema(
    [
        ("split", pa.string()),
        ("name", pa.string()),
        ("key", pa.string()),
        ("label", pa.int64()),
        ("image", pa.string()),
        ("fix", pa.string()),
        ("crc32c", pa.int64()),
        ("fields", pa.list_(_EXTENT)),
    ]
)
"""`image` is the field whose content is examined ("" if none), `fix` what is mended in it when it is written, `crc32c`
that of the image's raw bytes (-1 if they were not read). `data` holds small contents; else the extent says where."""

PLACED = [("source", pa.int64()), ("copy", pa.int32()), ("shard", pa.int32()), ("rank", pa.uint64())]
_PLACED_SCHEMA = pa.schema([*UNIT, *PLACED])
_CODEC = "zstd"
_SIZE_BYTES = 8

_REJECTED = b"rejected"
_DIGESTED = ["split", "name", "key", "label", "image", "fix"]


def to_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a compressed Arrow IPC file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """The inverse of `to_bytes`."""
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


def placed_to_bytes(table: pa.Table) -> bytes:
    """Placed rows for the shuffle: compressed, and without the schema, which is most of a small Arrow file."""
    (batch,) = table.to_batches()
    data = batch.serialize()
    return len(data).to_bytes(_SIZE_BYTES, "little") + pa.compress(data, codec=_CODEC, asbytes=True)


def placed_from_bytes(data: bytes) -> pa.Table:
    """The inverse of `placed_to_bytes`."""
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    batch = pa.ipc.read_record_batch(pa.decompress(data[_SIZE_BYTES:], size, codec=_CODEC), _PLACED_SCHEMA)
    return pa.Table.from_batches([batch])


def release_memory() -> None:
    """Gives back what Arrow keeps of freed tables: half of a worker's peak, if tables of another step follow."""
    pa.default_memory_pool().release_unused()


def unit_table(rows: Sequence[dict[str, Any]], rejected: Sequence[dict[str, Any]]) -> pa.Table:
    """The table of a unit; what was rejected travels in its metadata."""
    table = pa.Table.from_pylist(list(rows), schema=UNIT)
    return table.replace_schema_metadata({_REJECTED: json.dumps(list(rejected), sort_keys=True).encode()})


def rejected_of(table: pa.Table) -> list[dict[str, Any]]:
    """What `unit_table` was given as rejected."""
    return json.loads((table.schema.metadata or {})[_REJECTED])


def digest_of(table: pa.Table) -> str:
    """SHA-256 over what the table says of the samples, not over where their bytes happen to be."""
    hasher = hashlib.sha256()
    for column in _DIGESTED:
        hasher.update(json.dumps([column, table[column].to_pylist()]).encode())
    fields = table["fields"].combine_chunks().flatten()
    for column in ("field", "num_bytes"):
        hasher.update(json.dumps([column, pc.struct_field(fields, column).to_pylist()]).encode())
    for data in pc.struct_field(fields, "data"):
        hasher.update(data.as_py() or b"")
    return hasher.hexdigest()


def with_keys(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The table with other keys."""
    return table.set_column(table.schema.get_field_index("key"), "key", pa.array(keys, pa.string()))


def no_keys(table: pa.Table) -> np.ndarray:
    """The rows whose wanted key can't be one: `naming.is_key` of all at once."""
    key = table["key"]
    fits = pc.less_equal(pc.binary_length(key), pa.scalar(naming.MAX_KEY_BYTES, pa.int32()))
    good = pc.and_(fits, pc.match_substring_regex(key, rf"\A(?:{naming.KEY_PATTERN})\z"))
    return np.flatnonzero(~good.to_numpy())


def place_rows(table: pa.Table, row: np.ndarray, columns: Mapping[str, np.ndarray]) -> pa.Table:
    """The rows `row` of a unit's table, in one piece, with the columns of PLACED."""
    taken = table.replace_schema_metadata(None).take(pa.array(row)).combine_chunks()
    for name, dtype in PLACED:
        taken = taken.append_column(name, pa.array(columns[name], dtype))
    return taken


def numbers(table: pa.Table, column: str) -> np.ndarray:
    """A column without nulls as a NumPy array."""
    return table[column].to_numpy()
