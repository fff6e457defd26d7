"""The index of a shard: one record a sample, as an `.npy` file without pickles."""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardset.errors import DamagedShard

_RANGE = [("offset", "<u8"), ("num_bytes", "<u8")]  # the column of a field: where its content begins in the tar
_HEAD = [  # before the key
    *(("offset", "<u8"), ("crc32c", "<u4"), ("image_crc32c", "<u4")),
    *(("label", "<i8"), ("source", "<u8"), ("copy", "<u4")),
]
_NPY_1_0 = b"\x93NUMPY\x01\x00"
_KEY_COLUMN = re.compile(rb"\('key', '\|S([1-9][0-9]{0,3})'\)")
_FIELD_COLUMN = re.compile(rb"\('\.([a-z0-9_.-]+)', \[")
_SHAPE = re.compile(rb"'shape': \(([0-9]{1,12}),\)")


def index_dtype(fields: Sequence[str], key_bytes: int) -> np.dtype:
    """One index record.

    `offset` of the first header, `crc32c` over the contents of the fields in member order, `image_crc32c` over that of
    the first image alone (0 if there is none), `label`, `source`, `copy`, `key` (ASCII), then for each field of the
    split a column `.jpg`, `.cls`, ... with the pair (`offset`, `num_bytes`) of its content; (0, 0) where the sample has
    no such field.
    """
    return np.dtype([*_HEAD, ("key", f"S{key_bytes}"), *((f".{field}", _RANGE) for field in fields)])


def fits_index(fields: Sequence[str]) -> bool:
    """Whether the header of an index, of 64 KiB at most, has room for the names of all these fields."""
    descr = np.lib.format.dtype_to_descr(index_dtype(fields, 100))
    try:
        np.lib.format.write_array_header_1_0(
            io.BytesIO(), {"descr": descr, "fortran_order": False, "shape": (10**12 - 1,)}
        )
    except ValueError:
        return False
    return True


def index_array(rows: Sequence[tuple[Any, ...]], fields: Sequence[str]) -> np.ndarray:
    """The index of rows that hold the columns before the fields, then (offset, size) of each field.

    A row may leave out its last fields, which become (0, 0).
    """
    key_bytes = max((len(row[len(_HEAD)]) for row in rows), default=1)
    width = len(_HEAD) + 1 + len(fields)
    return np.array([row + ((0, 0),) * (width - len(row)) for row in rows], dtype=index_dtype(fields, key_bytes))


def index_to_bytes(index: np.ndarray) -> bytes:
    """An index as the bytes of an `.npy` file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(index), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def index_header(data: bytes, where: str) -> tuple[np.dtype, int, int]:
    """(record type, number of records, offset of the first) from the first bytes of an index, at least its header.

    Raises DamagedShard for anything but the header of an index.
    """
    size = int.from_bytes(data[8:10], "little")
    text = data[10 : 10 + size]
    key, shape = _KEY_COLUMN.search(text), _SHAPE.search(text)
    if not data.startswith(_NPY_1_0) or key is None or shape is None:
        raise DamagedShard(f"{where}: not a shard index; rebuild the shard with --only-shards")
    fields = [name.decode("ascii") for name in dict.fromkeys(_FIELD_COLUMN.findall(text))]
    dtype, num_samples = index_dtype(fields, int(key[1])), int(shape[1])
    descr = np.lib.format.dtype_to_descr(dtype)
    expected = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': ({num_samples},), }}"
    if text.rstrip() != expected.encode("ascii"):
        raise DamagedShard(f"{where}: its columns are not those of a shard index; rebuild the shard with --only-shards")
    return dtype, num_samples, 10 + size


def index_from_bytes(data: bytes, where: str) -> np.ndarray:
    """The records of an index; raises DamagedShard unless `data` is what `index_to_bytes` writes.

    Does not use NumPy's reader, which parses the header as Python: CPython 3.11 now and then fails to do so ("AST
    constructor recursion depth mismatch") while another thread does the same.
    """
    dtype, num_samples, start = index_header(data, where)
    if len(data) != start + num_samples * dtype.itemsize:
        raise DamagedShard(f"{where}: {len(data)} bytes do not hold {num_samples} samples; rebuild the shard")
    return np.frombuffer(data, dtype, offset=start).copy()


def index_fields(index: np.ndarray) -> list[str]:
    """The fields of an index in the order of its columns; the members of a sample may have another."""
    return [name.removeprefix(".") for name in (index.dtype.names or ())[len(_HEAD) + 1 :]]
