"""Images as they turn up in the wild, small and always the same: `make(name)` gives (extension by
name, bytes).
"""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

SIZE = (48, 32)
ORIENTATION = 0x0112
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
)


def picture(seed: int = 0, size: tuple[int, int] = SIZE) -> Image.Image:
    """A smooth RGB picture of `size` (width, height) that depends on the seed alone."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, image_format: str, **options) -> bytes:
    """The bytes of `image` in a Pillow format."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def jpeg(seed: int = 0, **options) -> bytes:
    """A small JPEG."""
    return encoded(picture(seed), "JPEG", quality=90, **options)


def png(seed: int = 0) -> bytes:
    """A small PNG."""
    return encoded(picture(seed), "PNG")


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A PNG chunk with its length and checksum."""
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_of(width: int, height: int, *chunks: bytes, bits: int = 8, colour: int = 0) -> bytes:
    """A PNG of any claimed size, made of the given chunks between its header and its end; grey
    unless another type of colour is given.
    """
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def oversized() -> bytes:
    """A PNG whose header claims 30000 x 30000 pixels, and which holds none.

    A complete one has 110 KB, and a decoder without a limit needs most of a GiB for it.
    """
    return png_of(30000, 30000, png_chunk(b"IDAT", b""), bits=1)


def cmyk(*, marked: bool = True) -> bytes:
    """A CMYK JPEG of the picture, as Adobe inverts it, with Adobe's segment or without it."""
    inks = Image.merge(
        "CMYK",
        [*(band.point(lambda v: 255 - v) for band in picture().split()), Image.new("L", SIZE)],
    )
    data = encoded(inks, "JPEG", quality=95)
    return data if marked else without_adobe(data)


def without_adobe(data: bytes) -> bytes:
    """A JPEG without its APP14 segment."""
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


def exif_rotated(orientation: int = 6) -> bytes:
    """A JPEG that asks to be turned."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return jpeg(exif=exif)


def sixteen_bit() -> Image.Image:
    """A 16-bit grey ramp over the whole range."""
    return Image.fromarray(
        np.linspace(0, 65535, SIZE[0] * SIZE[1]).astype(np.uint16).reshape(SIZE[::-1])
    )


def animated_gif() -> bytes:
    """A GIF of three frames."""
    return encoded(picture(0), "GIF", save_all=True, append_images=[picture(1), picture(2)])


def with_alpha() -> bytes:
    """An RGBA PNG, half of it transparent."""
    image = picture().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(SIZE))
    return encoded(image, "PNG")


FIXED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "cmyk jpeg": ("jpg", cmyk, "cmyk-to-rgb"),
    "cmyk jpeg without a mark": ("jpg", lambda: cmyk(marked=False), "cmyk-to-rgb"),
    "png named jpeg": ("JPEG", png, "renamed-png"),
    "jpeg named png": ("png", jpeg, "renamed-jpg"),
    "gif named jpg": ("jpg", animated_gif, "renamed-gif"),
}
"""Kept, put right and counted. Name -> (extension, maker, fix)."""

BAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "empty": ("jpg", lambda: b"", "empty"),
    "truncated jpeg": ("jpg", lambda: jpeg()[:-100], "truncated"),
    "truncated progressive jpeg": ("jpg", lambda: jpeg(progressive=True)[:-60], "truncated"),
    "jpeg without its last byte": ("jpg", lambda: jpeg()[:-1], "truncated"),
    "jpeg with a zeroed tail": ("jpg", lambda: jpeg()[:-8] + bytes(8), "truncated"),
    "truncated png": ("png", lambda: png()[: len(png()) // 2], "truncated"),
    "png without its last byte": ("png", lambda: png()[:-1], "truncated"),
    "truncated webp": ("webp", lambda: encoded(picture(), "WEBP")[:-5], "truncated"),
    "truncated ppm": ("ppm", lambda: encoded(picture(), "PPM")[:-1], "truncated"),
    "html": (
        "jpg",
        lambda: b"<!DOCTYPE html>",
        "HTML or XML instead of an image; read it, then download or convert it",
    ),
    "lfs": ("jpg", lambda: LFS_POINTER, "a Git LFS pointer instead of an image; run git lfs pull"),
    "zip": ("jpg", lambda: b"PK\3\4" + bytes(30), "a ZIP archive instead of an image; unpack it"),
    "text": ("jpg", lambda: b"404 not found\n", "text instead of an image"),
    "zeroed header": ("jpg", lambda: bytes(512) + jpeg()[512:], "zeroed header"),
    "all zero": ("jpg", lambda: bytes(4096), "zeroed header"),
    "oversized": ("png", oversized, "too many pixels"),
    "cursor": ("jpg", lambda: b"\0\0\2\0" + bytes(range(1, 200)), "unsupported format"),
    "broken png": ("png", lambda: png()[:60] + bytes(40) + png()[100:], "damaged"),
}
"""Quarantined. Name -> (extension, maker, reason)."""


def make(name: str) -> tuple[str, bytes]:
    """(extension by name, content) of one of the images above."""
    extension, maker = {**FIXED, **BAD}[name][:2]
    return extension, maker()
