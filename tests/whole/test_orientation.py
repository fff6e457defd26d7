"""Images that are stored turned: upright wherever pixels are shown or trained on, as by
`exif_transpose` of Pillow.
"""

import io
import random
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from pipelines.images.check import examine
from pipelines.images.encode import encode, thumbnail_of
from pipelines.images.options import ImageOptions
from shardset.decode.crops import CenterCrop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec, decode, image_size
from shardset.decode.workers import DecodeTask
from shardset.format.images.orientation import orientation_of
from shardset.settings import with_values
from tests.makers import odd_images
from tests.makers.image_files import PADDINGS, TURNED, XMP_OF_JPEG, turned_file
from tests.makers.odd_images import ORIENTATION, encoded
from tests.makers.training import tiny_config
from tests.shardset.decode.test_crops import one
from trainer.data.preparation import eval_spec, train_spec


def by_pillow(data):
    """The upright image."""
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def upright_by_pillow(data):
    """The same pixels, decoded as they are stored and turned by Pillow, as a PNG."""
    with Image.open(io.BytesIO(data)) as image:
        exif = b"" if image.format == "TIFF" else image.getexif().tobytes()
    stored = Image.fromarray(decode(data, upright=False))
    stored.info["exif"] = exif
    return encoded(Image.fromarray(np.asarray(ImageOps.exif_transpose(stored))), "PNG")


def off(found, expected):
    return np.abs(np.asarray(found, int) - np.asarray(expected)).mean()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", TURNED)
def test_crops_are_those_of_the_upright_image(kind, orientation):
    data = turned_file(kind, orientation)
    expected = np.asarray(by_pillow(data))
    assert image_size(data) == decode(data).shape[:2] == expected.shape[:2]
    assert np.abs(decode(data).astype(int) - expected).mean() <= (0.5 if "jpg" in kind else 0)
    upright = upright_by_pillow(data)
    for crop in (RandomResizedCrop(), CenterCrop(30), CenterCrop(30, "bicubic"), PadCrop(4)):
        spec = ImageSpec(size=30, crop=crop)
        np.testing.assert_array_equal(one(data, spec), one(upright, spec))


@pytest.mark.parametrize("orientation", [1, 4, 6, 7])
def test_a_jpeg_that_is_reduced_while_it_is_decoded_is_upright(orientation):
    data = turned_file("jpg", orientation, (640, 420))
    upright = upright_by_pillow(data)
    for crop in (RandomResizedCrop((0.5, 1)), CenterCrop(80)):
        spec = ImageSpec(size=64, crop=crop)
        off = np.abs(one(data, spec).astype(int) - one(upright, spec)).mean()
        assert off < 3, (crop, off)


@pytest.mark.parametrize("kind", TURNED)
def test_processes_that_decode_turn_images_too_and_leave_them_where_that_is_not_wanted(kind):
    data = turned_file(kind, 6, (24, 24))
    rows, drawn = np.zeros((1, 24, 24, 3), np.uint8), np.full((1, 3), 0.5)
    for upright in (True, False):
        spec = ImageSpec(size=24, crop=PadCrop(0), upright=upright)
        for task in (DecodeTask((255,) * 3, upright), DecodeTask((255,) * 3, upright, spec)):
            assert task.decode(rows, np.array([0]), [data], drawn).all()
            np.testing.assert_array_equal(rows[0], decode(data, upright=upright))
    # Pillow turns it anyway
    assert kind.startswith("tif") == np.array_equal(decode(data), decode(data, upright=False))


def damaged(rng):
    """A JPEG whose EXIF data were flipped, cut, divided or named twice."""
    exif = bytearray(odd_images.exif_rotated(rng.randint(0, 9))[30:60])
    for _ in range(rng.randint(0, 3)):
        exif[rng.randrange(len(exif))] = rng.choice([0, 255, 1, 3, 4, rng.randrange(256)])
    del exif[rng.choice([len(exif), rng.randrange(len(exif))]) :]
    at = rng.choice([len(exif), rng.randrange(len(exif) + 1)])
    parts = [rng.choice([b"", b"Exif\0\0"]) + exif[:at], exif[at:]]
    bodies = [*(b"Exif\0\0" + part for part in parts), XMP_OF_JPEG % rng.randint(0, 9)]
    segments = [
        struct.pack(">HH", 0xFFE1, len(body) + 2) + body + rng.choice([b"", *PADDINGS.values()])
        for body in bodies
    ]
    plain = odd_images.jpeg()
    return plain[:2] + b"".join(segments[: rng.randint(2, 3)]) + plain[2:]


@pytest.mark.filterwarnings("ignore")
def test_damaged_exif_is_read_as_pillow_reads_it_and_raises_nothing():
    rng, found = random.Random(0), []
    for _ in range(1000):
        data = damaged(rng)
        with Image.open(io.BytesIO(data)) as image:
            try:
                expected = image.getexif().get(ORIENTATION, 1)
            except (SyntaxError, struct.error):
                expected = 1
        expected = expected if isinstance(expected, int) and 1 <= expected <= 8 else 1
        found.append(orientation_of(data))
        assert found[-1] == expected, data[:200]
    assert len(set(found)) == 8
    for cut in range(0, 400, 7):
        orientation_of(turned_file("png", 6)[:cut])


def test_a_mark_that_pillow_does_not_know_hides_no_orientation():
    data = turned_file("jpg", 6)
    at = data.index(b"\xff\xe1")
    assert orientation_of(data[:at] + b"\xff\x01" + data[at:]) == 6  # TEM: OpenCV reads it


def test_a_damaged_text_of_a_png_hides_no_orientation():
    data = turned_file("png", 6)
    damaged = odd_images.png_chunk(b"zTXt", b"Raw profile type exif\0\7")
    assert orientation_of(data[:33] + damaged + data[33:]) == 6


@pytest.mark.parametrize(
    ("kind", "mode", "options", "fix"),
    [
        ("jpg", "RGB", ImageOptions(), ""),
        ("jpg", "RGB", ImageOptions(resize_shorter=999), "turned-upright"),
        ("png", "RGB", ImageOptions(image_format="jpg"), "turned-upright"),
        ("webp", "RGB", ImageOptions(image_format="webp"), ""),
        ("jpg", "CMYK", ImageOptions(), "cmyk-to-rgb+turned-upright"),
    ],
)
def test_the_build_counts_what_it_keeps_turned_and_what_it_stores_upright(kind, mode, options, fix):
    data = turned_file(kind, 6, mode=mode)
    found = examine(data, field=kind, verify="decode", options=options)
    assert found.marks == (fix or "turned")
    _, stored = encode(data, found.field, found.marks, options)
    assert (stored == data) == (not fix)
    with Image.open(io.BytesIO(stored)) as image:
        assert image.getexif().get(ORIENTATION, 1) == (1 if fix else 6)
    assert np.abs(decode(stored).astype(int) - decode(data)).mean() < 8
    small = thumbnail_of(data, 26)
    assert small.turned
    assert small.pixels.height > small.pixels.width
    assert (small.height, small.width) == image_size(data)


def test_a_run_may_take_images_as_they_are_stored_and_on_a_background_of_its_own():
    settings = {"image.upright": False, "image.background": "#0a141e"}
    image = with_values(tiny_config("shards", "run"), settings).image
    for spec in (train_spec(image), eval_spec(image)):
        assert (spec.upright, spec.background) == (False, (10, 20, 30))
