"""JPEGs to RGB pixels by simplejpeg (libjpeg-turbo): complete, at a reduced size, or only around a
window.

A JPEG whose blocks come row by row is decoded down to the last row that a crop needs; with restart
markers, only the blocks around the crop are decoded (`jpeg_restart`).
"""

import math

import numpy as np
import simplejpeg

from shardset.decode.crops import Box, Window
from shardset.decode.jpeg_restart import Grid, cut, head
from shardset.errors import UndecodableImage
from shardset.format.images import limits
from shardset.format.images.jpeg_header import may_be_reduced

_LEAST_COLUMNS = 5
"""The width from which on libjpeg-turbo interpolates colours: it needs three halved pixels
(jdsample.c).
"""


def size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from the header; None where libjpeg-turbo can't tell."""
    header = _header(data)
    return None if header is None else header[:2]


def decode(data: bytes, least: tuple[int, int], grid: Grid | None = None) -> np.ndarray | None:
    """The image, perhaps reduced to no less than the height and width of `least`: uint8 [height,
    width, 3].

    None where libjpeg-turbo has no true RGB for it (CMYK), should not reduce it, can't read its
    header or warns; Pillow then decides. Raises UndecodableImage if its end mark is missing.
    """
    if limits.is_cut(data, "jpg"):
        raise UndecodableImage("truncated")
    header = _header(data) if grid or may_be_reduced(data) else None
    return None if header is None or header[2] in ("CMYK", "YCCK") else _turbo(data, least)


def decode_window(data: bytes, grid: Grid, box: Box, least: tuple[int, int]) -> Window | None:
    """The window of a box, the same as of the complete image at `least`, but decoded from a part of
    the JPEG.

    None if that part can't be cut out or decoded.
    """
    eighths = reduction(grid.size, least)
    # Colours are interpolated between neighbours up to two pixels of the reduced image away.
    top, left = ((at * eighths // 8 - 2) * 8 // eighths for at in (box.top, box.left))
    bottom, right = (
        -((-at * eighths // 8 - 2) * 8 // eighths)
        for at in (box.top + box.height, box.left + box.width)
    )
    part = cut(data, grid, top, left, bottom, right) if grid.run else head(data, grid, bottom)
    if part is None:
        return None
    part_size = reduced(part.size, eighths)
    if part_size[1] < _LEAST_COLUMNS:
        return None
    # Not strict for a head: libjpeg-turbo warns that data follow. Damage in it gives the same
    # pixels as in the whole.
    image = _turbo(part.data, part_size, strict=grid.run > 0)
    if image is None or image.shape[:2] != part_size:
        return None
    return window_of(image, box, eighths, (-part.top * eighths / 8, -part.left * eighths / 8))


def window_of(
    image: np.ndarray, box: Box, eighths: int = 8, shift: tuple[float, float] = (0, 0)
) -> Window:
    """The window of a box in an image that was decoded at that many eighths and begins at `shift`
    (down, right) in the decoded pixels.

    Each of them has 8 / eighths pixels of the image a side, so the last ones may reach beyond it,
    into the padding of its blocks.
    """
    top, left, height, width = (side * eighths / 8 for side in box)
    top, left = top + shift[0], left + shift[1]
    pixels = image[int(top) : math.ceil(top + height), int(left) : math.ceil(left + width)]
    return Window(pixels, (top % 1, left % 1, height, width))


def reduction(size: tuple[int, int], least: tuple[int, int]) -> int:
    """The reduction that simplejpeg chooses for `least` with a `min_factor` of 2: 1 to 4 eighths,
    or 8.
    """
    fits = (
        n for n in (1, 2, 3, 4) if all(a >= b for a, b in zip(reduced(size, n), least, strict=True))
    )
    return next(fits, 8)


def reduced(size: tuple[int, int], eighths: int) -> tuple[int, int]:
    """The (height, width) of an image decoded at that many eighths."""
    return -(-size[0] * eighths // 8), -(-size[1] * eighths // 8)


def _header(data: bytes) -> tuple[int, int, str] | None:
    """(height, width, colour space); None if libjpeg-turbo can't tell or has no name for the colour
    sampling.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # KeyError: it has no colour space
        return None
    return height, width, colours


def _turbo(
    data: bytes | bytearray, least: tuple[int, int], *, strict: bool = True
) -> np.ndarray | None:
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, "RGB", min_height=least[0], min_width=least[1], min_factor=2, strict=strict
        )
    except ValueError:
        return None
    return pixels
