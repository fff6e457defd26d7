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
from shardset.read.pending import Contents, PendingSamples, SampleReader
from shardset.storage.local import OpenFile

SMALL_BYTES = 1 << 14
"""Up to this size a sample is one read, from which its fields are copied; beyond it, each field is
a read.
"""
MAX_OPEN_FILES = 256


class LocalSampleReader(SampleReader):
    """One `pread` per sample.

    `mmap` would save half a microsecond, but a file cut meanwhile would raise SIGBUS.
    """

    def __init__(self, table: ShardTable) -> None:
        self.table = table
        self.file = lru_cache(MAX_OPEN_FILES)(partial(_open, table))

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        return self.read_single(addresses)

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        """Samples outside the order of the steps."""
        return LocalPendingSamples(self, addresses)

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
        pread, verified, fields = os.pread, self._verified, self._fields
        file_of = self.reader.file
        samples = zip(
            self._shards[start:stop], self.starts[start:stop], self.sizes[start:stop], strict=True
        )
        for number, (shard, begin, size) in enumerate(samples, start):
            try:
                file = file_of(shard)
            except ShardsetError as error:
                raise self.located(number, error) from error
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


def _open(table: ShardTable, shard: int) -> OpenFile:
    try:
        file = OpenFile(table.url(shard))
    except NotFound as error:
        raise table.missing(shard) from error
    table.check_size(shard, file.facts.st_size)
    return file
