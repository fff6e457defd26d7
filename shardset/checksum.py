"""CRC32C, the checksum of manifests, indexes and Cloud Storage."""

import base64
from collections.abc import Iterable
from functools import reduce

import google_crc32c

_PIECE = 1 << 18


def extend_crc32c(crc: int, data: bytes | memoryview) -> int:
    """The CRC32C of `data` appended to the bytes whose CRC32C is `crc`."""
    if isinstance(data, bytes):
        return int(google_crc32c.extend(crc, data))
    # The library takes bytes only. Small copies stay in the processor's cache and take half the time of one large copy.
    for start in range(0, len(data), _PIECE):
        crc = int(google_crc32c.extend(crc, bytes(data[start : start + _PIECE])))
    return crc


def crc32c_of(*pieces: bytes | memoryview) -> int:
    """The CRC32C of some bytes, given in one or more pieces."""
    return reduce(extend_crc32c, pieces, 0)


def crc32c_text(crc: int) -> str:
    """A CRC32C as GCS spells it: base64 of its four bytes, most significant first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


def joined_crc32c(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC32C of pieces one after the other, from the CRC32C and the number of bytes of each."""
    joined = 0
    for crc, num_bytes in pieces:
        zeros = bytes(num_bytes)
        # A CRC is affine in the one that it extends, so zeros in place of the piece show what that one becomes.
        joined = extend_crc32c(joined, zeros) ^ extend_crc32c(0, zeros) ^ crc
    return joined
