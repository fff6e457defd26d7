"""Reads raw bytes by extent, in order: neighbours in one request, concurrently on gs://, and only as planned."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from typing import NamedTuple

from pipelines.plan.files import START_OVER
from pipelines.sources.base import UNREAD, Extent
from shardset.checksum import extend_crc32c
from shardset.errors import ChangedInput, NotFound, PreconditionFailed
from shardset.read.ranges import coalesce
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

    All workers may read the same object, and a bucket accepts more load only gradually.
    """

    def __init__(self) -> None:
        self.size = FIRST_IN_FLIGHT

    def grow(self) -> None:
        """Call after each read."""
        self.size = min(MOST_IN_FLIGHT, self.size + 1)

    def shrink(self) -> None:
        """Call before each retry."""
        self.size = max(1, self.size // 2)


_of_process = Window()


def fetch(
    groups: Iterable[Sequence[Extent]], source: Storage, output: Storage, window: Window = _of_process
) -> Iterator[list[bytes]]:
    """The contents of each group of extents, such as those of a sample; neighbours in a group share a request.

    Holds only the groups in flight. Reads an extent once more if its CRC32C differs. Raises ChangedInput if an object
    is no longer the planned one, or if its bytes changed.
    """

    def read_group(group: Sequence[Extent]) -> list[bytes]:
        return _read_group(group, lambda extent: _locate(extent, source, output))

    num_threads = max(source.reads_at_once, output.reads_at_once)
    if num_threads == 1:
        yield from map(read_group, groups)
        return
    source, output = source.on_retry(window.shrink), output.on_retry(window.shrink)
    with ThreadPoolExecutor(num_threads) as pool:
        yield from _ahead(pool, read_group, groups, window)


def _ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[Sequence[Extent]], list[bytes]],
    groups: Iterable[Sequence[Extent]],
    window: Window,
) -> Iterator[list[bytes]]:
    pending: deque[Future[list[bytes]]] = deque()
    remaining = iter(groups)
    try:
        while True:
            pending.extend(pool.submit(read, group) for group in islice(remaining, max(0, window.size - len(pending))))
            if not pending:
                return
            yield pending.popleft().result()
            window.grow()
    finally:
        for future in pending:
            future.cancel()


class _Located(NamedTuple):
    """The object of an extent; `generation` is None for a spool, which is a part of the plan."""

    storage: Storage
    name: str
    generation: str | None

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop); raises ChangedInput if the object is not the planned one."""
        where = f"{self.storage.url}/{self.name}"
        try:
            data = self.storage.read(self.name, start, stop, generation=self.generation) if stop > start else b""
        except (NotFound, PreconditionFailed) as error:
            raise ChangedInput(f"{where}: not the object that was planned ({error}); {self._remedy()}") from error
        if len(data) != stop - start:
            raise ChangedInput(f"{where}: {len(data)} bytes at {start}, planned were {stop - start}; {self._remedy()}")
        return data

    def _remedy(self) -> str:
        return f"restore it, or {START_OVER if self.generation is None else 'plan again with --overwrite'}"


Locate = Callable[[Extent], _Located]


def _locate(extent: Extent, source: Storage, output: Storage) -> _Located:
    if extent.object.startswith(SPOOLED):
        return _Located(output, extent.object.removeprefix(SPOOLED), None)
    if is_absolute(extent.object):
        return _Located(*open_file(extent.object), extent.generation)
    return _Located(source, extent.object, extent.generation)


def _read_group(group: Sequence[Extent], locate: Locate) -> list[bytes]:
    return [
        content if _fits(extent, content) else _read_again(extent, locate(extent))
        for extent, content in zip(group, _read_together(group, locate), strict=True)
    ]


def _fits(extent: Extent, content: bytes) -> bool:
    return extent.crc32c == UNREAD or extend_crc32c(0, content) == extent.crc32c


def _read_again(extent: Extent, located: _Located) -> bytes:
    content = located.read(extent.offset, extent.offset + extent.num_bytes)
    if not _fits(extent, content):
        raise ChangedInput(
            f"{located.storage.url}/{located.name}, {extent.num_bytes} bytes at {extent.offset}: its bytes changed "
            "since it was planned, its size and time did not "
            f"(CRC32C {extend_crc32c(0, content):08x}, expected {extent.crc32c:08x}, read twice); "
            f"restore it, or {START_OVER}"
        )
    return content


def _read_together(group: Sequence[Extent], locate: Locate) -> list[bytes]:
    if len(group) == 1:  # the usual case, which needs no sorting
        return _read_run(group, locate(group[0]))
    contents: dict[Extent, bytes] = {}
    for run in _runs(sorted(set(group), key=lambda extent: (extent.object, extent.offset))):
        contents.update(zip(run, _read_run(run, locate(run[0])), strict=True))
    return [contents[extent] for extent in group]


def _read_run(run: Sequence[Extent], located: _Located) -> list[bytes]:
    """The contents of neighbours in one object, by one request."""
    start, stop = run[0].offset, max(extent.offset + extent.num_bytes for extent in run)
    data = located.read(start, stop)
    return [data[extent.offset - start : extent.offset - start + extent.num_bytes] for extent in run]


def _runs(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Neighbours in one object that share a request; `extents` are sorted by object and offset."""
    for _, group in groupby(extents, key=lambda extent: (extent.object, extent.generation)):
        neighbours = list(group)
        ranges = [(extent.offset, extent.offset + extent.num_bytes) for extent in neighbours]
        for run in coalesce(ranges, max_gap=MAX_GAP, max_bytes=MAX_READ):
            yield neighbours[run]
