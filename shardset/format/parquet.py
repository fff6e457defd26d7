"""Small Parquet files in memory, with checksums of their pages,
and the errors of any Parquet file.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from shardset.prepared import JSON_ERRORS

_UNREADABLE = (
    *(pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError),
    *JSON_ERRORS,
)


@contextmanager
def parquet_errors(fail: Callable[[str], Exception]) -> Iterator[None]:
    """A block that raises `fail(reason)` for damage, and for values that Python can't hold.

    Such as bad UTF-8, far dates, unknown time zones, sizes that no memory has, and a footer that is
    not JSON.
    """
    try:
        yield
    except _UNREADABLE as error:
        what = " ".join(str(error).split())  # pyarrow writes several lines
        raise fail(f"{what:.200}") from error


def open_table(data: bytes) -> parquet.ParquetFile:
    """The file, whose pages are compared with their checksums; use it in a block of
    `parquet_errors`.
    """
    return parquet.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)


def as_numpy(values: pa.Array) -> NDArray[Any]:
    """Numbers without nulls, in the same memory; `to_numpy` imports pandas (40 MB, 0.3 s)."""
    array: NDArray[Any] = np.from_dlpack(values)
    return array


def table_to_bytes(table: pa.Table, **options: Any) -> bytes:
    """The file of a table; `options` go to `pyarrow.parquet.write_table`."""
    out = io.BytesIO()
    parquet.write_table(table, out, write_page_checksum=True, **{"compression": "zstd"} | options)
    return out.getvalue()
