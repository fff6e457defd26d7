"""Reads raw bytes by extent, in order: neighbours in one request, concurrently on gs://, and only as planned."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby, islice
from typing import NamedTuple, Self

from pipelines.plan.files import START_OVER
from pipelines.sources.base import UNREAD, Extent
from shardset.checksum import extend_crc32c
from shardset.errors import ChangedInput, NotFound, PreconditionFailed
from shardset.storage.base import Storage
from shardset.storage.open import is_absolute, open_file

MAX_GAP = 4096
MAX_READ = 8 * 2**20
FIRST_IN_FLIGHT = 4
MOST_IN_FLIGHT = 32

SPOOLED = "spool:///"
"""The prefix of a plan file's name in an extent of spooled bytes. No name of an input object can start with it."""


class Window:
    """The limit of reads in flight: grows by one after each read, and halves when a request must be retried.

    All workers may read the same object, and a bucket accepts more load only gradually. Threads share a window: all
    their reads together stay below its size.
    """

    def __init__(self) -> None:
        self.size = FIRST_IN_FLIGHT
        self._num_reading = 0
        self._changed = threading.Condition()

    def grow(self) -> None:
        """Call after each read."""
        with self._changed:
            self.size = min(MOST_IN_FLIGHT, self.size + 1)
            self._changed.notify()

    def shrink(self) -> None:
        """Call before each retry."""
        with self._changed:
            self.size = max(1, self.size // 2)

    def __enter__(self) -> Self:
        """Waits until one more read may be in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_reading < self.size)
            self._num_reading += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._num_reading -= 1
            self._changed.notify()


_of_process = Window()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def fetch(
    groups: Iterable[Sequence[Extent]], source: Storage, output: Storage, window: Window = _of_process
) -> Iterator[list[bytes]]:
    """The contents of each group of extents, such as those of a sample; neighbours in a group share a request.

    Holds only the groups in flight. Reads an extent once more if its CRC32C differs. Raises ChangedInput if an object
    is no longer the planned one, or if its bytes changed. All threads of a process share its window and its readers.
    """
    num_threads = max(source.reads_at_once, output.reads_at_once)
    if num_threads == 1:
        yield from (_read_group(group, source, output) for group in groups)
        return
    source, output, pool = source.on_retry(window.shrink), output.on_retry(window.shrink), _pool(num_threads)

    def read(group: Sequence[Extent]) -> list[bytes]:
        with window:
            return _read_group(group, source, output)

    yield from _ahead(lambda group: pool.submit(read, group), groups, window)


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_bytes: int) -> Iterator[slice]:
    """Slices of `ranges`, one per request.

    `ranges` are half-open (start, stop), ascending by start. Neighbours share a request if they are at most `max_gap`
    bytes apart and the request stays within `max_bytes`; a longer range is a request of its own.
    """
    first, end = 0, 0
    for number, (start, stop) in enumerate(ranges):
        if number > first and (start - end > max_gap or max(end, stop) - ranges[first][0] > max_bytes):
            yield slice(first, number)
            first, end = number, start
        end = max(end, stop)
    if ranges:
        yield slice(first, len(ranges))


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """The reading threads of this process, started at the first use."""
    key = (os.getpid(), num_threads)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(num_threads, "range-reads")
        return _pools[key]


def _ahead(
    submit: Callable[[Sequence[Extent]], Future[list[bytes]]], groups: Iterable[Sequence[Extent]], window: Window
) -> Iterator[list[bytes]]:
    """The results of `submit` for each group, in order; submits as many at once as the window allows."""
    pending: deque[Future[list[bytes]]] = deque()
    remaining = iter(groups)
    try:
        while True:
            pending.extend(map(submit, islice(remaining, max(0, window.size - len(pending)))))
            if not pending:
                return
            yield pending.popleft().result()
            window.grow()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


class _Located(NamedTuple):
    """The object of an extent; `generation` is None for a spool, which is a part of the plan."""

    storage: Storage
    name: str
    generation: str | None

    @property
    def url(self) -> str:
        return f"{self.storage.url}/{self.name}"

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop); raises ChangedInput if the object is not the planned one."""
        try:
            return self.storage.read(self.name, start, stop, generation=self.generation) if stop > start else b""
        except (NotFound, PreconditionFailed) as error:
            remedy = START_OVER if self.generation is None else "plan again with --overwrite"
            raise ChangedInput(
                f"{self.url}: not the object that was planned ({error}); restore it, or {remedy}"
            ) from error


def _locate(extent: Extent, source: Storage, output: Storage) -> _Located:
    if extent.object.startswith(SPOOLED):
        return _Located(output, extent.object.removeprefix(SPOOLED), None)
    if is_absolute(extent.object):
        return _Located(*open_file(extent.object), extent.generation)
    return _Located(source, extent.object, extent.generation)


def _read_group(group: Sequence[Extent], source: Storage, output: Storage) -> list[bytes]:
    contents: dict[Extent, bytes] = {}
    for run in _runs(group):
        located, start = _locate(run[0], source, output), run[0].offset
        data = located.read(start, max(extent.offset + extent.num_bytes for extent in run))
        for extent in run:
            content = data[extent.offset - start : extent.offset - start + extent.num_bytes]
            contents[extent] = content if _fits(extent, content) else _read_again(extent, located)
    return [contents[extent] for extent in group]


def _fits(extent: Extent, content: bytes) -> bool:
    # The length first: an extent that the build did not examine has no CRC32C.
    if len(content) != extent.num_bytes:
        return False
    return extent.crc32c == UNREAD or extend_crc32c(0, content) == extent.crc32c


def _read_again(extent: Extent, located: _Located) -> bytes:
    content = located.read(extent.offset, extent.offset + extent.num_bytes)
    if not _fits(extent, content):
        found = f"{len(content)} bytes"
        if extent.crc32c != UNREAD:
            found += f" with CRC32C {extend_crc32c(0, content):08x}, expected {extent.crc32c:08x}"
        raise ChangedInput(
            f"{located.url}, {extent.num_bytes} bytes at {extent.offset}: its bytes changed since it was planned, its "
            f"size and time did not ({found}, read twice); restore it, or {START_OVER}; a rerun alone compares with "
            "the same plan"
        )
    return content


def _runs(extents: Sequence[Extent]) -> Iterator[Sequence[Extent]]:
    """The extents in runs of neighbours in one object, which share a request."""
    if len(extents) == 1:  # the usual case, which needs no sorting
        yield extents
        return
    in_order = sorted(set(extents), key=lambda extent: (extent.object, extent.generation, extent.offset))
    for _, group in groupby(in_order, key=lambda extent: (extent.object, extent.generation)):
        neighbours = list(group)
        ranges = [(extent.offset, extent.offset + extent.num_bytes) for extent in neighbours]
        for run in coalesce(ranges, max_gap=MAX_GAP, max_bytes=MAX_READ):
            yield neighbours[run]
