"""8-bit PNGs to RGB pixels, and masks to their numbers. Imports little, because worker processes
start with it.

kornia_rs (Rust's png) decodes RGB and RGBA in little more than half the time of pyspng (libspng),
which converts grey and palettes. A mask needs no conversion, so kornia_rs decodes it, too. Neither
supports a PNG's transparent colour (tRNS): Pillow decodes such a PNG.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyspng
from kornia_rs import io as kornia

from shardset.format.images.background import WHITE, Background, over
from shardset.format.images.limits import ANCILLARY, IEND, may_orient, png_chunks

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = slice(8, 16)
_HEADER_BEGINS = b"\0\0\0\x0dIHDR"
_SIZE = struct.Struct(">II")
_RGB, _GREY_ALPHA, _RGBA = 2, 4, 6
_MASK_DECODERS = {
    b"\x08\0": kornia.decode_image_png_u8,
    b"\x08\3": kornia.decode_image_png_u8,
    b"\x10\0": kornia.decode_image_png_u16,
}
"""By the bits and the colour type of a header: grey or a palette, which kornia_rs leaves alone."""
_LEFT_TO_PILLOW = (b"acTL", b"tRNS")


def is_png(data: bytes) -> bool:
    """Whether the data begin as a PNG does and hold the size."""
    return data[:8] == _SIGNATURE and len(data) >= 26


def size(data: bytes) -> tuple[int, int]:
    """(height, width) as the header of a PNG claims."""
    width, height = _SIZE.unpack_from(data, 16)
    return height, width


def decode(data: bytes, background: Background = WHITE) -> np.ndarray | None:
    """The image of a PNG on a background, uint8 [height, width, 3]; None if it is cut, damaged or
    not 8-bit.

    None also for animated PNGs and for those with a transparent colour or metadata that may turn
    them. The caller limits the size.
    """
    colours = data[25]
    if (
        data[24] != 8
        or data[_HEADER] != _HEADER_BEGINS
        or not _is_one_image(data, sums=colours not in (_RGB, _RGBA))
    ):
        return None
    if colours in (_RGB, _RGBA):
        mode = "rgb" if colours == _RGB else "rgba"
        pixels = _decoded(kornia.decode_image_png_u8, data, size(data), mode)
    else:
        pixels = _decoded(pyspng.load, data, "RGBA" if colours == _GREY_ALPHA else "RGB")
    if pixels is not None and colours in (_GREY_ALPHA, _RGBA):
        pixels = over(pixels, background)
    return pixels


def mask(data: bytes) -> np.ndarray | None:
    """The grey levels, or places in a palette, that a PNG stores: uint8 or uint16 [height, width].

    None if it has fewer than 8 bits or is one that `decode` leaves. The caller limits the size.
    """
    decode = _MASK_DECODERS.get(data[24:26])
    if not decode or data[_HEADER] != _HEADER_BEGINS or not _is_one_image(data, sums=False):
        return None
    numbers = _decoded(decode, data, size(data), "mono")
    return None if numbers is None else numbers[:, :, 0]


def _decoded(decode: Callable[..., np.ndarray], data: bytes, *options: Any) -> np.ndarray | None:
    """What a decoder makes of the data; None if it refuses them."""
    try:
        return decode(data, *options)
    except Exception:  # noqa: BLE001 - kornia_rs raises nothing narrower
        return None


def _is_one_image(data: bytes, *, sums: bool) -> bool:
    """Whether it has neither frames, a transparent colour nor metadata that may turn it, and its
    last chunk ends where the data end.

    libspng allocates what a chunk claims, and kornia_rs may ignore the chunk. With `sums`, each
    chunk must match its CRC-32, which libspng does not verify.
    """
    end, view = 0, memoryview(data)
    for kind, start, end in png_chunks(data):
        if kind >= ANCILLARY and (kind in _LEFT_TO_PILLOW or may_orient(data, kind, start)):
            return False
        content, check = view[start + 4 : end - 4], data[end - 4 : end]
        if sums and check != zlib.crc32(content).to_bytes(4, "big"):
            return False
    return end == len(data) and data.endswith(IEND)
