"""The checksums of index pages, read from the files beside the shards with few requests and kept."""

import logging
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardset.errors import NotFound
from shardset.format import naming
from shardset.format.index_pages import ENTRY, FILE_HEADER_BYTES, first_entries, shards_per_file
from shardset.format.manifest import Split
from shardset.read.threads import ProcessLock
from shardset.storage.base import Storage

WHOLE_FILE_BYTES = 128 << 10
"""Up to this size a file is one chunk: the checksums of 2 million samples."""

CHUNK_BYTES = 64 << 10
"""The size of a chunk of a larger file."""

MAX_CHUNKS = 1024
"""All of a thousand million samples: 64 MiB."""

_log = logging.getLogger(__name__)


class _Range(NamedTuple):
    """The bytes [start, stop) of the entries in file `number`."""

    number: int
    start: int
    stop: int


class ChecksumReader:
    """Reads the checksums of the large indexes of a split; they are not verified. Pickles without those it keeps.

    The first time it reads those of one shard; for another shard of the same chunk, all of the chunk.
    """

    def __init__(self, storage: Storage, split: Split) -> None:
        self.storage, self.split = storage, split
        self.num_bytes_read = 0
        self._kept: dict[_Range, bytes] = {}
        self._asked: set[_Range] = set()
        self._absent: set[int] = set()
        self._locks: dict[_Range, ProcessLock] = {}
        self._lock = ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_asked": set(), "_locks": {}}

    def is_absent(self, shard: int) -> bool:
        """Whether it is known that there is no file for this shard."""
        return shard // self._shards_per_file in self._absent

    def entries(self, shard: int, *, fresh: bool) -> bytes | None:
        """The entries of a shard with a large index; None if the set has no file of them. `fresh` asks storage."""
        own, chunk = self._own(shard), self._chunk(shard)
        with self._lock_of(chunk):  # threads that need a chunk at the same time read it once
            if own.number in self._absent:
                return None
            try:
                if not fresh and (chunk in self._kept or chunk in self._asked):
                    kept = self._kept.get(chunk) or self._keep(chunk)
                    return kept[own.start - chunk.start : own.stop - chunk.start]
                self._asked.add(chunk)
                return self._read(own)
            except NotFound as error:
                self._absent.add(own.number)
                _log.info("%s; reading whole indexes instead of their pages", error)
                return None

    def _lock_of(self, chunk: _Range) -> ProcessLock:
        with self._lock:
            return self._locks.setdefault(chunk, ProcessLock())

    def _keep(self, chunk: _Range) -> bytes:
        data = self._read(chunk)
        with self._lock:
            self._kept[chunk] = data
            while len(self._kept) > MAX_CHUNKS:
                del self._kept[next(iter(self._kept))]
        return data

    def _read(self, wanted: _Range) -> bytes:
        name = naming.index_pages_path(self.split.shards[0].path, wanted.number)
        data = self.storage.read(name, FILE_HEADER_BYTES + wanted.start, FILE_HEADER_BYTES + wanted.stop)
        with self._lock:
            self.num_bytes_read += len(data)
        return data

    def _own(self, shard: int) -> _Range:
        number, within = divmod(shard, self._shards_per_file)
        return _Range(number, *self._starts(number)[within : within + 2].tolist())

    def _chunk(self, shard: int) -> _Range:
        """The bytes that are read together, with those of this shard."""
        number, start, _ = self._own(shard)
        starts = self._starts(number)
        if starts[-1] <= WHOLE_FILE_BYTES:
            return _Range(number, 0, starts.item(-1))
        begin = start // CHUNK_BYTES * CHUNK_BYTES
        first, last = np.searchsorted(starts[:-1], [begin, begin + CHUNK_BYTES])
        return _Range(number, starts.item(first), starts.item(last))

    def _starts(self, number: int) -> NDArray[np.int64]:
        """Where the entries of each shard begin in a file, and the end."""
        first = number * self._shards_per_file
        starts = self._all_starts[first : first + self._shards_per_file + 1]
        within: NDArray[np.int64] = starts - starts[0]
        return within

    @cached_property
    def _shards_per_file(self) -> int:
        return shards_per_file(self.split)

    @cached_property
    def _all_starts(self) -> NDArray[np.int64]:
        starts: NDArray[np.int64] = ENTRY.itemsize * first_entries(self.split)
        return starts
