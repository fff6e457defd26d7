"""Decoding a part of a JPEG gives the pixels that decoding all of it gives."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardset.decode import jpeg
from shardset.decode.crops import Box
from shardset.decode.image import ImageSpec, decode
from shardset.decode.jpeg_restart import cut, grid_of, head
from shardset.errors import UndecodableImage
from tests.shardset.decode.test_crops import busy, one

SPEC = ImageSpec(size=24)
BLOCKS = {"4:2:0": (16, 16), "4:2:2": (8, 16), "4:4:4": (8, 8), "grey": (8, 8)}
SIZES = [(131, 161), (33, 240), (16, 16)]


def restarted(kind, size=(131, 161), run=1, **options):
    """A busy picture with a marker after every `run` blocks, 0 for none."""
    image = Image.fromarray(busy(*size)).convert("L" if kind == "grey" else "RGB")
    buffer = io.BytesIO()
    subsampling = {} if kind == "grey" else {"subsampling": kind}
    image.save(buffer, "JPEG", quality=90, restart_marker_blocks=run, **subsampling, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_random_crops_have_the_same_pixels_with_restarts_and_without(kind, size):
    runs = -(-size[1] // BLOCKS[kind][1])
    for run in [n for n in range(1, runs + 1) if runs % n == 0]:
        whole, parts = restarted(kind, size, 0), restarted(kind, size, run)
        assert np.array_equal(decode(whole), decode(parts))
        for spec in (SPEC, ImageSpec(size=8), ImageSpec(size=160), ImageSpec(size=1)):
            for row in range(12):
                assert np.array_equal(one(whole, spec, row=row), one(parts, spec, row=row))


@settings(deadline=None)
@given(st.data())
def test_every_window_at_every_reduction_has_the_pixels_of_the_whole(data):
    kind = data.draw(st.sampled_from(sorted(BLOCKS)))
    image, size = restarted(kind, run=data.draw(st.integers(0, 1))), (131, 161)
    top, left = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
    height, width = (
        data.draw(st.integers(1, size[0] - top)),
        data.draw(st.integers(1, size[1] - left)),
    )
    box = Box(top, left, height, width)
    least = data.draw(st.integers(1, size[0])), data.draw(st.integers(1, size[1]))
    found = jpeg.decode_window(image, grid_of(image), box, least)
    if found is not None:
        whole = jpeg.window_of(decode(image, least), box, jpeg.reduction(size, least))
        assert found.inside == whole.inside
        assert np.array_equal(found.pixels, whole.pixels)


@given(st.integers(1, 200), st.integers(1, 200), st.data())
def test_the_reduction_is_the_one_that_simplejpeg_takes(height, width, data):
    least = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    image = simplejpeg.encode_jpeg(np.zeros((height, width, 3), np.uint8))
    found = simplejpeg.decode_jpeg(
        image, min_height=least[0], min_width=least[1], min_factor=2
    ).shape[:2]
    eighths = jpeg.reduction((height, width), least)
    assert found == jpeg.reduced((height, width), eighths)


def test_only_the_runs_around_a_window_are_decoded():
    data = restarted("4:2:0", (256, 256))
    part = cut(data, grid_of(data), 70, 40, 90, 60)
    assert (part.top, part.left, part.size) == (64, 32, (32, 32))
    assert len(part.data) < len(data) / 10
    assert np.array_equal(decode(bytes(part.data))[4:28, 4:28], decode(data)[68:92, 36:60])


def test_without_markers_the_rows_below_a_window_are_not_decoded():
    data = restarted("4:2:0", (256, 256), 0)
    part = head(data, grid_of(data), 90)
    assert (part.top, part.left, part.size) == (0, 0, (96, 256))
    assert np.array_equal(simplejpeg.decode_jpeg(part.data, strict=False)[:94], decode(data)[:94])
    assert head(data, grid_of(data), 250) is None


def test_the_head_of_a_jpeg_that_is_cut_is_not_taken():
    data = restarted("4:2:0", (256, 256), 0)[:-100]
    assert head(data, grid_of(data), 90) is None
    with pytest.raises(UndecodableImage, match="truncated"):
        one(data, ImageSpec(size=8))


def test_a_jpeg_that_is_turned_has_the_same_crops_with_restarts_and_without():
    exif = Image.Exif()
    exif[274] = 6
    whole, parts = (restarted("4:2:0", run=run, exif=exif) for run in (0, 1))
    assert all(
        np.array_equal(one(whole, SPEC, row=row), one(parts, SPEC, row=row)) for row in range(5)
    )


@pytest.mark.parametrize(
    ("data", "run"),
    [
        (restarted("4:2:0", progressive=True), None),
        (b"", None),
        (b"\xff\xd8\xff", None),
        (restarted("4:2:0")[:400], None),
        (restarted("4:2:0", run=0), 0),
        (restarted("4:2:0", (64, 80), run=2), 0),
    ],
    ids=["progressive", "nothing", "a beginning", "half a header", "no markers", "across rows"],
)
def test_what_can_not_be_cut_is_decoded_whole(data, run):
    grid = grid_of(data)
    assert run == (None if grid is None else grid.run)


def test_a_jpeg_whose_markers_are_not_those_that_its_header_promises_is_decoded_whole():
    data = bytearray(restarted("4:2:0"))
    at = data.index(b"\xff\xd3", grid_of(bytes(data)).begin)
    data[at + 1] = 0xD5
    assert cut(bytes(data), grid_of(bytes(data)), 0, 0, 16, 16) is None


@settings(deadline=None)
@given(st.data())
def test_a_damaged_jpeg_decodes_or_is_refused(data):
    image = bytearray(restarted(data.draw(st.sampled_from(sorted(BLOCKS))), (70, 64)))
    for _ in range(3):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert one(bytes(image), SPEC, row=data.draw(st.integers(0, 50))).shape == (24, 24, 3)
    except UndecodableImage:
        return
