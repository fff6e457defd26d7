"""Transparent images on a background: the one place where a transparent pixel gets its colour.

The build and every decoder of the reader call it, so that the same bytes give the same pixels
everywhere, as Pillow's `alpha_composite` does on an opaque background. It works in strips of rows,
so that a large image needs only the memory of its result in addition.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shardset.errors import ConfigError

if TYPE_CHECKING:  # processes that decode PNGs don't import Pillow
    from PIL import Image, ImageFile

Background = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

WHITE: Background = (255, 255, 255)

_STRIP_PIXELS = 2**18
_OPAQUE = 255 << 24  # an RGBA pixel is opaque from here on, read as one little-endian number

_ALPHA_MODES = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
"""The modes of Pillow for grey of 16 bits. A PGM of 16 bits has mode I instead."""

_GREY = SIXTEEN_BIT | {"1", "L", "LA", "La", "I"}
_NAMES = {"white": WHITE, "black": (0, 0, 0), "grey": (128, 128, 128), "gray": (128, 128, 128)}


def parse(text: str) -> Background:
    """The colour that a setting names: white, black, grey, or #rrggbb; raises ConfigError."""
    if text in _NAMES:
        return _NAMES[text]
    if re.fullmatch("#[0-9A-Fa-f]{6}", text):
        red, green, blue = bytes.fromhex(text[1:])
        return red, green, blue
    raise ConfigError(
        f"background is {text!r}, expected white, black, grey or #rrggbb, such as #f0f0f0"
    )


def check(background: Background) -> None:
    """Raises ConfigError unless it is a colour."""
    whole = isinstance(background, tuple | list) and len(background) == 3
    if not whole or not all(type(level) is int and 0 <= level <= 255 for level in background):
        raise ConfigError(
            f"background is {background!r}, expected three levels from 0 to 255, such as (255, 255,"
            " 255)"
        )


def over(pixels: np.ndarray, background: Background = WHITE) -> np.ndarray:
    """The colours of RGBA pixels on a background: uint8 [height, width, 4] -> [height, width,
    3].
    """
    height, width = pixels.shape[:2]
    out = np.empty((height, width, 3), np.uint8)
    pixels = np.ascontiguousarray(pixels)
    if np.bitwise_and.reduce(pixels.view("<u4"), axis=None) >= _OPAQUE:
        # Whole pixels are copied in a third of the time of their bytes.
        np.ndarray((height, width), "V3", out)[:] = np.ndarray(
            (height, width), "V3", pixels, 0, (4 * width, 4)
        )
        return out
    for start, stop in _strips(height, width):
        _put_over(out[start:stop], pixels[start:stop], background)
    return out


def repair_transparency(image: "ImageFile.ImageFile") -> None:
    """Converts the transparent level of a just opened PNG to the 8 bits of the pixels that Pillow
    will return.

    The level has as many bits as the pixels of the file. Pillow stretches pixels of fewer than 8
    bits, but does not convert the level. Colours of 16 bits stay: see `make_transparent`.
    """
    level = image.info.get("transparency")
    if image.format != "PNG" or level is None or not image.tile:
        return
    bits, _ = stored_bits(image.tile[0].args)
    if image.mode == "L" and isinstance(level, int):
        most = 2**bits - 1
        image.info["transparency"] = (level & most) * 255 // most
    elif image.mode == "RGB" and bits == 8:
        image.info["transparency"] = tuple(part & 0xFF for part in level)


def make_transparent(image: "Image.Image", lower: "Image.Image") -> None:
    """Gives an RGB image, the upper bytes of 16 bits, the alpha of its transparent colour, which is
    compared with all bits; `lower` has the lower bytes.
    """
    from PIL import Image

    alpha = Image.new("L", image.size)
    for start, stop in _strips(image.height, image.width):
        upper, under = (np.asarray(_rows(half, start, stop)) for half in (image, lower))
        colours = upper.astype(np.uint16) << 8 | under
        opaque = (colours != image.info["transparency"]).any(axis=2)
        alpha.paste(Image.fromarray(opaque), (0, start))
    image.putalpha(alpha)


def stored_bits(raw: object) -> tuple[int, bool]:
    """How many bits a level has in the file, and whether Pillow inverts it, by Pillow's name for
    that form, such as "L;2I"; (8, False) if that says neither.
    """
    form = str(raw).partition(";")[2]
    return int(form.rstrip("BILNR") or 8), "I" in form


def may_be_transparent(image: "Image.Image") -> bool:
    """Whether the image has an alpha channel or names a transparent colour, by its header."""
    if image.mode == "P" and image.palette is not None and image.palette.mode == "RGBA":
        return True
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def is_transparent(image: "Image.Image") -> bool:
    """Whether any pixel is not opaque; decodes the image where `may_be_transparent`."""
    if not may_be_transparent(image):
        return False
    if image.mode in _ALPHA_MODES - {"PA"}:
        return image.getextrema()[-1][0] < 255  # type: ignore[index]
    return any((strip[:, :, 3] < 255).any() for _, strip in _rgba_strips(image))


def flattened(image: "Image.Image", background: Background = WHITE) -> "Image.Image":
    """The 8-bit form of an image on a background: L if both are grey, RGB otherwise.

    16 bits become the upper 8.
    """
    from PIL import Image

    grey = image.mode in _GREY
    if not may_be_transparent(image):
        is_deep = image.mode.startswith("I")
        return Image.fromarray(_levels(image)) if is_deep else _as(image, "L" if grey else "RGB")
    grey &= len(set(background)) == 1
    out = Image.new("L" if grey else "RGB", image.size)
    for top, strip in _rgba_strips(image):
        colours = over(strip, background)
        out.paste(
            Image.fromarray(np.ascontiguousarray(colours[:, :, 0]) if grey else colours), (0, top)
        )
    return out


def rgb_pixels(image: "Image.Image", background: Background = WHITE) -> np.ndarray:
    """The pixels of an image on a background: uint8 [height, width, 3]; the upper 8 of 16 bits."""
    out = np.empty((image.height, image.width, 3), np.uint8)
    if may_be_transparent(image):
        for top, strip in _rgba_strips(image):
            _put_over(out[top : top + len(strip)], strip, background)
        return out
    for start, stop in _strips(image.height, image.width):
        out[start:stop] = np.asarray(_as(flattened(_rows(image, start, stop)), "RGB"))
    return out


def _put_over(out: np.ndarray, pixels: np.ndarray, background: Background) -> None:
    alpha = pixels[:, :, 3:]
    if (alpha == 255).all():
        out[:] = pixels[:, :, :3]
        return
    alpha = alpha.astype(np.uint16)
    mixed = pixels[:, :, :3] * alpha
    mixed += np.array(background, np.uint16) * (255 - alpha)
    mixed += 128
    mixed += mixed >> 8  # with the next line: divided by 255 and rounded
    out[:] = mixed >> 8


def _strips(height: int, width: int) -> Iterator[tuple[int, int]]:
    rows = max(1, _STRIP_PIXELS // max(1, width))
    return ((start, min(start + rows, height)) for start in range(0, height, rows))


def _rows(image: "Image.Image", start: int, stop: int) -> "Image.Image":
    image.load()
    return image if stop - start == image.height else image.crop((0, start, image.width, stop))


def _rgba_strips(image: "Image.Image") -> Iterator[tuple[int, np.ndarray]]:
    """(first row, pixels as uint8 [height, width, 4]) of each strip."""
    for start, stop in _strips(image.height, image.width):
        yield start, _rgba(_rows(image, start, stop))


def _rgba(image: "Image.Image") -> np.ndarray:
    if image.mode in SIXTEEN_BIT:
        opaque = np.asarray(image) != image.info["transparency"]
        grey = _levels(image)
        return np.stack([grey, grey, grey, opaque.astype(np.uint8) * 255], axis=2)
    if image.mode == "La":
        image = image.convert("LA")
    return np.asarray(_as(image, "RGBA"))


def _as(image: "Image.Image", mode: str) -> "Image.Image":
    return image if image.mode == mode else image.convert(mode)


def _levels(image: "Image.Image") -> np.ndarray:
    return (np.asarray(image) >> 8).astype(np.uint8)
