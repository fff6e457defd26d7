"""Image files opened by Pillow: whether bytes are a complete image, and if not, why.

The build, `verify`, the Writer, the reader, `predict` and the report ask here, so that they accept
the same files. The reader has faster decoders for most JPEGs and PNGs; the others come here too.
The content determines the format of an image, never its name. Metadata never decides about pixels.
"""

import importlib
import io
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from PIL import Image
from PIL.ImageFile import ImageFile

from shardset.errors import UndecodableImage
from shardset.format.images import limits
from shardset.format.images.background import SIXTEEN_BIT, make_transparent, repair_transparency
from shardset.format.images.jpeg_header import frame_of, may_be_reduced

PLUGINS = {
    "jpg": "Jpeg",
    "png": "Png",
    "gif": "Gif",
    "bmp": "Bmp",
    "tif": "Tiff",
    "webp": "WebP",
    "ppm": "Ppm",
    "pgm": "Ppm",
    "pbm": "Ppm",
    "avif": "Avif",
    "jp2": "Jpeg2K",
}
"""The plugin of Pillow that reads each format, by field."""

BROKEN = (
    *(OSError, RuntimeError, EOFError, Image.DecompressionBombError, struct.error, zlib.error),
    *(ValueError, SyntaxError, LookupError, TypeError, OverflowError),
)
"""What Pillow raises for malformed images, depending on the plugin."""

_UNSUPPORTED = re.compile(
    "unknown|unsupported|cannot handle|not supported|string index",  # the last: bands apart
    re.IGNORECASE,
)
_MODES = SIXTEEN_BIT | {
    *("1", "L", "LA", "La", "P", "PA"),
    *("RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB"),
}
"""The modes that have an 8-bit form, with I for a PGM of 16 bits."""

ORIENTATION = 0x0112
"""The tag of EXIF and TIFF."""


_WIDE = {"F": "floating-point numbers", "I": "signed numbers or numbers of 32 bits"}


@cache
def plugin(field: str) -> type[ImageFile]:
    """The class of Pillow that reads a format."""
    name = PLUGINS[field]
    module = importlib.import_module(f"PIL.{name}ImagePlugin")
    plugin: type[ImageFile] = getattr(module, f"{name}ImageFile")
    return plugin


@contextmanager
def opened(data: bytes, field: str, decoded_bytes: int) -> Iterator[ImageFile]:
    """The image, not decoded yet, with the memory to decode it reserved during the block.

    Raises UndecodableImage if `header` does or if the image is beyond the limits.
    """
    image = header(data, field)
    scans = limits.num_scans(data) if field == "jpg" else 1
    needed = limits.needed_bytes(field, *image.size, decoded_bytes, scans)
    with limits.room(needed, decoded_bytes), image:
        yield image


def header(data: bytes, field: str) -> ImageFile:
    """The image, not decoded yet; `field` is its format by `format_of`.

    Raises UndecodableImage if it is malformed, has more than MAX_PIXELS, or has no 8-bit form.
    """
    try:
        image = plugin(field)(io.BytesIO(_without_metadata(data) if field == "png" else data))
        if field == "tif":
            tags = image.getexif()
            if tags.get(ORIENTATION) in (5, 6, 7, 8):
                # Pillow turns it while it loads it; where only XMP says so, its size comes late.
                image._size = tags[0x0101], tags[0x0100]
            if (bands := tags.get(0x0115, 1)) > 4:
                raise ValueError(f"{bands} bands are not supported, at most 4")
    except BROKEN as error:
        raise _refusal(error, data, field) from error
    limits.check_pixels(*image.size)
    if image.mode not in _MODES and not (image.mode == "I" and field == "pgm"):
        pixels = f"its pixels are {_WIDE.get(image.mode, image.mode)}"
        raise UndecodableImage("no 8-bit form", f"{pixels}; convert them to levels of 8 or 16 bits")
    repair_transparency(image)
    return image


def reduce(
    image: ImageFile, data: bytes, field: str, size: tuple[int, int]
) -> tuple[float, float, float, float] | None:
    """Has an opened JPEG decoded at no less than `size`, if its frame allows that.

    Returns the box (left, top, right, bottom) that is the image in its decoded pixels, or None if
    it stays as large as it is.
    """
    if field != "jpg" or not may_be_reduced(data):
        return None
    draft = image.draft(None, size)
    return draft and draft[1]


def load(image: ImageFile, data: bytes, field: str) -> None:
    """Decodes the opened image; raises UndecodableImage if it is damaged or incomplete."""
    tiles = image.tile
    try:
        image.load()
        if "transparency" in image.info and tiles[0].args == "RGB;16B":
            with header(data, field) as lower:
                lower.tile = [tiles[0]._replace(args="RGB;16L")]  # bytes swapped
                lower.load()
            make_transparent(image, lower)
    except BROKEN as error:
        raise _refusal(error, data, field) from error
    if limits.is_cut(data, field):
        raise UndecodableImage("truncated")


def _refusal(error: Exception, data: bytes, field: str) -> UndecodableImage:
    said = str(error)
    if said.isdigit():  # such as the number of a compression of TIFF
        said = f"unknown code {said}"
    if "truncated" in said.lower() or limits.is_cut(data, field):
        return UndecodableImage("truncated")
    if field == "jpg" and not may_be_reduced(data) and (frame := frame_of(data)):
        said = f"unsupported: {frame[0]} of {frame[1]} bits"
    if _UNSUPPORTED.search(said):
        return UndecodableImage("unsupported format", said)
    # Other messages may hold addresses of objects; quarantine lists of two builds would differ.
    return UndecodableImage("damaged")


def _without_metadata(data: bytes) -> bytes:
    """A PNG with only the chunks of its pixels; Pillow refuses some images for other chunks."""
    kept, rest = [], 0
    for kind, start, end in limits.png_chunks(data):
        if kind >= limits.ANCILLARY and kind != b"tRNS":
            kept.append(data[rest:start])
            rest = end
    return b"".join([*kept, data[rest:]]) if kept else data
