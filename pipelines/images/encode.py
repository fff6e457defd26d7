"""Encodes an image for storage with Pillow, if the options or a fix require it.

Without options the stored bytes are the raw bytes, with one exception: a CMYK JPEG, which training
decoders misread, becomes an RGB JPEG.

Re-encoding (`resize_shorter`, `image_format`, the CMYK fix) follows these rules, so that two builds
agree:
- Only the first frame is stored. 16-bit values keep their high byte. Palettes are resolved.
  Transparent pixels are put on `background`, as in the reader. EXIF orientation is applied. The
  result is grey (L) or RGB.
- The shorter side becomes `resize_shorter` by Lanczos; the aspect ratio stays. A smaller image is
  not enlarged. Its bytes stay the same unless its format changes or EXIF turns it.
- If images are resized, gif, bmp and tif become png, and pbm becomes pgm, whatever their size, so
  that the field of a sample is known before its size.
- JPEG is written with 4:2:0 subsampling, neither progressive nor optimised; PNG with zlib level 6;
  WebP lossy with method 4.
- No metadata is written: no EXIF, no comment, no ICC profile.
- `jpeg_restart` comes last: every stored JPEG gets restart markers, without loss (see
  restart_markers.py).
"""

import io
from dataclasses import dataclass
from typing import Any

from PIL import Image, features
from PIL.ImageFile import ImageFile

from pipelines.images import restart_markers
from pipelines.images.check import check_sides, is_stored_unchanged, marks_of
from pipelines.images.options import CMYK_TO_RGB, DEFAULTS, ImageOptions, resized, stored_field
from shardset.format.images import IMAGE_FIELDS, format_of, masks
from shardset.format.images.background import (
    WHITE,
    Background,
    flattened,
    is_transparent,
)
from shardset.format.images.orientation import TURNS, UPRIGHT, orientation_of, upright_size
from shardset.format.images.pillow import load, opened, plugin, reduce

_REDUCING_GAP = 3.0
"""A JPEG is decoded at this many times the size of the result, or more; a smaller factor would be
visible.
"""


@dataclass(frozen=True, slots=True)
class ImageThumbnail:
    """A small upright image, 8-bit L or RGB on white, and the size of the whole; `turned` if it is
    not stored so.
    """

    pixels: Image.Image
    width: int
    height: int
    transparent: bool
    turned: bool


def encode(
    data: bytes, examined_field: str, marks: str, options: ImageOptions
) -> tuple[str, bytes]:
    """(`stored_field`, content) of an image that `examine` accepted; the same bytes if nothing is
    to be done.

    Raises UndecodableImage for an image that `examine` refuses with verify="decode".
    """
    field, content = _encoded(data, examined_field, marks, options)
    return field, (
        restart_markers.add_restart_markers(content)
        if options.jpeg_restart and field == "jpg"
        else content
    )


def _encoded(
    data: bytes, examined_field: str, marks: str, options: ImageOptions
) -> tuple[str, bytes]:
    is_cmyk = CMYK_TO_RGB in marks_of(marks)
    if not options.reencodes and not is_cmyk:
        return examined_field, data
    # The field of an image that was not examined comes from its name, which may be wrong or be no
    # image's.
    actual = format_of(data)
    field = stored_field(examined_field if examined_field in IMAGE_FIELDS else actual, options)
    if field == actual and not is_cmyk and options.resize_shorter is None:
        return field, data
    with opened(data, actual, options.decoded_bytes) as image:
        if field == actual and not is_cmyk and is_stored_unchanged(image, data, actual, options):
            return field, data
        size = resized(image.size, options.resize_shorter)
        check_sides(size, field)
        pixels = _pixels(image, data, actual, size, options.background)
        return field, _written(pixels, field, options.quality)


def thumbnail_of(data: bytes, longest: int, options: ImageOptions = DEFAULTS) -> ImageThumbnail:
    """A thumbnail with no side above `longest`; raises UndecodableImage, also for an image beyond
    the limits.
    """
    field = format_of(data)
    with opened(data, field, options.decoded_bytes) as image:
        width, height = image.size
        scale = min(1.0, longest / max(width, height))
        orientation = orientation_of(data, image)
        small = max(1, round(width * scale)), max(1, round(height * scale))
        pixels = _pixels(image, data, field, small)
        width, height = upright_size((width, height), orientation)
        return ImageThumbnail(pixels, width, height, is_transparent(image), orientation != UPRIGHT)


def resized_mask(data: bytes, size: tuple[int, int]) -> bytes:
    """A mask of (width, height) `size` as PNG, upright, each number the nearest one of `data`.

    Raises UndecodableImage if that is no mask.
    """
    numbers = Image.fromarray(masks.read(data, (0, 0)))
    return _written(numbers.resize(size, Image.Resampling.NEAREST), "png", 0)


def libraries(options: ImageOptions) -> dict[str, str]:
    """The libraries that determine the bytes of a re-encoded image, with their versions."""
    versions = {
        "pillow": features.version("pil"),
        "libjpeg-turbo": features.version_feature("libjpeg_turbo"),
        "libjpeg": features.version_codec("jpg"),
        "zlib": features.version_codec("zlib"),
        "zlib-ng": features.version_feature("zlib_ng"),
        "libwebp": features.version_module("webp"),
        **(restart_markers.libraries() if options.jpeg_restart else {}),
    }
    if versions["libjpeg-turbo"]:
        del versions["libjpeg"]  # the same codec
    return {name: version for name, version in versions.items() if version}


def _pixels(
    image: ImageFile, data: bytes, field: str, size: tuple[int, int], background: Background = WHITE
) -> Image.Image:
    """The upright image as 8-bit L or RGB, resized to `size`,
    which is that before EXIF turns it.
    """
    box = None
    turn = TURNS.get(orientation_of(data, image))
    if size != image.size:
        least = int(size[0] * _REDUCING_GAP), int(size[1] * _REDUCING_GAP)
        box = reduce(image, data, field, least)
    load(image, data, field)
    pixels = flattened(image, background)
    if size != pixels.size:
        pixels = pixels.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=_REDUCING_GAP)
    return pixels.transpose(turn) if turn is not None else pixels


def _written(pixels: Image.Image, field: str, quality: int) -> bytes:
    bare = pixels.convert("RGB") if field == "ppm" and pixels.mode != "RGB" else pixels
    bare.info = {}  # Pillow would write what it read: EXIF, comments, profiles
    settings: dict[str, dict[str, Any]] = {
        "jpg": {
            "quality": quality,
            "subsampling": "4:2:0",
            "progressive": False,
            "optimize": False,
        },
        "webp": {"quality": quality, "lossless": False, "method": 4},
        "png": {"compress_level": 6, "optimize": False},
    }
    buffer = io.BytesIO()
    bare.save(buffer, plugin(field).format, **settings.get(field, {}))
    return buffer.getvalue()
