"""A shard's index as it is stored, compared with the manifest before anybody trusts it."""

import google_crc32c
import numpy as np

from shardset.errors import DamagedShard, NotFound
from shardset.manifest import Shard
from shardset.storage import Storage
from shardset.tarindex import crc32c_text, index_from_bytes


def read_index(storage: Storage, shard: Shard) -> np.ndarray:
    """One record a sample (see `tarindex.index_dtype`); raises DamagedShard unless it is what the manifest lists."""
    where = f"{storage.url}/{shard.index.path}"
    try:
        data = storage.read(shard.index.path)
    except NotFound as error:
        raise DamagedShard(f"{where}: the index is missing; restore it, or rebuild it with --only-shards") from error
    if crc32c_text(google_crc32c.value(data)) != shard.index.crc32c:
        raise DamagedShard(f"{where}: its CRC32C is not that of the manifest; rebuild the shard with --only-shards")
    index = index_from_bytes(data, where)
    if len(index) != shard.num_samples:
        raise DamagedShard(f"{where}: lists {len(index)} samples, the manifest says {shard.num_samples}; rebuild it")
    return index
