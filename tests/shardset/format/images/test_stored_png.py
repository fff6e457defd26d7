import io

import numpy as np
import pyspng
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from shardset.format.images import stored_png
from tests.makers.objects import flipped

SIDES = st.integers(1, 40)
PICTURES = st.tuples(st.integers(1, 4), SIDES, SIDES).flatmap(
    lambda shape: hnp.arrays(np.uint8, (*shape, 3))
)
BLACK_PIXEL = (
    "89504e470d0a1a0a 0000000d 49484452 00000001 00000001 0802000000 907753de"
    "0000000f 49444154 7801 01 0400 fbff 00000000 00040001 6549c360 00000000 49454e44 ae426082"
)


def other_png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_black_pixel_is_these_bytes_for_ever():
    assert stored_png.stored(np.zeros((1, 1, 1, 3), np.uint8)) == [bytes.fromhex(BLACK_PIXEL)]


@given(PICTURES)
def test_what_is_stored_is_read_by_everybody(images_NHWC):
    files = stored_png.stored(images_NHWC)
    height, width = images_NHWC.shape[1:3]
    assert {len(file) for file in files} == {48 + height * (1 + 3 * width) + 20}
    for file, pixels in zip(files, images_NHWC, strict=True):
        with Image.open(io.BytesIO(file)) as image:
            image.verify()
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
        assert np.array_equal(pyspng.load(file), pixels)
    found, pixels_NHWC = stored_png.pixels(files, height, width)
    assert found.all()
    assert np.array_equal(pixels_NHWC, images_NHWC)


def test_other_files_are_left_alone():
    images = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    first, second, third, turned = stored_png.stored(images)
    files = [
        other_png(images[0]),
        first,
        b"",
        second + b"\0",
        third,
        *stored_png.stored(images[:1, :4]),
        turned[:-1],
    ]
    found, pixels_NHWC = stored_png.pixels(files, 8, 8)
    assert found.tolist() == [False, True, False, False, True, False, False]
    assert np.array_equal(pixels_NHWC, images[[0, 2]])
    assert stored_png.pixels([], 8, 8)[1].shape == (0, 8, 8, 3)


def test_a_changed_byte_anywhere_is_seen():
    [file] = stored_png.stored(np.full((1, 5, 4, 3), 7, np.uint8))
    changed = [flipped(file, at) for at in range(len(file))]
    assert not stored_png.pixels(changed, 5, 4)[0].any()


def test_a_picture_is_refused_that_takes_more_than_one_block():
    assert stored_png.stored(np.zeros((1, 147, 147, 3), np.uint8))
    with pytest.raises(
        ValueError, match="a picture of 148 x 148 pixels has 65860 bytes, expected 1 to 65535"
    ):
        stored_png.stored(np.zeros((1, 148, 148, 3), np.uint8))
