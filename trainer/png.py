"""8-bit PNGs to RGB pixels; imports no more than that needs, because processes are started for it.

kornia_rs (Rust's png) decodes RGB in little more than half the time of pyspng (libspng), which converts all others.
"""

import numpy as np
import pyspng
from kornia_rs import io as kornia

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = slice(8, 16)
_HEADER_BEGINS = b"\0\0\0\x0dIHDR"
_RGB = 2
_ANIMATED = b"acTL"
_END = b"\0\0\0\0IEND\xaeB`\x82"


def is_png(data: bytes) -> bool:
    """Whether they begin as a PNG does, so that `size` can tell."""
    return data[:8] == _SIGNATURE and len(data) >= 26


def size(data: bytes) -> tuple[int, int]:
    """(height, width) as a PNG's header claims them."""
    return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")


def decode(data: bytes) -> np.ndarray | None:
    """The image of a PNG, uint8 [height, width, 3], alpha dropped; None if it is cut, damaged or not 8-bit.

    None also of animated ones. What a header may claim is for the caller to check.
    """
    if data[24] != 8 or data[_HEADER] != _HEADER_BEGINS or _ANIMATED in data or not _fits_together(data):
        return None
    try:
        if data[25] == _RGB:
            return kornia.decode_image_png_u8(data, size(data), "rgb")
        return pyspng.load(data, "RGB")
    except Exception:  # noqa: BLE001 - kornia_rs knows no narrower one
        return None


def _fits_together(data: bytes) -> bool:
    """Whether its chunks end where it ends: libspng may allocate what one claims, kornia_rs overlook it."""
    at = 8
    while at + 12 <= len(data):
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return at == len(data) and data.endswith(_END)
