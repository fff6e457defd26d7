import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from shardset.decode import png
from shardset.decode.crops import (
    CenterCrop,
    PadCrop,
    RandomResizedCrop,
)
from shardset.decode.image import ImageSpec, decode, draws
from shardset.errors import ConfigError, UndecodableImage
from tests.makers.odd_images import oversized, png_chunk
from tests.makers.shardset import pixels

RANDOM = ImageSpec(size=24, crop=RandomResizedCrop(), flip="device")
FROZEN_DRAWS = [
    [0.3353072297651809, 0.2617807417765774, 0.3468532729782682],
    [0.9370000161807378, 0.9724123039911712, 0.14155932461799225],
]


def test_the_draws_of_a_slot_are_frozen():
    # The crops of every existing run. To change these numbers, raise ORDER_VERSION.
    found = draws(RANDOM, 5, 1, np.array([0, 3]), np.array([0, 2]))
    assert found.shape == (2, 23)
    assert found[:, :3].tolist() == FROZEN_DRAWS


def interlaced(image):
    """The PNG of an image in the seven passes of Adam7, nothing filtered."""
    places = [
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    ]
    passes = [image[top::down, left::along] for top, left, down, along in places]
    rows = b"".join(b"\0" + row.tobytes() for one in passes for row in one)
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 1)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def test_an_interlaced_png_decodes_to_its_pixels():
    image = pixels(3, 20, 30)
    assert np.array_equal(decode(interlaced(image)), image)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_png_whose_chunk_claims_more_than_there_is_is_left_to_pillow(mode):
    buffer = io.BytesIO()
    Image.fromarray(pixels(3, 20, 30)).convert(mode).save(buffer, "png")
    data = bytearray(buffer.getvalue())
    data[33:37] = len(data).to_bytes(4, "big")
    assert png.decode(buffer.getvalue()) is not None
    assert png.decode(bytes(data)) is None


def test_a_header_that_claims_too_much_is_refused_before_anything_is_decoded():
    with pytest.raises(UndecodableImage, match="too many pixels: 30000 x 30000"):
        decode(oversized())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ImageSpec(size=0),
        lambda: ImageSpec(size=64, crop=CenterCrop(63)),
        lambda: ImageSpec(size=64, crop=CenterCrop(64, "nearest")),
        lambda: RandomResizedCrop(scale=(0.5, 0.1)),
        lambda: RandomResizedCrop(ratio=(0, 1)),
        lambda: PadCrop(-1),
        lambda: ImageSpec(size=16, crop=CenterCrop),  # type: ignore[arg-type]
        lambda: ImageSpec(size=16, flip=True),  # type: ignore[arg-type]
        lambda: ImageSpec(size=224.0),  # type: ignore[arg-type]
        lambda: PadCrop("4"),  # type: ignore[arg-type]
        lambda: RandomResizedCrop(scale=1),  # type: ignore[arg-type]
    ],
)
def test_impossible_specs_are_refused(make):
    with pytest.raises(ConfigError):
        make()
