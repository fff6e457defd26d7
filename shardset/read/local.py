"""Samples from shards on a local disk, read one by one: the page cache does what blocks do for a
bucket.
"""

import os
from collections.abc import Iterator
from functools import lru_cache, partial

from shardset.errors import NotFound, ShardsetError, StorageError
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.indexes import ShardTable
from shardset.read.pending import Contents, PendingSamples
from shardset.storage.base import os_errors_as_storage_errors
from shardset.storage.local import Descriptor

SMALL_BYTES = 1 << 14
"""Up to this size a sample is one read, from which its fields are copied; beyond it, each field is
a read.
"""
MAX_OPEN_FILES = 256


class LocalSampleReader:
    """One `pread` per sample.

    `mmap` would save half a microsecond, but a file cut meanwhile would raise SIGBUS.
    """

    def __init__(self, table: ShardTable, max_open_files: int = MAX_OPEN_FILES) -> None:
        self.table = table
        self.num_bytes_read = 0
        """See SampleReader. A lower bound, because threads add to it without a lock."""
        self.file = lru_cache(max_open_files)(partial(_ShardFile, table))
        """The open file of a shard; its size is the manifest's."""

    def prepare(self, epoch: int, slots: Slots) -> None:
        """See SampleReader. Nothing, because an index on a disk is read at once."""

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        return self.read_single(addresses)

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        return LocalPendingSamples(self, addresses)

    def within_budget(self) -> bool:
        """See SampleReader. Always, because it holds nothing in memory."""
        return True

    def close(self) -> None:
        """See SampleReader.

        Each file is closed when the last thread that reads it lets go of it.
        """
        self.file.cache_clear()


class LocalPendingSamples(PendingSamples):
    """Samples on a local disk; each is read when it is taken."""

    def __init__(self, reader: LocalSampleReader, addresses: SampleAddresses) -> None:
        super().__init__(reader.table, addresses)
        self.reader = reader
        self._shards = addresses.shards.tolist()

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        # A small sample takes a few microseconds, so local names replace attributes in the loop.
        reader, pread, verified, fields = self.reader, os.pread, self._verified, self._fields
        samples = zip(
            self._shards[start:stop], self.starts[start:stop], self.sizes[start:stop], strict=True
        )
        for number, (shard, begin, size) in enumerate(samples, start):
            try:
                file = reader.file(shard)
            except ShardsetError as error:
                raise self._located(number, error) from error
            reader.num_bytes_read += size
            try:
                if size > SMALL_BYTES:
                    ranges = [
                        (begin + starts[number], begin + stops[number]) for starts, stops in fields
                    ]
                    contents = [pread(file.fd, last - first, first) for first, last in ranges]
                else:
                    data = pread(file.fd, size, begin)
                    contents = [data[starts[number] : stops[number]] for starts, stops in fields]
            except OSError as error:
                raise StorageError(
                    f"{self.describe(number)}: can't be read ({error.strerror}); check the disk"
                ) from error
            yield verified(number, contents)


class _ShardFile(Descriptor):
    """An open shard."""

    def __init__(self, table: ShardTable, shard: int) -> None:
        try:
            with os_errors_as_storage_errors(table.url(shard)):
                super().__init__(table.url(shard), os.O_RDONLY)
        except NotFound as error:
            raise table.missing(shard) from error
        table.check_size(shard, os.fstat(self.fd).st_size)
