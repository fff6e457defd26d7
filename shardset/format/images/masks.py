"""Masks: images whose pixels are numbers, such as a class or a depth.

The build, `verify`, the Writer and the stream ask here, so that they accept the same masks. A mask
has the numbers that its file stores, where Pillow gives levels: those of 2 and 4 bits and of a PGM
stretched, those of a TIFF in which 0 is white, and of a PBM, inverted.
"""

import numpy as np
from PIL.ImageFile import ImageFile

from shardset.errors import UndecodableImage
from shardset.format.images import format_of, is_image_field, pillow
from shardset.format.images.background import SIXTEEN_BIT, stored_bits
from shardset.format.images.limits import DECODED_BYTES
from shardset.format.images.orientation import TURNS, UPRIGHT, orientation_of, upright_size

_WHITE = {"1": 1, "L": 255, "P": 255} | dict.fromkeys(SIXTEEN_BIT | {"I"}, 65535)
"""The largest number that Pillow gives, by the modes of one channel."""


def is_mask_field(field: str) -> bool:
    """Whether a field is a mask by its name, such as `mask.png` or `left.mask.tif`."""
    return is_image_field(field) and "mask" in field.split(".")[:-1]


def check(image: ImageFile, orientation: int, size: tuple[int, int]) -> None:
    """Raises UndecodableImage unless an image, not decoded yet, has one channel and once it is
    upright the (width, height) `size`, (0, 0) for any.
    """
    width, height = upright = upright_size(image.size, orientation)
    if image.mode not in _WHITE:
        raise UndecodableImage("not a mask", f"its mode is {image.mode}, expected one channel")
    if size not in ((0, 0), upright):
        its_image = f"its image is stored with {size[0]} x {size[1]}"
        raise UndecodableImage("mask of another size", f"{width} x {height} pixels, {its_image}")


def read(
    data: bytes,
    size: tuple[int, int],
    upright: bool = True,
    decoded_bytes: int = DECODED_BYTES,
) -> np.ndarray:
    """The numbers of a mask: uint8 or uint16 [height, width].

    `size` is the (width, height) of its image; `upright` and `decoded_bytes` are those of
    ImageSpec. Raises UndecodableImage, before it decodes the mask if `check` does.
    """
    kind = format_of(data)
    with pillow.opened(data, kind, decoded_bytes) as image:
        orientation = orientation_of(data, image) if upright else UPRIGHT
        check(image, orientation, size)
        tiles = image.tile
        pillow.load(image, data, kind)
        turn = TURNS.get(orientation)
        pixels = np.asarray(image if turn is None else image.transpose(turn))
    codec, _, _, args = tiles[0]
    raw, *maxval = args if isinstance(args, tuple) else (args,)
    bits, inverted = stored_bits(raw)
    most = white = _WHITE[image.mode]
    if codec.startswith("ppm") and maxval:
        [most] = maxval
    elif image.mode == "L":
        most = 2**bits - 1
    first, last = (most, 0) if inverted else (0, most)
    numbers = np.linspace(first, last, white + 1).round()
    return numbers.astype(np.uint8 if most < 256 else np.uint16).take(pixels)
