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
"""Up to this size a file is read at once: the checksums of 2 million samples."""

CHUNK_BYTES = 64 << 10
"""Of a larger file, a reader that asks twice for shards of about so many bytes reads the checksums of all of them."""

MAX_CHUNKS = 512

_log = logging.getLogger(__name__)


class _Range(NamedTuple):
    """The bytes [start, stop) of the entries in file `number`."""

    number: int
    start: int
    stop: int


class ChecksumReader:
    """Reads the checksums of the large indexes of a split; they are not verified. Pickles without those it keeps."""

    def __init__(self, storage: Storage, split: Split) -> None:
        self.storage, self.split = storage, split
        self.num_bytes_read = 0
        self._kept: dict[_Range, bytes] = {}
        self._asked: set[_Range] = set()
        self._absent: set[int] = set()
        self._lock, self._file_lock = ProcessLock(), ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_asked": set()}

    def is_absent(self, shard: int) -> bool:
        """Whether it is known that there is no file for this shard."""
        return shard // self._shards_per_file in self._absent

    def entries(self, shard: int, *, fresh: bool) -> bytes | None:
        """The entries of a shard with a large index; None if the set has no file of them. `fresh` asks storage."""
        own, together = self._own(shard), self._together(shard)
        if own.number in self._absent:
            return None
        try:
            kept = None if fresh else self._chunk(together)
            return self._read(own) if kept is None else kept[own.start - together.start : own.stop - together.start]
        except NotFound as error:
            self._absent.add(own.number)
            _log.info("%s; reading whole indexes instead of their pages", error)
            return None

    def _chunk(self, together: _Range) -> bytes | None:
        """The bytes of a small file, or those that are asked for again; None if it is not worth reading them."""
        if together == self._whole(together.number):
            with self._file_lock:  # threads that need it at the same time read it once
                return self._kept.get(together) or self._keep(together)
        with self._lock:
            was_asked = together in self._asked
            self._asked.add(together)
        return self._kept.get(together) or (self._keep(together) if was_asked else None)

    def _keep(self, together: _Range) -> bytes:
        data = self._read(together)
        with self._lock:
            self._kept[together] = data
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

    def _together(self, shard: int) -> _Range:
        """The bytes that are read at once if this shard is asked for: all of a small file, or a chunk."""
        own = self._own(shard)
        whole = self._whole(own.number)
        if whole.stop <= WHOLE_FILE_BYTES:
            return whole
        starts, begin = self._starts(own.number), own.start // CHUNK_BYTES * CHUNK_BYTES
        first, last = np.searchsorted(starts[:-1], [begin, begin + CHUNK_BYTES])
        return _Range(own.number, starts.item(first), starts.item(last))

    def _whole(self, number: int) -> _Range:
        return _Range(number, 0, self._starts(number).item(-1))

    def _starts(self, number: int) -> NDArray[np.int64]:
        """Where the entries of each shard begin in a file, and the end."""
        first = number * self._shards_per_file
        starts = self._all_starts[first : first + self._shards_per_file + 1]
        return starts - starts[0]

    @cached_property
    def _shards_per_file(self) -> int:
        return shards_per_file(self.split)

    @cached_property
    def _all_starts(self) -> NDArray[np.int64]:
        return ENTRY.itemsize * first_entries(self.split)
