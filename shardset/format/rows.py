"""The index of a shard: a Parquet file next to its tar with a row per sample, in the order of the
tar. `docs/reference/format.md` explains its columns.

What a stream needs comes first, so that of a large index it reads a range for each group of rows.
The footer has the CRC32C of every column of every group, because those of Parquet's pages don't
cover the headers of the pages.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from shardset.checksum import crc32c_of
from shardset.errors import REPAIR, DamagedShard
from shardset.format.images import is_image_field
from shardset.format.parquet import as_numpy, parquet_errors

GROUP_ROWS: Final = 1024
"""Rows of a group in a large index; a stream's columns of so many take about 12 KB."""

WHOLE_ROWS: Final = 2 * GROUP_ROWS
"""An index of up to so many rows, about 100 KB, is one group and is read whole."""

MAX_FIELDS: Final = 900
"""More are parts of keys that were taken for fields."""

MAX_ROW_BYTES: Final = 1 << 16
"""An index that claims more for a row, once it is decompressed, is not read."""

_CHECKS = "shardset.crc32c"

STREAMED: Final = {"crc32c": pa.uint32(), "label": pa.int64()}
"""The columns that a stream reads, with those of the fields."""

FACTS: Final = {
    "key": pa.string(),
    "image_crc32c": pa.uint32(),
    "width": pa.int32(),
    "height": pa.int32(),
    "serial": pa.int64(),
    "copy": pa.int32(),
    "name": pa.string(),
    "object": pa.string(),
    "generation": pa.string(),
    "object_offset": pa.int64(),
    "object_bytes": pa.int64(),
    "fix": pa.string(),
}
"""The other columns; from `width` on they may be null, but `serial` and `copy`."""

_NEVER_NULL = {*STREAMED, "key", "image_crc32c", "serial", "copy"}
_REPEATING = ["label", "width", "height", "copy", "object", "fix"]


class Origin(NamedTuple):
    """Where a sample comes from: its name in the raw input, and the object, its generation and the
    range of bytes that hold its image; `fix` has the marks of what a build met or repaired in that.
    """

    name: str | None = None
    object: str | None = None
    generation: str | None = None
    offset: int | None = None
    num_bytes: int | None = None
    fix: str | None = None


class Member(NamedTuple):
    """The bytes [start, stop) of a tar that hold a field of a sample."""

    start: int
    stop: int
    field: str


ORIGIN: Final = ["name", "object", "generation", "object_offset", "object_bytes", "fix"]
"""The columns of an origin, in its order."""

UNKNOWN: Final = Origin()
"""The origin of samples that no build made."""


def schema_of(fields: Iterable[str]) -> pa.Schema:
    """The columns of an index of samples with these fields.

    For each field `jpg` there are `jpg.offset` and `jpg.bytes`, where its content begins in the tar
    and its size; null where a sample has no such field.
    """
    ranges = {f"{field}.{part}": pa.int64() for field in fields for part in ("offset", "bytes")}
    columns = STREAMED | ranges | FACTS
    return pa.schema(
        [pa.field(name, kind, name not in _NEVER_NULL) for name, kind in columns.items()]
    )


def fields_of(names: Iterable[str]) -> list[str]:
    """The fields of an index with these columns, in their order; the members of a sample may have
    another.
    """
    return [name.removesuffix(".offset") for name in names if name.endswith(".offset")]


def with_fields(rows: pa.Table, fields: Sequence[str]) -> pa.Table:
    """The rows with columns for all these fields, null in those that they lack."""
    schema = schema_of(fields)
    lacking = pa.nulls(len(rows), pa.int64())
    names = set(rows.column_names)
    return pa.table([rows[name] if name in names else lacking for name in schema.names], schema)


def to_bytes(rows: pa.Table) -> bytes:
    """The file of an index."""
    data = _written(rows)
    if len(rows) <= WHOLE_ROWS:
        return data
    chunks = _chunks(parquet.read_metadata(pa.BufferReader(data)))
    checks = np.array([crc32c_of(data[start:stop]) for start, stop in chunks], "<u4")
    return _written(rows, {_CHECKS: base64.b64encode(checks.tobytes())})


def footer_of(data: bytes) -> bytes:
    """The end of the file, which says where everything is."""
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


def from_bytes(
    data: bytes, num_rows: int, where: str, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of an index, or these columns of them, without those of fields that it lacks.

    Its checksum must have been compared. Raises DamagedShard unless it is an index of so many rows.
    """
    with _index_errors(where):
        return _read(parquet.ParquetFile(pa.BufferReader(data)), num_rows, columns, None)


class Footer:
    """The footer of a large index, from which groups of its rows are read."""

    def __init__(self, data: bytes, num_bytes: int, where: str) -> None:
        """`num_bytes` is the size of the index; raises DamagedShard unless `data` is its footer."""
        self._num_bytes, self._where = num_bytes, where
        with _index_errors(where):
            self._metadata = parquet.read_metadata(pa.BufferReader(b"PAR1" + data))
            checks = base64.b64decode((self._metadata.metadata or {})[_CHECKS.encode()])
            self._chunks = [*_chunks(self._metadata)]
            if len(checks) != 4 * len(self._chunks):
                raise ValueError(f"{len(checks)} bytes of checks for {len(self._chunks)} columns")
        self._checks: list[int] = np.frombuffer(checks, "<u4").tolist()
        self.num_bytes = 4 * len(data)
        """The memory that it takes, about."""

    def byte_range(self, group: int, columns: Sequence[str]) -> tuple[int, int]:
        """The bytes [start, stop) of an index that hold some columns of a group of rows."""
        chunks = [self._chunks[number] for number in self._numbers(group, columns)]
        return min(start for start, _ in chunks), max(stop for _, stop in chunks)

    def problem_of(self, group: int, columns: Sequence[str], data: bytes) -> str:
        """What is wrong with the bytes of `byte_range`, "" if nothing is."""
        first, _ = self.byte_range(group, columns)
        for number in self._numbers(group, columns):
            start, stop = self._chunks[number]
            if crc32c_of(data[start - first : stop - first]) != self._checks[number]:
                return f"rows {group * GROUP_ROWS:,} and following don't fit their crc32c"
        return ""

    def rows(self, parts: dict[int, bytes], columns: Sequence[str], num_rows: int) -> pa.Table:
        """The rows of the groups in `parts`, which has the bytes of each."""
        file = np.zeros(self._num_bytes, np.uint8)  # of which only these pages take memory
        for group, data in parts.items():
            start, stop = self.byte_range(group, columns)
            file[start:stop] = np.frombuffer(data, np.uint8)
        with _index_errors(self._where):
            source = parquet.ParquetFile(pa.py_buffer(file), metadata=self._metadata)
            return _read(source, num_rows, columns, [*parts])

    def _numbers(self, group: int, columns: Sequence[str]) -> list[int]:
        names = self._metadata.schema.names
        return [group * len(names) + number for number, name in enumerate(names) if name in columns]


def numbers(rows: pa.Table, column: str) -> NDArray[Any]:
    """A column of numbers; 0 where there is none."""
    values = rows[column].combine_chunks()
    return as_numpy(values.fill_null(0) if values.null_count else values)


def keys_of(rows: pa.Table) -> NDArray[np.bytes_]:
    """The keys, in ASCII."""
    return np.array(rows["key"].cast(pa.binary()).to_pylist(), np.bytes_)


def ranges_of(rows: pa.Table, field: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a field begins in the tar, and its size; zeros for samples that lack it."""
    if f"{field}.offset" not in rows.column_names:
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    return numbers(rows, f"{field}.offset"), numbers(rows, f"{field}.bytes")


def members_of(rows: pa.Table) -> Iterator[list[Member]]:
    """The fields of each sample in the order of the tar, without those that it lacks."""
    fields = fields_of(rows.column_names)
    ranges = (zip(*map(np.ndarray.tolist, ranges_of(rows, name)), strict=True) for name in fields)
    for of_sample in zip(*ranges, strict=True):
        yield sorted(
            Member(start, start + size, field)
            for field, (start, size) in zip(fields, of_sample, strict=True)
            if start
        )


def content_bytes(rows: pa.Table) -> int:
    """The size of all fields of all samples."""
    return sum(int(ranges_of(rows, field)[1].sum()) for field in fields_of(rows.column_names))


def first_images(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the first image of each sample begins in the tar, and its size;
    zeros if it has none.
    """
    starts, sizes = np.zeros((2, len(rows)), np.int64)
    for name in filter(is_image_field, fields_of(rows.column_names)):
        start, size = ranges_of(rows, name)
        is_first = (start > 0) & ((sizes == 0) | (start < starts))
        starts[is_first], sizes[is_first] = start[is_first], size[is_first]
    return starts, sizes


def origins_of(rows: pa.Table) -> Iterator[Origin]:
    """The origin of each sample."""
    return map(Origin, *(rows[name].to_pylist() for name in ORIGIN))


def _written(rows: pa.Table, metadata: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    signed = (pa.int32(), pa.int64())
    writer = parquet.ParquetWriter(
        out,
        rows.schema,
        compression="zstd",
        use_dictionary=_REPEATING,
        column_encoding={
            field.name: "DELTA_BINARY_PACKED"
            for field in rows.schema
            if field.type in signed and field.name not in _REPEATING
        },
        write_page_checksum=True,
        write_statistics=False,
        store_schema=False,
    )
    with writer:
        writer.write_table(rows, len(rows) if len(rows) <= WHOLE_ROWS else GROUP_ROWS)
        writer.add_key_value_metadata(metadata or {})
    return out.getvalue()


def _chunks(metadata: parquet.FileMetaData) -> Iterator[tuple[int, int]]:
    """The bytes [start, stop) of each column of each group."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            yield start, start + chunk.total_compressed_size


def _read(
    file: parquet.ParquetFile,
    num_rows: int,
    columns: Sequence[str] | None,
    groups: Sequence[int] | None,
) -> pa.Table:
    metadata = file.metadata
    if metadata.num_rows != num_rows:
        raise ValueError(f"{metadata.num_rows} rows, expected {num_rows}")
    parts = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if any(part.num_rows > WHOLE_ROWS for part in parts):
        raise ValueError(f"groups of more than {WHOLE_ROWS:,} rows")
    num_bytes = sum(part.total_byte_size for part in parts)
    if num_bytes > MAX_ROW_BYTES * num_rows:
        raise ValueError(f"{num_bytes:,} bytes for {num_rows:,} rows")
    stored = file.schema_arrow.remove_metadata()
    if stored != schema_of(fields_of(stored.names)):
        raise ValueError(f"the columns {', '.join(stored.names):.200}")
    wanted = None if columns is None else [name for name in columns if name in stored.names]
    if groups is None:
        rows = file.read(columns=wanted, use_threads=False)
    else:
        rows = file.read_row_groups(groups, columns=wanted, use_threads=False)
    rows.validate(full=True)  # its texts are UTF-8
    return rows.replace_schema_metadata()


def _index_errors(where: str) -> Any:
    return parquet_errors(lambda why: DamagedShard(f"{where}: not a shard index ({why}); {REPAIR}"))
