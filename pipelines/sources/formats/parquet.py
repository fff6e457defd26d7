"""Parquet files, read by a few rows at a time from any storage: neither a file nor a row group is
held in memory.
"""

import datetime
import decimal
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from shardset.errors import SourceError
from shardset.format import parquet

BUFFER_BYTES = 1 << 20
"""The pages of a column are read through a buffer of this size."""

_ARE_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_binary_view,
)

_ADVICE = "fetch or write the file again, with values that Python can hold"


def parquet_errors(where: str) -> AbstractContextManager[None]:
    """A block in which an error of the format or of a value is a SourceError about `where`."""
    return parquet.parquet_errors(
        lambda reason: SourceError(f"{where}: not readable as Parquet ({reason}); {_ADVICE}")
    )


def open_parquet(file: IO[bytes], where: str) -> ParquetFile:
    """The file, with its footer read; raises SourceError if it is not Parquet."""
    with parquet_errors(where):
        return ParquetFile(
            file, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )


def records(
    file: ParquetFile,
    where: str,
    *,
    columns: Sequence[str],
    batch_size: int,
    row_groups: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of some row groups, or of all, as Python values; `columns` may name leaves, such as
    `image.path`.

    Holds at most `batch_size` rows. Raises SourceError, with the row group and the column, for
    damage and for values that Python can't hold.
    """
    for number in range(file.num_row_groups) if row_groups is None else row_groups:
        place, num_rows = f"{where}: row group {number}", 0
        batches = file.iter_batches(
            batch_size, row_groups=[number], columns=list(columns), use_threads=False
        )
        while True:
            with parquet_errors(place):
                batch = next(batches, None)
            if batch is None:
                break
            num_rows += len(batch)
            names, values = batch.schema.names, []
            for name in names:
                with parquet_errors(f"{place}, column {name}"):
                    values.append(batch.column(name).to_pylist())
            yield from (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))
        if num_rows != (listed := file.metadata.row_group(number).num_rows):
            raise SourceError(f"{place}: {num_rows} rows, its footer says {listed}; {_ADVICE}")


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of this type are bytes."""
    if pa.types.is_dictionary(kind):
        return is_bytes(kind.value_type)
    return any(are_bytes(kind) for are_bytes in _ARE_BYTES)


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether values of this type are or contain bytes."""
    return is_bytes(kind) or any(
        holds_bytes(kind.field(number).type) for number in range(kind.num_fields)
    )


def json_value(value: Any) -> Any:
    """A value of a column as JSON has it: dates and decimals as texts, numbers that JSON lacks as
    null.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal | uuid.UUID):
        return str(value)
    return value
