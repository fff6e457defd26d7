"""Byte ranges of shards from the disk cache, and from another reader where the cache does not have them."""

import threading
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

import numpy as np

from shardset.read.disk_cache import BlockCache
from shardset.read.indexes import ShardTable
from shardset.read.remote import RangeReader
from shardset.read.threads import Threads, outcome_of, settle

NUM_CACHE_READERS = 4


class CachedReader:
    """Reads ranges from a cache; asks another reader for samples that are missing there, and keeps them."""

    def __init__(self, reader: RangeReader, table: ShardTable, cache: BlockCache) -> None:
        self.reader, self.table, self.cache = reader, table, cache
        self._threads = Threads("shardset-cache", NUM_CACHE_READERS)
        self._open: set[Future[bytes]] = set()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def num_bytes_read(self) -> int:
        """See RangeReader."""
        return self.reader.num_bytes_read

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> Future[bytes]:
        """See RangeReader."""
        index = self.table.index(shard)
        first, last = np.searchsorted(index.starts, [start, stop]).tolist()
        wanted, result = _SampleRange(shard, first, last, start, stop), self._open_future()
        missing = (first, last) if fresh else self.cache.missing(shard, first, last)
        if missing is None:
            self._threads.submit(lambda: self._read_cached(result, wanted))
        elif missing == (first, last):
            self._fetch(result, wanted, wanted)
        else:
            start, stop = index.start(missing[0]), index.stop(missing[1] - 1)
            self._fetch(result, wanted, _SampleRange(shard, missing[0], missing[1], start, stop))
        return result

    def close(self) -> None:
        """See RangeReader."""
        with self._lock:
            self._closed = True
            unsettled = list(self._open)
        self.reader.close()
        self._threads.close()
        for result in unsettled:
            settle(result, CancelledError())

    def _open_future(self) -> Future[bytes]:
        """A future that `close` fails unless it has been settled by then."""
        result: Future[bytes] = Future()
        with self._lock:
            if self._closed:
                raise CancelledError
            self._open.add(result)
        result.add_done_callback(self._forget)
        return result

    def _forget(self, result: Future[bytes]) -> None:
        with self._lock:
            self._open.discard(result)

    def _read_cached(self, result: Future[bytes], wanted: "_SampleRange") -> None:
        data = self.cache.read(wanted.shard, wanted.start, wanted.stop)
        if len(data) == wanted.stop - wanted.start:
            settle(result, data)
            return
        try:
            self._fetch(result, wanted, wanted)
        except CancelledError as error:  # closed meanwhile
            settle(result, error)

    def _fetch(self, result: Future[bytes], wanted: "_SampleRange", missing: "_SampleRange") -> None:
        """Fetches the samples that are missing among those wanted; the others come from the cache."""

        def assemble(data: bytes) -> bytes:
            self.cache.put(missing.shard, missing.first, missing.last, missing.start, data)
            before = self.cache.read(wanted.shard, wanted.start, missing.start)
            return before + data + self.cache.read(wanted.shard, missing.stop, wanted.stop)

        # The callback gets the future as an argument: with it in the closure, a cycle would hold the bytes for long.
        self.reader.submit(missing.shard, missing.start, missing.stop).add_done_callback(
            lambda fetched: settle(result, outcome_of(lambda: assemble(fetched.result())))
        )


class _SampleRange(NamedTuple):
    """The samples [first, last) of a shard, and their bytes [start, stop)."""

    shard: int
    first: int
    last: int
    start: int
    stop: int
