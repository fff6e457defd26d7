"""Byte ranges of shards in a bucket: many at a time, each from the object that the manifest lists,
late ones hedged.
"""

import threading
import time
from collections import Counter, deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from shardset.errors import NotFound
from shardset.read.indexes import CUT, ShardTable
from shardset.storage.checked import read_range
from shardset.storage.many import REQUESTS_AT_ONCE, Threads

HEDGE_AFTER = 0.95
"""A read is late once it takes longer than this share of the reads of about its size."""
MIN_HEDGE_S = 0.05
MAX_HEDGED = 0.03
"""The share of reads that may be hedged, which is also the share of extra bytes and load on the
bucket.
"""
NUM_TIMES = 256
MIN_TIMES = 20


class RemoteReader:
    """Reads ranges of shards from storage, one request each; the answers must be of the objects in
    the manifest.

    A read that takes longer than 95 % of the reads of about its size is hedged: requested again,
    and the first answer counts. Hedges are limited to 3 % of the reads of each size; there are none
    within a minute after the bucket refused a read because there were too many.
    """

    def __init__(self, table: ShardTable) -> None:
        self.table = table
        self.hedges = HedgePolicy()
        self._lock = threading.Lock()
        self._running: set[_RangeRead] = set()
        self._fetchers = Threads("shardset-fetch", REQUESTS_AT_ONCE)
        self._hedgers = Threads("shardset-hedge", REQUESTS_AT_ONCE // 8)
        self._closed = threading.Event()
        self._monitor = threading.Thread(
            target=self._hedge_late_reads, name="shardset-hedge-monitor", daemon=True
        )
        self._monitor.start()

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = True) -> Future[bytes]:
        """Requests all bytes [start, stop) of a shard; here every read is fresh."""
        read = _RangeRead(shard, start, stop)
        with self._lock:
            self._running.add(read)
            self.hedges.num_reads[read.size_class] += 1
        self._ask(read, self._fetchers)
        return read.result

    def close(self) -> None:
        """Cancels pending reads. A thread that waits for storage stops after its read."""
        self._fetchers.close()  # first, so that no further read begins
        self._closed.set()
        self._monitor.join()
        self._hedgers.close()
        with self._lock:
            running = list(self._running)
        for read in running:
            _settle(read.result, CancelledError())

    def _ask(self, read: "_RangeRead", threads: Threads) -> None:
        threads.call(partial(self._read, read)).add_done_callback(partial(self._note, read))

    def _note(self, read: "_RangeRead", attempt: Future[bytes]) -> None:
        error = attempt.exception()
        with self._lock:
            read.attempts -= 1
            if error and read.attempts:
                return  # the other attempt may still bring the bytes
            self._running.discard(read)
        _settle(read.result, error or attempt.result())

    def _read(self, read: "_RangeRead") -> bytes:
        begun = time.monotonic()
        read.started = read.started or begun
        data = _listed_range(self.table, read.shard, read.start, read.stop)
        with self._lock:
            self.hedges.note(read.size_class, time.monotonic() - begun)
        return data

    def _hedge_late_reads(self) -> None:
        while not self._closed.wait(MIN_HEDGE_S / 2):
            with self._lock:
                now, limits = time.monotonic(), self.hedges.limits_s()
                late = [
                    read
                    for read in self._running
                    if read.attempts == 1
                    and read.started
                    and now - read.started > limits.get(read.size_class, float("inf"))
                    and not self.table.storage.is_throttled
                    and self.hedges.take(read.size_class)
                ]
                for read in late:
                    read.attempts += 1
            for read in late:
                self._ask(read, self._hedgers)


class HedgePolicy:
    """Decides which reads are late and may be hedged, by the times of earlier reads of about the
    same size.
    """

    def __init__(self) -> None:
        self.num_reads: Counter[int] = Counter()
        self.num_hedges: Counter[int] = Counter()
        self._times_s: dict[int, deque[float]] = {}

    def note(self, size_class: int, seconds: float) -> None:
        """Records how long a read took."""
        self._times_s.setdefault(size_class, deque(maxlen=NUM_TIMES)).append(seconds)

    def limits_s(self) -> dict[int, float]:
        """Seconds after which a read is late, by size class;
        none for a class with too few times.
        """
        return {
            size_class: max(MIN_HEDGE_S, sorted(times)[int(HEDGE_AFTER * len(times))])
            for size_class, times in self._times_s.items()
            if len(times) >= MIN_TIMES
        }

    def take(self, size_class: int) -> bool:
        """Counts a hedge of a read of that size class; False if the limit does not allow one."""
        allowed = self.num_hedges[size_class] + 1 <= self.num_reads[size_class] * MAX_HEDGED
        self.num_hedges[size_class] += allowed
        return allowed


@dataclass(eq=False, slots=True)
class _RangeRead:
    """One range and the state of its read; `attempts` counts those under way."""

    shard: int
    start: int
    stop: int
    result: Future[bytes] = field(default_factory=Future)
    attempts: int = 1
    started: float = 0.0

    @property
    def size_class(self) -> int:
        """Groups ranges by powers of two: reads of about the same size take about the same time."""
        return (self.stop - self.start).bit_length()


def _settle(future: Future[bytes], outcome: bytes | BaseException) -> None:
    with suppress(InvalidStateError):  # the other attempt has done so
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _listed_range(table: ShardTable, shard: int, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a shard; raises DamagedShard if another object than the manifest's
    has its name.
    """
    listed = table.split.shards[shard]
    try:
        return read_range(
            table.storage, listed.path, start, stop,
            num_bytes=listed.num_bytes, crc32c=listed.crc32c, advice=CUT,
        )  # fmt: skip
    except NotFound as error:
        raise table.missing(shard) from error
