"""Reads that are checked against the manifest, and repeated once before the object counts as
damaged.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shardset.checksum import crc32c_of, crc32c_text, extend_crc32c
from shardset.errors import DamagedShard, SourceError, StorageError, TransientError
from shardset.storage.base import Storage

T = TypeVar("T")

PIECE_BYTES = 8 * 2**20


class DamagedObject(DamagedShard):
    """A stored object differs from what the manifest lists; `data` is what was read."""

    def __init__(self, message: str, data: bytes = b"") -> None:
        super().__init__(message)
        self.data = data


def read_twice(
    read: Callable[[], T],
    fits: Callable[[T], bool] = lambda answer: True,
    error: type[Exception] = SourceError,
) -> T:
    """The result of `read`, or of a second one if it doesn't fit or `read` raises `error`.

    Damage in transfer does not repeat; damage in storage does.
    """
    with suppress(error):
        answer = read()
        if fits(answer):
            return answer
        del answer  # it may be a complete shard
    return read()


def read_object(storage: Storage, name: str, num_bytes: int, crc32c: str, advice: str) -> bytes:
    """A whole object that has the size and CRC32C of the manifest; reads it a second time if they
    differ.

    Raises DamagedObject with `advice` if the second read differs too, and the errors of
    Storage.read.
    """

    def read() -> tuple[bytes, tuple[int, str]]:
        data = storage.read(name)
        return data, facts_of(data)

    data, facts = read_twice(read, lambda outcome: outcome[1] == (num_bytes, crc32c))
    if facts == (num_bytes, crc32c):
        return data
    raise DamagedObject(
        f"{storage.url}/{name}: {facts[0]} bytes with crc32c {facts[1]}, expected {num_bytes} with"
        f" {crc32c}; {advice}",
        data,
    )


def read_range(
    storage: Storage,
    name: str,
    start: int,
    stop: int,
    *,
    num_bytes: int,
    crc32c: str,
    advice: str,
    problem_of: Callable[[bytes], str] = lambda data: "",
) -> bytes:
    """The bytes [start, stop) of an object of the manifest, with its size and, where the storage
    knows it, its CRC32C; reads them a second time if they differ.

    `problem_of` says what else may be wrong with the bytes. Raises DamagedShard with `advice` if
    the second read is wrong too, and the errors of Storage.read.
    """

    def read() -> bytes:
        data, stat = storage.read_with_stat(name, start, stop)
        if stat.num_bytes != num_bytes or len(data) != stop - start:
            raise damage(f"{stat.num_bytes} bytes, expected {num_bytes}")
        if stat.crc32c not in (None, crc32c):
            raise damage(f"crc32c is {stat.crc32c}, expected {crc32c}")
        if problem := problem_of(data):
            raise damage(problem)
        return data

    def damage(problem: str) -> DamagedShard:
        return DamagedShard(f"{storage.url}/{name}: {problem}; {advice}")

    try:
        return read_twice(read, error=DamagedShard)
    except TransientError:
        raise
    except StorageError:  # an object that was cut lacks the range
        if (stored := storage.stat(name).num_bytes) != num_bytes:
            raise damage(f"{stored} bytes, expected {num_bytes}") from None
        raise


def facts_of(data: bytes) -> tuple[int, str]:
    """Length of `data`, and its CRC32C as text."""
    return len(data), crc32c_text(crc32c_of(data))


def stored_crc32c(storage: Storage, name: str, num_bytes: int) -> str:
    """The CRC32C of an object as text, computed from its bytes."""
    crc = 0
    for start in range(0, num_bytes, PIECE_BYTES):
        crc = extend_crc32c(crc, storage.read(name, start, min(start + PIECE_BYTES, num_bytes)))
    return crc32c_text(crc)
