"""The indexes of shards, verified against the manifest before anything uses them: whole, or rows of
large ones.

A reader that needs few rows of a large index in a bucket reads these and their neighbours, each
compared with its own check; from a quarter of the index on, all of it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard, NotFound, ShardsetError
from shardset.format import table
from shardset.format.index import index_from_bytes, stored_dtype, with_fields
from shardset.format.manifest import Shard, Split
from shardset.order.blocks import RangeReads
from shardset.order.budget import INDEX_BUDGET_BYTES
from shardset.per_process import PerProcess
from shardset.read.addresses import SampleAddress, SampleAddresses, ShardIndex, num_columns
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

T = TypeVar("T")

Positions = NDArray[np.int64]


class LostShard(DamagedShard):
    """A whole shard is missing, cut or replaced, so none of its samples can be read."""


def read_index(storage: Storage, shard: Shard) -> NDArray[np.void]:
    """The stored index of a shard, one record per sample (see `index.index_dtype`).

    Reads a second time if the first answer is not what the manifest lists. Raises NotFound or
    StorageError, or DamagedShard if the second answer is wrong too.
    """
    url = f"{storage.url}/{shard.index.path}"
    advice = f"the index of shard {shard.path} is damaged, rebuild the shard with --only-shards"
    try:
        data = read_object(
            storage, shard.index.path, shard.index.num_bytes, shard.index.crc32c, advice
        )
    except NotFound as error:
        raise _missing_index(storage, shard) from error
    records = index_from_bytes(data, url)
    if len(records) != shard.num_samples:
        raise DamagedShard(
            f"{url}: lists {len(records)} samples, the manifest says {shard.num_samples}; rebuild"
            f" shard {shard.path} with --only-shards"
        )
    return records


def read_rows(
    storage: Storage, shard: Shard, fields: Sequence[str], positions: Sequence[int]
) -> NDArray[np.void]:
    """The index rows of some samples of a shard, in the order asked for; reads only their range,
    and checks it.

    `fields` are those of its index. Raises NotFound or StorageError, or DamagedShard if two reads
    find other rows.
    """
    first, index = min(positions), shard.index
    dtype = stored_dtype(tuple(fields), shard.num_samples, index.num_bytes)
    if dtype is None:
        raise DamagedShard(
            f"{storage.url}/{index.path}: no index of {shard.num_samples} samples has"
            f" {index.num_bytes} bytes; build the set again"
        )
    advice = f"the index of shard {shard.path} is damaged, rebuild the shard with --only-shards"
    wanted = range(first, max(positions) + 1)
    try:
        rows = table.read_rows(
            storage,
            index.path,
            dtype,
            shard.num_samples,
            wanted,
            crc32c=index.crc32c,
            advice=advice,
        )
    except NotFound as error:
        raise _missing_index(storage, shard) from error
    return rows[[position - first for position in positions]]


def _missing_index(storage: Storage, shard: Shard) -> NotFound:
    return NotFound(
        f"{storage.url}/{shard.index.path}: the index of shard {shard.path} is missing; restore it,"
        " or rebuild the shard with --only-shards"
    )


class HeldRows(NamedTuple):
    """Some rows of a shard: `numbers` are theirs in `held`,
    which may lack other rows of the shard.
    """

    held: ShardIndex
    numbers: Positions


@dataclass(frozen=True, slots=True, eq=False)
class _HeldIndex:
    """Groups of rows that have been read.

    `places` is where each begins in `index`, -1 if it is missing.

    `places` is None for a whole index.
    """

    index: ShardIndex
    places: Positions | None = None

    def rows(self, positions: Positions) -> HeldRows:
        """The rows of samples whose groups have been read."""
        if self.places is None:
            return HeldRows(self.index, positions)
        return HeldRows(
            self.index, self.places[positions // ROWS_AT_ONCE] + positions % ROWS_AT_ONCE
        )


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
        self.num_bytes_read = 0
        """Bytes of indexes that were read."""
        self.reads_rows = by_rows and storage.is_remote and split.max_index_bytes > LARGE_BYTES
        """Whether the rows of some indexes may be read without the others."""
        self._held: OrderedDict[int, _HeldIndex] = OrderedDict()
        self._held_bytes = 0
        self._last_keys: tuple[int, NDArray[np.bytes_]] | None = None
        self._lock = PerProcess(threading.Lock)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "_held_bytes": 0, "_last_keys": None}

    def url(self, shard: int) -> str:
        """The URL of a shard, as messages show it."""
        return f"{self.storage.url}/{self.split.shards[shard].path}"

    def describe(self, address: SampleAddress) -> str:
        """A sample's shard, key and offset: the beginning of every message about a sample."""
        try:
            sample = f"sample {self._keys(address.shard)[address.position].decode('ascii')!r}"
        except ShardsetError:  # the message is about another failure; a lost index must not hide it
            sample = f"sample number {address.position}"
        return f"{self.url(address.shard)}: {sample} at byte {address.start}"

    def missing(self, shard: int) -> LostShard:
        """The error for a shard that is not stored."""
        return LostShard(
            f"{self.url(shard)}: the shard can't be opened (nothing is stored there); fetch or"
            " rebuild it"
        )

    def check_size(self, shard: int, num_bytes: int) -> None:
        """Raises LostShard unless the stored shard has the size of the manifest."""
        expected = self.split.shards[shard].num_bytes
        if num_bytes != expected:
            raise LostShard(
                f"{self.url(shard)}: {num_bytes} bytes, expected {expected}; the shard is cut or"
                " replaced, fetch or rebuild it"
            )

    def index(self, shard: int) -> ShardIndex:
        """The index of a shard; raises DamagedShard if it is missing or differs from
        the manifest.
        """
        held = self._find(shard)
        return (held if held and held.places is None else self._read_whole(shard)).index

    def indexes(self, shards: Sequence[int]) -> Iterator[ShardIndex]:
        """The indexes of several shards in this order; reads those that are missing concurrently
        from a bucket.
        """
        self.split.load(shards)
        with self._lock():
            whole = {
                shard for shard in shards if (held := self._held.get(shard)) and held.places is None
            }
        sizes = [self.split.shards[shard].index.num_bytes for shard in shards if shard not in whole]
        return self._concurrently(sizes, (partial(self.index, shard) for shard in shards))

    def rows(self, shards: Sequence[int], positions: Sequence[Positions]) -> Iterator[HeldRows]:
        """Where the index rows of some samples are, for several shards in this order; reads those
        that are missing.

        Of a large index in a bucket it reads the rows of these samples, up to a quarter of the
        index; then all of it.
        """
        self.split.load(shards)
        with self._lock():
            found = map(self._held.get, shards)
            wanted = [
                (shard, held, where)
                for shard, held, where in zip(shards, found, positions, strict=True)
                if held is None or held.places is not None
            ]
        sizes = [size for each in wanted if (size := self._num_bytes_to_read(*each))]
        return self._concurrently(sizes, map(partial, repeat(self._rows), shards, positions))

    def byte_range(self, shard: int, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) of a shard that hold the samples [first, last)."""
        [(index, numbers)] = self.rows([shard], [np.array([first, last - 1])])
        start, stop = numbers.tolist()
        return index.byte_range(start, stop + 1)

    def load(self, reads: RangeReads) -> None:
        """Reads the index rows of some ranges of shards, all at the same time."""
        shards, owners = np.unique(reads.shard, return_inverse=True)
        once = np.unique(reads.first, return_index=True)[1]
        ranges: list[list[Positions]] = [[] for _ in shards]
        for number in once.tolist():
            ranges[owners[number]].append(np.arange(reads.start[number], reads.stop[number]))
        for _ in self.rows(shards.tolist(), [np.concatenate(each) for each in ranges]):
            pass

    def addresses(self, shards: NDArray[np.int64], positions: NDArray[np.int64]) -> SampleAddresses:
        """Where several samples are stored, in the order given.

        Looks up the index of each shard once.
        """
        order = np.argsort(shards, kind="stable")
        group_starts = np.flatnonzero(np.diff(shards[order], prepend=-1))
        rows = np.empty((len(shards), num_columns(len(self.split.fields))), dtype=np.int64)
        keys = np.empty(len(shards), dtype=object)
        groups = np.split(order, group_starts[1:])
        held = self.rows(
            shards[order[group_starts]].tolist(), [positions[group] for group in groups]
        )
        for group, (index, numbers) in zip(groups, held, strict=True):
            rows[group] = index.rows[numbers]
            if index.keys is not None:
                keys[group] = index.keys[numbers].astype(str)
        return SampleAddresses(rows, shards, positions, keys.tolist() if self.with_keys else None)

    def _concurrently(self, sizes: Sequence[int], calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """The results of some calls in their order,
        of which those of `sizes` read that many bytes.
        """
        # A local disk answers faster than threads start.
        if len(sizes) < 2 or not self.storage.is_remote:
            return (call() for call in calls)
        num_threads = max(
            1, min(NUM_INDEX_READERS, len(sizes), MAX_BYTES_IN_FLIGHT * len(sizes) // sum(sizes))
        )
        return results_in_order("shardset-index", num_threads, calls)

    def _find(self, shard: int) -> _HeldIndex | None:
        with self._lock():
            if shard in self._held:
                self._held.move_to_end(shard)
            return self._held.get(shard)

    def _keep(self, shard: int, found: _HeldIndex) -> _HeldIndex:
        with self._lock():
            before = self._held.pop(shard, None)
            if before and before.places is None and found.places is not None:
                found = before  # another thread has read all of it meanwhile
            self._held[shard] = found
            self._held_bytes += found.index.num_bytes - (before.index.num_bytes if before else 0)
            while self._held_bytes > self.budget_bytes and len(self._held) > 1:
                self._held_bytes -= self._held.popitem(last=False)[1].index.num_bytes
        return found

    def _missing(
        self, shard: int, held: _HeldIndex | None, positions: Positions
    ) -> Positions | None:
        """The groups of rows to read for some samples, in order; None if the index is to be read
        whole.
        """
        listed = self.split.shards[shard]
        if not self.reads_rows or listed.index.num_bytes <= LARGE_BYTES:
            return None
        groups = np.unique(positions // ROWS_AT_ONCE)
        num_held = 0
        if held and held.places is not None:
            groups = groups[held.places[groups] < 0]
            num_held = int(np.count_nonzero(held.places >= 0))
        is_much = num_held + len(groups) > WHOLE_FROM * _num_groups(listed)
        return None if is_much and len(groups) else groups

    def _num_bytes_to_read(self, shard: int, held: _HeldIndex | None, positions: Positions) -> int:
        """How many bytes `_rows` will read, about."""
        missing, listed = self._missing(shard, held, positions), self.split.shards[shard]
        share = 1.0 if missing is None else len(missing) / _num_groups(listed)
        return int(share * listed.index.num_bytes)

    def _rows(self, shard: int, positions: Positions) -> HeldRows:
        held = self._find(shard)
        if held and held.places is None:
            return held.rows(positions)
        missing = self._missing(shard, held, positions)
        if missing is None:
            held = self._read_whole(shard)
        elif held is None or len(missing):
            held = self._read_groups(shard, held, missing)
        return held.rows(positions)

    def _read_whole(self, shard: int) -> _HeldIndex:
        # Read outside the lock, so that threads read several indexes at a time; two may read the
        # same one.
        return self._keep(shard, _HeldIndex(self._index_of(shard, self._records(shard))))

    def _read_groups(self, shard: int, held: _HeldIndex | None, missing: Positions) -> _HeldIndex:
        """What is held of an index, with the missing groups of its rows."""
        listed, fields = self.split.shards[shard], self.split.index_fields(shard)
        if held is not None and held.places is not None:
            index, places = held.index, held.places.copy()
        else:
            rows = np.empty((0, num_columns(len(self.split.fields))), np.int32)
            index = ShardIndex(rows, np.empty(0, "S1") if self.with_keys else None)
            places = np.full(_num_groups(listed), -1)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            groups = range(run.item(0), run.item(-1) + 1)
            wanted = range(
                groups.start * ROWS_AT_ONCE, min(groups.stop * ROWS_AT_ONCE, listed.num_samples)
            )
            try:
                records = read_rows(self.storage, listed, fields, wanted)
            except NotFound as error:
                raise DamagedShard(str(error)) from error
            with self._lock():
                self.num_bytes_read += records.nbytes
            places[groups] = len(index.rows) + ROWS_AT_ONCE * np.arange(len(groups))
            index = index.extended(self._index_of(shard, records))
        return self._keep(shard, _HeldIndex(index, places))

    def _index_of(self, shard: int, records: NDArray[np.void]) -> ShardIndex:
        listed, split = self.split.shards[shard], self.split
        if split.index_fields(shard) is not split.fields:
            records = with_fields(records, split.fields)
        return ShardIndex.from_records(
            records, listed, split.fields, self.storage.url, with_keys=self.with_keys
        )

    def _keys(self, shard: int) -> NDArray[np.bytes_]:
        """The keys of a shard.

        Keeps those of the last one, because bad samples often share a shard.
        """
        last = self._last_keys
        if last is None or last[0] != shard:
            last = self._last_keys = shard, self._records(shard)["key"].copy()
        return last[1]

    def _records(self, number: int) -> NDArray[np.void]:
        shard = self.split.shards[number]
        try:
            records = read_index(self.storage, shard)
        except NotFound as error:
            raise DamagedShard(str(error)) from error
        with self._lock():
            self.num_bytes_read += shard.index.num_bytes
        return records


def _num_groups(shard: Shard) -> int:
    return -(-shard.num_samples // ROWS_AT_ONCE)
