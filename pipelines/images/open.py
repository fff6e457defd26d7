"""Opens images within the limits of a build, and names what is wrong in stable words.

The content determines the format of an image, never its name.
"""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from pipelines.images.options import ImageOptions
from shardset.errors import UndecodableImage
from shardset.format.images import MAX_PIXELS, limits
from shardset.format.images.background import repair_transparency

PILLOW_FORMATS = {
    "jpg": "JPEG",
    "png": "PNG",
    "gif": "GIF",
    "bmp": "BMP",
    "tif": "TIFF",
    "webp": "WEBP",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
    "avif": "AVIF",
    "ico": "ICO",
    "jp2": "JPEG2000",
}
"""Pillow's names of the supported formats, by field."""

_WRONG_VALUES = (ValueError, SyntaxError, EOFError, LookupError, TypeError, OverflowError, struct.error)
BROKEN = (OSError, RuntimeError, *_WRONG_VALUES)
"""The errors that Pillow's parsers raise for malformed images."""

GREY_MODES = frozenset({"1", "L", "LA", "La"})
SIXTEEN_BIT_MODES = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})
_COLOUR_MODES = frozenset({"RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "CMYK", "YCbCr"})

_LONGEST_SIDE = {"jpg": 65500, "webp": 16383}
"""The limits of libjpeg and libwebp in pixels."""

_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


@contextmanager
def opened(data: bytes, field: str, options: ImageOptions) -> Iterator[Image.Image]:
    """The image, not decoded yet, with the memory to decode it reserved during the block.

    Raises UndecodableImage if it is malformed or beyond the limits.
    """
    image = _header(data, field, options)
    scans = limits.num_scans(data) if field == "jpg" else 1
    if reason := limits.refusal(field, *image.size, options.decoded_bytes, scans):
        raise UndecodableImage("takes too much to decode", reason)
    with limits.room(limits.num_bytes(field, *image.size, scans), options.decoded_bytes), image:
        yield image


def _header(data: bytes, field: str, options: ImageOptions) -> Image.Image:
    if limits.is_oversized_icon(data):
        raise UndecodableImage("damaged")
    try:
        image = Image.open(io.BytesIO(data), formats=(PILLOW_FORMATS[field],))
    except (*BROKEN, Image.DecompressionBombError) as error:
        raise _undecodable(error, data, field) from error
    width, height = image.size
    if width * height > options.max_pixels:
        raise UndecodableImage("too many pixels", f"{width} x {height}, at most {options.max_pixels}")
    repair_transparency(image)
    return image


def decode_whole(image: Image.Image, data: bytes, field: str) -> None:
    """Decodes an opened image, a JPEG at an eighth of its size; raises UndecodableImage."""
    try:
        if field == "jpg":
            # Saves the transforms, which can't fail; all of the entropy-coded data is still decoded.
            image.draft(None, (1, 1))
        image.load()
    except (*BROKEN, Image.DecompressionBombError) as error:
        raise _undecodable(error, data, field) from error
    if _is_truncated(data, field):
        raise UndecodableImage("truncated")


def _undecodable(error: Exception, data: bytes, field: str) -> UndecodableImage:
    if isinstance(error, Image.DecompressionBombError):
        return UndecodableImage("too many pixels", f"more than {MAX_PIXELS}")
    # Pillow's messages contain addresses of objects, which would make the quarantine list differ between builds.
    if "MAX_TEXT" in str(error):
        return UndecodableImage("decompression bomb")
    if "truncated" in str(error).lower() or _is_truncated(data, field):
        return UndecodableImage("truncated")
    return UndecodableImage("damaged")


def _is_truncated(data: bytes, field: str) -> bool:
    """Whether the end marker is missing, which Pillow tolerates in a PNG and in a JPEG whose tail is zeros."""
    if field == "png":
        return _PNG_END not in data
    if field == "webp":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return field == "jpg" and limits.is_cut_jpeg(data)


def check_mode(mode: str, field: str) -> None:
    """Raises UndecodableImage if this Pillow mode can't be converted to 8-bit grey or RGB."""
    is_wide_grey = mode in SIXTEEN_BIT_MODES or (mode == "I" and field == "pgm")
    if mode not in GREY_MODES | _COLOUR_MODES and not is_wide_grey:
        raise UndecodableImage("no 8-bit form", f"mode {mode}")


def check_sides(size: tuple[int, int], field: str) -> None:
    """Raises UndecodableImage if the format `field` can't have this size."""
    longest = _LONGEST_SIDE.get(field, MAX_PIXELS)
    if max(size) > longest:
        raise UndecodableImage(f"too large for {field}", f"{size[0]} x {size[1]}, at most {longest} a side")
