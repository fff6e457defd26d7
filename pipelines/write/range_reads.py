"""Raw bytes by extent, in order: coalesced, concurrent where that pays, pinned to the generation of the plan."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

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
"""Before the name of a plan's object, in an extent of bytes that a source gave to its spool.

No object of an input is called so: names have no empty parts, and no storage has this scheme."""


class Window:
    """How many reads are on their way at once: one more after each, half as many when the server refuses or fails.

    All workers may read one object, and a bucket takes a new load only step by step.
    """

    def __init__(self) -> None:
        self.size = FIRST_IN_FLIGHT

    def grow(self) -> None:
        """A read is done."""
        self.size = min(MOST_IN_FLIGHT, self.size + 1)

    def shrink(self) -> None:
        """A read has to be tried again."""
        self.size = max(1, self.size // 2)


_of_process = Window()


def fetch(
    groups: Iterable[Sequence[Extent]], source: Storage, output: Storage, window: Window = _of_process
) -> Iterator[list[bytes]]:
    """For each group of extents (a sample's), their contents; neighbours in a group are read together.

    Of `groups` only those in flight are held. What does not have the CRC32C of its extent is read once more.

    Raises ChangedInput if an object is not the one that was planned any more, or its bytes are others.
    """

    def read_group(group: Sequence[Extent]) -> list[bytes]:
        return _read_group(group, lambda extent: _place_of(extent, source, output))

    num_threads = max(source.reads_at_once, output.reads_at_once)
    if num_threads == 1:
        yield from map(read_group, groups)
        return
    source, output = source.on_retry(window.shrink), output.on_retry(window.shrink)
    with ThreadPoolExecutor(num_threads) as pool:
        yield from _ahead(pool, read_group, groups, window)


def _ahead(
    pool: ThreadPoolExecutor, read: Callable, groups: Iterable[Sequence[Extent]], window: Window
) -> Iterator[list[bytes]]:
    waiting: deque[Future[list[bytes]]] = deque()
    left = iter(groups)
    try:
        while True:
            waiting.extend(pool.submit(read, group) for group in islice(left, max(0, window.size - len(waiting))))
            if not waiting:
                return
            yield waiting.popleft().result()
            window.grow()
    finally:
        for future in waiting:
            future.cancel()


def _place_of(extent: Extent, source: Storage, output: Storage) -> tuple[Storage, str, str | None]:
    if extent.object.startswith(SPOOLED):
        return output, extent.object.removeprefix(SPOOLED), None
    if is_absolute(extent.object):
        return (*open_file(extent.object), extent.generation)
    return source, extent.object, extent.generation


def _read_group(group: Sequence[Extent], place_of: Callable[[Extent], tuple[Storage, str, str | None]]) -> list[bytes]:
    return [
        content if _fits(extent, content) else _read_again(extent, *place_of(extent))
        for extent, content in zip(group, _read_together(group, place_of), strict=True)
    ]


def _fits(extent: Extent, content: bytes) -> bool:
    return extent.crc32c == UNREAD or extend_crc32c(0, content) == extent.crc32c


def _read_again(extent: Extent, storage: Storage, name: str, generation: str | None) -> bytes:
    start, stop = extent.offset, extent.offset + extent.num_bytes
    content = _read_range(start, stop, storage, name, generation)
    if not _fits(extent, content):
        raise ChangedInput(
            f"{storage.url}/{name}, {stop - start} bytes at {start}: its bytes changed since it was planned, its size "
            f"and time did not (CRC32C {extend_crc32c(0, content):08x}, expected {extent.crc32c:08x}, read twice); "
            f"restore it, or {START_OVER}"
        )
    return content


def _read_together(
    group: Sequence[Extent], place_of: Callable[[Extent], tuple[Storage, str, str | None]]
) -> list[bytes]:
    if not group:
        return []
    if len(group) == 1:
        [extent] = group
        return [_read_range(extent.offset, extent.offset + extent.num_bytes, *place_of(extent))]
    contents: dict[Extent, bytes] = {}
    for run in _runs(sorted(set(group), key=lambda extent: (extent.object, extent.offset))):
        contents.update(zip(run, _read_run(run, *place_of(run[0])), strict=True))
    return [contents[extent] for extent in group]


def _read_run(run: Sequence[Extent], storage: Storage, name: str, generation: str | None) -> list[bytes]:
    """The contents of neighbours in one object, in one read."""
    start, stop = run[0].offset, max(extent.offset + extent.num_bytes for extent in run)
    data = _read_range(start, stop, storage, name, generation)
    return [data[extent.offset - start : extent.offset - start + extent.num_bytes] for extent in run]


def _read_range(start: int, stop: int, storage: Storage, name: str, generation: str | None) -> bytes:
    try:
        data = storage.read(name, start, stop, generation=generation) if stop > start else b""
    except (NotFound, PreconditionFailed) as error:
        raise ChangedInput(
            f"{storage.url}/{name}: not the object that was planned ({error}); {_way_out(generation)}"
        ) from error
    if len(data) != stop - start:
        raise ChangedInput(
            f"{storage.url}/{name}: {len(data)} bytes at {start}, planned were {stop - start}; {_way_out(generation)}"
        )
    return data


def _way_out(generation: str | None) -> str:
    """What to do about lost bytes: only those of a spool, a part of the plan, are pinned to no generation."""
    return f"restore it, or {START_OVER if generation is None else 'plan again with --overwrite'}"


def _runs(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    run: list[Extent] = []
    for extent in extents:
        if run and not _adjoins(run, extent):
            yield run
            run = []
        run.append(extent)
    if run:
        yield run


def _adjoins(run: Sequence[Extent], extent: Extent) -> bool:
    first, last = run[0], run[-1]
    same = (extent.object, extent.generation) == (last.object, last.generation)
    return (
        same
        and extent.offset - (last.offset + last.num_bytes) <= MAX_GAP
        and extent.offset + extent.num_bytes - first.offset <= MAX_READ
    )
