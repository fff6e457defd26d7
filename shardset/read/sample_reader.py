"""The reader of a split's samples: which one, and what it reads through."""

from shardset.order.epoch import Order
from shardset.read.block_reader import BlockSampleReader
from shardset.read.disk_cache import BlockCache, CachedReader
from shardset.read.indexes import ShardTable
from shardset.read.local import LocalSampleReader
from shardset.read.remote import RemoteReader


def open_sample_reader(
    order: Order, table: ShardTable, budget_bytes: int, cache: BlockCache | None = None
) -> LocalSampleReader | BlockSampleReader:
    """The reader of the samples of `order`: by sample from a local disk, by block from anywhere
    else.

    A remote one holds about `budget_bytes` and reads through `cache`.
    """
    if not table.storage.is_remote:
        return LocalSampleReader(table)
    remote = RemoteReader(table)
    reader = remote if cache is None else CachedReader(remote, table, cache)
    return BlockSampleReader(order, table, reader, budget_bytes)
