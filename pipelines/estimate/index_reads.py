"""The bytes of indexes that readers need for some samples, by pages where these are large."""

import numpy as np
from numpy.typing import NDArray

from pipelines.estimate.stored import StoredSplit
from shardset.format.index_pages import ENTRY, LARGE_BYTES, ROWS_PER_PAGE
from shardset.read.index_checksums import WHOLE_FILE_BYTES
from shardset.read.index_pages import WHOLE_FROM

Ints = NDArray[np.int64]


def index_bytes_for(stored: StoredSplit, shards: Ints, positions: Ints) -> int:
    """The bytes that one reader reads of indexes, and of the checksums of their pages, for samples of a split."""
    sizes, num_bytes = np.asarray(stored.shard_sizes, np.int64), np.asarray(stored.index_bytes, np.int64)
    touched, num_pages = _pages(shards, positions)
    all_pages = -(-sizes[touched] // ROWS_PER_PAGE)
    has_pages = (num_bytes[touched] > LARGE_BYTES) & stored.has_index_pages
    by_pages = has_pages & (num_pages <= WHOLE_FROM * all_pages)
    # The header of an index is small beside its rows.
    paged = num_bytes[touched] * ROWS_PER_PAGE * num_pages // sizes[touched]
    return int(np.where(by_pages, paged, num_bytes[touched]).sum()) + _checksum_bytes(sizes, touched[has_pages])


def index_range_gets(stored: StoredSplit, block_size: int, num_readers: int) -> int:
    """About how often all readers read pages of large indexes in an epoch, before they read these whole, if ever."""
    sizes = np.asarray(stored.shard_sizes, np.int64)
    is_large = (np.asarray(stored.index_bytes, np.int64) > LARGE_BYTES) & stored.has_index_pages
    before_whole = WHOLE_FROM * sizes // ROWS_PER_PAGE // (block_size // ROWS_PER_PAGE + 1)
    return int(np.minimum(sizes / block_size, num_readers * before_whole)[is_large].sum())


def _pages(shards: Ints, positions: Ints) -> tuple[Ints, Ints]:
    """The shards of some samples, once each, and in how many pages of their indexes these samples are."""
    pages = np.unique(np.stack([shards, positions // ROWS_PER_PAGE]), axis=1)
    return np.unique(pages[0], return_counts=True)


def _checksum_bytes(sizes: Ints, touched: Ints) -> int:
    """Those of one shard, then all of a small file; of a large file about those of each shard."""
    entries = ENTRY.itemsize * (2 - -sizes // ROWS_PER_PAGE)
    own, whole = entries[touched], int(entries.sum())
    return int(own[0]) + whole if len(touched) > 1 and whole <= WHOLE_FILE_BYTES else int(own.sum())
