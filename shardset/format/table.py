"""Tables whose rows check themselves, so that a reader may fetch any range of rows and trust it.

A table is a NumPy array file, version 1.0, of little-endian records without padding. Its last
column, `check`, is the CRC32C of the other bytes of the row and of its number as 8 bytes. The
header follows from the columns and the number of rows, so it is compared, never parsed.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardset.storage.base import Storage
from shardset.storage.checked import read_range

CHECK: Final = ("check", "<u4")
"""The last column of every table."""

ROWS_AT_ONCE: Final = 64
"""Neighbours that are read together, 4 to 6 KB: little more than a small image takes in its tar."""

MAGIC: Final = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64
_MAX_DIGITS = 21
_CHECK_BYTES = 4

Rows = NDArray[np.void]


@lru_cache(maxsize=256)
def header(dtype: np.dtype[Any], num_rows: int) -> bytes:
    """The bytes before the first row, as many for any number of rows.

    Raises ValueError beyond 64 KiB.
    """
    descr = np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': ({num_rows},), }}"
    text += " " * (_MAX_DIGITS - len(str(num_rows)))
    size = len(text) + 1 + -(len(MAGIC) + 2 + len(text) + 1) % _ALIGNMENT
    if size > 0xFFFF:
        raise ValueError(
            f"the header of a table would be {size} bytes, too big for 64 KiB; use fewer or shorter"
            " columns"
        )
    return MAGIC + size.to_bytes(2, "little") + text.ljust(size - 1).encode("ascii") + b"\n"


def num_bytes(dtype: np.dtype[Any], num_rows: int) -> int:
    """The size of a table."""
    return len(header(dtype, num_rows)) + num_rows * dtype.itemsize


def sealed(rows: Rows, first: int = 0) -> Rows:
    """A copy of rows, of which the first has the number `first`, with their checks filled in."""
    copy = np.array(rows, order="C")
    copy["check"] = checks(copy, first)
    return copy


def checks(rows: Rows, first: int = 0) -> NDArray[np.uint32]:
    """The right `check` of each row."""
    data, size, value = rows.tobytes(), rows.dtype.itemsize, google_crc32c.value
    checksums = (
        value(data[start : start + size - _CHECK_BYTES] + number.to_bytes(8, "little"))
        for start, number in zip(range(0, len(data), size), count(first), strict=False)
    )
    return np.fromiter(checksums, np.uint32, len(rows))


def to_bytes(rows: Rows) -> bytes:
    """A complete table, with the checks of its rows."""
    return header(rows.dtype, len(rows)) + sealed(rows).tobytes()


def rows_of(data: bytes, dtype: np.dtype[Any]) -> Rows:
    """The rows of a complete table, whose checksum has been compared."""
    num_rows = (len(data) - len(header(dtype, 0))) // dtype.itemsize
    return np.frombuffer(data, dtype, num_rows, len(header(dtype, 0)))


def runs_of_groups(groups: NDArray[np.int64], num_rows: int) -> Iterator[range]:
    """The rows of some groups of neighbours, in order: a range for each run of groups."""
    for run in np.split(groups, np.flatnonzero(np.diff(groups) > 1) + 1):
        if len(run):
            stop = (run.item(-1) + 1) * ROWS_AT_ONCE
            yield range(run.item(0) * ROWS_AT_ONCE, min(stop, num_rows))


def read_rows(
    storage: Storage,
    name: str,
    dtype: np.dtype[Any],
    num_rows: int,
    wanted: range,
    *,
    crc32c: str,
    advice: str,
) -> Rows:
    """The rows `wanted` of a stored table of `num_rows`, each compared with its check.

    Reads and raises as `read_range` does.
    """
    start = len(header(dtype, num_rows))
    first, stop = (start + number * dtype.itemsize for number in (wanted.start, wanted.stop))

    def wrong_row(data: bytes) -> str:
        rows = np.frombuffer(data, dtype)
        wrong = np.flatnonzero(rows["check"] != checks(rows, wanted.start))
        return f"row {wanted.start + wrong.item(0)} does not fit its check" if len(wrong) else ""

    data = read_range(
        storage, name, first, stop,
        num_bytes=num_bytes(dtype, num_rows), crc32c=crc32c, advice=advice, problem_of=wrong_row,
    )  # fmt: skip
    return np.frombuffer(data, dtype)
