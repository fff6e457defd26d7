"""Finds keys that occur twice in a shard set: by their hashes first, so that a billion keys fit the
memory.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from shardset.format.manifest import Shard
from shardset.read.indexes import read_index
from shardset.storage.base import Storage


def duplicate_keys(
    storage: Storage, shards: Sequence[Shard], key_hashes: Sequence[np.ndarray]
) -> Iterator[tuple[Shard, str, Shard]]:
    """(shard, key, shard that has it first) for each key that occurs again; `key_hashes` has one
    array per shard.
    """
    hashes = np.concatenate([np.zeros(0, np.uint64), *key_hashes])
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    # Equal hashes prove nothing yet: the keys of these samples are read and compared.
    suspects = np.union1d(order[again], order[again + 1])
    first_ids = np.cumsum([0, *map(len, key_hashes)])
    by_shard = np.split(suspects, np.searchsorted(suspects, first_ids[1:]))
    first: dict[bytes, Shard] = {}
    for shard, first_id, ids in zip(shards, first_ids, by_shard, strict=False):
        keys = read_index(storage, shard)["key"][ids - first_id].tolist() if len(ids) else []
        for key in keys:
            if key in first:
                yield shard, key.decode("ascii", "replace"), first[key]
            first.setdefault(key, shard)
