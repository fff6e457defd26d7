"""Limits on the decoding of one image, the same for the build and the reader: memory and, for a JPEG, scans.

A small file may claim a large image: a WebP of 34 bytes 16,383 x 10,000 pixels, a JPEG of 11 KB a thousand passes over
its pixels. Both are known before anything is decoded.
"""

import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shardset.errors import ConfigError

DECODED_BYTES = 2 * 2**30
"""Default memory for the images that a process decodes at once: enough for 76 megapixels of JPEG 2000, 107 of WebP and
AVIF, and 179 of any other format."""

MAX_SCANS = 100
"""Scans of a JPEG: encoders write about ten, and each takes as long as decoding the image once."""

# With the result: libwebp holds two canvases, Pillow a copy; a single strip of a TIFF may be the whole image.
_BYTES_PER_PIXEL = {"webp": 20, "tif": 12, "avif": 20, "jp2": 28, "image": 28}  # the last: of an unknown format
_OTHERS, _MANY_SCANS = 8, 12
_FREE_BYTES = 32 * 2**20  # images up to this size don't wait for others

_ICON, _LONGEST_ICON = b"\0\0\1\0", 256

EOI = b"\xff\xd9"
_SOS = b"\xff\xda"
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
# In entropy-coded data 0xff is followed by 0 or by a restart number; anything else begins a segment.
_NEXT_SEGMENT = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")


def check(decoded_bytes: int) -> None:
    """Raises ConfigError unless it is a budget."""
    if type(decoded_bytes) is not int or decoded_bytes < 1:
        raise ConfigError(f"decoded_bytes is {decoded_bytes!r}, expected a number of bytes from 1")


def num_bytes(kind: str, width: int, height: int, num_scans: int = 1) -> int:
    """Memory that decoding an image takes, with its result; `kind` is its format as a field, such as `jpg`."""
    each = _MANY_SCANS if num_scans > 1 else _BYTES_PER_PIXEL.get(kind, _OTHERS)
    return each * width * height


def num_scans(jpeg: bytes) -> int:
    """The number of scans of a JPEG.

    Up to MAX_SCANS it may be too high, where metadata look like scans.
    """
    if _is_sequential(jpeg):
        return 1
    most = jpeg.count(_SOS)
    return most if most <= MAX_SCANS else sum(kind == _SOS for kind in jpeg_segments(jpeg))


def is_cut_jpeg(jpeg: bytes) -> bool:
    """Whether the end mark of a JPEG is missing, which decoders tolerate where the tail is blank."""
    # Nearly all JPEGs end with it. Walking the segments of the others costs half a decode.
    return not jpeg.endswith(EOI) and all(marker != EOI for marker in jpeg_segments(jpeg))


def jpeg_segments(jpeg: bytes) -> Iterator[bytes]:
    """The markers of a JPEG without restarts, up to its end mark or to the end of the data."""
    position = 2
    while match := _NEXT_SEGMENT.search(jpeg, position):
        kind = b"\xff" + match[1]
        yield kind
        if kind == EOI:
            return
        position = match.end() + int.from_bytes(jpeg[match.end() : match.end() + 2], "big")


def is_oversized_icon(data: bytes) -> bool:
    """Whether it is an ICO with an image of more pixels than an icon can have; Pillow decodes an ICO to open it."""
    if not data.startswith(_ICON):
        return False
    for at in range(6, min(6 + 16 * int.from_bytes(data[4:6], "little"), len(data) - 16), 16):
        start = int.from_bytes(data[at + 12 : at + 16], "little")
        is_png = data[start : start + 4] == b"\x89PNG"
        size = struct.unpack_from(
            ">II" if is_png else "<II", data[start : start + 24].ljust(24, b"\0"), 16 if is_png else 4
        )
        if max(size) > 2 * _LONGEST_ICON:  # a bitmap has a mask below, which doubles its height
            return True
    return False


def refusal(kind: str, width: int, height: int, budget: int, num_scans: int = 1) -> str:
    """Why the image may not be decoded; "" if it may."""
    if num_scans > MAX_SCANS:
        return f"{num_scans} scans, at most {MAX_SCANS}"
    needed = num_bytes(kind, width, height, num_scans)
    if needed > budget:
        return f"{width} x {height} pixels, which take {needed} bytes to decode, at most {budget}"
    return ""


def room(needed: int, budget: int) -> AbstractContextManager[None]:
    """A context to decode an image of so many bytes in; waits until it fits beside those being decoded.

    A thread must not enter a second one.
    """
    return nullcontext() if needed <= _FREE_BYTES else _held(needed, budget)


class _Room:
    def __init__(self) -> None:
        self.taken = 0
        self.changed = threading.Condition()


# By process: in a child, what another thread held during the fork would stay taken for ever.
_rooms: dict[int, _Room] = {}


def _is_sequential(jpeg: bytes) -> bool:
    """Whether the first scan holds all colours completely, so that decoders read no further."""
    at, num_parts = 2, 0
    while at + 5 <= len(jpeg) and jpeg[at] == 0xFF:
        kind, size = jpeg[at + 1], int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if kind in _SEQUENTIAL and at + 10 <= len(jpeg):
            num_parts = jpeg[at + 9]
        elif kind == _SOS[1]:
            return 0 < num_parts == jpeg[at + 4]
        at += 2 + size
    return False


@contextmanager
def _held(needed: int, budget: int) -> Iterator[None]:
    own = _rooms.setdefault(os.getpid(), _Room())
    with own.changed:
        own.changed.wait_for(lambda: not own.taken or own.taken + needed <= budget)
        own.taken += needed
    try:
        yield
    finally:
        with own.changed:
            own.taken -= needed
            own.changed.notify_all()
