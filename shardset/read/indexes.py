"""The indexes of shards, verified against the manifest before anything uses them: whole, or groups
of rows of large ones.

A reader that needs few rows of a large index in a bucket reads their groups, each column compared
with its CRC32C in the footer; from a quarter of the index on, all of it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import REPAIR, DamagedShard, NotFound, ShardsetError
from shardset.format.manifest import Shard, Split
from shardset.format.rows import GROUP_ROWS, WHOLE_ROWS, Footer, from_bytes, keys_of
from shardset.order.blocks import RangeReads
from shardset.order.budget import INDEX_BUDGET_BYTES
from shardset.per_process import PerProcess
from shardset.read.addresses import (
    Positions,
    Rows,
    SampleAddress,
    SampleAddresses,
    columns_of,
    row_dtype,
    rows_of_index,
    stops_of,
)
from shardset.storage.base import Storage
from shardset.storage.checked import read_object, read_range
from shardset.storage.many import REQUESTS_AT_ONCE, in_order

MAX_GROUPS_IN_FLIGHT: Final = 256
"""Groups of rows that are read at the same time, about 16 MB; one index may have more."""

WHOLE_FROM: Final = 0.25
"""From this share of its rows on, an index is read whole: one request instead of many more."""

CUT: Final = "the shard is cut or replaced, fetch or rebuild it"


def read_index(storage: Storage, shard: Shard, columns: Sequence[str] | None = None) -> pa.Table:
    """The index of a shard, or these columns of it: a row per sample (see `format.rows`).

    Reads a second time if the first answer is not what the manifest lists. Raises NotFound or
    StorageError, or DamagedShard if the second answer is wrong too.
    """
    index = shard.index
    with _reading(storage, shard) as advice:
        data = read_object(storage, index.path, index.num_bytes, index.crc32c, advice)
    return from_bytes(data, shard.num_samples, f"{storage.url}/{index.path}", columns)


def read_footer(storage: Storage, shard: Shard) -> Footer:
    """The footer of the index of a shard, by which `read_groups` reads parts of it.

    Raises NotFound or StorageError, or DamagedShard if two reads find another one.
    """
    index, url = shard.index, f"{storage.url}/{shard.index.path}"

    def problem_of(data: bytes) -> str:
        crc32c = crc32c_text(crc32c_of(data))
        wrong = f"crc32c of the footer is {crc32c}, expected {index.footer_crc32c}"
        return "" if crc32c == index.footer_crc32c else wrong

    start = max(0, index.num_bytes - index.footer_bytes)
    with _reading(storage, shard) as advice:
        data = read_range(
            storage, index.path, start, index.num_bytes,
            num_bytes=index.num_bytes, crc32c=index.crc32c, advice=advice, problem_of=problem_of,
        )  # fmt: skip
    return Footer(data, index.num_bytes, url)


def read_groups(
    storage: Storage, shard: Shard, footer: Footer, groups: Sequence[int], columns: Sequence[str]
) -> pa.Table:
    """Some columns of some groups of rows of a shard's index, in order; raises as `read_footer`."""
    index, parts = shard.index, dict[int, bytes]()
    with _reading(storage, shard) as advice:
        for group in groups:
            start, stop = footer.byte_range(group, columns)
            parts[group] = read_range(
                storage, index.path, start, stop,
                num_bytes=index.num_bytes, crc32c=index.crc32c, advice=advice,
                problem_of=partial(footer.problem_of, group, columns),
            )  # fmt: skip
    return footer.rows(parts, columns, shard.num_samples)


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
        self.footer: Footer | None = None
        self.is_read = np.zeros(-(-num_samples // GROUP_ROWS), bool)
        """Of each group of rows that are read together."""
        self.is_whole = False

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        num_rows = min(len(self.rows), GROUP_ROWS * int(self.is_read.sum()))
        row_bytes = self.rows.itemsize + (0 if self.keys is None else self.keys.itemsize)
        return num_rows * row_bytes + (self.footer.num_bytes if self.footer else 0)

    def put(self, groups: NDArray[np.int64], rows: Rows, keys: NDArray[np.bytes_] | None) -> None:
        """Keeps what has been read of some groups."""
        part = np.isin(np.arange(len(self.rows)) // GROUP_ROWS, groups)
        self.rows[part] = rows
        if keys is not None:
            width = max(keys.itemsize, 0 if self.keys is None else self.keys.itemsize)
            held = np.empty(len(self.rows), f"S{width}") if self.keys is None else self.keys
            self.keys = held.astype(f"S{width}", copy=False)
            self.keys[part] = keys
        self.is_read[groups] = True
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
        self.reads_rows = (
            by_rows and storage.is_remote and split.shards.sizes.max(initial=0) > WHOLE_ROWS
        )
        """Whether groups of rows of some indexes may be read without the others."""
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
            index = read_index(self.storage, self.split.shards[address.shard], ["key"])
            sample = f"sample {index['key'][address.position].as_py()!r}"
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
        items, at_once = list(zip(shards, positions, strict=True)), 1
        if self.storage.is_remote:
            missing = [len(self._missing(self._find(shard), rows)) for shard, rows in items]
            num_fitting = MAX_GROUPS_IN_FLIGHT // max([1, *missing])
            at_once = min(REQUESTS_AT_ONCE, int(np.count_nonzero(missing)), num_fitting)
        return in_order(at_once, items, lambda item: self._index_with(*item))

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

    def _missing(self, index: ShardIndex, positions: Positions) -> NDArray[np.int64]:
        """The groups to read of an index, which include the rows of some samples."""
        whole = np.arange(len(index.is_read))
        if index.is_whole:
            return whole[:0]
        if not self.reads_rows or len(index.rows) <= WHOLE_ROWS:
            return whole
        groups = np.unique(positions // GROUP_ROWS)
        groups = groups[~index.is_read[groups]]
        is_much = index.is_read.sum() + len(groups) > WHOLE_FROM * len(whole)
        return whole if is_much and len(groups) else groups

    def _index_with(self, shard: int, positions: Positions) -> ShardIndex:
        """The index of a shard, with the rows of some samples."""
        index = self._find(shard)
        groups = self._missing(index, positions)
        if len(groups):
            # Read outside the lock, so that threads read several indexes at a time; two may read
            # the same one.
            self._keep(shard, index, groups, *self._read(shard, index, groups))
        return index

    def _read(
        self, shard: int, index: ShardIndex, groups: NDArray[np.int64]
    ) -> tuple[pa.Table, Footer | None]:
        """Groups of rows of the index of a shard, with the columns that this table needs; and the
        footer by which to read others.
        """
        listed = self.split.shards[shard]
        columns = columns_of(self.split) + (["key"] if self.with_keys else [])
        try:
            if len(groups) == len(index.is_read):
                return read_index(self.storage, listed, columns), None
            footer = index.footer or read_footer(self.storage, listed)
            return read_groups(self.storage, listed, footer, groups.tolist(), columns), footer
        except NotFound as error:
            raise DamagedShard(str(error)) from error

    def _keep(
        self,
        shard: int,
        index: ShardIndex,
        groups: NDArray[np.int64],
        table: pa.Table,
        footer: Footer | None,
    ) -> None:
        rows = rows_of_index(table, self.split.shards[shard], self.split, self.storage.url)
        with self._lock():
            before = index.num_bytes
            index.put(groups, rows, keys_of(table) if self.with_keys else None)
            index.footer = None if index.is_whole else footer
            if self._held.get(shard) is index:
                self._held_bytes += index.num_bytes - before
            while self._held_bytes > self.budget_bytes and len(self._held) > 1:
                self._held_bytes -= self._held.popitem(last=False)[1].num_bytes
