"""Rows of large indexes in a bucket, read a few at a time; each is compared with its own check.

A reader that needs few rows of an index reads these and their neighbours; from a quarter of the index on, all of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard, NotFound
from shardset.format import table
from shardset.format.index import stored_dtype
from shardset.format.manifest import Shard, Split
from shardset.read.addresses import ShardIndex, num_columns
from shardset.read.threads import ProcessLock, results_in_order
from shardset.storage.base import Storage

LARGE_BYTES: Final = 128 << 10
"""An index of more bytes, which is one of more than about 1,500 samples, is read by its rows."""

ROWS_AT_ONCE: Final = 64
"""Neighbours that are read together, about 6 KB: little more than a small image takes in its tar."""

WHOLE_FROM: Final = 0.25
"""From this share of its rows on, an index is read whole: one request instead of many more."""

NUM_ROW_READERS = 32

Positions = NDArray[np.int64]


def read_rows(storage: Storage, shard: Shard, fields: Sequence[str], positions: Sequence[int]) -> NDArray[np.void]:
    """The index rows of some samples of a shard, in the order asked for; reads only their range, and checks it.

    `fields` are those of the split. Raises NotFound or StorageError, or DamagedShard if two reads find other rows.
    """
    first, last = min(positions), max(positions)
    rows = _read(storage, shard, fields, range(first, last + 1))
    return rows[[position - first for position in positions]]


def _read(storage: Storage, shard: Shard, fields: Sequence[str], wanted: range) -> NDArray[np.void]:
    dtype = stored_dtype(tuple(fields), shard.num_samples, shard.index.num_bytes)
    if dtype is None:
        raise DamagedShard(
            f"{storage.url}/{shard.index.path}: no index of {shard.num_samples} samples has {shard.index.num_bytes} "
            "bytes; a development version may have written the set: build it again"
        )
    advice = f"the index of shard {shard.path} is damaged, rebuild the shard with --only-shards"
    index = shard.index
    try:
        return table.read_rows(
            storage, index.path, dtype, shard.num_samples, wanted, crc32c=index.crc32c, advice=advice
        )
    except NotFound as error:
        raise missing_index(storage, shard) from error


def missing_index(storage: Storage, shard: Shard) -> NotFound:
    """The error for an index that is not stored."""
    return NotFound(
        f"{storage.url}/{shard.index.path}: the index of shard {shard.path} is missing; restore it, or rebuild the "
        "shard with --only-shards"
    )


class HeldRows(NamedTuple):
    """Some rows of a shard: `numbers` are theirs in `held`, which may lack other rows of the shard."""

    held: ShardIndex
    numbers: Positions


@dataclass(frozen=True, slots=True, eq=False)
class _PartialIndex:
    """Groups of rows that have been read. `places` is where each group begins in `index`, -1 if it is missing."""

    places: Positions
    index: ShardIndex

    def missing(self, positions: Positions) -> Positions:
        """The groups of these samples that have not been read, in order."""
        groups = np.unique(positions // ROWS_AT_ONCE)
        return groups[self.places[groups] < 0]

    def held(self, positions: Positions) -> HeldRows:
        """The rows of samples whose groups have been read."""
        return HeldRows(self.index, self.places[positions // ROWS_AT_ONCE] + positions % ROWS_AT_ONCE)

    def with_groups(self, groups: range, rows: ShardIndex) -> "_PartialIndex":
        """This, with the rows of further groups."""
        places = self.places.copy()
        places[groups] = len(self.index.rows) + ROWS_AT_ONCE * np.arange(len(groups))
        return replace(self, places=places, index=self.index.extended(rows))


class RowTable:
    """The rows of the large indexes of a split that have been read, kept within a budget."""

    def __init__(self, storage: Storage, split: Split, *, with_keys: bool, budget_bytes: int) -> None:
        self.storage, self.split, self.with_keys, self.budget_bytes = storage, split, with_keys, budget_bytes
        self.num_bytes_read = 0
        self._partial: OrderedDict[int, _PartialIndex] = OrderedDict()
        self._held_bytes = 0
        self._lock = ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partial": OrderedDict(), "_held_bytes": 0}

    def rows(self, wanted: Sequence[tuple[int, Positions]]) -> Iterator[HeldRows | None]:
        """The rows of some samples of several shards, in this order; None for an index that is to be read whole."""
        calls = [partial(self._rows, shard, positions) for shard, positions in wanted]
        num_waiting = sum(self._must_wait(shard, positions) for shard, positions in wanted)
        if num_waiting < 2:
            yield from (call() for call in calls)
        else:
            yield from results_in_order("shardset-index", min(NUM_ROW_READERS, num_waiting), calls)

    def _must_wait(self, shard: int, positions: Positions) -> bool:
        found = self._partial.get(shard)
        return len(found.missing(positions)) > 0 if found else self._is_large(shard)

    def _is_large(self, shard: int) -> bool:
        return self.split.shards[shard].index.num_bytes > LARGE_BYTES

    def _rows(self, shard: int, positions: Positions) -> HeldRows | None:
        found = self._partial.get(shard) or (self._nothing(shard) if self._is_large(shard) else None)
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

    def _nothing(self, shard: int) -> _PartialIndex:
        """An index of which nothing has been read."""
        rows = np.empty((0, num_columns(len(self.split.fields))), np.int32)
        num_groups = -(-self.split.shards[shard].num_samples // ROWS_AT_ONCE)
        return _PartialIndex(np.full(num_groups, -1), ShardIndex(rows, np.empty(0, "S1") if self.with_keys else None))

    def _extended(self, shard: int, found: _PartialIndex, missing: Positions) -> _PartialIndex | None:
        """With the missing groups; None if the index is to be read whole."""
        if np.count_nonzero(found.places >= 0) + len(missing) > WHOLE_FROM * len(found.places):
            return None
        listed, fields = self.split.shards[shard], self.split.fields
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            groups = range(run.item(0), run.item(-1) + 1)
            wanted = range(groups.start * ROWS_AT_ONCE, min(groups.stop * ROWS_AT_ONCE, listed.num_samples))
            try:
                records = _read(self.storage, listed, fields, wanted)
            except NotFound as error:
                raise DamagedShard(str(error)) from error
            with self._lock:
                self.num_bytes_read += records.nbytes
            rows = ShardIndex.from_records(records, listed, fields, self.storage.url, with_keys=self.with_keys)
            found = found.with_groups(groups, rows)
        return found
