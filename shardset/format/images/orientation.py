"""Which way up a stored image is, by its EXIF data: a number from 1 (upright) to 8.

The build and every decoder of the reader ask here, so that both turn the same images, those that
Pillow's `exif_transpose` turns. Nothing is raised: of data that are cut or damaged, what precedes
the fault counts, as in Pillow. TIFFs are upright here, because Pillow turns them while it loads
them.
"""

from contextlib import suppress

from PIL import Image

from shardset.format.images.limits import png_chunks
from shardset.format.images.pillow import BROKEN

UPRIGHT = 1
APP1 = b"\xff\xe1"
"""The mark of a JPEG's segments that hold EXIF data and XMP."""

_SOS = 0xDA
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_TAG = 0x0112


def orientation_of(data: bytes, image: Image.Image | None = None) -> int:
    """How an image is stored: 1 (upright) to 8, as EXIF numbers it; `image` is the opened one if it
    is no JPEG or PNG.

    XMP is searched where EXIF does not say it.
    """
    exif, xmp = b"", b""
    if data[:2] == b"\xff\xd8":
        exif, xmp = _in_jpeg(data)
    elif data[:4] == b"\x89PNG":
        chunks = (
            data[start + 8 : end - 4] for kind, start, end in png_chunks(data) if kind == b"eXIf"
        )
        exif = next(chunks, b"")
    elif image is not None and image.format != "TIFF":
        exif, xmp = image.info.get("exif", b""), image.info.get("xmp", b"")
    return _stated(exif, xmp) if exif or xmp else UPRIGHT


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """The (height, width), or (width, height), of a stored image once it is upright."""
    return size[::-1] if orientation >= 5 else size


def _in_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """The EXIF data and the XMP that stand before the first scan."""
    exif, xmp, at = [], b"", 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SOS:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == APP1[1]:
            if data.startswith(_EXIF, at + 4):
                exif.append(data[at + 10 : end])
            elif data.startswith(_XMP, at + 4):
                xmp = data[at + 4 : end]
        at = end
    return b"".join(exif), xmp


def _stated(exif: bytes, xmp: bytes) -> int:
    """The orientation that Pillow finds in the metadata of an image."""
    image = Image.Image()
    image.info = {"exif": exif, "xmp": xmp}
    with suppress(*BROKEN):
        found = image.getexif().get(_TAG)
        if isinstance(found, int) and UPRIGHT <= found <= 8:
            return found
    return UPRIGHT
