"""A shard's index as it is stored, compared with the manifest before anybody trusts it."""

from collections.abc import Sequence

import numpy as np

from shardset.errors import DamagedShard, NotFound
from shardset.format.index import index_from_bytes, index_header
from shardset.format.manifest import Shard
from shardset.storage.base import Storage
from shardset.storage.checked import read_object

HEADER = 10 + 65_535
"""The header of an index is not longer than that: what version 1.0 of the file format allows."""

SMALL = 1 << 20
"""Up to so many bytes an index is read whole: one request, and its checksum can be compared."""


def read_index(storage: Storage, shard: Shard) -> np.ndarray:
    """One record a sample (see `tarindex.index_dtype`); read a second time if it is not what the manifest lists.

    Raises NotFound or StorageError, or DamagedShard if the second time is not either.
    """
    advice = "its CRC32C is not that of the manifest, rebuild the shard with --only-shards"
    where = f"{storage.url}/{shard.index.path}"
    try:
        data = read_object(storage, shard.index.path, shard.index.num_bytes, shard.index.crc32c, advice)
    except NotFound as error:
        raise NotFound(
            f"{where}: the index of shard {shard.path} is missing; restore it, or rebuild the shard with --only-shards"
        ) from error
    index = index_from_bytes(data, where)
    if len(index) != shard.num_samples:
        raise DamagedShard(f"{where}: lists {len(index)} samples, the manifest says {shard.num_samples}; rebuild it")
    return index


def read_rows(storage: Storage, shard: Shard, positions: Sequence[int]) -> np.ndarray:
    """The records of some samples of a shard: from the whole index where that is small, else from two ranged reads.

    Ranges of an index have no checksum of their own: each is read twice, and the whole index if the two differ.
    """
    rows = _rows_by_range(storage, shard, positions) if shard.index.num_bytes > SMALL else None
    return read_index(storage, shard)[list(positions)] if rows is None else rows


def read_record_type(storage: Storage, shard: Shard) -> np.dtype:
    """What a record of the shard's index is, from its first bytes; raises as `read_index`."""
    header = _header(storage, shard)
    return read_index(storage, shard).dtype if header is None else header[0]


def _rows_by_range(storage: Storage, shard: Shard, positions: Sequence[int]) -> np.ndarray | None:
    """None if what came is not of the index that the manifest lists, or was not the same twice."""
    header = _header(storage, shard)
    if header is None:
        return None
    dtype, start = header
    first, last = min(positions), max(positions)
    begin, end = (start + position * dtype.itemsize for position in (first, last + 1))
    data = _same_twice(storage, shard.index.path, begin, end)
    return None if data is None else np.frombuffer(data, dtype)[[position - first for position in positions]]


def _header(storage: Storage, shard: Shard) -> tuple[np.dtype, int] | None:
    """Record type and where the records begin; None as `_rows_by_range`."""
    path, num_bytes = shard.index.path, shard.index.num_bytes
    head = _same_twice(storage, path, 0, min(HEADER, num_bytes))
    try:
        dtype, num_samples, start = index_header(head or b"", f"{storage.url}/{path}")
    except DamagedShard:
        return None
    if start + num_samples * dtype.itemsize != num_bytes or num_samples != shard.num_samples:
        return None
    return dtype, start


def _same_twice(storage: Storage, name: str, start: int, stop: int) -> bytes | None:
    data = storage.read(name, start, stop)
    return data if storage.read(name, start, stop) == data else None
