"""The indexes of shards, verified against the manifest before anything uses them: whole, or rows of
large ones.

A reader that needs few rows of a large index in a bucket reads these and their neighbours, each
compared with its own check; from a quarter of the index on, all of it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard, NotFound, ShardsetError
from shardset.format import table
from shardset.format.index import index_from_bytes, stored_dtype
from shardset.format.manifest import Shard, Split
from shardset.order.blocks import RangeReads
from shardset.order.budget import INDEX_BUDGET_BYTES
from shardset.per_process import PerProcess
from shardset.read.addresses import (
    Positions,
    Rows,
    SampleAddress,
    SampleAddresses,
    row_dtype,
    rows_of_index,
    stops_of,
)
from shardset.read.threads import results_in_order
from shardset.storage.base import Storage
from shardset.storage.checked import read_object

NUM_INDEX_READERS = 32
MAX_BYTES_IN_FLIGHT: Final = 16 << 20
"""Of indexes that are read at the same time; one index may be larger."""

LARGE_BYTES: Final = 128 << 10
"""An index of more bytes, which is one of more than about 1,500 samples, is read by its rows."""

ROWS_AT_ONCE: Final = 64
"""Neighbours that are read together, about 6 KB: little more than a small image takes in its tar.
"""

WHOLE_FROM: Final = 0.25
"""From this share of its rows on, an index is read whole: one request instead of many more."""

CUT: Final = "the shard is cut or replaced, fetch or rebuild it"

_NO_GROUPS: Final = np.zeros(0, np.int64)


def read_index(storage: Storage, shard: Shard) -> Rows:
    """The stored index of a shard, one record per sample (see `index.index_dtype`).

    Reads a second time if the first answer is not what the manifest lists. Raises NotFound or
    StorageError, or DamagedShard if the second answer is wrong too.
    """
    index = shard.index
    with _reading(storage, shard) as advice:
        data = read_object(storage, index.path, index.num_bytes, index.crc32c, advice)
    url = f"{storage.url}/{index.path}"
    records = index_from_bytes(data, url)
    if len(records) != shard.num_samples:
        raise DamagedShard(
            f"{url}: lists {len(records)} samples, the manifest says {shard.num_samples}; rebuild"
            f" shard {shard.path} with --only-shards"
        )
    return records


def read_rows(
    storage: Storage, shard: Shard, fields: Sequence[str], positions: Sequence[int]
) -> Rows:
    """The index rows of some samples of a shard, in the order asked for; reads only their range,
    and checks it.

    `fields` are those of its index. Raises NotFound or StorageError, or DamagedShard if two reads
    find other rows.
    """
    first, index, num_samples = min(positions), shard.index, shard.num_samples
    dtype = stored_dtype(tuple(fields), num_samples, index.num_bytes)
    if dtype is None:
        raise DamagedShard(
            f"{storage.url}/{index.path}: no index of {num_samples} samples has"
            f" {index.num_bytes} bytes; build the set again"
        )
    wanted, crc32c = range(first, max(positions) + 1), index.crc32c
    with _reading(storage, shard) as advice:
        rows = table.read_rows(
            storage, index.path, dtype, num_samples, wanted, crc32c=crc32c, advice=advice
        )
    return rows[[position - first for position in positions]]


@contextmanager
def _reading(storage: Storage, shard: Shard) -> Iterator[str]:
    """A block that reads from the index of a shard, with the advice for one that is damaged."""
    try:
        yield f"the index of shard {shard.path} is damaged, rebuild the shard with --only-shards"
    except NotFound as error:
        raise NotFound(
            f"{storage.url}/{shard.index.path}: the index of shard {shard.path} is missing; restore"
            " it, or rebuild the shard with --only-shards"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """The rows of a shard's index that have been read, and on request the keys of their samples.

    `places` is where each group of rows begins in `rows`, -1 if it is missing; None if all rows
    are there, in order.
    """

    rows: Rows
    keys: NDArray[np.bytes_] | None
    places: Positions | None = None

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return self.rows.nbytes + (0 if self.keys is None else self.keys.nbytes)

    def numbers(self, positions: Positions) -> Positions:
        """The places in `rows` of samples whose rows have been read."""
        if self.places is None:
            return positions
        return self.places[positions // ROWS_AT_ONCE] + positions % ROWS_AT_ONCE

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) that hold the samples [first, last)."""
        ends = self.rows[self.numbers(np.array([first, last - 1]))]
        return ends["start"].item(0), stops_of(ends).item(1)

    def extended(self, groups: range, other: "ShardIndex") -> "ShardIndex":
        """These rows, then those of further groups of the same shard."""
        assert self.places is not None
        places = self.places.copy()
        places[groups] = len(self.rows) + ROWS_AT_ONCE * np.arange(len(groups))
        keys = None if self.keys is None else np.concatenate([self.keys, other.keys])
        return ShardIndex(np.concatenate([self.rows, other.rows]), keys, places)


class ShardTable:
    """The shards of a split and their indexes, which are read and verified on first use and kept
    within a budget.
    """

    def __init__(
        self,
        storage: Storage,
        split: Split,
        *,
        with_keys: bool = False,
        budget_bytes: int = INDEX_BUDGET_BYTES,
        by_rows: bool = True,
    ) -> None:
        self.storage = storage
        self.split = split
        self.with_keys = with_keys
        self.budget_bytes = budget_bytes
        self.reads_rows = by_rows and storage.is_remote and split.max_index_bytes > LARGE_BYTES
        """Whether the rows of some indexes may be read without the others."""
        self._held: OrderedDict[int, ShardIndex] = OrderedDict()
        self._held_bytes = 0
        self._lock = PerProcess(threading.Lock)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "_held_bytes": 0}

    def url(self, shard: int) -> str:
        """The URL of a shard, as messages show it."""
        return f"{self.storage.url}/{self.split.shards[shard].path}"

    def describe(self, address: SampleAddress) -> str:
        """A sample's shard, key and offset: the beginning of every message about a sample."""
        try:
            [row] = self._read_rows(address.shard, [address.position])
            sample = f"sample {row['key'].decode('ascii')!r}"
        except ShardsetError:  # the message is about another failure; a lost index must not hide it
            sample = f"sample number {address.position}"
        return f"{self.url(address.shard)}: {sample} at byte {address.start}"

    def missing(self, shard: int) -> DamagedShard:
        """The error for a shard that is not stored."""
        return DamagedShard(
            f"{self.url(shard)}: the shard can't be opened (nothing is stored there); fetch or"
            " rebuild it"
        )

    def check_size(self, shard: int, num_bytes: int) -> None:
        """Raises DamagedShard unless the stored shard has the size of the manifest."""
        expected = self.split.shards[shard].num_bytes
        if num_bytes != expected:
            raise DamagedShard(f"{self.url(shard)}: {num_bytes} bytes, expected {expected}; {CUT}")

    def index(self, shard: int) -> ShardIndex:
        """The whole index of a shard; raises DamagedShard if it is missing or differs from the
        manifest.
        """
        return self._index_with(shard, np.arange(self.split.shards.sizes[shard]))

    def indexes(
        self, shards: Sequence[int], positions: Sequence[Positions]
    ) -> Iterator[ShardIndex]:
        """The indexes of several shards in this order, with the rows of some samples of each;
        reads those that are missing, from a bucket concurrently.

        Of a large index in a bucket it reads the rows of these samples, up to a quarter of the
        index; then all of it.
        """
        self.split.shards.load(np.array(shards, np.int64))
        with self._lock():
            held = list(map(self._held.get, shards))
        sizes = list(filter(None, map(self._num_bytes_to_read, shards, held, positions)))
        # A local disk answers faster than threads start.
        if len(sizes) < 2 or not self.storage.is_remote:
            return map(self._index_with, shards, positions)
        num_fitting = MAX_BYTES_IN_FLIGHT * len(sizes) // sum(sizes)
        num_threads = max(1, min(NUM_INDEX_READERS, len(sizes), num_fitting))
        calls = map(partial, repeat(self._index_with), shards, positions)
        return results_in_order("shardset-index", num_threads, calls)

    def keys(self) -> NDArray[np.bytes_]:
        """The keys of all samples, by id; for a table with keys."""
        sizes = self.split.shard_sizes
        indexes = self.indexes(range(len(sizes)), [np.arange(size) for size in sizes])
        return np.concatenate([index.keys for index in indexes if index.keys is not None])

    def byte_range(self, shard: int, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) of a shard that hold the samples [first, last)."""
        [index] = self.indexes([shard], [np.array([first, last - 1])])
        return index.byte_range(first, last)

    def load(self, reads: RangeReads) -> None:
        """Reads the index rows of some ranges of shards, all at the same time."""
        shards, owners = np.unique(reads.shard, return_inverse=True)
        once = np.unique(reads.first, return_index=True)[1]
        ranges: list[list[Positions]] = [[] for _ in shards]
        for number in once.tolist():
            ranges[owners[number]].append(np.arange(reads.start[number], reads.stop[number]))
        for _ in self.indexes(shards.tolist(), [np.concatenate(each) for each in ranges]):
            pass

    def addresses(self, shards: NDArray[np.int64], positions: Positions) -> SampleAddresses:
        """Where several samples are stored, in the order given.

        Looks up the index of each shard once.
        """
        order = np.argsort(shards, kind="stable")
        group_starts = np.flatnonzero(np.diff(shards[order], prepend=-1))
        dtype = row_dtype(self.split)
        # As bytes without columns: NumPy copies rows with columns one column at a time.
        rows = np.empty(len(shards), f"V{dtype.itemsize}")
        keys = np.empty(len(shards), dtype=object)
        groups = np.split(order, group_starts[1:])
        indexes = self.indexes(
            shards[order[group_starts]].tolist(), [positions[group] for group in groups]
        )
        for group, index in zip(groups, indexes, strict=True):
            numbers = index.numbers(positions[group])
            rows[group] = index.rows.view(rows.dtype)[numbers]
            if index.keys is not None:
                keys[group] = index.keys[numbers].astype(str)
        names = keys.tolist() if self.with_keys else None
        return SampleAddresses(rows.view(dtype), shards, positions, names)

    def _keep(self, shard: int, found: ShardIndex) -> ShardIndex:
        with self._lock():
            before = self._held.pop(shard, None)
            if before and before.places is None and found.places is not None:
                found = before  # another thread has read all of it meanwhile
            self._held[shard] = found
            self._held_bytes += found.num_bytes - (before.num_bytes if before else 0)
            while self._held_bytes > self.budget_bytes and len(self._held) > 1:
                self._held_bytes -= self._held.popitem(last=False)[1].num_bytes
        return found

    def _missing(
        self, shard: int, held: ShardIndex | None, positions: Positions
    ) -> Positions | None:
        """The groups of rows to read for some samples, in order; None if the index is to be read
        whole.
        """
        places = None if held is None else held.places
        if held and places is None:
            return _NO_GROUPS
        listed = self.split.shards[shard]
        if not self.reads_rows or listed.index.num_bytes <= LARGE_BYTES:
            return None
        if places is None:
            places = _no_places(listed)
        groups = np.unique(positions // ROWS_AT_ONCE)
        groups = groups[places[groups] < 0]
        is_much = np.count_nonzero(places >= 0) + len(groups) > WHOLE_FROM * len(places)
        return None if is_much and len(groups) else groups

    def _num_bytes_to_read(self, shard: int, held: ShardIndex | None, positions: Positions) -> int:
        """How many bytes `_index_with` will read, about."""
        missing = self._missing(shard, held, positions)
        if missing is not None and not len(missing):
            return 0  # without a look at the list of shards, which takes longer
        listed = self.split.shards[shard]
        share = 1.0 if missing is None else len(missing) / len(_no_places(listed))
        return int(share * listed.index.num_bytes)

    def _index_with(self, shard: int, positions: Positions) -> ShardIndex:
        """The index of a shard, with the rows of some samples."""
        with self._lock():
            held = self._held.get(shard)
            if held:
                self._held.move_to_end(shard)
        missing = self._missing(shard, held, positions)
        if missing is None:
            return self._read_whole(shard)
        return held if held and not len(missing) else self._read_groups(shard, held, missing)

    def _read_whole(self, shard: int) -> ShardIndex:
        # Read outside the lock, so that threads read several indexes at a time; two may read the
        # same one.
        listed = self.split.shards[shard]
        try:
            records = read_index(self.storage, listed)
        except NotFound as error:
            raise DamagedShard(str(error)) from error
        return self._keep(shard, self._index_of(shard, records))

    def _read_groups(self, shard: int, held: ShardIndex | None, missing: Positions) -> ShardIndex:
        """What is held of an index, with the missing groups of its rows."""
        listed = self.split.shards[shard]
        index = held or ShardIndex(
            np.empty(0, row_dtype(self.split)),
            np.empty(0, "S1") if self.with_keys else None,
            _no_places(listed),
        )
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            groups = range(run.item(0), run.item(-1) + 1)
            wanted = range(
                groups.start * ROWS_AT_ONCE, min(groups.stop * ROWS_AT_ONCE, listed.num_samples)
            )
            records = self._read_rows(shard, wanted)
            index = index.extended(groups, self._index_of(shard, records))
        return self._keep(shard, index)

    def _read_rows(self, shard: int, positions: Sequence[int]) -> Rows:
        fields = self.split.index_fields(shard)
        try:
            return read_rows(self.storage, self.split.shards[shard], fields, positions)
        except NotFound as error:
            raise DamagedShard(str(error)) from error

    def _index_of(self, shard: int, records: Rows) -> ShardIndex:
        """What is kept of records."""
        split = self.split
        rows = rows_of_index(records, split.shards[shard], split, self.storage.url)
        return ShardIndex(rows, records["key"].copy() if self.with_keys else None)


def _no_places(shard: Shard) -> Positions:
    """The `places` of an index of which nothing has been read."""
    return np.full(-(-shard.num_samples // ROWS_AT_ONCE), -1)
