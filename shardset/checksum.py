"""CRC32C, the checksum of manifests, indexes and Cloud Storage."""

import base64
from functools import reduce

import google_crc32c

_PIECE = 1 << 18


def extend_crc32c(crc: int, data: bytes | memoryview) -> int:
    """The CRC32C of `data` appended to the bytes whose CRC32C is `crc`."""
    if isinstance(data, bytes):
        return int(google_crc32c.extend(crc, data))
    # The library takes bytes only. Small copies stay in the processor's cache and take half the
    # time of one large copy.
    for start in range(0, len(data), _PIECE):
        crc = int(google_crc32c.extend(crc, bytes(data[start : start + _PIECE])))
    return crc


def crc32c_of(*pieces: bytes | memoryview) -> int:
    """The CRC32C of some bytes, given in one or more pieces."""
    return reduce(extend_crc32c, pieces, 0)


def crc32c_text(crc: int) -> str:
    """A CRC32C as GCS spells it: base64 of its four bytes, most significant first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")
