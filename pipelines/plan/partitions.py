"""What a step leaves for the next one below `plan/partitions/`, so that only byte ranges go through the runner.

A call of a step writes one object with a byte range for each receiver. Its name and bytes depend on the call's input
alone, so a retry or a second attempt leaves the same object. A receiver reads its byte range of each object.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pipelines.plan import files
from shardset.checksum import extend_crc32c
from shardset.storage.base import Storage

K = TypeVar("K")

COPY_BYTES = 8 * 2**20
"""Copies move this many bytes at a time."""


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes [start, stop) of one plan object, and the CRC32C that they had when they were written."""

    name: str
    start: int
    stop: int
    crc32c: int


def write_partitions(
    output: Storage, name: str, partitions: Iterable[tuple[K, bytes | memoryview]]
) -> list[tuple[K, ByteRange]]:
    """Writes the partitions into one object; returns each receiver with its byte range."""
    written, start = [], 0
    with output.writer(name) as out:
        for receiver, data in partitions:
            out.write(data)
            written.append((receiver, ByteRange(name, start, start + len(data), extend_crc32c(0, data))))
            start += len(data)
    return written


def write_pieces(output: Storage, name: str, pieces: Iterable[bytes]) -> ByteRange:
    """Writes the pieces as one object; returns the range of all its bytes."""
    num_bytes, crc = 0, 0
    with output.writer(name) as out:
        for data in pieces:
            out.write(data)
            num_bytes, crc = num_bytes + len(data), extend_crc32c(crc, data)
    return ByteRange(name, 0, num_bytes, crc)


def read_range(output: Storage, byte_range: ByteRange) -> bytes:
    """The bytes of a range; reads once more if the CRC32C differs, then raises ConfigError."""

    def check(data: bytes) -> bytes:
        crc = extend_crc32c(0, data)
        if (len(data), crc) != (byte_range.stop - byte_range.start, byte_range.crc32c):
            raise ValueError(
                f"bytes {byte_range.start} to {byte_range.stop} have the CRC32C {crc:08x}, "
                f"expected {byte_range.crc32c:08x}"
            )
        return data

    try:
        return files.read_checked(lambda: output.read(byte_range.name, byte_range.start, byte_range.stop), check)
    except ValueError as error:
        raise files.damaged(output, byte_range.name, error) from error


def read_partitions(output: Storage, byte_ranges: Iterable[ByteRange]) -> Iterator[bytes]:
    """The bytes of each range, in the order of their names; a runner hands them over in any order."""
    return files.in_order(output, sorted(byte_ranges), lambda byte_range: read_range(output, byte_range))


def copy_range(output: Storage, byte_range: ByteRange, to: str, if_generation: str | None) -> None:
    """Copies a range to an object of its own; publishes it only if the CRC32C fits."""
    try:
        try:
            _copy_once(output, byte_range, to, if_generation)
        except ValueError:
            _copy_once(output, byte_range, to, if_generation)
    except ValueError as error:
        raise files.damaged(output, byte_range.name, error) from error


def _copy_once(output: Storage, byte_range: ByteRange, to: str, if_generation: str | None) -> None:
    crc = 0
    with output.writer(to, if_generation=if_generation) as out:
        for start in range(byte_range.start, byte_range.stop, COPY_BYTES):
            data = output.read(byte_range.name, start, min(start + COPY_BYTES, byte_range.stop))
            crc = extend_crc32c(crc, data)
            out.write(data)
        if crc != byte_range.crc32c:  # inside the block, so that nothing is published
            raise ValueError(f"it has the CRC32C {crc:08x}, expected {byte_range.crc32c:08x}")
