"""What decoding one image may take, the same for the build and the reader: memory and, for a JPEG, scans.

A small file may claim a large image: a WebP of 34 bytes one of 16,383 x 10,000 pixels, a JPEG of 11 KB a thousand
passes over its pixels. Both are known before anything is decoded.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shardset.errors import ConfigError

DECODED_BYTES = 2 * 2**30
"""Memory of the images that one process decodes at once, by default: enough for 179 megapixels of every format but
WebP, of which it is enough for 107."""

MAX_SCANS = 100
"""Scans of a JPEG; an encoder writes about ten, and each takes as long as decoding the image once."""

_BYTES_PER_PIXEL = {"webp": 20, "tif": 12}
"""Of a decoded image with its result: libwebp holds two canvases, Pillow a copy; a strip of a TIFF may be all of it."""

_OTHERS, _MANY_SCANS = 8, 12
_FREE_BYTES = 32 * 2**20
"""Images up to this size wait for nobody."""

EOI = b"\xff\xd9"
_SOS = b"\xff\xda"
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
# In entropy-coded data 0xff is followed by 0 or by a restart number; anything else starts a new segment.
_NEXT_SEGMENT = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")


def check(decoded_bytes: int) -> None:
    """Raises ConfigError unless it is a budget."""
    if type(decoded_bytes) is not int or decoded_bytes < 1:
        raise ConfigError(f"decoded_bytes is {decoded_bytes!r}, expected a number of bytes from 1")


def num_bytes(kind: str, width: int, height: int, num_scans: int = 1) -> int:
    """Memory that decoding an image takes, its result included: `kind` is its format as a field, such as `jpg`."""
    each = _MANY_SCANS if num_scans > 1 else _BYTES_PER_PIXEL.get(kind, _OTHERS)
    return each * width * height


def num_scans(jpeg: bytes) -> int:
    """How many scans a decoder of a JPEG looks for.

    Up to MAX_SCANS it may be more than there are, where metadata look like some.
    """
    if _is_sequential(jpeg):
        return 1
    most = jpeg.count(_SOS)
    return most if most <= MAX_SCANS else sum(kind == _SOS for kind in jpeg_segments(jpeg))


def is_cut_jpeg(jpeg: bytes) -> bool:
    """Whether the end mark of a JPEG is missing: decoders do without it where a tail is blank."""
    # Nearly all JPEGs end with their end mark; walking the segments of the others costs half a decode.
    return not jpeg.endswith(EOI) and all(marker != EOI for marker in jpeg_segments(jpeg))


def jpeg_segments(jpeg: bytes) -> Iterator[bytes]:
    """The markers of a JPEG, restarts left out, up to its end mark or as far as it goes."""
    position = 2
    while match := _NEXT_SEGMENT.search(jpeg, position):
        kind = b"\xff" + match[1]
        yield kind
        if kind == EOI:
            return
        position = match.end() + int.from_bytes(jpeg[match.end() : match.end() + 2], "big")


def refusal(kind: str, width: int, height: int, budget: int, num_scans: int = 1) -> str:
    """Why the image may not be decoded; empty if it may."""
    if num_scans > MAX_SCANS:
        return f"{num_scans} scans, at most {MAX_SCANS}"
    needed = num_bytes(kind, width, height, num_scans)
    if needed > budget:
        return f"{width} x {height} pixels, which take {needed} bytes to decode, at most {budget}"
    return ""


def room(needed: int, budget: int) -> AbstractContextManager[None]:
    """Waits until an image that needs so many bytes fits beside those that this process is decoding.

    To be held while it is decoded. One thread holds one room at a time.
    """
    return nullcontext() if needed <= _FREE_BYTES else _held(needed, budget)


class _Room:
    def __init__(self) -> None:
        self.taken = 0
        self.changed = threading.Condition()


_rooms: dict[int, _Room] = {}
"""By process: one that another thread changed during a fork would stay as it was in the child."""


def _is_sequential(jpeg: bytes) -> bool:
    """Whether its first scan holds all colours, whole: a decoder stops behind that."""
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
