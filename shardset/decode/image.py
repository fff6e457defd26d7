"""Image bytes to rows of one uint8 batch buffer.

simplejpeg decodes JPEG (`jpeg`), kornia_rs and pyspng 8-bit PNG (`png`), Pillow everything else. Transparent pixels
are put on a background, whatever decodes them (`shardset.format.background`); `crops` fills the row. `docs/decoding.md`
states how far the result may be from Pillow's and torchvision's.
"""

import io
import struct
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PIL import Image

from shardset.arguments import require_int
from shardset.decode import jpeg, png
from shardset.decode.crops import Box, Crop, RandomResizedCrop
from shardset.decode.jpeg_restart import Grid, grid_of
from shardset.errors import ConfigError, UndecodableImage
from shardset.format import background as backgrounds
from shardset.format import limits
from shardset.format.background import WHITE, Background, mend_transparency, rgb_pixels
from shardset.format.images import MAX_PIXELS
from shardset.format.limits import DECODED_BYTES
from shardset.order.epoch import slot_key

FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF")
"""What Pillow may open."""

_SMALL_PIXELS, _MOST_PER_PIXEL = 2**20, 20
_UNLIMITED: AbstractContextManager[None] = nullcontext()
_PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """What each image becomes: uint8 [size, size, 3], RGB.

    With `flip=True`, batches say in `flip` (bool) which images the device must mirror; the pixels come unmirrored. With
    `flip="pixels"` they come mirrored, and nothing is left to the device.
    Transparent images are put on `background`. `decoded_bytes` limits the memory of the images that a process decodes
    at once; an image that needs more is undecodable.
    """

    size: int
    crop: Crop = field(default_factory=RandomResizedCrop)
    flip: bool | Literal["pixels"] = False
    background: Background = WHITE
    decoded_bytes: int = DECODED_BYTES

    def __post_init__(self) -> None:
        if require_int("image size", self.size) < 1:
            raise ConfigError(f"image size is {self.size}, expected at least 1")
        if not isinstance(self.crop, Crop):
            raise ConfigError(f"crop is {self.crop!r}, expected a RandomResizedCrop(), CenterCrop(...) or PadCrop(...)")
        if isinstance(self.flip, str) and self.flip != "pixels":
            raise ConfigError(f"flip is {self.flip!r}, expected True, False or 'pixels'")
        self.crop.check(self.size)
        backgrounds.check(self.background)
        limits.check(self.decoded_bytes)

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn."""
        return bool(self.flip) or self.crop.num_draws > 0


def draws(spec: ImageSpec, seed: int, epoch: int, rows: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) for each slot: float64 [n, m]; column 0 is the flip, the others are the crop's."""
    keys = slot_key(seed, epoch, rows[:, None], lanes[:, None], np.arange(1 + spec.crop.num_draws))
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def decode_into(row: np.ndarray, data: bytes, spec: ImageSpec, drawn: np.ndarray) -> None:
    """Decodes and crops one image into `row`, uint8 [size, size, 3]; raises UndecodableImage."""
    grid = _grid(data)
    size = _size(data, grid)
    region = spec.crop.region(size, row.shape[0], drawn)
    with _memory_for(data, size, spec.decoded_bytes, grid, region.num_bytes):
        if region.box is None:
            pixels = _decode_whole(data, region.least, spec.background)
        else:
            pixels = _decode_box(data, size, grid, region.box, region.least, spec.background)
        region.put(row, pixels)


def decode(
    data: bytes,
    least: tuple[int, int] = (0, 0),
    *,
    background: Background = WHITE,
    decoded_bytes: int = DECODED_BYTES,
) -> np.ndarray:
    """The image: uint8 [height, width, 3], RGB; raises UndecodableImage.

    With `least`, a JPEG may come smaller, with at least that height and width. Transparent pixels are put on the
    background, 16 bits become the upper 8. `decoded_bytes` is that of ImageSpec.
    """
    grid = _grid(data)
    with _memory_for(data, _size(data, grid), decoded_bytes, grid):
        return _decode_whole(data, least, background)


def image_size(data: bytes) -> tuple[int, int]:
    """(height, width) from the header; raises UndecodableImage, also above MAX_PIXELS."""
    return _size(data, None)


def _grid(data: bytes) -> Grid | None:
    return grid_of(data) if jpeg.is_jpeg(data) else None


def _size(data: bytes, grid: Grid | None) -> tuple[int, int]:
    if grid:
        size = grid.size
    elif png.is_png(data):
        size = png.size(data)
    else:
        size = (jpeg.size(data) if jpeg.is_jpeg(data) else None) or _pillow_size(data)
    if not 0 < size[0] * size[1] <= MAX_PIXELS:
        raise UndecodableImage(f"it says it has {size[0]} x {size[1]} pixels, expected 1 to {MAX_PIXELS}")
    return size


def _memory_for(
    data: bytes, size: tuple[int, int], budget: int, grid: Grid | None, result_bytes: int = 0
) -> AbstractContextManager[None]:
    """Memory to decode an image in, and `result_bytes` to resize it into; raises UndecodableImage beyond the limits."""
    if (
        not jpeg.is_jpeg(data)
        and size[0] * size[1] <= _SMALL_PIXELS
        and result_bytes <= _SMALL_PIXELS <= budget // _MOST_PER_PIXEL
    ):
        return _UNLIMITED
    num_scans = 1 if grid or not jpeg.is_jpeg(data) else limits.num_scans(data)
    kind = _kind(data)
    if why := limits.refusal(kind, size[1], size[0], budget, num_scans):
        raise UndecodableImage(f"it has {why}; store it re-encoded, or raise decoded_bytes if more memory is there")
    return limits.room(limits.num_bytes(kind, size[1], size[0], num_scans) + result_bytes, budget)


def _kind(data: bytes) -> str:
    if data[8:12] == b"WEBP":
        return "webp"
    return "tif" if data[:2] in (b"II", b"MM") else "jpg" if jpeg.is_jpeg(data) else "image"


def _decode_box(
    data: bytes, size: tuple[int, int], grid: Grid | None, box: Box, least: tuple[int, int], background: Background
) -> np.ndarray:
    """The pixels of a box: of a JPEG from a part of it where its grid allows that."""
    window = jpeg.decode_window(data, grid, box, least) if grid else None
    if window is not None:
        return window
    image = _decode_whole(data, least, background)
    inside = jpeg.scaled(box, size, (image.shape[0], image.shape[1]))
    return image[inside.top : inside.top + inside.height, inside.left : inside.left + inside.width]


def _decode_whole(data: bytes, least: tuple[int, int], background: Background) -> np.ndarray:
    """`decode` without its limits, which the caller has checked."""
    if jpeg.is_jpeg(data):
        image = jpeg.decode(data, least)
    elif png.is_png(data):
        image = png.decode(data, background)
    else:
        image = None
    return _decode_pillow(data, background) if image is None else image


def _pillow_size(data: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except _PILLOW_ERRORS as error:
        raise UndecodableImage(f"no image format of {', '.join(FORMATS)} begins like it ({error})") from error


def _decode_pillow(data: bytes, background: Background) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            mend_transparency(image)
            if image.format == "PNG" and png.is_cut(data):
                raise UndecodableImage("it is truncated: the end mark of a PNG is missing; restore it")
            if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
                kind = "floating-point numbers" if image.mode == "F" else "numbers of 32 bits"
                raise UndecodableImage(f"its pixels are {kind}, not levels; convert it to 8 or 16 bits")
            return rgb_pixels(image, background)  # of I;16 of a PNG, and of I of a PGM, which Pillow brings to 16 bits
    except _PILLOW_ERRORS as error:
        raise UndecodableImage(f"Pillow can't decode it ({error})") from error
