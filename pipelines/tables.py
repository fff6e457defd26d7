"""The durable tables of a plan, as Arrow IPC files: one row a raw sample, later one row a stored sample.

A unit's table lists what the unit holds; a shard's table (its references) lists what stands at which position and
where its bytes are. What only the writer of a shard looks at is one binary value of a row: rows are moved three times
between the two, and it is columns that make that slow.
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

from pipelines.sources.base import Extent
from shardset import naming
from shardset.errors import ConfigError
from shardset.permutation import hash64

_ROW = [
    ("name", pa.string()),
    ("key", pa.string()),
    ("label", pa.int64()),
    ("fix", pa.string()),
    ("content", pa.binary()),
]
UNIT = pa.schema([("split", pa.string()), *_ROW])
"""`fix` is what is mended in the image when it is written, `content` a Content as MessagePack."""

REFERENCE = pa.schema([*_ROW, ("source", pa.int64()), ("copy", pa.int32())])
"""One stored sample: the row of its unit, its number in the split's raw samples, and which copy of it this is."""

PLACED = pa.schema([*REFERENCE, ("shard", pa.int32()), ("rank", pa.uint64())])
"""A reference on its way to its shard."""

_REJECTED = b"rejected"
_START_OVER = f"it is damaged; remove {naming.PLAN_FOLDER} at the output, then build again with --overwrite"
_WORD_BYTES = 8
_KEY_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+=-/"


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a sample is made of.

    `image` is the field whose content is examined ("" if none), `crc32c` that of the image's raw bytes (-1 if they were
    not read). `fields` are those that are stored, in member order, with where each content is, or a small one itself.
    """

    image: str
    crc32c: int
    fields: list[tuple[str, Extent | bytes]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(content.num_bytes if isinstance(content, Extent) else len(content) for _, content in self.fields)


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One raw sample of a unit's table."""

    split: str
    name: str
    key: str
    label: int
    fix: str
    content: Content


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Content).decode


def unit_table(rows: Sequence[Row], rejected: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """The table of a unit; what was rejected travels in its metadata."""
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in UNIT.names}
    columns["content"] = list(map(_encode, columns["content"]))
    metadata = {_REJECTED: json.dumps(list(rejected), sort_keys=True).encode()}
    arrays = [pa.array(columns[field.name], field.type) for field in UNIT]
    return pa.RecordBatch.from_arrays(arrays, schema=UNIT.with_metadata(metadata))


def rejected_of(table: pa.RecordBatch) -> list[dict[str, Any]]:
    """What `unit_table` was given as rejected."""
    return json.loads(table.schema.metadata[_REJECTED])


def rows_of(table: pa.RecordBatch) -> list[Row]:
    """The rows that `unit_table` was given."""
    columns = [values(table[name]) for name in ("split", "name", "key", "label", "fix")]
    found = zip(*columns, contents_of(table), strict=True)
    return [
        Row(split=split, name=name, key=key, label=label, fix=fix, content=content)
        for split, name, key, label, fix, content in found
    ]


def contents_of(table: pa.RecordBatch) -> list[Content]:
    """The content of each row."""
    return list(map(_decode, values(table["content"])))


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


def with_columns(table: pa.RecordBatch, schema: pa.Schema, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """A table of that schema: the given columns, the others from `table`."""
    arrays = [columns[name] if name in columns else table[name] for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_bytes(table: pa.RecordBatch) -> bytes:
    """A table as the bytes of a compressed Arrow IPC file."""
    sink = pa.BufferOutputStream()
    # Not in threads: of the many small columns each would wait for one longer than it takes to compress.
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    return sink.getvalue().to_pybytes()


def unit_from_bytes(data: bytes, *columns: str) -> pa.RecordBatch:
    """A unit's table, or these columns of it, the others left compressed; ConfigError if it is none."""
    return _read(data, UNIT, columns or UNIT.names)


def references_from_bytes(data: bytes) -> pa.RecordBatch:
    """A shard's references; ConfigError if these are none."""
    return _read(data, REFERENCE, REFERENCE.names)


def part_to_bytes(table: pa.RecordBatch) -> memoryview:
    """Placed references on their way between two steps, not compressed: they are read once, and soon."""
    return memoryview(table.serialize())


def part_from_bytes(data: bytes) -> pa.RecordBatch:
    """The inverse of `part_to_bytes`."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), PLACED)


def release_memory() -> None:
    """Gives back what Arrow keeps of freed tables: half of a worker's peak, if tables of another step follow."""
    pa.default_memory_pool().release_unused()


def digest_of(rows: Iterable[Row]) -> str:
    """SHA-256 over what the rows say of the samples, not over where their bytes happen to be."""
    hasher = hashlib.sha256()
    for row in rows:
        fields = [
            (field, content.num_bytes if isinstance(content, Extent) else content)
            for field, content in row.content.fields
        ]
        hasher.update(_encode((row.split, row.name, row.key, row.label, row.fix, row.content.image, fields)))
    return hasher.hexdigest()


def no_keys(key: pa.Array) -> np.ndarray:
    """The rows whose wanted key can't be one: `naming.is_key` of all at once."""
    num_bytes = pc.binary_length(key).to_numpy()
    if _are_keys(key, num_bytes):
        return np.zeros(0, np.int64)
    good = pc.match_substring_regex(key, rf"\A(?:{naming.KEY_PATTERN})\z").to_numpy(zero_copy_only=False)
    return np.flatnonzero(~good | (num_bytes > naming.MAX_KEY_BYTES))


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
    """A column as Python values."""
    return column.to_numpy(zero_copy_only=False).tolist()


def _are_keys(key: pa.Array, num_bytes: np.ndarray) -> bool:
    """Whether all can be keys, by what can be told of many at once: False says that some may be none."""
    if not len(key) or not 0 < num_bytes.min() <= num_bytes.max() <= naming.MAX_KEY_BYTES:
        return False
    _, ends, text = key.buffers()
    first, last = np.frombuffer(ends, np.int32)[[key.offset, key.offset + len(key)]].tolist()
    joined = text[first:last].to_pybytes()
    if b"//" in joined or joined.translate(None, _KEY_CHARACTERS):
        return False
    return not (pc.any(pc.starts_with(key, "/")).as_py() or pc.any(pc.ends_with(key, "/")).as_py())


def _read(data: bytes, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    wanted = [schema.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    try:
        table = pa.ipc.open_file(pa.BufferReader(data), options=options).get_batch(0)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"a table of the plan can't be read ({error}): {_START_OVER}") from error
    if list(table.schema) != [schema.field(name) for name in columns]:
        found = ", ".join(table.schema.names)
        raise ConfigError(f"a table of the plan has the columns {found}, expected {', '.join(columns)}: {_START_OVER}")
    return table
