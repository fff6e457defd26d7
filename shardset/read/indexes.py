"""The indexes of shards, verified against the manifest before anything uses them: whole, or rows of
large ones.

A reader that needs few rows of a large index in a bucket reads these and their neighbours, each
compared with its own check; from a quarter of the index on, all of it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardset.errors import REPAIR, DamagedShard, NotFound, ShardsetError
from shardset.format import table
from shardset.format.index import index_from_bytes, stored_dtype
from shardset.format.manifest import Shard, Split
from shardset.format.table import ROWS_AT_ONCE
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

WHOLE_FROM: Final = 0.25
"""From this share of its rows on, an index is read whole: one request instead of many more."""

CUT: Final = "the shard is cut or replaced, fetch or rebuild it"


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
            f"{url}: lists {len(records)} samples, the manifest says {shard.num_samples}; {REPAIR}"
        )
    return records


def read_rows(
    storage: Storage, shard: Shard, fields: Sequence[str], positions: Sequence[int]
) -> Rows:
    """The index rows of some samples of a shard, in the order asked for; reads only their range,
    and checks it.

    `fields` are its index's. Raises NotFound or StorageError, or DamagedShard if two reads
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
        yield f"the index of shard {shard.path} is damaged; {REPAIR}"
    except NotFound as error:
        raise NotFound(
            f"{storage.url}/{shard.index.path}: the index of shard {shard.path} is missing;"
            f" {REPAIR}"
        ) from error


class ShardIndex:
    """The rows of a shard's index, and on request the keys of their samples, by position; those
    that have not been read are of no meaning, and take no memory.
    """

    def __init__(self, num_samples: int, dtype: np.dtype[np.void]) -> None:
        self.rows = np.empty(num_samples, dtype)
        self.keys: NDArray[np.bytes_] | None = None
        self.is_read = np.zeros(-(-num_samples // ROWS_AT_ONCE), bool)
        """Of each group of rows that are read together."""
        self.is_whole = False

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        num_rows = min(len(self.rows), ROWS_AT_ONCE * int(self.is_read.sum()))
        return num_rows * (self.rows.itemsize + (0 if self.keys is None else self.keys.itemsize))

    def put(self, wanted: range, rows: Rows, keys: NDArray[np.bytes_] | None) -> None:
        """Keeps what has been read of some groups."""
        part = slice(wanted.start, wanted.stop)
        self.rows[part] = rows
        if keys is not None:
            if self.keys is None:
                self.keys = np.empty(len(self.rows), keys.dtype)
            self.keys[part] = keys
        self.is_read[wanted.start // ROWS_AT_ONCE : -(-wanted.stop // ROWS_AT_ONCE)] = True
        self.is_whole = bool(self.is_read.all())

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) that hold the samples [first, last)."""
        ends = self.rows[[first, last - 1]]
        return ends["start"].item(0), stops_of(ends).item(1)


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
            [row] = self._read(address.shard, [address.position])
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
        """The complete index of a shard; raises DamagedShard if it is missing or differs from the
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
        if not self.storage.is_remote:  # a local disk answers faster than threads start
            return map(self._index_with, shards, positions)
        sizes = list(filter(None, map(self._num_bytes_to_read, shards, positions)))
        num_fitting = MAX_BYTES_IN_FLIGHT * len(sizes) // max(1, sum(sizes))
        num_threads = min(NUM_INDEX_READERS, len(sizes), num_fitting)
        if num_threads < 2:
            return map(self._index_with, shards, positions)
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
            rows[group] = index.rows.view(rows.dtype)[positions[group]]
            if index.keys is not None:
                keys[group] = index.keys[positions[group]].astype(str)
        names = keys.tolist() if self.with_keys else None
        return SampleAddresses(rows.view(dtype), shards, positions, names)

    def _find(self, shard: int) -> ShardIndex:
        """The held part of an index; at first nothing."""
        with self._lock():
            index = self._held.get(shard)
            if index is None:
                num_samples = int(self.split.shards.sizes[shard])
                index = self._held[shard] = ShardIndex(num_samples, row_dtype(self.split))
            self._held.move_to_end(shard)
        return index

    def _missing(self, shard: int, index: ShardIndex, positions: Positions) -> list[range]:
        """The rows to read of an index, which include the rows of some samples."""
        if index.is_whole:
            return []
        whole = range(len(index.rows))
        if not self.reads_rows or self.split.shards[shard].index.num_bytes <= LARGE_BYTES:
            return [whole]
        groups = np.unique(positions // ROWS_AT_ONCE)
        groups = groups[~index.is_read[groups]]
        if index.is_read.sum() + len(groups) > WHOLE_FROM * len(index.is_read):
            return [whole] if len(groups) else []
        return [*table.runs_of_groups(groups, whole.stop)]

    def _num_bytes_to_read(self, shard: int, positions: Positions) -> int:
        """How many bytes `_index_with` will read, about."""
        index = self._find(shard)
        num_rows = sum(map(len, self._missing(shard, index, positions)))
        if not num_rows:
            return 0  # without a look at the list of shards, which takes longer
        listed: Shard = self.split.shards[shard]
        return listed.index.num_bytes * num_rows // len(index.rows)

    def _index_with(self, shard: int, positions: Positions) -> ShardIndex:
        """The index of a shard, with the rows of some samples."""
        index = self._find(shard)
        for wanted in self._missing(shard, index, positions):
            # Read outside the lock, so that threads read several indexes at a time; two may read
            # the same one.
            self._keep(shard, index, wanted, self._read(shard, wanted))
        return index

    def _read(self, shard: int, wanted: Sequence[int]) -> Rows:
        """Rows of the index of a shard, as they are stored."""
        listed = self.split.shards[shard]
        try:
            if len(wanted) == listed.num_samples:
                return read_index(self.storage, listed)
            return read_rows(self.storage, listed, self.split.index_fields(shard), wanted)
        except NotFound as error:
            raise DamagedShard(str(error)) from error

    def _keep(self, shard: int, index: ShardIndex, wanted: range, records: Rows) -> None:
        rows = rows_of_index(records, self.split.shards[shard], self.split, self.storage.url)
        with self._lock():
            before = index.num_bytes
            index.put(wanted, rows, records["key"] if self.with_keys else None)
            if self._held.get(shard) is index:
                self._held_bytes += index.num_bytes - before
            while self._held_bytes > self.budget_bytes and len(self._held) > 1:
                self._held_bytes -= self._held.popitem(last=False)[1].num_bytes
