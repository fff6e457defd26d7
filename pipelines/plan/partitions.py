"""What a step leaves for the next one in the plan's folder, so that between two steps only names go through the runner.

A call of a step writes one object with a part for each receiver, under a name that its work alone decides, as a whole:
trying it again or doing it twice leaves the same object. A receiver reads its part of each object.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from pipelines.plan import files
from shardset.checksum import extend_crc32c
from shardset.storage.base import Storage

K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")

PIECE = 8 * 2**20
"""What is copied at once."""

_AT_ONCE = 64


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes [start, stop) of one object of the plan, and the CRC32C that they had when they were written."""

    name: str
    start: int
    stop: int
    crc32c: int


def write_partitions(
    output: Storage, name: str, parts: Iterable[tuple[K, bytes | memoryview]]
) -> list[tuple[K, ByteRange]]:
    """Where each receiver finds its part, once all of them stand in one object."""
    found, start = [], 0
    with output.writer(name) as out:
        for receiver, data in parts:
            out.write(data)
            found.append((receiver, ByteRange(name, start, start + len(data), extend_crc32c(0, data))))
            start += len(data)
    return found


def write_whole(output: Storage, name: str, pieces: Iterable[bytes]) -> ByteRange:
    """All of one object, a piece after the other."""
    num_bytes, crc = 0, 0
    with output.writer(name) as out:
        for data in pieces:
            out.write(data)
            num_bytes, crc = num_bytes + len(data), extend_crc32c(crc, data)
    return ByteRange(name, 0, num_bytes, crc)


def read_part(output: Storage, part: ByteRange) -> bytes:
    """The bytes of a part; what does not have its CRC32C is read once more, then it is a ConfigError."""

    def check(data: bytes) -> bytes:
        if (len(data), found := extend_crc32c(0, data)) != (part.stop - part.start, part.crc32c):
            raise ValueError(
                f"bytes {part.start} to {part.stop} have the CRC32C {found:08x}, expected {part.crc32c:08x}"
            )
        return data

    try:
        return files.checked(lambda: output.read(part.name, part.start, part.stop), check)
    except ValueError as error:
        raise files.damaged(output, part.name, error) from error


def read_partitions(output: Storage, parts: Iterable[ByteRange]) -> Iterator[bytes]:
    """The bytes of each part, in order; many are on their way at once where that pays. Holds a few of them."""
    return in_order(output, parts, lambda part: read_part(output, part))


def in_order(output: Storage, names: Iterable[T], read: Callable[[T], R]) -> Iterator[R]:
    """What is read of each name, in order; many are on their way at once where that pays. Holds a few of them."""
    if output.reads_at_once == 1:
        yield from map(read, names)
        return
    left = iter(names)
    with ThreadPoolExecutor(output.reads_at_once) as pool:
        while some := list(islice(left, _AT_ONCE)):
            yield from pool.map(read, some)


def copy_part(output: Storage, part: ByteRange, to: str, if_generation: str | None) -> None:
    """A part as an object of its own, a piece after the other; it stands only if it is what was written."""

    def once() -> None:
        crc = 0
        with output.writer(to, if_generation=if_generation) as out:
            for start in range(part.start, part.stop, PIECE):
                data = output.read(part.name, start, min(start + PIECE, part.stop))
                crc = extend_crc32c(crc, data)
                out.write(data)
            if crc != part.crc32c:  # within the block: nothing is published then
                raise ValueError(f"it has the CRC32C {crc:08x}, expected {part.crc32c:08x}")

    try:
        try:
            once()
        except ValueError:
            once()
    except ValueError as error:
        raise files.damaged(output, part.name, error) from error
