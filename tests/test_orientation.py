"""Images that are stored turned: upright wherever pixels are shown or trained on, as Pillow's `exif_transpose` has it."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardset.decode.crops import CenterCrop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec, decode, decode_into, draws, image_size
from shardset.decode.workers import DecodeWhole
from shardset.format.orientation import orientation_of
from tests.makers import odd_images
from tests.makers.odd_images import ORIENTATION, encoded

SIZE = (52, 37)
FILES = {
    "jpg": ("JPEG", {"quality": 95}),
    "progressive jpg": ("JPEG", {"quality": 95, "progressive": True}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {"lossless": True}),
    "tif": ("TIFF", {}),
}


def exif_of(orientation, **more):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    exif[0x010E] = "a description, which stands before the orientation"
    return exif


def turned_file(kind, orientation, size=SIZE):
    name, options = FILES[kind]
    return encoded(odd_images.picture(3, size), name, exif=exif_of(orientation), **options)


def upright_png(data):
    """The same pixels, decoded as they are stored and turned by Pillow, without EXIF."""
    with Image.open(io.BytesIO(data)) as image:
        stated = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION, 1)
    stored = Image.fromarray(decode(data, upright=False))
    exif = Image.Exif()
    exif[ORIENTATION] = stated
    stored.info["exif"] = exif.tobytes()
    return encoded(Image.fromarray(np.asarray(ImageOps.exif_transpose(stored))), "PNG")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", FILES)
def test_crops_are_those_of_the_upright_image(kind, orientation):
    data = turned_file(kind, orientation)
    with Image.open(io.BytesIO(data)) as image:
        by_pillow = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert image_size(data) == by_pillow.shape[:2] == decode(data).shape[:2]
    assert np.abs(decode(data).astype(int) - by_pillow).mean() < (0.5 if "jpg" in kind else 1e-9)
    same = upright_png(data)
    for crop in (RandomResizedCrop(), CenterCrop(30), CenterCrop(30, "bicubic"), PadCrop(4)):
        spec = ImageSpec(size=30, crop=crop)
        drawn = draws(spec, 5, 1, np.array([3]), np.array([2]))[0]
        rows = np.zeros((2, 30, 30, 3), np.uint8)
        decode_into(rows[0], data, spec, drawn)
        decode_into(rows[1], same, spec, drawn)
        np.testing.assert_array_equal(*rows)
