"""Where each sample's bytes are, and those bytes, checked: pinned ranged reads of blocks, hedged, within a budget.

Local shards are read one sample at a time (the page cache is the block). Remote shards are read by blocks, many at
a time; a block is freed when its last sample has been taken. No byte reaches a caller before its length and its
CRC32C have been compared with the index, and the index with the manifest.
"""

import heapq
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np

from shardset.errors import DamagedShard, NotFound, PreconditionFailed, ShardsetError, StorageError
from shardset.format.manifest import Shard, Split
from shardset.format.tar import index_fields, index_from_bytes
from shardset.order.budget import INDEX_BUDGET_BYTES
from shardset.order.epoch import Order, RangeReads, Slots
from shardset.read.disk_cache import BlockCache
from shardset.read.threads import ProcessLock, Threads
from shardset.storage.base import Storage, os_errors_as_storage_errors
from shardset.storage.checked import read_object, read_twice

_log = logging.getLogger(__name__)

NUM_FETCHERS = 32
NUM_CACHE_READERS = 4
INDEX_BYTES_AT_ONCE = 16 << 20
SMALL_BYTES = 1 << 14
MAX_OPEN_FILES = 256
HEDGE_AFTER = 0.95
MIN_HEDGE_S = 0.05
MAX_HEDGED = 0.03
NUM_TIMES = 256
MIN_TIMES = 20


class LostShard(DamagedShard):
    """A whole shard is missing, cut or replaced, so none of its samples can be read."""


class SampleAddress(NamedTuple):
    """Where one sample is stored: the bytes [start, stop) of a shard hold all its fields."""

    shard: int
    position: int
    start: int
    stop: int


_START, _CRC, _LABEL, _PLACES = range(4)
"""The columns of `ShardIndex.rows`: one each, then the offset from the start of every field, then all sizes."""
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What reading needs of a shard's index: one row a sample, of 4-byte numbers wherever they suffice.

    The CRC32C is kept as a signed number; the offset of a field that a sample has not is -1, its size 0. `keys` are
    kept only where they are asked for.
    """

    rows: np.ndarray
    keys: np.ndarray | None

    @property
    def num_bytes(self) -> int:
        """What it holds in memory."""
        return self.rows.nbytes + (0 if self.keys is None else self.keys.nbytes)

    @property
    def starts(self) -> np.ndarray:
        """Where each sample begins."""
        return self.rows[:, _START]

    def start(self, position: int) -> int:
        """Where a sample begins."""
        return self.rows.item(position, _START)

    def stop(self, position: int) -> int:
        """Where the last field of a sample ends."""
        return int(_stops(self.rows[position : position + 1])[0])


class SampleAddresses:
    """Where several samples are stored, their labels and, if asked for, their keys, in columns."""

    def __init__(self, shards: np.ndarray, positions: np.ndarray, rows: np.ndarray, keys: list[str] | None) -> None:
        self.shards, self.positions, self.rows, self.keys = shards, positions, rows, keys

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> SampleAddress:
        return next(iter(self.part(number, number + 1)))

    def __iter__(self) -> Iterator[SampleAddress]:
        columns = self.shards, self.positions, self.starts, self.stops
        return map(SampleAddress, *(column.tolist() for column in columns))

    def part(self, start: int, stop: int) -> "SampleAddresses":
        """Those from number `start` to before `stop`."""
        keys = None if self.keys is None else self.keys[start:stop]
        return SampleAddresses(self.shards[start:stop], self.positions[start:stop], self.rows[start:stop], keys)

    @property
    def labels(self) -> np.ndarray:
        """int64 [n]."""
        return self.rows[:, _LABEL].astype(np.int64)

    def label(self, number: int) -> int:
        """That of one of them."""
        return self.rows.item(number, _LABEL)

    @property
    def starts(self) -> np.ndarray:
        """Where in their shards the samples begin."""
        return self.rows[:, _START]

    @property
    def stops(self) -> np.ndarray:
        """Where in their shards the last fields of the samples end."""
        return _stops(self.rows)


class ShardTable:
    """The shards of a split; an index is read when first asked for, checked, and kept within a budget of bytes."""

    def __init__(
        self, storage: Storage, split: Split, *, with_keys: bool = False, budget_bytes: int = INDEX_BUDGET_BYTES
    ) -> None:
        self.storage = storage
        self.split = split
        self.with_keys = with_keys
        self.budget_bytes = budget_bytes
        self.num_bytes_read = 0
        self._kept: OrderedDict[int, ShardIndex] = OrderedDict()
        self._kept_bytes = 0
        self._named: tuple[int, np.ndarray] | None = None
        self._lock = ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict(), "_kept_bytes": 0, "_named": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=ProcessLock())

    def where(self, shard: int) -> str:
        """The shard as a user would name it."""
        return f"{self.storage.url}/{self.split.shards[shard].path}"

    def named(self, address: SampleAddress) -> str:
        """A sample by shard, key and offset, as every message about one begins."""
        try:
            sample = f"sample {self._keys(address.shard)[address.position].decode('ascii')!r}"
        except ShardsetError:  # the message is about something else
            sample = f"sample number {address.position}"
        return f"{self.where(address.shard)}: {sample} at byte {address.start}"

    def index(self, shard: int) -> ShardIndex:
        """The index of a shard; raises DamagedShard if it is missing or not the one that the manifest lists."""
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        index = self._load(shard)
        with self._lock:
            if shard not in self._kept:
                self._kept[shard] = index
                self._kept_bytes += index.num_bytes
            while self._kept_bytes > self.budget_bytes and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return index

    def indexes(self, shards: Sequence[int]) -> Iterator[ShardIndex]:
        """The indexes of several shards in this order; from a bucket, those that have to be read at the same time.

        At most 16 MiB of them are being read, at least one and at most as many as there are fetchers.
        """
        with self._lock:
            missing = [self.split.shards[shard].index.num_bytes for shard in shards if shard not in self._kept]
        if len(missing) < 2 or not self.storage.is_remote:  # of a disk nobody waits long enough
            yield from map(self.index, shards)
            return
        num_threads = max(1, min(NUM_FETCHERS, len(missing), INDEX_BYTES_AT_ONCE // max(missing)))
        # No pool of concurrent.futures: who leaves the program would wait for its threads, and they for the network.
        promised, threads = deque[Future[ShardIndex]](), Threads("shardset-index", num_threads)
        try:
            for shard in shards:
                if len(promised) == num_threads:
                    yield promised.popleft().result()
                promised.append(self._promised(shard, threads))
            while promised:
                yield promised.popleft().result()
        finally:
            threads.close()
            threads.join()

    def _promised(self, shard: int, threads: Threads) -> Future[ShardIndex]:
        """The index of a shard, as one of the threads reads it."""
        promise: Future[ShardIndex] = Future()

        def read() -> None:
            try:
                outcome: ShardIndex | BaseException = self.index(shard)
            except BaseException as error:  # noqa: BLE001 - raised again to whoever waits for it
                outcome = error
            _settle(promise, outcome)

        threads.submit(read)
        return promise

    def addresses(self, shards: np.ndarray, positions: np.ndarray) -> SampleAddresses:
        """Where several samples are stored, in the order asked for; each index is asked for once."""
        order = np.argsort(shards, kind="stable")
        begins = np.flatnonzero(np.diff(shards[order], prepend=-1))
        rows = np.empty((len(shards), _PLACES + 2 * len(self.split.fields)), dtype=np.int64)
        keys = np.empty(len(shards), dtype=object)
        groups = np.split(order, begins[1:])
        for places, index in zip(groups, self.indexes(shards[order[begins]].tolist()), strict=True):
            rows[places] = index.rows[positions[places]]
            if index.keys is not None:
                keys[places] = index.keys[positions[places]].astype(str)
        return SampleAddresses(shards, positions, rows, keys.tolist() if self.with_keys else None)

    def _keys(self, shard: int) -> np.ndarray:
        """The keys of a shard; those asked for last are kept, because bad samples come in company."""
        named = self._named
        if named is None or named[0] != shard:
            named = self._named = shard, self._read(shard)["key"].copy()
        return named[1]

    def _load(self, number: int) -> ShardIndex:
        shard, where = self.split.shards[number], self._index_url(number)
        return _packed(self._read(number), shard, self.split.fields, where, with_keys=self.with_keys)

    def _index_url(self, number: int) -> str:
        return f"{self.storage.url}/{self.split.shards[number].index.path}"

    def _read(self, number: int) -> np.ndarray:
        shard, where = self.split.shards[number], self._index_url(number)
        try:
            advice = f"the index of shard {shard.path} is damaged, rebuild it with --only-shards"
            data = read_object(self.storage, shard.index.path, shard.index.num_bytes, shard.index.crc32c, advice)
        except NotFound as error:
            raise DamagedShard(
                f"{where}: the index of shard {shard.path} is missing; rebuild the shard with --only-shards"
            ) from error
        with self._lock:
            self.num_bytes_read += len(data)
        index = index_from_bytes(data, where)
        if len(index) != shard.num_samples or index_fields(index) != list(self.split.fields):
            raise DamagedShard(
                f"{where}: {len(index)} records with fields {index_fields(index)}, expected {shard.num_samples} with "
                f"{list(self.split.fields)}; rebuild shard {shard.path} with --only-shards"
            )
        return index


Contents = Sequence[bytes | None]
"""The contents of a sample's fields, a column each; None for one that it has not."""


class PendingSamples(ABC):
    """Promises of the bytes of some samples, which any thread may take."""

    def __init__(self, table: ShardTable, addresses: SampleAddresses) -> None:
        self.table, self.addresses = table, addresses
        offsets, sizes = np.split(addresses.rows[:, _PLACES:], 2, axis=1)
        self.starts = addresses.starts.tolist()
        self.sizes = (addresses.stops - addresses.starts).tolist()
        self._fields = list(zip(offsets.T.tolist(), (offsets + sizes).T.tolist(), strict=True))
        self._crcs = (addresses.rows[:, _CRC] & 0xFFFFFFFF).tolist()
        self._absent = (offsets < 0).tolist() if (offsets < 0).any() else None
        # The checksum is over the members as they stand, the columns are those of the whole split.
        self._orders = np.argsort(offsets, axis=1, kind="stable").tolist() if _unordered(offsets) else None

    @abstractmethod
    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        """The checked fields of the samples [start, stop), each once.

        Raises DamagedShard or StorageError naming shard, key and offset; then nothing follows.
        """

    def take(self, number: int) -> Contents:
        """The checked fields of one sample, once."""
        return next(self.contents(number, number + 1))

    def places(self, number: int, start: int) -> list[tuple[int, int]]:
        """Where the fields of a sample that begins at `start` begin and end."""
        return [(start + begins[number], start + ends[number]) for begins, ends in self._fields]

    def checked(self, number: int, contents: list[bytes]) -> Contents:
        """`contents` if they are those of the sample; raises DamagedShard."""
        crc = 0
        for content in contents if self._orders is None else [contents[column] for column in self._orders[number]]:
            crc = google_crc32c.extend(crc, content)
        if crc != self._crcs[number]:
            raise self.damaged(number, sum(map(len, contents)), crc)
        if self._absent is None:
            return contents
        return [None if gone else content for gone, content in zip(self._absent[number], contents, strict=True)]

    def damaged(self, number: int, found: int, crc: int) -> DamagedShard:
        """What is wrong with a sample whose fields hold `found` bytes."""
        expected = sum(ends[number] - begins[number] for begins, ends in self._fields)
        if found != expected:
            what = f"{found} bytes, expected {expected}; the shard is cut"
        else:
            what = f"crc32c is {crc:08x}, expected {self._crcs[number]:08x}; the shard is damaged"
        return DamagedShard(f"{self.named(number)}: {what}, fetch or rebuild it")

    def renamed(self, number: int, error: ShardsetError) -> ShardsetError:
        """A failure of ours with shard, key and offset."""
        return type(error)(f"{self.named(number)}: {error}")

    def named(self, number: int) -> str:
        """A sample by shard, key and offset."""
        return self.table.named(self.addresses[number])


class SampleReader(Protocol):
    """A way to the bytes of samples. Asked in the order of the steps by one thread; tickets go to any thread."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes that storage has sent so far, without indexes."""
        ...

    def tickets(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        """One ticket for each slot of a step."""
        ...

    def alone(self, addresses: SampleAddresses) -> PendingSamples:
        """PendingSamples for samples outside the order of the steps."""
        ...

    def has_room(self) -> bool:
        """Whether another step may be asked for before one is taken."""
        ...

    def close(self) -> None:
        """Ends all threads and fails all open tickets."""
        ...


class RangeReader(Protocol):
    """A way to ranges of shards that begin and end with a sample."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes that storage has sent so far."""
        ...

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> Future[bytes]:
        """The bytes [start, stop) of a shard, all of them; `fresh` asks storage even where they are cached."""
        ...

    def close(self) -> None:
        """Ends all threads and fails what is open."""
        ...


def open_sample_reader(
    order: Order, table: ShardTable, budget_bytes: int, cache: BlockCache | None = None
) -> SampleReader:
    """SampleReader by sample on a local disk, by block anywhere else, from the cache what it has."""
    if not table.storage.is_remote:
        return LocalSampleReader(table)
    remote = RemoteReader(table)
    return BlockSampleReader(
        order, table, remote if cache is None else CachedReader(remote, table, cache), budget_bytes
    )


class LocalSampleReader:
    """One `pread` a sample: `mmap` would save half a microsecond, but turn a file cut under us into a SIGBUS."""

    def __init__(self, table: ShardTable) -> None:
        self.table = table
        self.num_bytes_read = 0
        """See SampleReader. Threads may count over each other: a lower bound."""
        self.files: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    def tickets(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        """See SampleReader."""
        return LocalPendingSamples(self, addresses)

    def alone(self, addresses: SampleAddresses) -> PendingSamples:
        """See SampleReader."""
        return LocalPendingSamples(self, addresses)

    def has_room(self) -> bool:
        """Always: nothing is held."""
        return True

    def close(self) -> None:
        """Closes the files that are not being read."""
        self.files.clear()

    def file(self, shard: int) -> "_File":
        """The open file of a shard, whole as its manifest says."""
        with self._lock:
            file = self.files.get(shard)
            if file is None:
                file = self.files[shard] = _File(self.table, shard)
            if len(self.files) > MAX_OPEN_FILES:
                self.files.popitem(last=False)
        return file


class LocalPendingSamples(PendingSamples):
    """Samples on a local disk."""

    def __init__(self, reads: LocalSampleReader, addresses: SampleAddresses) -> None:
        super().__init__(reads.table, addresses)
        self.reads = reads
        self._shards = addresses.shards.tolist()

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        """See PendingSamples."""
        # Of a small sample a microsecond counts: nothing is looked up or called that may be known before.
        reads, pread, checked, fields = self.reads, os.pread, self.checked, self._fields
        samples = zip(self._shards[start:stop], self.starts[start:stop], self.sizes[start:stop], strict=True)
        for number, (shard, begin, size) in enumerate(samples, start):
            file = reads.files.get(shard) or self._opened(number, shard)
            reads.num_bytes_read += size
            try:
                if size > SMALL_BYTES:  # a field of its own is handed out as it was read; a small one is cheap to copy
                    contents = [pread(file.fd, b - a, a) for a, b in self.places(number, begin)]
                else:
                    data = pread(file.fd, size, begin)
                    contents = [data[begins[number] : ends[number]] for begins, ends in fields]
            except OSError as error:
                raise StorageError(f"{self.named(number)}: can't be read ({error.strerror}); check the disk") from error
            yield checked(number, contents)

    def _opened(self, number: int, shard: int) -> "_File":
        try:
            return self.reads.file(shard)
        except ShardsetError as error:
            raise self.renamed(number, error) from error


class _File:
    """An open shard; closed when the last reader lets go of it."""

    def __init__(self, table: ShardTable, shard: int) -> None:
        self.fd = -1
        try:
            with os_errors_as_storage_errors(table.where(shard)):
                self.fd = os.open(table.where(shard), os.O_RDONLY | os.O_CLOEXEC)
        except NotFound as error:
            raise _missing(table, shard) from error
        _check_size(table, shard, os.fstat(self.fd).st_size)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class RemoteReader:
    """Ranged reads of shards, many at a time, pinned to the generation that the manifest describes, hedged.

    A read that takes longer than 95 of 100 of about its size is asked for again; the first answer counts. At most 3
    in 100 of each size are, so hedging costs about 3 % more bytes at most.
    """

    def __init__(self, table: ShardTable, num_fetchers: int = NUM_FETCHERS) -> None:
        self.table = table
        self.num_bytes_read = 0
        self.num_reads: Counter[int] = Counter()
        self.num_hedges: Counter[int] = Counter()
        self._pins: dict[int, Future[str]] = {}
        self._lock = threading.Lock()
        self._times: dict[int, deque[float]] = {}
        self._running: set[_Read] = set()
        self._fetchers = Threads("shardset-fetch", num_fetchers)
        self._hedgers = Threads("shardset-hedge", max(1, num_fetchers // 8))
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._hedge_late_ones, name="shardset-watch", daemon=True)
        self._watch.start()

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = True) -> Future[bytes]:
        """The bytes [start, stop) of a shard, all of them, from the object that the manifest describes."""
        read = _Read(shard, start, stop)
        with self._lock:
            if self._closed.is_set():
                raise CancelledError
            self._running.add(read)
            self.num_reads[read.size_class] += 1
            self._attempt(read, self._fetchers)
        return read.result

    def close(self) -> None:
        """Ends the threads (one that waits for storage ends with its read) and fails what is open."""
        with self._lock:
            self._closed.set()
            running = list(self._running)
        self._watch.join()
        self._fetchers.close()
        self._hedgers.close()
        for read in running:
            _settle(read.result, CancelledError())

    def _attempt(self, read: "_Read", threads: "Threads") -> None:
        read.attempts += 1
        threads.submit(lambda: self._try(read, is_hedge=threads is self._hedgers))

    def _try(self, read: "_Read", *, is_hedge: bool) -> None:
        try:
            outcome: bytes | BaseException = self._read(read, is_hedge=is_hedge)
        except BaseException as error:  # noqa: BLE001 - raised again to whoever waits for the bytes
            outcome = error
        with self._lock:
            read.attempts -= 1
            if isinstance(outcome, BaseException) and read.attempts:
                return
            self._running.discard(read)
        _settle(read.result, outcome)

    def _read(self, read: "_Read", *, is_hedge: bool) -> bytes:
        read.started = read.started or time.monotonic()
        begun = time.monotonic()
        name = self.table.split.shards[read.shard].path
        generation = self._generation(read.shard, is_hedge=is_hedge)
        try:
            data = self.table.storage.read(name, read.start, read.stop, generation=generation)
        except (NotFound, PreconditionFailed):
            # Gone or replaced since it was looked at: what stands there now is the shard, or is damage to be named.
            generation = self._look(read.shard)
            self._pin(read.shard, generation)
            data = self.table.storage.read(name, read.start, read.stop, generation=generation)
        self._note(read, len(data), time.monotonic() - begun)
        return data

    def _pin(self, shard: int, generation: str) -> None:
        pin: Future[str] = Future()
        pin.set_result(generation)
        with self._lock:
            self._pins[shard] = pin

    def _generation(self, shard: int, *, is_hedge: bool) -> str:
        """That of a shard's object. The first read looks, the others wait for it; a hedge waits for nobody."""
        with self._lock:
            pin = self._pins.get(shard)
            looks = pin is None or (is_hedge and not pin.done())
            pin = self._pins.setdefault(shard, Future())
        if looks:
            try:
                outcome: str | BaseException = self._look(shard)
            except BaseException as error:  # noqa: BLE001 - raised again to all that wait
                outcome = error
            _settle(pin, outcome)
            if pin.exception() is not None:
                self._pins.pop(shard, None)  # later reads look again
        return pin.result()

    def _look(self, shard: int) -> str:
        expected = self.table.split.shards[shard]
        try:
            found = read_twice(
                lambda: self.table.storage.stat(expected.path),
                lambda stat: stat.num_bytes == expected.num_bytes and stat.crc32c in (None, expected.crc32c),
            )
        except NotFound as error:
            raise _missing(self.table, shard) from error
        _check_size(self.table, shard, found.num_bytes)
        if found.crc32c not in (None, expected.crc32c):
            raise LostShard(
                f"{self.table.where(shard)}: crc32c is {found.crc32c}, expected {expected.crc32c}; "
                "another object stands there, fetch or rebuild the shard"
            )
        return found.generation

    def _note(self, read: "_Read", num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.num_bytes_read += num_bytes
            self._times.setdefault(read.size_class, deque(maxlen=NUM_TIMES)).append(seconds)

    def _hedge_late_ones(self) -> None:
        while not self._closed.wait(MIN_HEDGE_S / 2):
            for read in self._late_ones():
                self._attempt(read, self._hedgers)

    def _late_ones(self) -> "list[_Read]":
        now = time.monotonic()
        with self._lock:
            limits = {size: _late_after(times) for size, times in self._times.items()}
            late = [
                read
                for read in self._running
                if read.attempts == 1 and read.started and now - read.started > limits.get(read.size_class, np.inf)
            ]
            return [read for read in late if self._may_hedge(read.size_class)]

    def _may_hedge(self, size: int) -> bool:
        """Takes one of the hedges that reads of that size have earned."""
        earned = self.num_hedges[size] + 1 <= self.num_reads[size] * MAX_HEDGED
        self.num_hedges[size] += earned
        return earned


class CachedReader:
    """A reader that asks another one only for what a cache has not, and keeps what that brings."""

    def __init__(self, reader: RangeReader, table: ShardTable, cache: BlockCache) -> None:
        self.reader, self.table, self.cache = reader, table, cache
        self._threads = Threads("shardset-cache", NUM_CACHE_READERS)
        self._open: set[Future[bytes]] = set()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def num_bytes_read(self) -> int:
        """See RangeReader."""
        return self.reader.num_bytes_read

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> Future[bytes]:
        """See RangeReader."""
        first, last = np.searchsorted(self.table.index(shard).starts, [start, stop]).tolist()
        wanted, result = _Samples(shard, first, last, start, stop), self._promised()
        if fresh or (span := self.cache.missing(shard, first, last)) == (first, last):
            self._fetch(result, wanted, wanted)
        elif span is None:
            self._threads.submit(lambda: self._read(result, wanted))
        else:
            index = self.table.index(shard)
            start, stop = index.start(span[0]), index.stop(span[1] - 1)
            self._fetch(result, wanted, _Samples(shard, *span, start, stop))
        return result

    def close(self) -> None:
        """See RangeReader."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        self.reader.close()
        self._threads.close()
        for result in left:
            _settle(result, CancelledError())

    def _promised(self) -> Future[bytes]:
        """A future that `close` fails if nothing else has settled it."""
        result: Future[bytes] = Future()
        with self._lock:
            if self._closed:
                raise CancelledError
            self._open.add(result)
        result.add_done_callback(self._kept)
        return result

    def _kept(self, result: Future[bytes]) -> None:
        with self._lock:
            self._open.discard(result)

    def _read(self, result: Future[bytes], wanted: "_Samples") -> None:
        data = self.cache.read(wanted.shard, wanted.start, wanted.stop)
        if len(data) == wanted.stop - wanted.start:
            _settle(result, data)
            return
        try:
            self._fetch(result, wanted, wanted)
        except CancelledError as error:  # closed meanwhile
            _settle(result, error)

    def _fetch(self, result: Future[bytes], wanted: "_Samples", span: "_Samples") -> None:
        def arrived(read: Future[bytes]) -> None:
            try:
                data = read.result()
                self.cache.put(span.shard, span.first, span.last, span.start, data)
                before = self.cache.read(wanted.shard, wanted.start, span.start)
                outcome: bytes | BaseException = before + data + self.cache.read(wanted.shard, span.stop, wanted.stop)
            except BaseException as error:  # noqa: BLE001 - raised again to whoever waits for the bytes
                outcome = error
            _settle(result, outcome)

        self.reader.submit(span.shard, span.start, span.stop).add_done_callback(arrived)


class _Samples(NamedTuple):
    """The samples [first, last) of a shard, and their bytes [start, stop)."""

    shard: int
    first: int
    last: int
    start: int
    stop: int


def _settle(result: "Future[Any]", outcome: Any) -> None:
    """Gives a read its outcome unless it has one."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)


@dataclass(eq=False, slots=True)
class _Read:
    """One ranged read and how it goes; `attempts` are those under way."""

    shard: int
    start: int
    stop: int
    result: "Future[bytes]" = field(default_factory=Future)
    attempts: int = 0
    started: float = 0.0

    @property
    def size_class(self) -> int:
        """SampleReader of about the same size take about the same time."""
        return (self.stop - self.start).bit_length()


class BlockSampleReader:
    """Reads the blocks of an order ahead of its steps; a sample is cut out of its block when it is taken.

    The first step reads its samples one by one, and the blocks come when all of them have been taken, so that a run
    begins after its own bytes and no others. What is held is counted; `has_room` says when to wait.
    """

    def __init__(self, order: Order, table: ShardTable, reader: RangeReader, budget_bytes: int) -> None:
        self.order = order
        self.table = table
        self.reader = reader
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.most_held_bytes = 0
        self._open: dict[tuple[int, int], _Block] = {}
        self._closing: list[tuple[int, int, tuple[int, int]]] = []
        self._last = (-1, -1)
        self._first_left = 0
        self._first_taken = threading.Event()
        self._begun = False
        self._lock = threading.Lock()

    @property
    def num_bytes_read(self) -> int:
        """Bytes that storage has sent so far."""
        return self.reader.num_bytes_read

    def tickets(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        """See SampleReader."""
        if not self._begun:
            self._begun = True
            self._first_left = len(addresses)
            return self.alone(addresses)
        self._first_taken.wait()
        self._close_if_back(epoch, slots)
        there = slots.weights > 0
        pieces = self.order.reads(epoch, slots.lanes[there], slots.positions[there])
        of_piece = iter(self._of_pieces(epoch, slots.lanes[there], pieces))
        blocks = [
            next(of_piece) if weight else self._single(addresses[slot])
            for slot, weight in enumerate(slots.weights.tolist())
        ]
        self._close_passed(epoch, int(slots.rows.max()) + 1)
        return BlockPendingSamples(self, addresses, blocks)

    def alone(self, addresses: SampleAddresses) -> PendingSamples:
        """See SampleReader."""
        return BlockPendingSamples(self, addresses, [self._single(address) for address in addresses])

    def has_room(self) -> bool:
        """See SampleReader."""
        return self.held_bytes < self.budget_bytes

    def close(self) -> None:
        """See SampleReader."""
        self._first_taken.set()
        self.reader.close()

    def taken(self, blocks: "Sequence[_Block]") -> None:
        """Counts one sample taken from each of some blocks, which may repeat; frees a block after its last."""
        with self._lock:
            self._first_left -= len(blocks)
            for block, number in Counter(blocks).items():
                block.num_taken += number
                self._free_if_done(block)
        if self._first_left <= 0:
            self._first_taken.set()

    def _of_pieces(self, epoch: int, lanes: np.ndarray, pieces: RangeReads) -> "list[_Block]":
        """For each piece the block of the order that brings it; equal pieces share one."""
        _, places, owners, counts = np.unique(pieces.first, return_index=True, return_inverse=True, return_counts=True)
        blocks = [self._of_piece(epoch, lanes.item(place), pieces, place) for place in places.tolist()]
        for block, count in zip(blocks, counts.tolist(), strict=True):
            block.num_asked += count
        return [blocks[owner] for owner in owners.tolist()]

    def _of_piece(self, epoch: int, lane: int, pieces: RangeReads, place: int) -> "_Block":
        first = pieces.first.item(place)
        block = self._open.get((epoch, first))
        if block is None:
            shard, num_samples = pieces.shard.item(place), pieces.num_samples.item(place)
            index = self.table.index(shard)
            start, stop = index.start(pieces.start.item(place)), index.stop(pieces.stop.item(place) - 1)
            block = self._open[epoch, first] = self._block(shard, start, stop, num_samples=num_samples)
            last = first + num_samples - 1 - int(self.order.lane_starts(np.array(lane)))
            heapq.heappush(self._closing, (epoch, last + max(1, self.order.window), (epoch, first)))
        return block

    def _single(self, address: SampleAddress) -> "_Block":
        return self._block(address.shard, address.start, address.stop, num_samples=1)

    def _block(self, shard: int, start: int, stop: int, *, num_samples: int) -> "_Block":
        with self._lock:
            self.held_bytes += stop - start
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        return _Block(start, stop - start, num_samples, self.reader.submit(shard, start, stop))

    def _close_if_back(self, epoch: int, slots: Slots) -> None:
        """Closes all blocks where the steps go back: some have given samples that are asked for once more."""
        begin = epoch, slots.rows.item(0)
        if begin <= self._last:
            self._close_passed(*_THE_END)
        self._last = begin

    def _close_passed(self, epoch: int, row: int) -> None:
        """Blocks that no later row can touch: what was not asked for by now never will be (resumed, shared lanes)."""
        while self._closing and self._closing[0][:2] <= (epoch, row):
            block = self._open.pop(heapq.heappop(self._closing)[2])
            with self._lock:
                block.num_samples = block.num_asked
                self._free_if_done(block)

    def _free_if_done(self, block: "_Block") -> None:
        if block.num_taken == block.num_samples and block.num_bytes:
            self.held_bytes -= block.num_bytes
            block.num_bytes = 0
            block.data = _FREED


@dataclass(eq=False, slots=True)
class _Block:
    """One read of several samples. `num_samples` will be taken from it, `num_asked` have been asked for."""

    start: int
    num_bytes: int
    num_samples: int
    data: "Future[bytes]"
    num_asked: int = 0
    num_taken: int = 0


class BlockPendingSamples(PendingSamples):
    """Samples in blocks."""

    def __init__(self, reads: BlockSampleReader, addresses: SampleAddresses, blocks: "list[_Block]") -> None:
        super().__init__(reads.table, addresses)
        self.reads, self._blocks = reads, blocks

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        """See PendingSamples."""
        number = start - 1
        try:
            for number in range(start, stop):
                yield self._content(number)
        finally:
            self.reads.taken(self._blocks[start : number + 1])

    def _content(self, number: int) -> Contents:
        block = self._blocks[number]
        try:
            data = block.data.result()
        except ShardsetError as error:
            raise self.renamed(number, error) from error
        try:
            return self._cut(number, data, self.starts[number] - block.start)
        except DamagedShard as error:
            _log.warning("%s; asking for it once more, in case it was the wire or the cache", error)
        address = self.addresses[number]
        try:
            again = self.reads.reader.submit(address.shard, address.start, address.stop, fresh=True).result()
        except ShardsetError as error:
            raise self.renamed(number, error) from error
        return self._cut(number, again, 0)

    def _cut(self, number: int, data: bytes, start: int) -> Contents:
        fields = self._fields
        return self.checked(number, [data[start + begins[number] : start + ends[number]] for begins, ends in fields])


_FREED: "Future[bytes]" = Future()
_THE_END = (sys.maxsize, 0)


def _late_after(times: "deque[float]") -> float:
    """Seconds after which a read is late: the 95th percentile of those before it; never while few are known."""
    if len(times) < MIN_TIMES:
        return float("inf")
    return max(MIN_HEDGE_S, sorted(times)[int(HEDGE_AFTER * len(times))])


def _missing(table: ShardTable, shard: int) -> LostShard:
    return LostShard(f"{table.where(shard)}: the shard can't be opened (nothing is stored there); fetch or rebuild it")


def _check_size(table: ShardTable, number: int, num_bytes: int) -> None:
    expected = table.split.shards[number].num_bytes
    if num_bytes != expected:
        raise LostShard(
            f"{table.where(number)}: {num_bytes} bytes, expected {expected}; the shard is cut or replaced, "
            "fetch or rebuild it"
        )


def _packed(index: np.ndarray, shard: Shard, fields: Sequence[str], where: str, *, with_keys: bool) -> ShardIndex:
    """What reading needs of an index; raises DamagedShard if it points outside of its shard."""
    offsets = np.stack([index[f".{name}"]["offset"] for name in fields], axis=1).astype(np.int64)
    sizes = np.stack([index[f".{name}"]["num_bytes"] for name in fields], axis=1).astype(np.int64)
    starts = np.where(offsets > 0, offsets, shard.num_bytes).min(axis=1)
    stops = (offsets + sizes).max(axis=1)
    if (offsets < 0).any() or (sizes < 0).any() or (starts > stops).any() or stops.max() > shard.num_bytes:
        raise DamagedShard(f"{where}: it points outside shard {shard.path} of {shard.num_bytes} bytes; rebuild it")
    labels = index["label"]
    is_small = shard.num_bytes < 1 << 31 and labels.min() >= -(1 << 31) and labels.max() < 1 << 31
    rows = np.empty((len(index), _PLACES + 2 * len(fields)), dtype=np.int32 if is_small else np.int64)
    rows[:, _START], rows[:, _CRC], rows[:, _LABEL] = starts, index["crc32c"].view(np.int32), labels
    rows[:, _PLACES : _PLACES + len(fields)] = np.where(offsets > 0, offsets - starts[:, None], _NOWHERE)
    rows[:, _PLACES + len(fields) :] = sizes
    return ShardIndex(rows, index["key"].copy() if with_keys else None)


def _stops(rows: np.ndarray) -> np.ndarray:
    """Where the last fields of samples end."""
    offsets, sizes = np.split(rows[:, _PLACES:].astype(np.int64), 2, axis=1)
    return rows[:, _START] + (offsets + sizes).max(axis=1)


def _unordered(offsets: np.ndarray) -> bool:
    """Whether in any sample the fields stand in another order than the columns."""
    return bool((np.diff(offsets, axis=1) < 0).any())
