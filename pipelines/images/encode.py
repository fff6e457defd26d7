"""Pure: the raw bytes of an image -> what it is, and the bytes that are stored. Pillow does the work.

An image is what its content says, never what its name says. Without options the stored bytes are the raw bytes;
the one exception is a CMYK JPEG, which no training decoder reads right and which becomes an RGB JPEG.

Re-encoding (`resize_shorter`, `image_format`, the CMYK fix) follows these rules, so that two builds agree: the first
frame; 16-bit samples keep their high byte; palettes are looked up; what is transparent is put on `background`, as the
reader does; EXIF orientation is applied; the result is grey (L) or RGB. The shorter side becomes `resize_shorter` by
Lanczos and the longer side keeps the aspect ratio; an image that is already that small is not enlarged, and not touched
unless its format changes or EXIF turns it. Where images are resized, gif, bmp and tif become png and pbm becomes pgm,
large or small, so that the field of a sample is known before its size. JPEG is written with 4:2:0 subsampling, neither
progressive nor optimised; PNG with zlib level 6; WebP lossy, method 4. No metadata is written: no EXIF, no comment, no
ICC profile.

`jpeg_restart` comes last: the entropy-coded data of every stored JPEG is written anew with restart markers, without
loss (see restarts.py).
"""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from PIL import ExifTags, Image, ImageChops, features

from pipelines.images import jpeg_restart as restarts
from shardset.errors import ConfigError, UndecodableImage
from shardset.format import background as backgrounds
from shardset.format import limits
from shardset.format.background import (
    WHITE,
    Background,
    flattened,
    is_transparent,
    may_be_transparent,
    mend_transparency,
)
from shardset.format.images import IMAGE_FIELDS, MAX_PIXELS
from shardset.format.limits import DECODED_BYTES

Verify = Literal["decode", "header", "none"]
ImageFormat = Literal["keep", "jpg", "png", "ppm", "webp"]

CMYK_TO_RGB = "cmyk-to-rgb"

ALPHA_TO_BACKGROUND = "alpha-to-background"
"""The fix of a transparent image that is re-encoded: nothing of it is transparent afterwards."""

TRANSPARENT = "transparent"
"""The mark of a transparent image that is stored as it is: no fix, but counted."""

_AND = "+"
"""Between the marks of one image."""

_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
_NETPBM = {b"P1": "pbm", b"P2": "pgm", b"P3": "ppm", b"P4": "pbm", b"P5": "pgm", b"P6": "ppm"}
_READERS = {
    "jpg": "JPEG",
    "png": "PNG",
    "gif": "GIF",
    "bmp": "BMP",
    "tif": "TIFF",
    "webp": "WEBP",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
}
_LONGEST_SIDE = {"jpg": 65500, "webp": 16383}
"""In pixels, what libjpeg and libwebp write."""

_ALIASES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif", "dib": "bmp"}
_REWRITTEN_AS = {"gif": "png", "bmp": "png", "tif": "png", "pbm": "pgm"}
_TO_GREY = {"1", "L", "LA", "La"}
_TO_RGB = {"RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "CMYK", "YCbCr"}
_SIXTEEN_BIT = {"I;16", "I;16B", "I;16L", "I;16N"}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_REDUCING_GAP = 3.0
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
# What Pillow's parsers raise on bytes that are not what they seem.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """What becomes of images. The default stores them byte for byte.

    `resize_shorter` is in pixels, `quality` (1 to 100) is that of JPEG and WebP where something is re-encoded, and
    images of more than `max_pixels` are refused before they are decoded, as are those that take more than
    `decoded_bytes` of memory; a process decodes as many at once as fit those. `jpeg_restart` rewrites JPEGs without
    loss, so that readers can decode the part that a crop needs. `background` is what transparent images that are
    re-encoded are put on.
    """

    resize_shorter: int | None = None
    quality: int = 95
    image_format: ImageFormat = "keep"
    max_pixels: int = MAX_PIXELS
    jpeg_restart: bool = False
    background: Background = WHITE
    decoded_bytes: int = DECODED_BYTES

    def __post_init__(self) -> None:
        if self.resize_shorter is not None and self.resize_shorter < 1:
            raise ConfigError(
                f"resize shorter={self.resize_shorter}: expected at least 1 pixel, for example shorter=256"
            )
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"quality {self.quality}: expected 1 to 100, for example 95")
        if self.image_format not in ("keep", "jpg", "png", "ppm", "webp"):
            raise ConfigError(f"image format {self.image_format!r}: expected keep, jpg, png, ppm or webp")
        if not 1 <= self.max_pixels <= MAX_PIXELS:
            raise ConfigError(f"max_pixels {self.max_pixels}: expected 1 to {MAX_PIXELS}, the limit of the decoder")
        limits.check(self.decoded_bytes)
        backgrounds.check(self.background)
        if self.background != WHITE and not self.reencodes:
            raise ConfigError(
                "--background is for images that are re-encoded, and none is; add --resize or --image-format, or set "
                "image.background in training, which puts stored images on it"
            )

    @property
    def reencodes(self) -> bool:
        """Whether the pixels of images that need no fix may be encoded again."""
        return self.resize_shorter is not None or self.image_format != "keep"


@dataclass(frozen=True, slots=True)
class Examined:
    """What an image is: its field by content, size in pixels and Pillow mode (0, 0 and "" if not looked at).

    `fix` is "" or what is put right, joined by `+`: `cmyk-to-rgb`, `alpha-to-background`, or `renamed-png` where the
    content is a PNG under another name. `transparent`: it is stored so.
    """

    field: str
    width: int
    height: int
    mode: str
    fix: str
    transparent: bool = False

    @property
    def marks(self) -> str:
        """What the plan keeps of it: its fix, and whether it is stored with transparency; see `marks_of`."""
        return _AND.join(filter(None, [self.fix, TRANSPARENT if self.transparent else ""]))


@dataclass(frozen=True, slots=True)
class Miniature:
    """A small upright version of an image, 8-bit L or RGB on white, and of the image itself the size as stored."""

    pixels: Image.Image
    width: int
    height: int
    transparent: bool


def marks_of(fix: str) -> list[str]:
    """The marks that the plan keeps of an image, one by one."""
    return fix.split(_AND) if fix else []


def fixes_of(fix: str) -> list[str]:
    """The marks of an image that say what is put right."""
    return [mark for mark in marks_of(fix) if mark != TRANSPARENT]


def examine(data: bytes, *, field: str, verify: Verify, options: ImageOptions) -> Examined:
    """What the image is that came under the extension `field`; raises UndecodableImage if it can't be a sample.

    `decode` decodes all of it, which alone finds truncation (0.8 ms for a 110 KB JPEG, of whose data all is decoded
    but at an eighth of the size); `header` parses the header (0.03 ms); `none` looks at the first bytes only, and
    believes `field` where `data` is empty. A CMYK JPEG and a transparent image are found by `decode` and `header`, not
    by `none`; `header` takes an alpha channel for transparency.
    """
    wanted = _ALIASES.get(field.lower(), field.lower())
    if verify == "none" and not data:
        return Examined(wanted, 0, 0, "", "")
    kind = _kind(data)
    if verify == "none":
        return Examined(kind, 0, 0, "", _fix(kind, wanted, "", options))
    with _opened(data, kind, options) as image:
        (width, height), mode = image.size, image.mode
        field = stored_field(kind, options)
        if options.reencodes:
            _check_eight_bit(mode, kind)
            _check_sides(_resized(image.size, options.resize_shorter), field)
        stays = not options.reencodes or _stays(image, kind, field, options)
        if verify == "decode":
            _decode_whole(image, data, kind)
        transparent = _is_transparent(image) if verify == "decode" else may_be_transparent(image)
        fixes = [_fix(kind, wanted, mode, options), ALPHA_TO_BACKGROUND if transparent and not stays else ""]
    return Examined(kind, width, height, mode, _AND.join(filter(None, fixes)), transparent and stays)


def encode(data: bytes, examined_field: str, fix: str, options: ImageOptions) -> tuple[str, bytes]:
    """(`stored_field`, content) for an image that `examine` found good; the bytes as they are if nothing is asked.

    An image that was not examined may be of another kind than its field says; one whose field is no image's gets that
    of its content where it is encoded. Raises UndecodableImage for an image that `examine` would have refused with
    verify="decode".
    """
    field, content = _encoded(data, examined_field, fix, options)
    return field, restarts.with_restarts(content) if options.jpeg_restart and field == "jpg" else content


def stored_field(examined_field: str, options: ImageOptions) -> str:
    """The extension under which `encode` stores an image, whatever its size."""
    if options.image_format != "keep":
        return options.image_format
    return examined_field if options.resize_shorter is None else _REWRITTEN_AS.get(examined_field, examined_field)


def libraries(options: ImageOptions) -> dict[str, str]:
    """The libraries that decide the bytes of an image that is written anew, with their versions."""
    found = {
        "pillow": features.version("pil"),
        "libjpeg-turbo": features.version_feature("libjpeg_turbo"),
        "libjpeg": features.version_codec("jpg"),
        "zlib": features.version_codec("zlib"),
        "zlib-ng": features.version_feature("zlib_ng"),
        "libwebp": features.version_module("webp"),
        **(restarts.libraries() if options.jpeg_restart else {}),
    }
    if found["libjpeg-turbo"]:
        del found["libjpeg"]
    return {name: version for name, version in found.items() if version}


def _encoded(data: bytes, examined_field: str, fix: str, options: ImageOptions) -> tuple[str, bytes]:
    if not options.reencodes and fix != CMYK_TO_RGB:
        return examined_field, data
    # An image that was not examined has the field that its name says, or one that says nothing.
    kind = _kind(data)
    field = stored_field(examined_field if examined_field in IMAGE_FIELDS else kind, options)
    if field == kind and fix != CMYK_TO_RGB and options.resize_shorter is None:
        return field, data
    with _opened(data, kind, options) as image:
        if fix != CMYK_TO_RGB and _stays(image, kind, field, options):
            return field, data
        size = _resized(image.size, options.resize_shorter)
        _check_sides(size, field)
        return field, _written(_pixels(image, size, kind, options.background), field, options.quality)


def _stays(image: Image.Image, kind: str, field: str, options: ImageOptions) -> bool:
    """Whether an image that needs no fix is stored byte for byte although images are re-encoded."""
    if field != kind:
        return False
    small = _resized(image.size, options.resize_shorter) == image.size
    return small and (options.resize_shorter is None or _orientation(image) not in _TURNS)


def thumbnail_of(data: bytes, longest: int) -> Miniature:
    """An image with no side above `longest`; raises UndecodableImage."""
    kind = _kind(data)
    with _opened(data, kind, ImageOptions()) as image:
        width, height = image.size
        share = min(1.0, longest / max(width, height))
        pixels = _pixels(image, (max(1, round(width * share)), max(1, round(height * share))), kind)
        return Miniature(pixels, width, height, _is_transparent(image))


def _is_transparent(image: Image.Image) -> bool:
    try:
        return is_transparent(image)
    except _BROKEN as error:
        raise UndecodableImage("damaged") from error


def _kind(data: bytes) -> str:
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:2] in _NETPBM and data[2:3].isspace():
        return _NETPBM[data[:2]]
    raise UndecodableImage(_why_no_image(data))


def _why_no_image(data: bytes) -> str:
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not data:
        return "empty"
    if not any(data[:8]):
        return "zeroed header"
    if start.startswith(b"<"):
        return "HTML or XML instead of an image"
    if all(byte >= 32 or byte in b"\t\r\n" for byte in data[:64]):
        return "text instead of an image"
    return "unsupported format"


def _fix(kind: str, wanted: str, mode: str, options: ImageOptions) -> str:
    if kind == "jpg" and mode == "CMYK":
        return CMYK_TO_RGB
    named_right = wanted in ("", kind) or (wanted == "pnm" and _READERS[kind] == "PPM")
    return "" if named_right or options.image_format != "keep" else f"renamed-{kind}"


@contextmanager
def _opened(data: bytes, kind: str, options: ImageOptions) -> Iterator[Image.Image]:
    """The image within the limits, not decoded yet; in the block it has the memory for that."""
    image = _header(data, kind, options)
    scans = limits.num_scans(data) if kind == "jpg" else 1
    if why := limits.refusal(kind, *image.size, options.decoded_bytes, scans):
        raise UndecodableImage("takes too much to decode", why)
    with limits.room(limits.num_bytes(kind, *image.size, scans), options.decoded_bytes), image:
        yield image


def _header(data: bytes, kind: str, options: ImageOptions) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=(_READERS[kind],))
    except Image.DecompressionBombError as error:
        raise UndecodableImage("too many pixels", f"more than {MAX_PIXELS}") from error
    except _BROKEN as error:
        raise _undecodable(error, data, kind) from error
    width, height = image.size
    if width * height > options.max_pixels:
        raise UndecodableImage("too many pixels", f"{width} x {height}, at most {options.max_pixels}")
    mend_transparency(image)
    return image


def _decode_whole(image: Image.Image, data: bytes, kind: str) -> None:
    try:
        if kind == "jpg":
            # All of the entropy-coded data is still decoded; what is left out for an eighth of the size can't fail.
            image.draft(None, (1, 1))
        image.load()
    except Image.DecompressionBombError as error:
        raise UndecodableImage("too many pixels", f"more than {MAX_PIXELS}") from error
    except _BROKEN as error:
        raise _undecodable(error, data, kind) from error
    if _is_cut(data, kind):
        raise UndecodableImage("truncated")


def _undecodable(error: Exception, data: bytes, kind: str) -> UndecodableImage:
    # Only our own words go into the reason: Pillow's name objects by address, and a quarantine list must not change.
    if "MAX_TEXT" in str(error):
        return UndecodableImage("decompression bomb")
    if "truncated" in str(error).lower() or _is_cut(data, kind):
        return UndecodableImage("truncated")
    return UndecodableImage("damaged")


def _is_cut(data: bytes, kind: str) -> bool:
    """Whether the end mark is missing: Pillow does without it in a PNG, and in a JPEG whose tail is zeroed."""
    if kind == "png":
        return _PNG_END not in data
    if kind == "webp":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return kind == "jpg" and limits.is_cut_jpeg(data)


def _check_eight_bit(mode: str, kind: str) -> None:
    wide_grey = mode in _SIXTEEN_BIT or (mode == "I" and kind == "pgm")
    if mode not in _TO_GREY | _TO_RGB and not wide_grey:
        raise UndecodableImage("no 8-bit form", f"mode {mode}")


def _check_sides(size: tuple[int, int], field: str) -> None:
    longest = _LONGEST_SIDE.get(field, MAX_PIXELS)
    if max(size) > longest:
        raise UndecodableImage(f"too large for {field}", f"{size[0]} x {size[1]}, at most {longest} a side")


def _resized(size: tuple[int, int], shorter: int | None) -> tuple[int, int]:
    if shorter is None or min(size) <= shorter:
        return size
    width, height = (_round_half_up(side * shorter, min(size)) for side in size)
    return width, height


def _round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _pixels(image: Image.Image, size: tuple[int, int], kind: str, background: Background = WHITE) -> Image.Image:
    """The upright image as 8-bit L or RGB with its sides resized to `size` (as stored, before it is turned)."""
    _check_eight_bit(image.mode, kind)
    box: Any = None
    try:
        turn = _TURNS.get(_orientation(image))
        if size != image.size and (draft := image.draft(None, _times(size, _REDUCING_GAP))):
            box = draft[1]
        image.load()
        opaque = flattened(image, background)
    except _BROKEN as error:
        raise UndecodableImage("damaged") from error
    pixels = _eight_bit(opaque)
    if size != pixels.size:
        pixels = pixels.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=_REDUCING_GAP)
    return pixels.transpose(turn) if turn is not None else pixels


def _times(size: tuple[int, int], factor: float) -> tuple[int, int]:
    return int(size[0] * factor), int(size[1] * factor)


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":
        return 1  # Pillow turns a TIFF while it loads it
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _BROKEN:
        return 1  # broken EXIF means no orientation to every reader; the pixels are what counts
    return value if isinstance(value, int) else 1


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode in _SIXTEEN_BIT:
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Pillow takes every CMYK JPEG for inverted, as Adobe writes it; without Adobe's mark it is not.
        image = ImageChops.invert(image)
    wanted = "L" if image.mode in _TO_GREY else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


def _written(pixels: Image.Image, field: str, quality: int) -> bytes:
    bare = pixels.convert("RGB") if field == "ppm" and pixels.mode != "RGB" else pixels
    bare.info = {}
    buffer = io.BytesIO()
    bare.save(buffer, _READERS[field], **_settings(field, quality))
    return buffer.getvalue()


def _settings(field: str, quality: int) -> dict[str, Any]:
    if field == "jpg":
        return {"quality": quality, "subsampling": "4:2:0", "progressive": False, "optimize": False}
    if field == "webp":
        return {"quality": quality, "lossless": False, "method": 4}
    return {"compress_level": 6, "optimize": False} if field == "png" else {}
