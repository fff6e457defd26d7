"""The fast decoder of masks gives the numbers that Pillow gives, or leaves the file to it."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.decode import png
from shardset.format.images import masks
from tests.makers.odd_images import png_chunk, png_of

GREY, PALETTE = 0, 3
FORMS = [(bits, GREY) for bits in (1, 2, 4, 8, 16)] + [(bits, PALETTE) for bits in (1, 2, 4, 8)]


@st.composite
def mask_files(draw, forms=FORMS):
    """(PNG, width, height, bits), each row with any filter; its data may be in several chunks."""
    bits, colour = draw(st.sampled_from(forms))
    width, height = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    row_bytes = -(-width * bits // 8)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = b"".join(
        bytes([draw(st.integers(0, 4))]) + rng.integers(0, 256, row_bytes, np.uint8).tobytes()
        for _ in range(height)
    )
    packed = zlib.compress(rows, draw(st.integers(0, 9)))
    cut = draw(st.integers(0, len(packed)))
    chunks = [png_chunk(b"IDAT", part) for part in (packed[:cut], packed[cut:])]
    if colour == PALETTE:
        chunks.insert(0, png_chunk(b"PLTE", bytes(3 * 2**bits)))
    return png_of(width, height, *chunks, bits=bits, colour=colour), width, height, bits


@given(mask_files())
@settings(deadline=None)
def test_a_mask_has_the_numbers_that_pillow_gives(file):
    data, width, height, bits = file
    expected, found = masks.read(data, (width, height)), png.mask(data)
    if bits < 8:
        assert found is None
        return
    assert found is not None
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_an_interlaced_mask_has_its_numbers():
    numbers = np.random.default_rng(0).integers(0, 256, (11, 13), np.uint8)
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2)]
    passes += [(0, 1, 2, 2), (1, 0, 2, 1)]
    parts = [numbers[y::down, x::right] for y, x, down, right in passes]
    rows = b"".join(b"\0" + row.tobytes() for part in parts for row in part)
    plain = png_of(13, 11, png_chunk(b"IDAT", zlib.compress(rows)))
    header = plain[16:28] + b"\1"
    data = plain[:8] + png_chunk(b"IHDR", header) + plain[33:]
    np.testing.assert_array_equal(masks.read(data, (13, 11)), numbers)
    np.testing.assert_array_equal(png.mask(data), numbers)


@given(mask_files([(8, GREY), (8, PALETTE), (16, GREY)]), st.data())
@settings(deadline=None)
def test_a_damaged_mask_is_left_to_pillow_unless_that_gives_the_same(file, data):
    content, width, height, _ = file
    at = data.draw(st.integers(26, len(content) - 1))  # behind the size, bits and colour
    damaged = data.draw(
        st.sampled_from([content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]])
    )
    if (found := png.mask(damaged)) is not None:
        np.testing.assert_array_equal(found, masks.read(damaged, (width, height)))


@pytest.mark.parametrize("kind", [b"tRNS", b"eXIf", b"acTL"])
def test_what_may_change_pixels_is_left_to_pillow(kind):
    rows = png_chunk(b"IDAT", zlib.compress(bytes(6)))
    assert png.mask(png_of(2, 2, rows)) is not None
    assert png.mask(png_of(2, 2, png_chunk(kind, bytes(8)), rows)) is None


def test_other_files_are_left_to_pillow():
    rows = png_chunk(b"IDAT", zlib.compress(bytes(14)))
    for data in (b"", b"no image", png_of(2, 2, rows, colour=2), png_of(2, 2, rows, bits=3)):
        assert png.mask(data) is None
