"""Rows of large indexes in a bucket, read in pages and verified before anything uses them.

A reader that needs few rows of an index reads their pages; from a quarter of the index on, all of it. Wherever a page
or its checksum is not as it should be, the whole index is read instead and compared with the manifest.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardset.errors import StorageError, TransientError
from shardset.format.index_pages import LARGE_BYTES, ROWS_PER_PAGE, IndexPages
from shardset.format.manifest import Shard, Split
from shardset.read.addresses import ShardIndex, num_columns
from shardset.read.index_checksums import ChecksumReader
from shardset.read.threads import ProcessLock, results_in_order
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice

NUM_PAGE_READERS = 32
WHOLE_FROM = 0.25
"""From this share of its pages on, an index is read whole: one request instead of many more."""

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
        self._page_bytes_read = 0
        self._partial: OrderedDict[int, _PartialIndex] = OrderedDict()
        self._held_bytes = 0
        self._checksums = ChecksumReader(storage, split)
        self._refused: set[int] = set()
        """Shards whose indexes are read whole because a page or its checksum was damaged."""
        self._lock = ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partial": OrderedDict(), "_held_bytes": 0}

    @property
    def num_bytes_read(self) -> int:
        """Bytes of pages and of checksums that were read."""
        return self._page_bytes_read + self._checksums.num_bytes_read

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
        if shard in self._refused or self._checksums.is_absent(shard):
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
                entries = self._checksums.entries(shard, fresh=fresh)
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

    def _read(self, name: str, start: int, stop: int) -> bytes:
        data = self.storage.read(name, start, stop)
        with self._lock:
            self._page_bytes_read += len(data)
        return data

    def _refuse(self, shard: int, what: str) -> None:
        self._refused.add(shard)
        path = self.split.shards[shard].index.path
        _log.warning("%s/%s: %s; reading the whole index instead", self.storage.url, path, what)
