"""The frame of a file of a build's plan: behind the content one line says whose it is, how long, and its CRC32C.

Whoever reads JSON or Arrow up to its end reads such a file too. The CRC32C covers the content and the line before it.
"""

from typing import NamedTuple

from shardset.checksum import extend_crc32c

_MARK = b"\nshardset "
_WHOSE_BYTES, _LENGTH_BYTES, _CRC_BYTES = 16, 16, 8
NUM_BYTES = len(_MARK) + _WHOSE_BYTES + 1 + _LENGTH_BYTES + 1 + _CRC_BYTES + 1
"""What a frame adds to a file."""


class Framed(NamedTuple):
    """The content of a file, and the digest of the build that it belongs to."""

    build: str
    content: memoryview


def frame(build: str, content: bytes | memoryview) -> bytes:
    """What stands behind the content of a file of that build; `build` has at most 16 letters and digits."""
    said = b"%s%s %016x " % (_MARK, build.encode().rjust(_WHOSE_BYTES, b"-"), len(content))
    return b"%s%08x\n" % (said, extend_crc32c(extend_crc32c(0, content), said))


def open_frame(data: bytes) -> Framed:
    """The content and whose it is; ValueError says what is wrong with the bytes."""
    if not has_frame(data):
        raise ValueError(f"its {len(data)} bytes don't end with a length and a CRC32C")
    content, end = memoryview(data)[:-NUM_BYTES], data[-NUM_BYTES:]
    said = end[len(_MARK) : len(_MARK) + _WHOSE_BYTES]
    build = said.lstrip(b"-").decode("ascii", "replace")
    if end != frame(build, content):
        raise ValueError("its length and CRC32C are not those of its bytes")
    return Framed(build, content)


def has_frame(data: bytes) -> bool:
    """Whether the bytes end with a frame, be it that of these bytes or not."""
    return len(data) >= NUM_BYTES and data[-NUM_BYTES:].startswith(_MARK)
