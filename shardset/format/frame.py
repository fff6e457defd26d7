"""The frame of a plan's files: a line behind the content with the build's digest, the length and
the CRC32C.

Readers of JSON or Arrow that stop at its end read such a file too. The CRC32C covers the content
and the line before it.
"""

from typing import NamedTuple

from shardset.checksum import crc32c_of

_MARK = b"\nshardset "
_BUILD_BYTES, _LENGTH_BYTES, _CRC_BYTES = 16, 16, 8
NUM_BYTES = len(_MARK) + _BUILD_BYTES + 1 + _LENGTH_BYTES + 1 + _CRC_BYTES + 1
"""What a frame adds to a file."""


class Framed(NamedTuple):
    """The content of a file, and the digest of the build that it belongs to."""

    build: str
    content: memoryview


def frame(build: str, content: bytes | memoryview) -> bytes:
    """The line to put behind the content of a file of that build; `build` has at most 16 letters
    and digits.
    """
    line = b"%s%s %016x " % (_MARK, build.encode().rjust(_BUILD_BYTES, b"-"), len(content))
    return b"%s%08x\n" % (line, crc32c_of(content, line))


def open_frame(data: bytes) -> Framed:
    """The content and its build; raises ValueError, which says what is wrong with the bytes."""
    content, end = memoryview(data)[:-NUM_BYTES], data[-NUM_BYTES:]
    if len(end) < NUM_BYTES or not end.startswith(_MARK):
        raise ValueError(f"its {len(data)} bytes don't end with a length and a CRC32C")
    build = end[len(_MARK) : len(_MARK) + _BUILD_BYTES].lstrip(b"-").decode("ascii", "replace")
    if end != frame(build, content):
        raise ValueError("its length and CRC32C are not those of its bytes")
    return Framed(build, content)
