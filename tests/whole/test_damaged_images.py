"""The build and the reader agree on which damaged images are images."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from pipelines.images.check import examine
from pipelines.images.encode import encode
from pipelines.images.options import ImageOptions
from shardset.decode.image import decode
from shardset.errors import UndecodableImage
from tests.makers.image_files import FILES

KINDS = [
    *("jpg RGB", "jpg JPEG RGB progressive True", "png RGB", "png L", "png RGBA", "png P"),
    *("png text", "png icc at its end", "webp RGB", "gif RGB", "bmp RGB", "ppm RGB", "avif RGB"),
    *("tif TIFF RGB compression tiff_lzw", "jp2 RGB"),
]


def damaged(kind: str) -> list[bytes]:
    """The image cut, with a byte or a bit changed, or with a tail of zeros."""
    whole, draw = FILES[kind].data, random.Random(5)
    found = []
    for _ in range(25):
        at = draw.randrange(1, len(whole))
        changed, flipped = bytearray(whole), bytearray(whole)
        changed[at] = draw.randrange(256)
        flipped[at] ^= 1 << draw.randrange(8)
        found += [whole[:at], bytes(changed), bytes(flipped), whole[:at] + bytes(len(whole) - at)]
    return found


def build(data: bytes) -> None:
    """What the build does with an image."""
    found = examine(data, field="", verify="decode", options=ImageOptions())
    encode(data, found.field, found.marks, ImageOptions(resize_shorter=8))


def refused(act: Callable[[], object]) -> str:
    """The reason why an image is refused, or ""."""
    try:
        act()
    except UndecodableImage as error:
        return error.reason
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_build_refuses_as_damaged_the_reader_refuses_too(kind):
    for data in damaged(kind):
        reason = refused(partial(build, data))
        assert bool(reason) == bool(refused(partial(decode, data))), reason
