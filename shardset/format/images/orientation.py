"""Which way up a stored image is, by its metadata: a number from 1 (upright) to 8, as EXIF counts.

The build and every decoder of the reader ask here, so that both turn the same images, those that
Pillow's `exif_transpose` turns. Nothing is raised: of data that are cut or damaged, what precedes
the fault counts, as in Pillow. TIFFs are upright here, because Pillow turns them while it loads
them.
"""

import io
from contextlib import suppress
from typing import Any

from PIL import Image

from shardset.format.images import limits
from shardset.format.images.jpeg_header import SOS, segments
from shardset.format.images.pillow import BROKEN, ORIENTATION, plugin

UPRIGHT = 1
APP1 = b"\xff\xe1"
"""The mark of a JPEG's segments that hold EXIF data and XMP."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transpositions that make an image upright."""

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


def orientation_of(data: bytes, image: Image.Image | None = None) -> int:
    """How an image is stored: 1 (upright) to 8, as EXIF numbers it; `image` is the opened one if it
    is no JPEG or PNG.

    XMP is searched where EXIF does not say it.
    """
    if data[:2] == b"\xff\xd8":
        return _stated(_jpeg_info(data))
    if data[:4] == b"\x89PNG":
        return _stated(_png_info(data))
    return UPRIGHT if image is None or image.format == "TIFF" else _stated(image.info)


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """The (height, width), or (width, height), of a stored image once it is upright."""
    return size[::-1] if orientation >= 5 else size


def _jpeg_info(data: bytes) -> dict[Any, Any]:
    """The EXIF data and the XMP that stand before the first scan."""
    info = dict[Any, Any]()
    for kind, begin, end in segments(data):
        if kind == SOS:
            break
        if kind == APP1 and data.startswith(_EXIF, begin):
            info["exif"] = info.get("exif", b"") + data[begin + len(_EXIF) : end]
        elif kind == APP1 and data.startswith(_XMP, begin):
            info["xmp"] = data[begin:end]
    return info


def _png_info(data: bytes) -> dict[Any, Any]:
    """What Pillow makes of each chunk alone, because it refuses all if one is damaged."""
    info = dict[Any, Any]()
    for kind, start, end in limits.png_chunks(data):
        if kind >= limits.ANCILLARY and limits.may_orient(data, kind, start):
            alone = data[:33] + data[start:end] + limits.IEND  # 33: signature and IHDR
            with suppress(*BROKEN):
                info |= plugin("png")(io.BytesIO(alone)).info
    return info


def _stated(info: dict[Any, Any]) -> int:
    """The orientation that Pillow finds in the metadata of an image."""
    if not info:
        return UPRIGHT
    image = Image.Image()
    image.info = info
    with suppress(*BROKEN):
        value = image.getexif().get(ORIENTATION)
        if isinstance(value, int) and UPRIGHT <= value <= 8:
            return value
    return UPRIGHT
