"""Reads raw bytes by extent, in order: neighbours in one request, concurrently on gs://, and only
as planned.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby, islice
from typing import NamedTuple

from pipelines.plan.files import START_OVER
from pipelines.sources.base import UNREAD, Extent
from shardset.checksum import extend_crc32c
from shardset.errors import ChangedInput, NotFound, PreconditionFailed
from shardset.per_process import PerProcess
from shardset.storage.base import Storage
from shardset.storage.open import is_absolute, open_file

MAX_GAP = 4096
MAX_READ = 8 * 2**20

SPOOLED = "spool:///"
"""The prefix of a plan file's name in an extent of spooled bytes.

No name of an input object can start with it.
"""


def fetch(
    groups: Iterable[Sequence[Extent]], source: Storage, output: Storage
) -> Iterator[list[bytes]]:
    """The contents of each group of extents, such as a sample's; neighbours in a group share
    a request.

    Holds only the groups in flight. Reads an extent once more if its CRC32C differs. Raises
    ChangedInput if an object is no longer the planned one, or if its bytes changed. All threads of
    a process share its readers.
    """
    num_threads = max(source.reads_at_once, output.reads_at_once)
    if num_threads == 1:
        yield from (_read_group(group, source, output) for group in groups)
        return
    pool, remaining = _pool(num_threads), iter(groups)
    pending: deque[Future[list[bytes]]] = deque()
    try:
        while True:
            for group in islice(remaining, num_threads - len(pending)):
                pending.append(pool.submit(_read_group, group, source, output))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_bytes: int) -> Iterator[slice]:
    """Slices of `ranges`, one per request.

    `ranges` are half-open (start, stop), ascending by start. Neighbours share a request if they are
    at most `max_gap` bytes apart and the request stays within `max_bytes`; a longer range is a
    separate request.
    """
    first, end = 0, 0
    for number, (start, stop) in enumerate(ranges):
        if number > first and (
            start - end > max_gap or max(end, stop) - ranges[first][0] > max_bytes
        ):
            yield slice(first, number)
            first, end = number, start
        end = max(end, stop)
    if ranges:
        yield slice(first, len(ranges))


@PerProcess
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """The reading threads of this process, started at the first use."""
    return ThreadPoolExecutor(num_threads, "range-reads")


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
            return (
                self.storage.read(self.name, start, stop, generation=self.generation)
                if stop > start
                else b""
            )
        except (NotFound, PreconditionFailed) as error:
            remedy = START_OVER if self.generation is None else "plan again with --overwrite"
            raise ChangedInput(
                f"{self.url}: not the object that was planned ({error}); restore it, or {remedy}"
            ) from error


def _locate(extent: Extent, source: Storage, output: Storage) -> _Located:
    if extent.object.startswith(SPOOLED):
        return _Located(output, extent.object.removeprefix(SPOOLED), None)
    if is_absolute(extent.object):
        return _Located(*open_file(extent.object), extent.generation or None)
    return _Located(source, extent.object, extent.generation or None)


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
            f"{located.url}, {extent.num_bytes} bytes at {extent.offset}: its bytes changed since"
            f" it was planned, its size and time did not ({found}, read twice); restore it, or"
            f" {START_OVER}; a rerun alone compares with the same plan"
        )
    return content


def _runs(extents: Sequence[Extent]) -> Iterator[Sequence[Extent]]:
    """The extents in runs of neighbours in one object, which share a request."""
    in_order = sorted(
        set(extents), key=lambda extent: (extent.object, extent.generation, extent.offset)
    )
    for _, group in groupby(in_order, key=lambda extent: (extent.object, extent.generation)):
        neighbours = list(group)
        ranges = [(extent.offset, extent.offset + extent.num_bytes) for extent in neighbours]
        for run in coalesce(ranges, max_gap=MAX_GAP, max_bytes=MAX_READ):
            yield neighbours[run]
