"""Limits on the decoding of one image, the same for the build and the reader: memory and, for a
JPEG, scans.

A small file may claim a large image: a WebP of 34 bytes 16,383 x 10,000 pixels, a JPEG of 11 KB a
thousand passes over its pixels. Both are known before anything is decoded.
"""

import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shardset.errors import ConfigError, UndecodableImage
from shardset.format.images import MAX_PIXELS
from shardset.format.images.jpeg_header import EOI, SOS, is_one_scan, segments
from shardset.per_process import PerProcess

DECODED_BYTES = 2 * 2**30
"""Default memory for the images that a process decodes at once: enough for 76 megapixels of JPEG
2000, 107 of WebP and AVIF, and 179 of any other format.
"""

MAX_SCANS = 100
"""Scans of a JPEG: encoders write about ten, and each takes as long as decoding the image once."""

# With the result: libwebp holds two canvases, Pillow a copy; a single strip of a TIFF may be the
# complete image.
_BYTES_PER_PIXEL = {"webp": 20, "tif": 12, "avif": 20, "jp2": 28}
_OTHERS, _MANY_SCANS = 8, 12
_FREE_BYTES = 32 * 2**20  # images up to this size don't wait for others

IEND = b"\0\0\0\0IEND\xaeB`\x82"
"""The end mark of a PNG."""

ANCILLARY = b"a"
"""The kinds of a PNG's chunks from here on can be left out, by the standard."""

_PNG_CHUNK = struct.Struct(">I4s")
_ORIENTING_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
_TOO_MUCH = "takes too much to decode"


def check(decoded_bytes: int) -> None:
    """Raises ConfigError unless it is a budget."""
    if type(decoded_bytes) is not int or decoded_bytes < 1:
        raise ConfigError(f"decoded_bytes is {decoded_bytes!r}, expected a number of bytes from 1")


def check_pixels(width: int, height: int) -> None:
    """Raises UndecodableImage for a size with more pixels than MAX_PIXELS."""
    if width * height > MAX_PIXELS:
        raise UndecodableImage("too many pixels", f"{width} x {height}, at most {MAX_PIXELS}")


def needed_bytes(kind: str, width: int, height: int, budget: int, num_scans: int = 1) -> int:
    """Memory that decoding an image takes, with its result.

    `kind` is its format as a field, such as `jpg`.
    Raises UndecodableImage if it is more than the budget, or if a JPEG has too many scans.
    """
    each = _MANY_SCANS if num_scans > 1 else _BYTES_PER_PIXEL.get(kind, _OTHERS)
    needed = each * width * height
    if num_scans > MAX_SCANS:
        raise UndecodableImage(_TOO_MUCH, f"{num_scans} scans, at most {MAX_SCANS}; re-encode it")
    if needed > budget:
        raise UndecodableImage(
            _TOO_MUCH,
            f"{width} x {height} pixels, which take {needed} bytes to decode, at most {budget}; "
            "re-encode it, or raise decoded_bytes",
        )
    return needed


def num_scans(jpeg: bytes) -> int:
    """The number of scans of a JPEG.

    Up to MAX_SCANS it may be too high, where metadata look like scans.
    """
    if is_one_scan(jpeg):  # nearly all; to count takes ten times as long
        return 1
    most = jpeg.count(SOS)
    return most if most <= MAX_SCANS else sum(marker == SOS for marker, *_ in segments(jpeg))


def is_cut(data: bytes, kind: str) -> bool:
    """Whether the end of an image is missing, which decoders tolerate in PNG, WebP and JPEG."""
    if kind == "png":
        return IEND not in data
    if kind == "webp":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    # Nearly all JPEGs end with their mark. Walking the segments of the others costs half a decode.
    return (
        kind == "jpg"
        and not data.endswith(EOI)
        and all(marker != EOI for marker, *_ in segments(data))
    )


def png_chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The kind of each chunk of a PNG, and where the chunk begins and ends."""
    at = 8
    while at + 12 <= len(png):
        num_bytes, kind = _PNG_CHUNK.unpack_from(png, at)
        yield kind, at, at + 12 + num_bytes
        at += 12 + num_bytes


def may_orient(png: bytes, kind: bytes, start: int) -> bool:
    """Whether a chunk of a PNG may hold an orientation: EXIF data or XMP, as Pillow finds them."""
    return kind == b"eXIf" or png.startswith(_ORIENTING_TEXTS, start + 8)


def room(needed: int, budget: int) -> AbstractContextManager[None]:
    """A context to decode an image of so many bytes in; waits until it fits next to those being
    decoded.

    A thread must not enter a second one.
    """
    return nullcontext() if needed <= _FREE_BYTES else _held(needed, budget)


class _Room:
    def __init__(self) -> None:
        self.taken = 0
        self.changed = threading.Condition()


_room_of_process = PerProcess(_Room)


@contextmanager
def _held(needed: int, budget: int) -> Iterator[None]:
    room = _room_of_process()
    with room.changed:
        room.changed.wait_for(lambda: not room.taken or room.taken + needed <= budget)
        room.taken += needed
    try:
        yield
    finally:
        with room.changed:
            room.taken -= needed
            room.changed.notify_all()
