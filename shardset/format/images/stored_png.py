"""PNGs whose pixels stand in them as they are: neither filtered nor compressed.

The build makes them from arrays, because they are fast to write and to read; other programs see
ordinary PNGs. Those of 8-bit RGB pictures of one size differ only in pixels and two checksums:
signature, IHDR, one IDAT that is one stored block of deflate (all rows, a zero byte before each),
IEND. Sources: the PNG specification, third edition; RFC 1950 and 1951.
"""

import io
import itertools
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

MAX_BYTES = 65_535
"""The capacity of a stored block of deflate, which holds all rows of a picture, each with one more
byte.
"""

# bytes before the first row: signature, IHDR, length and name of IDAT, headers of zlib and of the
# block
_HEAD = 48
_IDAT = 37  # where the name of IDAT begins, the first byte that its checksum covers
_ADLER, _CRC, _END = -20, -16, -12  # where Adler-32 of the rows, CRC-32 of IDAT and IEND begin


def stored(images_NHWC: np.ndarray) -> list[bytes]:
    """A PNG of each picture, uint8 [n, height, width, 3]; raises ValueError if one needs more than
    MAX_BYTES.
    """
    num_images, height, width, _ = images_NHWC.shape
    template = _template(height, width)
    files = np.tile(template, (num_images, 1))
    _rows(files, height, width)[:, :, 1:] = images_NHWC.reshape(num_images, height, 3 * width)
    return [_summed(file.data) for file in files]


def encoded(image: np.ndarray) -> bytes:
    """The PNG of a picture, uint8 [height, width] or [height, width, 3]:
    not compressed if it fits.
    """
    if image.ndim == 3 and fits(*image.shape[:2]):
        return stored(image[None])[0]
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def pixels(files: Sequence[bytes], height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which files are intact ones of `stored` for pictures of that size, bool [n], and their
    pixels.

    Pixels are uint8 [m, height, width, 3].
    """
    template = _template(height, width)
    size = len(template)
    whole = (
        len(file) == size and _crc(memoryview(file)[_IDAT:_CRC]) == file[_CRC:_END]
        for file in files
    )
    matches = np.fromiter(whole, np.bool_, len(files))
    if not matches.any():
        return matches, np.empty((0, height, width, 3), np.uint8)
    content = np.frombuffer(b"".join(itertools.compress(files, matches)), np.uint8).reshape(
        -1, size
    )
    rows = _rows(content, height, width)
    good = (content[:, :_HEAD] == template[:_HEAD]).all(axis=1) & (
        content[:, _END:] == template[_END:]
    ).all(axis=1)
    good &= ~rows[:, :, 0].any(axis=1)
    matches[matches] = good
    return matches, rows[good, :, 1:].reshape(-1, height, width, 3)


def fits(height: int, width: int) -> bool:
    """Whether a picture of that size can be stored uncompressed."""
    return 0 < height * (1 + 3 * width) <= MAX_BYTES


@cache
def _template(height: int, width: int) -> np.ndarray:
    """The file of a black picture, without its checksums."""
    size = height * (1 + 3 * width)
    if not fits(height, width):
        raise ValueError(
            f"a picture of {height} x {width} pixels has {size} bytes, expected 1 to {MAX_BYTES}"
        )
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    block = (
        b"\x78\x01\x01"
        + size.to_bytes(2, "little")
        + (size ^ 0xFFFF).to_bytes(2, "little")
        + bytes(size)
    )
    parts = (
        b"\x89PNG\r\n\x1a\n",
        b"\0\0\0\x0d" + header + _crc(header),
        (len(block) + 4).to_bytes(4, "big") + b"IDAT" + block + bytes(8),
        b"\0\0\0\0IEND" + _crc(b"IEND"),
    )
    return np.frombuffer(b"".join(parts), np.uint8)


def _rows(files: np.ndarray, height: int, width: int) -> np.ndarray:
    """The rows in each file, the byte before each included: a view [n, height, 1 + 3 * width]."""
    return files[:, _HEAD:_ADLER].reshape(-1, height, 1 + 3 * width)


def _summed(file: memoryview) -> bytes:
    """The file with its checksums."""
    adler = zlib.adler32(file[_HEAD:_ADLER]).to_bytes(4, "big")
    return b"".join(
        [file[:_ADLER], adler, _crc(b"".join([file[_IDAT:_ADLER], adler])), file[_END:]]
    )


def _crc(chunk: bytes | memoryview) -> bytes:
    return zlib.crc32(chunk).to_bytes(4, "big")
