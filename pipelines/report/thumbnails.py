"""Small pictures for the page: at most 96 pixels, WebP, within a budget of bytes."""

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipelines.images.encode import thumbnail_of
from pipelines.images.options import DEFAULTS, ImageOptions
from shardset.html.page import Picture, data_uri

MAX_THUMBNAIL_BYTES = 2 * 2**20
"""Budget for all thumbnails of a page; the rest are left out."""

MAX_SIDE = 96
LOSSLESS_PIXELS = 1024
MIN_SHOWN_SIDE = 66
"""Smaller thumbnails are enlarged on the page, by a whole number."""


class Thumbnail(NamedTuple):
    """A WebP file and its size in pixels."""

    content: bytes
    width: int
    height: int


def thumbnail(data: bytes, options: ImageOptions = DEFAULTS) -> Thumbnail:
    """The thumbnail of an image file; raises UndecodableImage."""
    pixels = thumbnail_of(data, MAX_SIDE, options).pixels
    buffer = io.BytesIO()
    lossless = pixels.width * pixels.height <= LOSSLESS_PIXELS
    pixels.save(buffer, "WEBP", lossless=lossless, quality=70, method=4)
    return Thumbnail(buffer.getvalue(), pixels.width, pixels.height)


def picture(small: Thumbnail) -> Picture:
    """A thumbnail as the page embeds it."""
    scale = max(1, MIN_SHOWN_SIDE // max(small.width, small.height))
    return Picture(
        uri=data_uri("image/webp", small.content),
        width=small.width * scale,
        height=small.height * scale,
        sharp=scale > 1,
    )


def within_budget(
    thumbnails: Mapping[int, Thumbnail], samples: Sequence[int], max_bytes: int
) -> tuple[dict[int, Picture], int]:
    """Pictures of `samples` in order until `max_bytes` are spent, and the number of those left out."""
    available = [sample for sample in samples if sample in thumbnails]
    spent = accumulate(len(thumbnails[sample].content) for sample in available)
    within = [sample for sample, num_bytes in zip(available, spent, strict=True) if num_bytes <= max_bytes]
    pictures = {sample: picture(thumbnails[sample]) for sample in within}
    return pictures, len(available) - len(pictures)
