"""The indexes of shards, verified against the manifest before anything uses them."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard, NotFound, ShardsetError
from shardset.format.index import index_fields, index_from_bytes
from shardset.format.manifest import Shard, Split
from shardset.order.blocks import RangeReads
from shardset.order.budget import INDEX_BUDGET_BYTES
from shardset.read.addresses import SampleAddress, SampleAddresses, ShardIndex, num_columns
from shardset.read.index_rows import LARGE_BYTES, HeldRows, RowTable, missing_index
from shardset.read.threads import ProcessLock, results_in_order
from shardset.storage.base import Storage
from shardset.storage.checked import read_object

NUM_INDEX_READERS = 32
MAX_BYTES_IN_FLIGHT = 16 << 20


class LostShard(DamagedShard):
    """A whole shard is missing, cut or replaced, so none of its samples can be read."""


def read_index(storage: Storage, shard: Shard) -> NDArray[np.void]:
    """The stored index of a shard, one record per sample (see `index.index_dtype`).

    Reads a second time if the first answer is not what the manifest lists. Raises NotFound or StorageError, or
    DamagedShard if the second answer is wrong too.
    """
    url = f"{storage.url}/{shard.index.path}"
    advice = (
        f"the index of shard {shard.path} is damaged (its CRC32C is not that of the manifest), rebuild the shard with "
        "--only-shards"
    )
    try:
        data = read_object(storage, shard.index.path, shard.index.num_bytes, shard.index.crc32c, advice)
    except NotFound as error:
        raise missing_index(storage, shard) from error
    records = index_from_bytes(data, url)
    if len(records) != shard.num_samples:
        raise DamagedShard(
            f"{url}: lists {len(records)} samples, the manifest says {shard.num_samples}; rebuild shard {shard.path} "
            "with --only-shards"
        )
    return records


class ShardTable:
    """The shards of a split and their indexes, which are read and verified on first use and kept within a budget."""

    def __init__(
        self,
        storage: Storage,
        split: Split,
        *,
        with_keys: bool = False,
        budget_bytes: int = INDEX_BUDGET_BYTES,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
        by_rows: bool = True,
    ) -> None:
        self.storage = storage
        self.split = split
        self.with_keys = with_keys
        self.budget_bytes = budget_bytes
        self.max_bytes_in_flight = max_bytes_in_flight
        self._whole_bytes_read = 0
        self._rows: RowTable | None = None
        if by_rows and storage.is_remote and split.max_index_bytes > LARGE_BYTES:
            self._rows = RowTable(storage, split, with_keys=with_keys, budget_bytes=budget_bytes // 4)
            self.budget_bytes -= budget_bytes // 4
        self._cached: OrderedDict[int, ShardIndex] = OrderedDict()
        self._cached_bytes = 0
        self._last_keys: tuple[int, NDArray[np.bytes_]] | None = None
        self._lock = ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": OrderedDict(), "_cached_bytes": 0, "_last_keys": None}

    @property
    def num_bytes_read(self) -> int:
        """Bytes of indexes that were read."""
        return self._whole_bytes_read + (self._rows.num_bytes_read if self._rows else 0)

    @property
    def reads_rows(self) -> bool:
        """Whether the rows of some indexes may be read without the others."""
        return self._rows is not None

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
        return LostShard(f"{self.url(shard)}: the shard can't be opened (nothing is stored there); fetch or rebuild it")

    def check_size(self, shard: int, num_bytes: int) -> None:
        """Raises LostShard unless the stored shard has the size of the manifest."""
        expected = self.split.shards[shard].num_bytes
        if num_bytes != expected:
            raise LostShard(
                f"{self.url(shard)}: {num_bytes} bytes, expected {expected}; the shard is cut or replaced, "
                "fetch or rebuild it"
            )

    def index(self, shard: int) -> ShardIndex:
        """The index of a shard; raises DamagedShard if it is missing or differs from the manifest."""
        with self._lock:
            if shard in self._cached:
                self._cached.move_to_end(shard)
                return self._cached[shard]
        # Read outside the lock, so that threads read several indexes at a time; two may read the same one.
        index = ShardIndex.from_records(
            self._records(shard),
            self.split.shards[shard],
            self.split.fields,
            self.storage.url,
            with_keys=self.with_keys,
        )
        with self._lock:
            if shard not in self._cached:
                self._cached[shard] = index
                self._cached_bytes += index.num_bytes
            while self._cached_bytes > self.budget_bytes and len(self._cached) > 1:
                self._cached_bytes -= self._cached.popitem(last=False)[1].num_bytes
        return index

    def indexes(self, shards: Sequence[int]) -> Iterator[ShardIndex]:
        """The indexes of several shards in this order; reads those that are missing concurrently from a bucket.

        Limits the bytes in flight to `max_bytes_in_flight`, or to one index if that is larger.
        """
        self.split.load(shards)
        with self._lock:
            missing = [self.split.shards[shard].index.num_bytes for shard in shards if shard not in self._cached]
        # A local disk answers faster than threads start.
        if len(missing) < 2 or not self.storage.is_remote:
            yield from map(self.index, shards)
            return
        num_threads = max(1, min(NUM_INDEX_READERS, len(missing), self.max_bytes_in_flight // max(missing)))
        yield from results_in_order("shardset-index", num_threads, (partial(self.index, shard) for shard in shards))

    def rows(self, shards: Sequence[int], positions: Sequence[NDArray[np.int64]]) -> Iterator[HeldRows]:
        """Where the index rows of some samples are, for several shards in this order; reads those that are missing.

        Of a large index in a bucket it reads the rows of these samples, up to a quarter of the index; then all of it.
        """
        self.split.load(shards)
        found = self._rows_alone(shards, positions)
        whole = self.indexes([shard for shard, rows in zip(shards, found, strict=True) if rows is None])
        for rows, where in zip(found, positions, strict=True):
            yield rows or HeldRows(next(whole), where)

    def _rows_alone(self, shards: Sequence[int], positions: Sequence[NDArray[np.int64]]) -> Sequence[HeldRows | None]:
        """The rows that were read without the others; None for those of whole indexes."""
        if self._rows is None:
            return [None] * len(shards)
        with self._lock:
            is_cached = [shard in self._cached for shard in shards]
        wanted = [
            pair for pair, cached in zip(zip(shards, positions, strict=True), is_cached, strict=True) if not cached
        ]
        found = iter([*self._rows.rows(wanted)])
        return [None if cached else next(found) for cached in is_cached]

    def byte_range(self, shard: int, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) of a shard that hold the samples [first, last)."""
        [(index, numbers)] = self.rows([shard], [np.array([first, last - 1])])
        start, stop = numbers.tolist()
        return index.byte_range(start, stop + 1)

    def load(self, reads: RangeReads) -> None:
        """Reads the index rows of some ranges of shards, all at the same time."""
        shards, owners = np.unique(reads.shard, return_inverse=True)
        once = np.unique(reads.first, return_index=True)[1]
        ranges: list[list[NDArray[np.int64]]] = [[] for _ in shards]
        for number in once.tolist():
            ranges[owners[number]].append(np.arange(reads.start[number], reads.stop[number]))
        for _ in self.rows(shards.tolist(), [np.concatenate(each) for each in ranges]):
            pass

    def addresses(self, shards: NDArray[np.int64], positions: NDArray[np.int64]) -> SampleAddresses:
        """Where several samples are stored, in the order given. Looks up the index of each shard once."""
        order = np.argsort(shards, kind="stable")
        group_starts = np.flatnonzero(np.diff(shards[order], prepend=-1))
        rows = np.empty((len(shards), num_columns(len(self.split.fields))), dtype=np.int64)
        keys = np.empty(len(shards), dtype=object)
        groups = np.split(order, group_starts[1:])
        held = self.rows(shards[order[group_starts]].tolist(), [positions[group] for group in groups])
        for group, (index, numbers) in zip(groups, held, strict=True):
            rows[group] = index.rows[numbers]
            if index.keys is not None:
                keys[group] = index.keys[numbers].astype(str)
        return SampleAddresses(rows, shards, positions, keys.tolist() if self.with_keys else None)

    def _keys(self, shard: int) -> NDArray[np.bytes_]:
        """The keys of a shard. Keeps those of the last one, because bad samples often share a shard."""
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
        with self._lock:
            self._whole_bytes_read += shard.index.num_bytes
        if index_fields(records) != list(self.split.fields):
            raise DamagedShard(
                f"{self.storage.url}/{shard.index.path}: fields {index_fields(records)}, expected "
                f"{list(self.split.fields)}; rebuild shard {shard.path} with --only-shards"
            )
        return records
