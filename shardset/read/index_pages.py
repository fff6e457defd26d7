"""Rows of large indexes in a bucket, read in pages and verified before anything uses them.

A reader that needs few rows of an index reads their pages; from a quarter of the index on, all of it. Wherever a page
or its checksum is not as it should be, the whole index is read instead and compared with the manifest.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardset.errors import NotFound, StorageError, TransientError
from shardset.format import naming
from shardset.format.index_pages import (
    ENTRY,
    FILE_HEADER_BYTES,
    LARGE_BYTES,
    ROWS_PER_PAGE,
    IndexPages,
    first_entries,
    shards_per_file,
)
from shardset.format.manifest import Shard, Split
from shardset.read.addresses import ShardIndex, num_columns
from shardset.read.threads import ProcessLock, results_in_order
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice

NUM_PAGE_READERS = 32
WHOLE_FROM = 0.25
"""From this share of its pages on, an index is read whole: one request instead of many more."""

WHOLE_FILE_BYTES = 128 << 10
"""Up to this size a file of checksums is read at once: those of 2 million samples."""

_log = logging.getLogger(__name__)

Positions = NDArray[np.int64]


class HeldRows(NamedTuple):
    """Some rows of a shard: `numbers` are theirs in `held`, which may lack other rows of the shard."""

    held: ShardIndex
    numbers: Positions


@dataclass(frozen=True, slots=True, eq=False)
class _PartialIndex:
    """The rows of the pages that have been read. `places` is where each page begins in `index`, -1 if it is missing."""

    pages: IndexPages
    places: Positions
    index: ShardIndex

    def missing(self, positions: Positions) -> Positions:
        """The pages of these samples that have not been read, in order."""
        pages = np.unique(positions // ROWS_PER_PAGE)
        return pages[self.places[pages] < 0]

    def held(self, positions: Positions) -> HeldRows:
        """The rows of samples whose pages have been read."""
        return HeldRows(self.index, self.places[positions // ROWS_PER_PAGE] + positions % ROWS_PER_PAGE)

    def with_pages(self, pages: range, rows: ShardIndex) -> "_PartialIndex":
        """This, with the rows of further pages."""
        places = self.places.copy()
        places[pages] = len(self.index.rows) + ROWS_PER_PAGE * np.arange(len(pages))
        return replace(self, places=places, index=self.index.extended(rows))


class PageTable:
    """The rows of the large indexes of a split that have been read in pages, kept within a budget."""

    def __init__(self, storage: Storage, split: Split, *, with_keys: bool, budget_bytes: int) -> None:
        self.storage, self.split, self.with_keys, self.budget_bytes = storage, split, with_keys, budget_bytes
        self.num_bytes_read = 0
        self._partial: OrderedDict[int, _PartialIndex] = OrderedDict()
        self._held_bytes = 0
        self._files: dict[int, bytes | None] = {}
        """Whole files of checksums; None for those that the set does not have."""
        self._refused: set[int] = set()
        """Shards whose indexes are read whole because a page or its checksum was damaged."""
        self._lock, self._file_lock = ProcessLock(), ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partial": OrderedDict(), "_held_bytes": 0, "_files": {}}

    def rows(self, wanted: Sequence[tuple[int, Positions]]) -> Iterator[HeldRows | None]:
        """The rows of some samples of several shards, in this order; None for an index that is to be read whole."""
        calls = [partial(self._rows, shard, positions) for shard, positions in wanted]
        num_waiting = sum(self._must_wait(shard, positions) for shard, positions in wanted)
        if num_waiting < 2:
            yield from (call() for call in calls)
        else:
            yield from results_in_order("shardset-index", min(NUM_PAGE_READERS, num_waiting), calls)

    def _must_wait(self, shard: int, positions: Positions) -> bool:
        found = self._partial.get(shard)
        return len(found.missing(positions)) > 0 if found else self._may_have_pages(shard)

    def _may_have_pages(self, shard: int) -> bool:
        if shard in self._refused or self._files.get(shard // self._shards_per_file, b"") is None:
            return False
        return self.split.shards[shard].index.num_bytes > LARGE_BYTES

    def _rows(self, shard: int, positions: Positions) -> HeldRows | None:
        found = self._partial.get(shard) or self._opened(shard)
        if found and len(missing := found.missing(positions)):
            found = self._extended(shard, found, missing)
        with self._lock:
            self._keep(shard, found)
        return found.held(positions) if found else None

    def _keep(self, shard: int, found: _PartialIndex | None) -> None:
        before = self._partial.pop(shard, None)
        self._held_bytes += (found.index.num_bytes if found else 0) - (before.index.num_bytes if before else 0)
        if found:
            self._partial[shard] = found
        while self._held_bytes > self.budget_bytes and len(self._partial) > 1:
            self._held_bytes -= self._partial.popitem(last=False)[1].index.num_bytes

    def _opened(self, shard: int) -> _PartialIndex | None:
        """An index of which nothing has been read; None if it is to be read whole."""
        pages = self._pages(shard) if self._may_have_pages(shard) else None
        if pages is None:
            return None
        nothing = ShardIndex(
            np.empty((0, num_columns(len(self.split.fields))), np.int32),
            np.empty(0, pages.dtype["key"]) if self.with_keys else None,
        )
        return _PartialIndex(pages, np.full(len(pages.crcs), -1), nothing)

    def _extended(self, shard: int, found: _PartialIndex, missing: Positions) -> _PartialIndex | None:
        """With the missing pages; None if the index is to be read whole."""
        num_held = np.count_nonzero(found.places >= 0)
        if num_held + len(missing) > WHOLE_FROM * len(found.places):
            return None
        listed = self.split.shards[shard]
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            pages = range(run.item(0), run.item(-1) + 1)
            records = self._read_pages(listed, found.pages, pages)
            if records is None:
                self._refuse(shard, f"pages {pages.start} to {pages.stop - 1} differ from their checksums")
                return None
            rows = ShardIndex.from_records(
                records, listed, self.split.fields, self.storage.url, with_keys=self.with_keys
            )
            found = found.with_pages(pages, rows)
        return found

    def _read_pages(self, shard: Shard, pages: IndexPages, wanted: range) -> NDArray[np.void] | None:
        """The records of consecutive pages; None if two reads find others."""
        start, stop = pages.byte_range(wanted.start, wanted.stop)

        def fits(data: bytes) -> bool:
            return pages.fits(wanted.start, data)

        try:
            data = read_twice(lambda: self._read(shard.index.path, start, stop), fits)
        except TransientError:
            raise
        except StorageError:  # the index is cut or gone, which the read of the whole one says
            return None
        return np.frombuffer(data, pages.dtype) if fits(data) else None

    def _pages(self, shard: int) -> IndexPages | None:
        """The verified checksums of the pages of an index; None if it is to be read whole."""
        listed, found = self.split.shards[shard], None
        try:
            for fresh in (False, True):
                entries = self._entries(shard, fresh=fresh)
                if entries is None:
                    return None
                found = IndexPages.from_entries(entries, listed.index, listed.num_samples, self.split.fields)
                if found:
                    return found
        except TransientError:
            raise
        except StorageError:  # the file is cut
            pass
        self._refuse(shard, "the checksums of its pages do not make that of the manifest")
        return None

    def _entries(self, shard: int, *, fresh: bool) -> bytes | None:
        """What the files of checksums have for a shard, None without a file; reads a small file once, and keeps it."""
        size, number = self._shards_per_file, shard // self._shards_per_file
        starts = self._first_entries[number * size : (number + 1) * size + 1] - self._first_entries[number * size]
        start, stop = (ENTRY.itemsize * starts[shard % size : shard % size + 2]).tolist()
        end = ENTRY.itemsize * starts.item(-1)
        name = naming.index_pages_path(self.split.shards[0].path, number)
        try:
            if fresh or end > WHOLE_FILE_BYTES:
                return self._read(name, FILE_HEADER_BYTES + start, FILE_HEADER_BYTES + stop)
            with self._file_lock:  # so that threads that need it at the same time read it once
                if number not in self._files:
                    self._files[number] = self._read(name, FILE_HEADER_BYTES, FILE_HEADER_BYTES + end)
        except NotFound as error:
            self._files[number] = None
            _log.info("%s; reading whole indexes instead of their pages", error)
        whole = self._files[number]
        return None if whole is None else whole[start:stop]

    def _read(self, name: str, start: int, stop: int) -> bytes:
        data = self.storage.read(name, start, stop)
        with self._lock:
            self.num_bytes_read += len(data)
        return data

    @cached_property
    def _shards_per_file(self) -> int:
        return shards_per_file(self.split)

    @cached_property
    def _first_entries(self) -> Positions:
        """Where the entries of each shard begin among those of the split, and the end."""
        return first_entries(self.split)

    def _refuse(self, shard: int, what: str) -> None:
        self._refused.add(shard)
        path = self.split.shards[shard].index.path
        _log.warning("%s/%s: %s; reading the whole index instead", self.storage.url, path, what)
