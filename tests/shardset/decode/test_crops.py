import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from shardset.decode.crops import (
    Box,
    CenterCrop,
    PadCrop,
    RandomResizedCrop,
    random_box,
)
from shardset.decode.image import ImageSpec, decode_into, draws
from shardset.decode.jpeg import window_of
from shardset.errors import UndecodableImage
from tests.makers.shardset import encode, pixels

RANDOM = ImageSpec(size=24, crop=RandomResizedCrop(), flip="device")
FROZEN_BOX = (74, 28, 299, 298)


def one(data, spec, *, row=3, lane=2):
    out = np.full((spec.size, spec.size, 3), 7, np.uint8)
    decode_into(out, data, spec, draws(spec, 5, 1, np.array([row]), np.array([lane]))[0])
    return out


def busy(height, width):
    """A picture with edges, where crops and filters show."""
    down, right = np.mgrid[0:height, 0:width]
    stripes = 60 * ((down // 13 + right // 17) % 2)
    return np.clip(pixels(3, height, width) * 0.7 + stripes[:, :, None], 0, 255).astype(np.uint8)


def off(found, expected):
    return np.abs(found.astype(int) - np.asarray(expected).astype(int)).mean()


def test_a_crop_is_frozen():
    drawn = draws(RANDOM, 5, 1, np.array([3]), np.array([2]))[0]
    box = random_box(RandomResizedCrop(), 375, 500, drawn)
    assert (box.top, box.left, box.height, box.width) == FROZEN_BOX


@given(
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.integers(0, 2**32),
    st.sampled_from([(3 / 4, 4 / 3), (3, 4), (0.2, 0.3)]),
)
@example(1, 1, 0, (3, 4))
@example(1, 50, 0, (0.2, 0.3))
def test_a_random_crop_lies_inside_and_has_a_pixel(height, width, row, ratio):
    drawn = draws(RANDOM, 9, 0, np.array([row]), np.array([2]))[0]
    box = random_box(RandomResizedCrop(ratio=ratio), height, width, drawn)
    assert 0 <= box.top < box.top + box.height <= height
    assert 0 <= box.left < box.left + box.width <= width


def test_random_crops_cover_the_range_of_areas_evenly():
    rows = np.arange(4000)
    boxes = [
        random_box(RandomResizedCrop(), 400, 400, drawn)
        for drawn in draws(RANDOM, 1, 0, rows, rows * 0)
    ]
    areas = np.array([box.height * box.width for box in boxes]) / 400**2
    assert areas.min() > 0.07
    # below 0.54: large crops of a wide or tall shape do not fit a square
    assert 0.45 < np.quantile(areas, 0.5) < 0.52
    assert abs(np.mean([box.width > box.height for box in boxes]) - 0.5) < 0.05


@pytest.mark.parametrize("row", range(2))
def test_a_random_crop_is_near_pillows_filtered_one(row):
    # Linear without a low-pass: docs/reference/images.md says what that means on photographs.
    data, spec = encode(busy(600, 800), "jpeg", quality=95), ImageSpec(size=224)
    box = random_box(
        RandomResizedCrop(), 600, 800, draws(spec, 5, 1, np.array([row]), np.array([2]))[0]
    )
    crop = (box.left, box.top, box.left + box.width, box.top + box.height)
    expected = Image.open(io.BytesIO(data)).resize((224, 224), Image.Resampling.BILINEAR, crop)
    assert off(one(data, spec, row=row), expected) < 5


@pytest.mark.parametrize(
    ("name", "most"), [("area", 1.5), ("bilinear", 0), ("bicubic", 0), ("lanczos", 0)]
)
@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (300, 400), (401, 300), (257, 256), (20, 90)]
)
def test_a_centre_crop_is_torchvisions_or_near_it(name, most, height, width):
    image, short = pixels(9, height, width), min(height, width)
    side = int(64 * width / short), int(64 * height / short)
    resample = Image.Resampling["BILINEAR" if name == "area" else name.upper()]
    resized = Image.fromarray(image).resize(side, resample)
    left, top = round((side[0] - 56) / 2), round((side[1] - 56) / 2)
    found = one(encode(image, "png"), ImageSpec(size=56, crop=CenterCrop(64, name)))
    assert off(found, resized.crop((left, top, left + 56, top + 56))) <= most


def test_a_reduced_jpeg_gives_almost_the_same_crop():
    image = pixels(4, 600, 800)
    whole = one(encode(image, "png"), RANDOM)
    assert off(one(encode(image, "jpeg", quality=97), RANDOM), whole) < 3


@pytest.mark.parametrize(("size", "padding"), [(1, 1), (2, 4), (4, 4), (5, 4), (3, 7)])
def test_a_window_of_a_padded_image_may_lie_in_the_black(size, padding):
    image, places = busy(size + 8, size + 8)[8:, 8:], np.arange(2 * padding + 1)
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    tops, lefts = (each.ravel() for each in np.meshgrid(places, places, indexing="ij"))
    drawn = np.stack([0 * tops, (tops + 0.5) / len(places), (lefts + 0.5) / len(places)], axis=1)
    expected = [
        padded[top : top + size, left : left + size] for top, left in zip(tops, lefts, strict=True)
    ]
    single, together = (np.full((len(tops), size, size, 3), 7, np.uint8) for _ in range(2))
    crop = PadCrop(padding)
    for row, one_drawn in zip(single, drawn, strict=True):
        crop.region((size, size), size, one_drawn).put(row, window_of(image, Box(0, 0, size, size)))
    images_NHWC = np.ascontiguousarray(image)[None]
    crop.put_many(together, np.arange(len(tops)), images_NHWC, np.zeros(len(tops), int), drawn)
    assert np.array_equal(single, expected)
    assert np.array_equal(together, expected)


def test_an_image_too_small_for_its_pad_crop_says_so():
    with pytest.raises(
        UndecodableImage, match=r"20 x 30 pixels with 4 .* fewer than the crop's 32"
    ):
        one(encode(busy(20, 30), "png"), ImageSpec(size=32, crop=PadCrop(4)))


@pytest.mark.parametrize("shape", [(1, 5000), (60000, 1)])
@pytest.mark.parametrize("file_format", ["png", "jpeg"])
def test_a_thin_image_that_would_become_huge_is_refused(shape, file_format):
    data = encode(np.zeros((*shape, 3), np.uint8), file_format)
    row = np.empty((224, 224, 3), np.uint8)
    with pytest.raises(UndecodableImage, match=f"its {shape[0]} x {shape[1]} pixels would become"):
        decode_into(row, data, ImageSpec(size=224, crop=CenterCrop(256)), np.zeros(1))


def test_a_crop_of_an_image_of_a_hundred_million_pixels_is_read():
    data, row = (
        encode(np.full((10_000, 10_000, 3), 70, np.uint8), "jpeg"),
        np.empty((8, 8, 3), np.uint8),
    )
    decode_into(row, data, ImageSpec(size=8, crop=CenterCrop(8)), np.zeros(1))
    assert off(row, np.full_like(row, 70)) < 1
