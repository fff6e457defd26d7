"""Where each sample's bytes are, and those bytes, checked: pinned ranged reads of blocks, hedged, within a budget.

Local shards are read one sample at a time (the page cache is the block). Remote shards are read by blocks, many at
a time; a block is freed when its last sample has been taken. No byte reaches a caller before its length and its
CRC32C have been compared with the index, and the index with the manifest.
"""

import heapq
import itertools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np

from shardset.budget import INDEX_BUDGET_BYTES
from shardset.errors import DamagedShard, NotFound, ShardsetError
from shardset.manifest import Shard, Split
from shardset.order import Order, Pieces, Slots
from shardset.storage import LocalStorage, Storage
from shardset.tarindex import crc32c_text, index_fields, index_from_bytes
from trainer.blockcache import BlockCache
from trainer.threads import Threads

_log = logging.getLogger(__name__)

NUM_FETCHERS = 32
NUM_CACHE_READERS = 4
SMALL_BYTES = 4096
MAX_OPEN_FILES = 256
HEDGE_AFTER = 0.95
MIN_HEDGE_S = 0.05
MAX_HEDGED = 0.03
NUM_TIMES = 256
MIN_TIMES = 20


class Address(NamedTuple):
    """Where one sample is stored: the bytes [start, stop) of a shard hold all its fields.

    `fields` are (name, offset from start, size in bytes) in member order; `crc32c` is over their contents.
    """

    shard: int
    position: int
    key: str
    label: int
    start: int
    stop: int
    crc32c: int
    fields: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The columns of a shard's index as plain arrays: one entry a sample; `offsets` and `sizes` are [n, fields]."""

    keys: np.ndarray
    labels: np.ndarray
    crcs: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    @property
    def num_bytes(self) -> int:
        """What it holds in memory."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)


class ShardTable:
    """The shards of a split; an index is read when first asked for, checked, and kept within a budget of bytes."""

    def __init__(self, storage: Storage, split: Split, budget_bytes: int = INDEX_BUDGET_BYTES) -> None:
        self.storage = storage
        self.split = split
        self.budget_bytes = budget_bytes
        self.num_bytes_read = 0
        self._kept: OrderedDict[int, ShardIndex] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return ShardTable, (self.storage, self.split, self.budget_bytes)

    def where(self, shard: int) -> str:
        """The shard as a user would name it."""
        return f"{self.storage.url}/{self.split.shards[shard].path}"

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

    def address(self, shard: int, position: int) -> Address:
        """Where sample number `position` of a shard is stored."""
        return self.addresses(np.array([shard]), np.array([position]))[0]

    def addresses(self, shards: np.ndarray, positions: np.ndarray) -> list[Address]:
        """Where several samples are stored, in the order asked for."""
        found: dict[int, Address] = {}
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            found |= zip(places.tolist(), self._addresses(shard, positions[places]), strict=True)
        return [found[place] for place in range(len(shards))]

    def _addresses(self, shard: int, positions: np.ndarray) -> Iterator[Address]:
        index, names = self.index(shard), self.split.fields
        starts = index.starts[positions]
        offsets = (index.offsets[positions] - starts[:, None]).tolist()
        fields = (
            # By offset: the checksum is over the members as they stand, the columns are those of the whole split.
            tuple(sorted((place for place in zip(names, row, sizes, strict=True) if place[1] >= 0), key=itemgetter(1)))
            for row, sizes in zip(offsets, index.sizes[positions].tolist(), strict=True)
        )
        return map(
            Address,
            itertools.repeat(shard),
            positions.tolist(),
            index.keys[positions].astype(str).tolist(),
            index.labels[positions].tolist(),
            starts.tolist(),
            index.stops[positions].tolist(),
            index.crcs[positions].tolist(),
            fields,
        )

    def _load(self, number: int) -> ShardIndex:
        shard = self.split.shards[number]
        where = f"{self.storage.url}/{shard.index.path}"
        try:
            data = self.storage.read(shard.index.path)
        except NotFound as error:
            raise DamagedShard(
                f"{where}: the index of shard {shard.path} is missing; rebuild the shard with --only-shards"
            ) from error
        self.num_bytes_read += len(data)
        found = crc32c_text(google_crc32c.value(data))
        if len(data) != shard.index.num_bytes or found != shard.index.crc32c:
            raise DamagedShard(
                f"{where}: {len(data)} bytes with crc32c {found}, expected {shard.index.num_bytes} with "
                f"{shard.index.crc32c}; the index of shard {shard.path} is damaged, rebuild it with --only-shards"
            )
        return _columns(index_from_bytes(data, where), shard, self.split.fields, where)


def check_sample(data: bytes, address: Address, where: str) -> bytes:
    """`data` itself if it is the sample at `address`; raises DamagedShard naming shard, key and offset."""
    if len(data) != address.stop - address.start:
        raise DamagedShard(
            f"{named(address, where)}: {len(data)} bytes, expected {address.stop - address.start}; "
            "the shard is cut, fetch or rebuild it"
        )
    crc, whole = 0, np.frombuffer(data, dtype=np.uint8)
    for _, offset, size in address.fields:
        # A slice of an array is no copy; the checksum takes neither a memoryview nor anything that may be written to.
        part = whole[offset : offset + size] if size > SMALL_BYTES else data[offset : offset + size]
        crc = google_crc32c.extend(crc, part)
    if crc != address.crc32c:
        raise DamagedShard(
            f"{named(address, where)}: crc32c is {crc:08x}, expected {address.crc32c:08x}; "
            "the shard is damaged, fetch or rebuild it"
        )
    return data


def named(address: Address, where: str) -> str:
    """`where` with the sample's key and offset, as every message about a sample begins."""
    return f"{where}: sample {address.key!r} at byte {address.start}"


@contextmanager
def _naming(address: Address, where: str) -> Iterator[None]:
    """Adds shard, key and offset to any failure of ours."""
    try:
        yield
    except ShardsetError as error:
        raise type(error)(f"{named(address, where)}: {error}") from error


class Ticket(Protocol):
    """A promise of one sample's bytes."""

    def take(self) -> bytes:
        """The checked bytes [start, stop) of the sample, once; raises DamagedShard or StorageError."""
        ...


class Reads(Protocol):
    """A way to the bytes of samples. Asked in the order of the steps by one thread; tickets go to any thread."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes that storage has sent so far, without indexes."""
        ...

    def tickets(self, epoch: int, slots: Slots, addresses: Sequence[Address]) -> list[Ticket]:
        """One ticket for each slot of a step."""
        ...

    def alone(self, address: Address) -> Ticket:
        """A ticket for a sample outside the order of the steps."""
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


def open_reads(order: Order, table: ShardTable, budget_bytes: int, cache: BlockCache | None = None) -> Reads:
    """Reads by sample on a local disk, by block anywhere else, from the cache what it has."""
    if isinstance(table.storage, LocalStorage):
        return LocalReads(table)
    remote = RemoteReader(table)
    return BlockReads(order, table, remote if cache is None else CachedReader(remote, table, cache), budget_bytes)


class LocalReads:
    """One `pread` a sample: `mmap` would save 1 to 3 microseconds, but turn a file cut under us into a SIGBUS."""

    def __init__(self, table: ShardTable) -> None:
        self.table = table
        self._num_bytes_read = 0
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes_read(self) -> int:
        """See Reads. Threads may count over each other: a lower bound."""
        return self._num_bytes_read

    def tickets(self, epoch: int, slots: Slots, addresses: Sequence[Address]) -> list[Ticket]:
        """See Reads."""
        return [LocalTicket(self, address) for address in addresses]

    def alone(self, address: Address) -> Ticket:
        """See Reads."""
        return LocalTicket(self, address)

    def has_room(self) -> bool:
        """Always: nothing is held."""
        return True

    def close(self) -> None:
        """Closes the files that are not being read."""
        self._files.clear()

    def read(self, address: Address) -> bytes:
        """The bytes of a sample, unchecked."""
        data = os.pread(self.file(address.shard).fd, address.stop - address.start, address.start)
        self._num_bytes_read += len(data)
        return data

    def file(self, shard: int) -> "_File":
        """The open file of a shard, whole as its manifest says."""
        with self._lock:
            file = self._files.get(shard)
            if file is None:
                file = self._files[shard] = _File(self.table, shard)
            if len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)
        return file


@dataclass(frozen=True, slots=True)
class LocalTicket:
    """A sample on a local disk."""

    reads: LocalReads
    address: Address

    def take(self) -> bytes:
        """See Ticket."""
        where = self.reads.table.where(self.address.shard)
        with _naming(self.address, where):
            data = self.reads.read(self.address)
        return check_sample(data, self.address, where)


class _File:
    """An open shard; closed when the last reader lets go of it."""

    def __init__(self, table: ShardTable, shard: int) -> None:
        self.fd = -1
        try:
            self.fd = os.open(table.where(shard), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _missing(table, shard, str(error.strerror)) from error
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
        self._pins: dict[int, str] = {}
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
        threads.submit(lambda: self._try(read))

    def _try(self, read: "_Read") -> None:
        try:
            outcome: bytes | BaseException = self._read(read)
        except BaseException as error:  # noqa: BLE001 - raised again to whoever waits for the bytes
            outcome = error
        with self._lock:
            read.attempts -= 1
            if isinstance(outcome, BaseException) and read.attempts:
                return
            self._running.discard(read)
        _settle(read.result, outcome)

    def _read(self, read: "_Read") -> bytes:
        read.started = read.started or time.monotonic()
        begun = time.monotonic()
        name = self.table.split.shards[read.shard].path
        generation = self._pins.get(read.shard) or self._pin(read.shard)
        data = self.table.storage.read(name, read.start, read.stop, generation=generation)
        self._note(read, len(data), time.monotonic() - begun)
        return data

    def _pin(self, shard: int) -> str:
        expected = self.table.split.shards[shard]
        try:
            found = self.table.storage.stat(expected.path)
        except NotFound as error:
            raise _missing(self.table, shard, "nothing is stored there") from error
        _check_size(self.table, shard, found.num_bytes)
        if found.crc32c not in (None, expected.crc32c):
            raise DamagedShard(
                f"{self.table.where(shard)}: crc32c is {found.crc32c}, expected {expected.crc32c}; "
                "another object stands there, fetch or rebuild the shard"
            )
        self._pins[shard] = found.generation
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

    @property
    def num_bytes_read(self) -> int:
        """See RangeReader."""
        return self.reader.num_bytes_read

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> Future[bytes]:
        """See RangeReader."""
        first, last = np.searchsorted(self.table.index(shard).starts, [start, stop]).tolist()
        wanted, result = _Samples(shard, first, last, start, stop), Future[bytes]()
        if fresh or (span := self.cache.missing(shard, first, last)) == (first, last):
            self._fetch(result, wanted, wanted)
        elif span is None:
            self._threads.submit(lambda: self._read(result, wanted))
        else:
            index = self.table.index(shard)
            start, stop = index.starts.item(span[0]), index.stops.item(span[1] - 1)
            self._fetch(result, wanted, _Samples(shard, *span, start, stop))
        return result

    def close(self) -> None:
        """See RangeReader."""
        self.reader.close()
        self._threads.close()

    def _read(self, result: Future[bytes], wanted: "_Samples") -> None:
        data = self.cache.read(wanted.shard, wanted.start, wanted.stop)
        if len(data) == wanted.stop - wanted.start:
            _settle(result, data)
        else:
            self._fetch(result, wanted, wanted)

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


def _settle(result: "Future[bytes]", outcome: bytes | BaseException) -> None:
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
        """Reads of about the same size take about the same time."""
        return (self.stop - self.start).bit_length()


class BlockReads:
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
        self._open: dict[tuple[int, int, int], _Block] = {}
        self._closing: list[tuple[int, int, tuple[int, int, int]]] = []
        self._first_left = 0
        self._first_taken = threading.Event()
        self._begun = False
        self._lock = threading.Lock()

    @property
    def num_bytes_read(self) -> int:
        """Bytes that storage has sent so far."""
        return self.reader.num_bytes_read

    def tickets(self, epoch: int, slots: Slots, addresses: Sequence[Address]) -> list[Ticket]:
        """See Reads."""
        if not self._begun:
            return self._begin(addresses)
        self._first_taken.wait()
        pieces = self.order.reads(epoch, slots.lanes, slots.positions)
        tickets = [
            self._ticket(epoch, slots, pieces, slot, address) if slots.weights[slot] else self.alone(address)
            for slot, address in enumerate(addresses)
        ]
        self._close_passed(epoch, int(slots.rows.max()) + 1)
        return tickets

    def alone(self, address: Address) -> Ticket:
        """See Reads."""
        return BlockTicket(self, self._block(address.shard, address.start, address.stop, num_samples=1), address)

    def has_room(self) -> bool:
        """See Reads."""
        return self.held_bytes < self.budget_bytes

    def close(self) -> None:
        """See Reads."""
        self._first_taken.set()
        self.reader.close()

    def taken(self, block: "_Block") -> None:
        """Counts one sample taken from a block; frees it after the last."""
        with self._lock:
            self._first_left -= 1
            block.num_taken += 1
            self._free_if_done(block)
        if self._first_left <= 0:
            self._first_taken.set()

    def _begin(self, addresses: Sequence[Address]) -> list[Ticket]:
        self._begun = True
        self._first_left = len(addresses)
        return [self.alone(address) for address in addresses]

    def _ticket(self, epoch: int, slots: Slots, pieces: Pieces, slot: int, address: Address) -> Ticket:
        lane, first = slots.lanes.item(slot), pieces.first.item(slot)
        name = (epoch, lane, first)
        block = self._open.get(name)
        if block is None:
            index = self.table.index(address.shard)
            start, stop = index.starts.item(pieces.start.item(slot)), index.stops.item(pieces.stop.item(slot) - 1)
            block = self._open[name] = self._block(
                address.shard, start, stop, num_samples=pieces.num_samples.item(slot)
            )
            last = first + pieces.num_samples.item(slot) - 1 - int(self.order.lane_starts(np.array(lane)))
            heapq.heappush(self._closing, (epoch, last + max(1, self.order.window), name))
        block.num_asked += 1
        return BlockTicket(self, block, address)

    def _block(self, shard: int, start: int, stop: int, *, num_samples: int) -> "_Block":
        with self._lock:
            self.held_bytes += stop - start
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        return _Block(start, stop - start, num_samples, self.reader.submit(shard, start, stop))

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


@dataclass(frozen=True, slots=True)
class BlockTicket:
    """A sample in a block."""

    reads: BlockReads
    block: _Block
    address: Address

    def take(self) -> bytes:
        """See Ticket."""
        where = self.reads.table.where(self.address.shard)
        try:
            with _naming(self.address, where):
                data = self.block.data.result()
        finally:
            self.reads.taken(self.block)
        begin = self.address.start - self.block.start
        sample = data[begin : begin + self.address.stop - self.address.start]
        try:
            return check_sample(sample, self.address, where)
        except DamagedShard as error:
            _log.warning("%s; asking for it once more, in case it was the wire or the cache", error)
        with _naming(self.address, where):
            place = self.address.shard, self.address.start, self.address.stop
            again = self.reads.reader.submit(*place, fresh=True).result()
        return check_sample(again, self.address, where)


_FREED: "Future[bytes]" = Future()


def _late_after(times: "deque[float]") -> float:
    """Seconds after which a read is late: the 95th percentile of those before it; never while few are known."""
    if len(times) < MIN_TIMES:
        return float("inf")
    return max(MIN_HEDGE_S, sorted(times)[int(HEDGE_AFTER * len(times))])


def _missing(table: ShardTable, shard: int, reason: str) -> DamagedShard:
    return DamagedShard(f"{table.where(shard)}: the shard can't be opened ({reason}); fetch or rebuild it")


def _check_size(table: ShardTable, number: int, num_bytes: int) -> None:
    expected = table.split.shards[number].num_bytes
    if num_bytes != expected:
        raise DamagedShard(
            f"{table.where(number)}: {num_bytes} bytes, expected {expected}; the shard is cut or replaced, "
            "fetch or rebuild it"
        )


def _columns(index: np.ndarray, shard: Shard, fields: Sequence[str], where: str) -> ShardIndex:
    if len(index) != shard.num_samples or index_fields(index) != list(fields):
        raise DamagedShard(
            f"{where}: {len(index)} records with fields {index_fields(index)}, expected {shard.num_samples} with "
            f"{list(fields)}; rebuild shard {shard.path} with --only-shards"
        )
    offsets = np.stack([index[f".{name}"]["offset"] for name in fields], axis=1).astype(np.int64)
    sizes = np.stack([index[f".{name}"]["num_bytes"] for name in fields], axis=1).astype(np.int64)
    starts = np.where(offsets > 0, offsets, shard.num_bytes).min(axis=1)
    stops = (offsets + sizes).max(axis=1)
    if (offsets < 0).any() or (sizes < 0).any() or (starts > stops).any() or stops.max() > shard.num_bytes:
        raise DamagedShard(f"{where}: it points outside shard {shard.path} of {shard.num_bytes} bytes; rebuild it")
    return ShardIndex(
        keys=index["key"].copy(),
        labels=index["label"].astype(np.int64),
        crcs=index["crc32c"].astype(np.int64),
        starts=starts,
        stops=stops,
        offsets=offsets,
        sizes=sizes,
    )
