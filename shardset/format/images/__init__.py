"""The rules for images that build and reader share: extensions, formats and the pixel limit."""

import re

from shardset.errors import UndecodableImage

_EXTENSIONS = {
    "jpg": "jpg jpeg jpe jfif jif pjpeg pjp mpo",
    "png": "png apng",
    "ppm": "ppm pnm",
    "pgm": "pgm",
    "pbm": "pbm",
    "bmp": "bmp dib",
    "gif": "gif",
    "webp": "webp",
    "tif": "tif tiff",
    "avif": "avif avifs",
    "jp2": "jp2 j2k j2c jpc jpf jpx",
}

FIELD_OF_EXTENSION = {name: field for field, names in _EXTENSIONS.items() for name in names.split()}
"""The field of each image extension (lower case, without the dot); the content may be of another
format.
"""

IMAGE_FIELDS = frozenset(_EXTENSIONS)
"""Fields under which the build stores images."""


def is_image_field(field: str) -> bool:
    """Whether a field holds an image: by its name, such as `jpg`, `jfif` or `left.jpg`."""
    return field.rpartition(".")[2] in FIELD_OF_EXTENSION


MAX_PIXELS = 178_956_970
"""Pillow refuses larger images by itself (twice its MAX_IMAGE_PIXELS), so no limit of ours may be
higher.
"""

_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"II\0*", "tif"),  # written in the wrong order, which Pillow tolerates
    (b"MM*\0", "tif"),
    (b"II+\0", "tif"),  # BigTIFF
    (b"MM\0+", "tif"),
    (b"\0\0\0\x0cjP  ", "jp2"),
    (b"\xff\x4f\xff\x51", "jp2"),
)
_AVIF = re.compile(b"avi[fs]")
_OTHERS = {
    b"version https://git-lfs.github.com/spec/": ("a Git LFS pointer", "run git lfs pull"),
    b"PK\3\4": ("a ZIP archive", "unpack it"),
    b"\x1f\x8b": ("gzip data", "unpack it with gunzip"),
    b"<": ("HTML or XML", "read it, then download or convert it"),
}
_NETPBM = {b"P1": "pbm", b"P2": "pgm", b"P3": "ppm", b"P4": "pbm", b"P5": "pgm", b"P6": "ppm"}


def format_of(data: bytes) -> str:
    """The format of an image by its first bytes, as a field; raises UndecodableImage if it is not
    supported.
    """
    for magic, field in _MAGIC:
        if data.startswith(magic):
            return field
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp" and _AVIF.search(data, 8, int.from_bytes(data[:4], "big")):
        return "avif"
    if data[:2] in _NETPBM and data[2:3].isspace():
        return _NETPBM[data[:2]]
    raise UndecodableImage(_why_no_image(data))


def other_file(data: bytes, expected: str) -> str:
    """A file's kind instead of the expected one, and advice; "" if its first bytes don't
    tell.
    """
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, (name, advice) in _OTHERS.items():
        if start.startswith(magic):
            return f"{name} instead of {expected}; {advice}"
    return ""


def _why_no_image(data: bytes) -> str:
    if not data:
        return "empty"
    if not any(data[:8]):
        return "zeroed header"
    if other := other_file(data, "an image"):
        return other
    if all(byte >= 32 or byte in b"\t\r\n" for byte in data[:64]):
        return "text instead of an image"
    return "unsupported format"
