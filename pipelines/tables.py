"""The durable tables of a plan, as Arrow IPC files: one row a raw sample, later one row a stored sample.

A unit's table lists what the unit holds; a shard's table (its references) lists what stands at which position and
where its bytes are.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset import naming
from shardset.permutation import hash64

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
_CODEC = "lz4"

_REJECTED = b"rejected"
_DIGESTED = ["split", "name", "key", "label", "image", "fix"]
_SHORT = 4
_WORD_BYTES = 8
_FEW = {"split", "image", "fix", "field", "object", "generation"}
"""Columns that hold few different values, most often: numbers into a dictionary, in files and wherever rows move."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table as flat columns, fast to put into another order.

    `extents` are the columns of all rows' fields in one line; those of row i are at ends[i] to ends[i + 1].
    """

    columns: dict[str, pa.Array]
    ends: np.ndarray
    extents: dict[str, pa.Array]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def numbers(self, column: str) -> np.ndarray:
        """A column of numbers, or the codes of a column with a dictionary."""
        found = self.columns[column]
        return (found.indices if pa.types.is_dictionary(found.type) else found).to_numpy()

    def words(self, column: str) -> list[str]:
        """The dictionary that the codes of a column point into."""
        return self.columns[column].dictionary.to_pylist()

    def take(self, row: np.ndarray) -> "Rows":
        """The rows with these numbers, in this order."""
        start, each = self.ends[row], self.ends[row + 1] - self.ends[row]
        ends = _ends(each)
        rows, fields = pa.array(row), pa.array(np.repeat(start - ends[:-1], each) + np.arange(ends[-1]))
        return Rows(
            {name: pc.take(column, rows, boundscheck=False) for name, column in self.columns.items()},
            ends,
            {name: pc.take(column, fields, boundscheck=False) for name, column in self.extents.items()},
        )

    def slices(self, bounds: Sequence[int]) -> Iterator["Rows"]:
        """The rows between each two neighbours of `bounds`, without a copy."""
        for start, stop in pairwise(bounds):
            first, last = int(self.ends[start]), int(self.ends[stop])
            yield Rows(
                {name: column.slice(start, stop - start) for name, column in self.columns.items()},
                self.ends[start : stop + 1] - first,
                {name: column.slice(first, last - first) for name, column in self.extents.items()},
            )

    def replace(self, **columns: pa.Array) -> "Rows":
        """The rows with other or more columns."""
        return Rows({**self.columns, **columns}, self.ends, self.extents)


def concat(parts: Sequence[Rows]) -> Rows:
    """All rows of all parts."""
    first = parts[0]
    return Rows(
        {name: _joined([part.columns[name] for part in parts]) for name in first.columns},
        _ends(np.concatenate([np.diff(part.ends) for part in parts])),
        {name: _joined([part.extents[name] for part in parts]) for name in first.extents},
    )


def rows_of(table: pa.Table) -> Rows:
    """A table's rows as flat columns."""
    fields = _one_piece(table["fields"])
    ends = fields.offsets.to_numpy().astype(np.int64)
    return Rows(
        {name: _coded(name, _one_piece(table[name])) for name in table.column_names if name != "fields"},
        ends - ends[0],
        {
            column.name: _coded(column.name, values)
            for column, values in zip(_EXTENT, fields.flatten().flatten(), strict=True)
        },
    )


def table_of(rows: Rows) -> pa.Table:
    """The inverse of `rows_of`; columns of few values keep their dictionaries."""
    extents = pa.StructArray.from_arrays([_trimmed(column) for column in rows.extents.values()], list(rows.extents))
    columns = {name: _trimmed(column) for name, column in rows.columns.items()}
    columns["fields"] = pa.ListArray.from_arrays(pa.array(rows.ends.astype(np.int32)), extents)
    placed = [name for name, _ in PLACED if name in columns]
    return pa.table({name: columns[name] for name in [*UNIT.names, *placed]})


def to_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a compressed Arrow IPC file."""
    return rows_to_bytes(rows_of(table), table.schema.metadata)


def rows_to_bytes(rows: Rows, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Rows as the bytes of a compressed Arrow IPC file."""
    table = table_of(rows).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    # Not in threads: of the many small columns each would wait for one longer than it takes to compress.
    options = pa.ipc.IpcWriteOptions(compression=_CODEC, use_threads=False)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """The inverse of `to_bytes`."""
    table = _read(data)
    fields = _one_piece(table["fields"])
    extents = pa.StructArray.from_arrays(list(map(_plain, fields.flatten().flatten())), fields=list(_EXTENT))
    lists = pa.ListArray.from_arrays(fields.offsets, extents)
    columns = [lists if name == "fields" else _plain(_one_piece(table[name])) for name in table.column_names]
    return pa.table(columns, table.column_names).replace_schema_metadata(table.schema.metadata)


def rows_from_bytes(data: bytes) -> Rows:
    """The rows of what `to_bytes` or `rows_to_bytes` made."""
    return rows_of(_read(data))


def keys_from_bytes(data: bytes) -> pa.Array:
    """The column of keys of what `to_bytes` made, the others left compressed."""
    wanted = pa.ipc.IpcReadOptions(included_fields=[UNIT.get_field_index("key")], use_threads=False)
    return _one_piece(pa.ipc.open_file(pa.BufferReader(data), options=wanted).read_all()["key"])


def part_to_bytes(rows: Rows) -> bytes:
    """Rows on their way between two steps, not compressed: they are read once, soon, and as fast as they come."""
    table = table_of(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def part_from_bytes(data: bytes) -> Rows:
    """The inverse of `part_to_bytes`."""
    return rows_of(pa.ipc.open_stream(data).read_all())


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


def digest_of(rows: Rows) -> str:
    """SHA-256 over what the rows say of the samples, not over where their bytes happen to be."""
    hasher = hashlib.sha256()
    for column in _DIGESTED:
        hasher.update(json.dumps([column, values(rows.columns[column])]).encode())
    for column in ("field", "num_bytes"):
        hasher.update(json.dumps([column, values(rows.extents[column])]).encode())
    hasher.update(b"".join(filter(None, values(rows.extents["data"]))))
    return hasher.hexdigest()


def field_bytes(rows: Rows) -> np.ndarray:
    """The bytes of all fields of each row."""
    return np.diff(_ends(rows.extents["num_bytes"].to_numpy())[rows.ends])


def no_keys(key: pa.Array) -> np.ndarray:
    """The rows whose wanted key can't be one: `naming.is_key` of all at once."""
    fits = pc.less_equal(pc.binary_length(key), pa.scalar(naming.MAX_KEY_BYTES, pa.int32()))
    good = pc.and_(fits, pc.match_substring_regex(key, rf"\A(?:{naming.KEY_PATTERN})\z"))
    return np.flatnonzero(~good.to_numpy(zero_copy_only=False))


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


def with_copies(key: pa.Array, copy: np.ndarray) -> pa.Array:
    """The key of each repeat: `naming.copy_key` of all at once."""
    if not copy.any():
        return key
    repeats = pc.binary_join_element_wise(key, pa.array(copy).cast(pa.string()), naming.COPY_MARK)
    return pc.if_else(pa.array(copy == 0), key, repeats)


def values(column: pa.Array) -> list[Any]:
    """A column as Python values; what it holds often is one object."""
    if pa.types.is_dictionary(column.type):
        words = [*column.dictionary.to_pylist(), None]
        return [words[code] for code in pc.fill_null(column.indices, len(words) - 1).to_numpy().tolist()]
    if column.null_count or not pa.types.is_integer(column.type):
        return column.to_pylist()
    return column.to_numpy().tolist()


def _read(data: bytes) -> pa.Table:
    options = pa.ipc.IpcReadOptions(use_threads=False)
    return pa.ipc.open_file(pa.BufferReader(data), options=options).read_all()


def _ends(sizes: np.ndarray) -> np.ndarray:
    """0 and the running sums."""
    return np.concatenate([[0], np.cumsum(sizes)])


def _one_piece(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.unify_dictionaries().chunks) if column.num_chunks else pa.array([], column.type)


def _joined(columns: Sequence[pa.Array]) -> pa.Array:
    return columns[0] if len(columns) == 1 else _one_piece(pa.chunked_array(columns))


def _coded(name: str, column: pa.Array) -> pa.Array:
    return column.dictionary_encode() if name in _FEW and not pa.types.is_dictionary(column.type) else column


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _trimmed(column: pa.Array) -> pa.Array:
    """With a dictionary no longer than the column: a slice of many rows brings the words of all."""
    if not pa.types.is_dictionary(column.type) or len(column.dictionary) <= max(_SHORT, len(column)):
        return column
    return column.dictionary_decode().dictionary_encode()
