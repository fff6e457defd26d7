"""A shard's index as it is stored, compared with the manifest before anybody trusts it."""

from collections.abc import Sequence

import google_crc32c
import numpy as np

from shardset.errors import DamagedShard, NotFound
from shardset.manifest import Shard
from shardset.storage import Storage
from shardset.tarindex import crc32c_text, index_from_bytes, index_header

HEADER = 10 + 65_535
"""The header of an index is not longer than that: what version 1.0 of the file format allows."""

SMALL = 1 << 20
"""Up to so many bytes an index is read whole: one request, and its checksum can be compared."""


def read_index(storage: Storage, shard: Shard) -> np.ndarray:
    """One record a sample (see `tarindex.index_dtype`).

    Raises NotFound or StorageError, or DamagedShard unless it is what the manifest lists.
    """
    where = f"{storage.url}/{shard.index.path}"
    try:
        data = storage.read(shard.index.path)
    except NotFound as error:
        raise NotFound(
            f"{where}: the index of shard {shard.path} is missing; restore it, or rebuild the shard with --only-shards"
        ) from error
    if crc32c_text(google_crc32c.value(data)) != shard.index.crc32c:
        raise DamagedShard(f"{where}: its CRC32C is not that of the manifest; rebuild the shard with --only-shards")
    index = index_from_bytes(data, where)
    if len(index) != shard.num_samples:
        raise DamagedShard(f"{where}: lists {len(index)} samples, the manifest says {shard.num_samples}; rebuild it")
    return index


def read_rows(storage: Storage, shard: Shard, positions: Sequence[int]) -> np.ndarray:
    """The records of some samples of a shard: from the whole index where that is small, else from two ranged reads.

    Ranges of an index have no checksum of their own, so only small indexes are compared with the manifest's.
    """
    if shard.index.num_bytes <= SMALL:
        return read_index(storage, shard)[list(positions)]
    where = f"{storage.url}/{shard.index.path}"
    dtype, num_samples, start = index_header(
        storage.read(shard.index.path, 0, min(HEADER, shard.index.num_bytes)), where
    )
    if start + num_samples * dtype.itemsize != shard.index.num_bytes or num_samples != shard.num_samples:
        raise DamagedShard(f"{where}: its header is not that of the manifest's index; rebuild the shard")
    first, last = min(positions), max(positions)
    begin, end = (start + position * dtype.itemsize for position in (first, last + 1))
    rows = np.frombuffer(storage.read(shard.index.path, begin, end), dtype)
    return rows[[position - first for position in positions]]
