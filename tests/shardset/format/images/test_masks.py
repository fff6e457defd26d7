"""A mask has the numbers that its file stores, upright, and only if it fits its image."""

import io
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardset.errors import UndecodableImage
from shardset.format.images.masks import is_mask_field, read
from tests.makers.image_files import tiff
from tests.makers.odd_images import ORIENTATION, encoded, png_chunk, png_of

IDS = np.arange(64, dtype=np.uint8).reshape(8, 8) % 4


def packed(bits, ids=IDS):
    """The rows of numbers of some bits."""
    shifts = np.arange(bits - 1, -1, -1)
    return [np.packbits(row[:, None] >> shifts & 1).tobytes() for row in ids]


def png(bits, ids=IDS):
    rows = b"".join(b"\0" + row for row in packed(bits, ids))
    return png_of(8, 8, png_chunk(b"IDAT", zlib.compress(rows)), bits=bits)


def tif(bits, photometric):
    rows = [IDS.astype("<u2").tobytes()] if bits == 16 else packed(bits)
    return tiff(bits, 1, photometric=photometric, pixels=b"".join(rows))


def palette():
    image = Image.fromarray(IDS)
    image.putpalette([200, 0, 0] * 4)
    return image


TEXT = b" ".join(b"%d" % one for one in IDS.ravel())
FILES = {
    **{f"png {bits}": png(bits) for bits in (2, 4, 8, 16)},
    **{f"tif {bits} {of}": tif(bits, of) for bits in (2, 4, 8, 16) for of in (0, 1)},
    **{f"pgm {most}": b"P5 8 8 %d\n" % most + IDS.tobytes() for most in (3, 100, 255)},
    **{f"pgm {most}": b"P5 8 8 %d\n" % most + IDS.astype(">u2").tobytes() for most in (700, 65535)},
    **{f"pgm text {most}": b"P2 8 8 %d\n" % most + TEXT for most in (3, 100, 700)},
    **{f"palette {name}": encoded(palette(), name) for name in ("PNG", "GIF", "BMP", "TIFF")},
}


@pytest.mark.parametrize("name", FILES)
def test_numbers_are_those_of_the_file(name):
    numbers = read(FILES[name], (8, 8))
    assert numbers.dtype in (np.uint8, np.uint16)
    np.testing.assert_array_equal(numbers, IDS)


@pytest.mark.parametrize("name", ["png", "tif 0", "tif 1", "pbm", "bmp"])
def test_one_bit_is_0_or_1(name):
    ones = IDS & 1
    rows = b"".join(packed(1, ones))
    black = Image.fromarray(255 * ones).convert("1")
    data = {
        "png": png(1, ones),
        "tif 0": tiff(1, 1, photometric=0, pixels=rows),
        "tif 1": tiff(1, 1, pixels=rows),
        "pbm": b"P4 8 8\n" + rows,
        "bmp": encoded(black, "BMP"),
    }
    np.testing.assert_array_equal(read(data[name], (8, 8)), ones)


@given(most=st.integers(1, 65535), numbers=st.lists(st.integers(0, 65535), min_size=1))
@settings(max_examples=50, deadline=None)
def test_a_pgm_of_any_maxval_gives_its_numbers(most, numbers):
    numbers = np.minimum(numbers, most)
    pixels = numbers.astype("u1" if most < 256 else ">u2").tobytes()
    data = b"P5 %d 1 %d\n" % (len(numbers), most) + pixels
    np.testing.assert_array_equal(read(data, (len(numbers), 1))[0], numbers)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["PNG", "TIFF"])
def test_a_mask_is_turned_as_its_image_is(name, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored = Image.fromarray(IDS[:5])
    data = encoded(stored, name, exif=exif)
    # The same pixels as an RGB image, which Pillow turns.
    with Image.open(io.BytesIO(encoded(stored.convert("RGB"), "TIFF", exif=exif))) as image:
        upright = np.asarray(image)[:, :, 0] if image.load() else None
    np.testing.assert_array_equal(read(data, upright.shape[::-1]), upright)
    if name == "PNG":
        np.testing.assert_array_equal(read(data, (8, 5), upright=False), IDS[:5])


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (png_of(2000, 2000), (8, 8), "mask of another size: 2000 x 2000 pixels, its image is"),
        (png_of(8, 5), (5, 8), "8 x 5 pixels, its image is stored with 5 x 8"),
        (png_of(8, 8, colour=2), (8, 8), "not a mask: its mode is RGB, expected one channel"),
        (png_of(8, 8, colour=6), (8, 8), "its mode is RGBA"),
        (png_of(8, 8, colour=4), (8, 8), "its mode is LA"),
        (png_of(9000, 9000), (9000, 9000), "takes too much to decode"),
        (png(8)[:-20], (8, 8), "truncated"),
        (b"no image", (8, 8), "text instead of an image"),
    ],
)
def test_what_is_no_mask_of_its_image_is_refused_by_its_header(data, size, message):
    with pytest.raises(UndecodableImage, match=message):
        read(data, size, decoded_bytes=10**8)


def test_the_name_of_a_field_says_that_it_is_a_mask():
    names = ("mask.png", "left.mask.tif", "mask.left.png", "png", "mask", "masks.png", "mask.json")
    assert [name for name in names if is_mask_field(name)] == [*names[:3]]
