"""Reads raw bytes by extent, in order: neighbours in one request, concurrently on gs://, and only
as planned.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

from pipelines.plan.files import START_OVER
from pipelines.sources.base import UNREAD, Extent
from shardset.checksum import extend_crc32c
from shardset.errors import ChangedInput, NotFound, PreconditionFailed
from shardset.per_process import PerProcess
from shardset.storage.base import Storage
from shardset.storage.many import MAX_READ, Threads, coalesce, in_order
from shardset.storage.open import is_absolute, open_file

MAX_GAP = 4096

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
    at_once = max(source.reads_at_once, output.reads_at_once)
    read = partial(_read_group, source=source, output=output)
    return in_order(at_once, groups, read, shared=_threads(at_once) if at_once > 1 else None)


@PerProcess
def _threads(num_threads: int) -> Threads:
    """The reading threads of this process, started at the first use."""
    return Threads("shardset-ranges", num_threads)


def _read_group(group: Sequence[Extent], source: Storage, output: Storage) -> list[bytes]:
    contents: dict[Extent, bytes] = {}
    for run in _runs(group):
        start = run[0].offset
        stop = max(extent.offset + extent.num_bytes for extent in run)
        data = _read(run[0], start, stop, source, output)
        for extent in run:
            content = data[extent.offset - start : extent.offset - start + extent.num_bytes]
            if not _fits(extent, content):
                content = _read_again(extent, source, output)
            contents[extent] = content
    return [contents[extent] for extent in group]


def _read(extent: Extent, start: int, stop: int, source: Storage, output: Storage) -> bytes:
    """The bytes [start, stop) of the object of an extent; raises ChangedInput if it is not the
    planned one.
    """
    storage, name, is_spool = _locate(extent, source, output)
    try:
        generation = extent.generation or None
        return storage.read(name, start, stop, generation=generation) if stop > start else b""
    except (NotFound, PreconditionFailed) as error:
        remedy = START_OVER if is_spool else "plan again with --overwrite"
        raise ChangedInput(
            f"{storage.url}/{name}: not the object that was planned ({error}); restore it, or"
            f" {remedy}"
        ) from error


def _locate(extent: Extent, source: Storage, output: Storage) -> tuple[Storage, str, bool]:
    """The storage and the name of the object of an extent, and whether it is a spool."""
    if extent.object.startswith(SPOOLED):
        return output, extent.object.removeprefix(SPOOLED), True
    if is_absolute(extent.object):
        return *open_file(extent.object), False
    return source, extent.object, False


def _fits(extent: Extent, content: bytes) -> bool:
    # The length first: an extent that the build did not examine has no CRC32C.
    if len(content) != extent.num_bytes:
        return False
    return extent.crc32c == UNREAD or extend_crc32c(0, content) == extent.crc32c


def _read_again(extent: Extent, source: Storage, output: Storage) -> bytes:
    content = _read(extent, extent.offset, extent.offset + extent.num_bytes, source, output)
    if not _fits(extent, content):
        facts = f"{len(content)} bytes"
        if extent.crc32c != UNREAD:
            facts += f" with CRC32C {extend_crc32c(0, content):08x}, expected {extent.crc32c:08x}"
        storage, name, _ = _locate(extent, source, output)
        raise ChangedInput(
            f"{storage.url}/{name}, {extent.num_bytes} bytes at {extent.offset}: its bytes changed"
            f" since it was planned, its size and time did not ({facts}, read twice); restore it,"
            f" or {START_OVER}; a rerun alone compares with the same plan"
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
