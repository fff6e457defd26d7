"""Which way up a stored image is, by its EXIF data: a number from 1 (upright) to 8.

The build and every decoder of the reader ask here, so that both turn the same images, those that
Pillow's `exif_transpose` turns. Nothing is raised: of data that are cut or damaged, what precedes
the fault counts, as in Pillow. TIFFs are upright here, because Pillow turns them while it loads
them.
"""

import re
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that decode PNGs don't import Pillow
    from PIL import Image

UPRIGHT = 1
APP1 = b"\xff\xe1"
"""The mark of a JPEG's segments that hold EXIF data and XMP."""

_SOS = 0xDA
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_CHUNK = struct.Struct(">I4s")
_TAG = 0x0112
_ORDERS = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_NUMBERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I"}


def orientation_of(data: bytes, image: "Image.Image | None" = None) -> int:
    """How an image is stored: 1 (upright) to 8, as EXIF numbers it; `image` is the opened one if it
    is no JPEG or PNG.

    XMP is searched where EXIF does not say it.
    """
    exif, xmp = b"", b""
    if data[:2] == b"\xff\xd8":
        exif, xmp = _in_jpeg(data)
    elif data[:4] == b"\x89PNG":
        exif = _in_png(data)
    elif image is not None and image.format != "TIFF":
        exif, xmp = image.info.get("exif", b""), image.info.get("xmp", b"")
    stated = _in_exif(exif)
    if stated is None and (match := _IN_XMP.search(xmp)):
        stated = int(match[1])
    return stated if stated and UPRIGHT <= stated <= 8 else UPRIGHT


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


def _in_png(data: bytes) -> bytes:
    at = 8
    while at + 12 <= len(data):
        num_bytes, kind = _CHUNK.unpack_from(data, at)
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + num_bytes]
        at += 12 + num_bytes
    return b""


def _in_exif(exif: bytes) -> int | None:
    """The orientation in the first directory of EXIF data; None if it has none, 0 if that can't be
    understood.
    """
    start, stated = 0, None
    while exif.startswith(_EXIF, start):
        start += len(_EXIF)
    exif = exif[start:]
    order = _ORDERS.get(exif[:4])
    if order is None or len(exif) < 8:
        return 0 if exif else None
    with suppress(struct.error):
        [first] = struct.unpack_from(f"{order}I", exif, 4)
        [num_entries] = struct.unpack_from(f"{order}H", exif, first)
        for at in range(first + 2, first + 2 + 12 * num_entries, 12):
            tag, kind, count, place = struct.unpack_from(f"{order}HHII", exif, at)
            size = count * _SIZES.get(kind, 0)
            if size > 4 and place + size > len(exif):
                break  # Pillow reads no further
            if tag == _TAG and size:
                where = place if size > 4 else at + 8
                stated = (
                    struct.unpack_from(order + _NUMBERS[kind], exif, where)[0]
                    if kind in _NUMBERS
                    else 0
                )
    return stated
