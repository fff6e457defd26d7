"""The bytes of indexes that readers need for some samples, by rows where these are large."""

import numpy as np
from numpy.typing import NDArray

from pipelines.estimate.stored import StoredSplit
from shardset.read.index_rows import LARGE_BYTES, ROWS_AT_ONCE, WHOLE_FROM

Ints = NDArray[np.int64]


def index_bytes_for(stored: StoredSplit, shards: Ints, positions: Ints) -> int:
    """The bytes that one reader reads of indexes for samples of a split."""
    sizes, num_bytes = np.asarray(stored.shard_sizes, np.int64), np.asarray(stored.index_bytes, np.int64)
    groups = np.unique(np.stack([shards, positions // ROWS_AT_ONCE]), axis=1)
    touched, num_groups = np.unique(groups[0], return_counts=True)
    by_rows = (num_bytes[touched] > LARGE_BYTES) & (num_groups <= WHOLE_FROM * -(-sizes[touched] // ROWS_AT_ONCE))
    # The header of an index is small beside its rows.
    few = num_bytes[touched] * ROWS_AT_ONCE * num_groups // sizes[touched]
    return int(np.where(by_rows, few, num_bytes[touched]).sum())


def index_range_gets(stored: StoredSplit, block_size: int, num_readers: int) -> int:
    """About how often all readers read rows of large indexes in an epoch, before they read these whole, if ever."""
    sizes = np.asarray(stored.shard_sizes, np.int64)
    is_large = np.asarray(stored.index_bytes, np.int64) > LARGE_BYTES
    before_whole = WHOLE_FROM * sizes // ROWS_AT_ONCE // (block_size // ROWS_AT_ONCE + 1)
    return int(np.minimum(sizes / block_size, num_readers * before_whole)[is_large].sum())
