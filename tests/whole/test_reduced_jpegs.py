"""JPEGs decoded at n/8 of their size: a point lies where it lies in the same image as a PNG."""

import io
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from pipelines.images.encode import encode as build
from pipelines.images.encode import thumbnail_of
from pipelines.images.options import ImageOptions
from shardset.decode.crops import CenterCrop, Letterbox, RandomResizedCrop, Resize
from shardset.decode.image import ImageSpec, decode_into
from tests.makers.odd_images import ORIENTATION
from tests.makers.shardset import encode

AIM = 0.05
"""Pixels of the result."""

FILES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "progressive": {"progressive": True},
    "restart": {"restart_marker_blocks": 2},
    "halved colours": {"subsampling": "4:2:0"},
}
CROPS = [
    Resize(),
    CenterCrop(64),
    CenterCrop(70, "bicubic"),
    Letterbox(fill=0),
    *(RandomResizedCrop((0.85, 1), (0.95, 1.05), name) for name in ("linear", "area", "bilinear")),
]
DRAWN = np.array([0.4, 0.3, 0.7, *[0.55] * 20])


@cache
def spot(number: int) -> np.ndarray:
    """A bright spot on black, uint8 [height, width, 3]: sides that eight does not divide."""
    rng = np.random.default_rng(number)
    height, width = 8 * rng.integers(40, 60, 2) + rng.integers(1, 8, 2)
    down, right = np.mgrid[0:height, 0:width]
    y, x = (rng.uniform(0.3, 0.7) * side for side in (height, width))
    level = np.exp(-((right + 0.5 - x) ** 2 + (down + 0.5 - y) ** 2) / 2 / 16**2)
    return np.repeat((255 * level).round().astype(np.uint8)[..., None], 3, axis=2)


def centre(image: np.ndarray) -> np.ndarray:
    """(x, y) of the spot, in pixels."""
    level = image[..., 0].astype(float)
    level[level < 12] = 0
    down, right = np.mgrid[0 : len(level), 0 : level.shape[1]] + 0.5
    return np.array([(right * level).sum(), (down * level).sum()]) / level.sum()


def off(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(centre(found) - centre(expected)).max())


def pair(number: int, kind: str = "baseline", orientation: int = 1) -> tuple[bytes, bytes]:
    """A spot as JPEG and as PNG."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image = spot(number)
    options = {"quality": 97, "subsampling": "4:4:4", **FILES[kind]}
    return encode(image, "jpeg", exif=exif, **options), encode(image, "png", exif=exif)


@pytest.mark.parametrize("crop", CROPS, ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_the_stream_shows_it_where_it_shows_the_png(kind, crop, monkeypatch):
    shapes, decode_jpeg = [], simplejpeg.decode_jpeg

    def watched(*args, **options):
        found = decode_jpeg(*args, **options)
        shapes.append(found.shape)
        return found

    monkeypatch.setattr(simplejpeg, "decode_jpeg", watched)
    for number, orientation in product(range(4), range(1, 9)):
        rows = np.zeros((2, 64, 64, 3), np.uint8)
        for row, data in zip(rows, pair(number, kind, orientation), strict=True):
            decode_into(row, data, ImageSpec(size=64, crop=crop), DRAWN)
        assert off(*rows) < AIM, spot(number).shape
    assert len(shapes) == 32
    assert max(map(max, shapes)) < 300


@pytest.mark.parametrize("number", range(8))
def test_build_and_report_show_it_where_they_show_the_png(number):
    options = ImageOptions(image_format="png", resize_shorter=64)
    files = dict(zip(("jpg", "png"), pair(number, orientation=number + 1), strict=True))
    for smaller in (
        lambda field: Image.open(io.BytesIO(build(files[field], field, "", options)[1])),
        lambda field: thumbnail_of(files[field], 64).pixels,
    ):
        images = [np.asarray(smaller(field).convert("RGB")) for field in files]
        assert off(*images) < AIM
