"""The index of a shard: a table with a row per sample."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardset.errors import REPAIR, DamagedShard
from shardset.format import table
from shardset.format.images import is_image_field

MAX_FIELDS = 900
"""The header of an index, of 64 KiB, has room for so many, whatever they are called."""

# the column of a field: where its content begins in the tar
_RANGE = [("offset", "<u8"), ("num_bytes", "<u8")]
_HEAD = [  # before the key
    *(("offset", "<u8"), ("crc32c", "<u4"), ("image_crc32c", "<u4")),
    *(("label", "<i8"), ("source", "<u8"), ("copy", "<u4")),
]
_KEY_COLUMN = re.compile(rb"\('key', '\|S([1-9][0-9]{0,3})'\)")
_FIELD_COLUMN = re.compile(rb"\('\.([a-z0-9_.-]+)', \[")
_SHAPE = re.compile(rb"'shape': \(([0-9]{1,12}),\)")


def index_dtype(fields: Sequence[str], key_bytes: int) -> np.dtype:
    """One row of an index.

    `offset` of the first header, `crc32c` over the contents of the fields in member order,
    `image_crc32c` over the first image alone (0 if there is none), `label`, `source`,
    `copy`, `key` (ASCII), then for each field of the split a column `.jpg`, `.cls`, ... with the
    pair (`offset`, `num_bytes`) of its content; (0, 0) where the sample has no such field. Last the
    `check` of the row (see `shardset.format.table`).
    """
    return np.dtype(
        [
            *_HEAD,
            ("key", f"S{key_bytes}"),
            *((f".{field}", _RANGE) for field in fields),
            table.CHECK,
        ]
    )


@lru_cache(maxsize=256)
def stored_dtype(fields: tuple[str, ...], num_samples: int, num_bytes: int) -> np.dtype | None:
    """The type of the rows of a stored index of that size, whose keys have one width; None if there
    is none.
    """
    for like in (1, 10, 100):  # the number of digits decides the size of the header
        dtype = index_dtype(fields, like)
        row_bytes, rest = divmod(num_bytes - len(table.header(dtype, num_samples)), num_samples)
        key_bytes = like + row_bytes - dtype.itemsize
        if not rest and key_bytes > 0 and len(str(key_bytes)) == len(str(like)):
            return index_dtype(fields, key_bytes)
    return None


def index_array(rows: Sequence[tuple[Any, ...]], fields: Sequence[str]) -> np.ndarray:
    """The index of rows that hold the columns before the fields, then (offset, size) of each field.

    A row may leave out its last fields, which become (0, 0). `table.to_bytes` fills in the checks.
    """
    key_bytes = max((len(row[len(_HEAD)]) for row in rows), default=1)
    width = len(_HEAD) + 1 + len(fields)
    full = [row + ((0, 0),) * (width - len(row)) + (0,) for row in rows]
    return np.array(full, dtype=index_dtype(fields, key_bytes))


def with_fields(index: np.ndarray, fields: Sequence[str]) -> np.ndarray:
    """The rows of an index with columns for all these fields, (0, 0) in those that it lacks."""
    full = np.zeros(len(index), index_dtype(fields, index.dtype["key"].itemsize))
    for column in index.dtype.names or ():
        full[column] = index[column]
    return full


def index_from_bytes(data: bytes, where: str) -> np.ndarray:
    """The rows of an index; raises DamagedShard unless `data` is as long as a table and has the
    header of an index.

    Does not use NumPy's reader, which parses the header as Python: CPython 3.11 now and then fails
    to do so ("AST constructor recursion depth mismatch") while another thread does the same.
    """
    text = data[10 : 10 + int.from_bytes(data[8:10], "little")]
    key, shape = _KEY_COLUMN.search(text), _SHAPE.search(text)
    fields = [name.decode("ascii") for name in dict.fromkeys(_FIELD_COLUMN.findall(text))]
    dtype = index_dtype(fields, int(key[1]) if key else 1)
    num_samples = int(shape[1]) if shape else 0
    header = table.header(dtype, num_samples)
    if not data.startswith(header) or len(data) != table.num_bytes(dtype, num_samples):
        raise DamagedShard(f"{where}: these {len(data)} bytes are not a shard index; {REPAIR}")
    return np.frombuffer(data, dtype, offset=len(header)).copy()


def index_fields(index: np.ndarray) -> list[str]:
    """The fields of an index in the order of its columns;
    the members of a sample may have another.
    """
    return [name.removeprefix(".") for name in (index.dtype.names or ())[len(_HEAD) + 1 : -1]]


def content_bytes(index: np.ndarray) -> int:
    """The size of all fields of all samples of an index."""
    return sum(int(index[f".{name}"]["num_bytes"].sum()) for name in index_fields(index))


def first_images(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the first image of each sample begins in the tar, and its size;
    zeros if it has none.
    """
    starts, sizes = np.zeros((2, len(index)), np.int64)
    for name in filter(is_image_field, index_fields(index)):
        start, size = (index[f".{name}"][part].astype(np.int64) for part in ("offset", "num_bytes"))
        is_first = (start > 0) & ((sizes == 0) | (start < starts))
        starts[is_first], sizes[is_first] = start[is_first], size[is_first]
    return starts, sizes
