"""Stored bytes compared with what the manifest says of them, and read a second time before they count as damaged."""

from collections.abc import Callable
from typing import TypeVar

import google_crc32c

from shardset.checksum import crc32c_text
from shardset.errors import DamagedShard
from shardset.storage.base import Storage

T = TypeVar("T")


class DamagedObject(DamagedShard):
    """A stored object differs from what the manifest says; `data` is what was read."""

    def __init__(self, message: str, data: bytes = b"") -> None:
        super().__init__(message)
        self.data = data


def read_twice(read: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """What `read` returns; where that does not fit, what it returns the second time, be it right or wrong.

    Damage on the way comes once; what is damaged where it is stored comes again.
    """
    found = read()
    if fits(found):
        return found
    del found  # it may be a whole shard
    return read()


def read_object(storage: Storage, name: str, num_bytes: int, crc32c: str, advice: str) -> bytes:
    """A whole object, as long and with the CRC32C as the manifest says; read a second time if it is not.

    Raises NotFound or StorageError, or DamagedObject if the second time differs too; `advice` says what to do then.
    """

    def read() -> tuple[bytes, tuple[int, str]]:
        data = storage.read(name)
        return data, facts_of(data)

    data, facts = read_twice(read, lambda found: found[1] == (num_bytes, crc32c))
    if facts == (num_bytes, crc32c):
        return data
    raise DamagedObject(
        f"{storage.url}/{name}: {facts[0]} bytes with crc32c {facts[1]}, expected {num_bytes} with {crc32c}; {advice}",
        data,
    )


def facts_of(data: bytes) -> tuple[int, str]:
    """Length and CRC32C of some bytes."""
    return len(data), crc32c_text(google_crc32c.value(data))
