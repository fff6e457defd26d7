"""The data between two steps, stored below `plan/slices/`, so that only byte ranges go through the
runner.

Each call of a step writes one object with a byte range for each receiver. Name and bytes depend
only on the call's input, so a retry writes the same object. A receiver reads its byte range of each
object.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pipelines.plan.files import PlanFiles, in_order, read_checked
from shardset.checksum import extend_crc32c
from shardset.storage.base import Storage
from shardset.storage.checked import pieces_of, read_small

K = TypeVar("K")


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes [start, stop) of one plan object, and their CRC32C when written."""

    name: str
    start: int
    stop: int
    crc32c: int


def write_slices(
    files: PlanFiles, name: str, slices: Iterable[tuple[K, bytes | memoryview]]
) -> list[tuple[K, ByteRange]]:
    """Writes the slices into one object; returns each receiver with its byte range."""
    written, start = [], 0
    with files.writer(name) as out:
        for receiver, data in slices:
            out.write(data)
            written.append(
                (receiver, ByteRange(name, start, start + len(data), extend_crc32c(0, data)))
            )
            start += len(data)
    return written


def write_pieces(files: PlanFiles, name: str, pieces: Iterable[bytes]) -> ByteRange:
    """Writes the pieces as one object; returns the range of all its bytes."""
    num_bytes, crc = 0, 0
    with files.writer(name) as out:
        for data in pieces:
            out.write(data)
            num_bytes, crc = num_bytes + len(data), extend_crc32c(crc, data)
    return ByteRange(name, 0, num_bytes, crc)


def read_range(output: Storage, byte_range: ByteRange) -> bytes:
    """The bytes of a range; raises ConfigError if the length or CRC32C differs in two reads."""
    name, start, stop = byte_range.name, byte_range.start, byte_range.stop

    def read() -> bytes:
        data = output.read(name, start, stop)
        crc = extend_crc32c(0, data)
        if (len(data), crc) != (stop - start, byte_range.crc32c):
            raise ValueError(
                f"bytes {start} to {stop} are {len(data)} with the CRC32C {crc:08x}, expected"
                f" {byte_range.crc32c:08x}"
            )
        return data

    return read_checked(output, name, read)


def read_slices(output: Storage, byte_ranges: Iterable[ByteRange]) -> Iterator[bytes]:
    """The bytes of each range, sorted by name: a runner delivers the ranges in any order."""
    return in_order(output, sorted(byte_ranges), lambda byte_range: read_range(output, byte_range))


def copy_range(
    files: PlanFiles, byte_range: ByteRange, to: str, *, after: str | None = None
) -> None:
    """Copies a range to an object of its own, behind the object `after`; it appears only if the
    CRC32C matches.
    """
    start = read_small(files.output, after) if after else b""

    def copy() -> None:
        crc = 0
        with files.writer(to) as out:
            out.write(start)
            for data in pieces_of(files.output, byte_range.name, byte_range.start, byte_range.stop):
                crc = extend_crc32c(crc, data)
                out.write(data)
            if crc != byte_range.crc32c:  # inside the block: an exception here discards the copy
                raise ValueError(f"it has the CRC32C {crc:08x}, expected {byte_range.crc32c:08x}")

    read_checked(files.output, byte_range.name, copy)
