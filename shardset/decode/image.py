"""Image bytes to rows of one uint8 batch buffer.

simplejpeg (libjpeg-turbo) decodes JPEG, at reduced size where the crop is much larger than the result, and only around
the crop where restart markers allow it; `png` decodes 8-bit PNG; OpenCV resizes; Pillow decodes everything else. What
is transparent is put on a background, whatever decodes it (`shardset.format.background`). Crops come from keyed draws,
so the same slot gets the same crop whatever decodes it. `docs/decoding.md` states how far the result may be from
Pillow's and torchvision's.
"""

import io
import math
import struct
import threading
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from shardset.arguments import require_int
from shardset.decode import png
from shardset.decode.jpeg_restart import Grid, cut, grid_of, head
from shardset.errors import ConfigError, UndecodableImage
from shardset.format import background as backgrounds
from shardset.format import limits
from shardset.format.background import WHITE, Background, mend_transparency, rgb_pixels
from shardset.format.images import MAX_PIXELS
from shardset.format.limits import DECODED_BYTES
from shardset.order.epoch import slot_key

FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF")
NUM_TRIES = 10
_FRAMES_BYTES = 2**18
"""So much of padded images stays in the processor's cache."""

_LEAST_COLUMNS = 5
"""Pixels in a row from which on libjpeg-turbo interpolates colours: it needs three of halved ones (jdsample.c)."""

_SMALL_PIXELS, _MOST_PER_PIXEL = 2**20, 20
_NOTHING: AbstractContextManager[None] = nullcontext()
_JPEG = b"\xff\xd8"
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


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A crop of `scale` of the area and an aspect of `ratio`, resized: torchvision's rule on keyed draws."""

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, ends in (("scale", self.scale), ("ratio", self.ratio)):
            if not _is_range(ends):
                raise ConfigError(f"crop {name} is {ends!r}, expected (low, high) with 0 < low <= high")


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The shorter side resized to `resize`, then the centre; `resize` equal to the image's size resizes nothing."""

    resize: int

    def __post_init__(self) -> None:
        require_int("resize", self.resize)


@dataclass(frozen=True, slots=True)
class PadCrop:
    """A random window of the image with `padding` black pixels around it: no resizing, for small images."""

    padding: int = 4

    def __post_init__(self) -> None:
        if require_int("padding", self.padding) < 0:
            raise ConfigError(f"padding is {self.padding}, expected 0 or more pixels")


def _is_range(ends: Sequence[float]) -> bool:
    try:
        low, high = ends
        return 0 < low <= high
    except (TypeError, ValueError):
        return False


Crop = RandomResizedCrop | CenterCrop | PadCrop


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """What each image becomes: uint8 [size, size, 3], RGB.

    With `flip`, batches say in `flip` (bool) which images the device must mirror; the pixels come unmirrored.
    Transparent images are put on `background`. `decoded_bytes` is the memory of the images that a process decodes at
    once; an image that needs more is undecodable.
    """

    size: int
    crop: Crop = field(default_factory=RandomResizedCrop)
    flip: bool = False
    background: Background = WHITE
    decoded_bytes: int = DECODED_BYTES

    def __post_init__(self) -> None:
        if require_int("image size", self.size) < 1:
            raise ConfigError(f"image size is {self.size}, expected at least 1")
        if not isinstance(self.crop, Crop):
            raise ConfigError(f"crop is {self.crop!r}, expected a RandomResizedCrop(), CenterCrop(...) or PadCrop(...)")
        if isinstance(self.crop, CenterCrop) and self.crop.resize < self.size:
            raise ConfigError(f"the centre {self.size} of a side of {self.crop.resize} does not exist; raise resize")
        backgrounds.check(self.background)
        limits.check(self.decoded_bytes)

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn."""
        return self.flip or not isinstance(self.crop, CenterCrop)


@dataclass(frozen=True, slots=True)
class Box:
    """A window of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def draws(spec: ImageSpec, seed: int, epoch: int, rows: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) for each slot: float64 [n, m]; column 0 is the flip, 1 and 2 the place, then tries."""
    num_draws = 3 + 2 * NUM_TRIES if isinstance(spec.crop, RandomResizedCrop) else 3
    keys = slot_key(seed, epoch, rows[:, None], lanes[:, None], np.arange(num_draws))
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_box(crop: RandomResizedCrop, height: int, width: int, drawn: np.ndarray) -> Box:
    """The crop that a slot's draws choose in an image of that size; the largest centred one if ten tries miss."""
    log_low, log_high = math.log(crop.ratio[0]), math.log(crop.ratio[1])
    down, right, *tries = drawn[1:].tolist()
    for size, aspect in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (crop.scale[0] + size * (crop.scale[1] - crop.scale[0]))
        ratio = math.exp(log_low + aspect * (log_high - log_low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w)
    return _widest_box(crop, height, width)


def decode_into(row: np.ndarray, data: bytes, spec: ImageSpec, drawn: np.ndarray) -> None:
    """Decodes one image into `row`, uint8 [size, size, 3]; raises UndecodableImage."""
    match spec.crop:
        case RandomResizedCrop() as crop:
            _resized(row, data, crop, spec, drawn)
        case CenterCrop(resize):
            _centre(row, data, resize, spec)
        case PadCrop(padding):
            image = decode(data, background=spec.background, decoded_bytes=spec.decoded_bytes)
            pad_crop(row, image, padding, drawn)


def image_size(data: bytes) -> tuple[int, int]:
    """(height, width) from the header; raises UndecodableImage, also above MAX_PIXELS."""
    if data[:2] == _JPEG:
        size = _jpeg_size(data)
    elif png.is_png(data):
        size = png.size(data)
    else:
        size = _pillow_size(data)
    return _checked(size)


def decode(
    data: bytes,
    least: tuple[int, int] | None = None,
    *,
    background: Background = WHITE,
    decoded_bytes: int = DECODED_BYTES,
) -> np.ndarray:
    """The image: uint8 [height, width, 3], RGB; raises UndecodableImage.

    With `least`, a JPEG may come smaller, with at least that height and width. What is transparent is put on the
    background, 16 bits become the upper 8. `decoded_bytes` is that of ImageSpec.
    """
    with _room(data, image_size(data), decoded_bytes):
        return _decoded(data, least or (0, 0), background)


def _decoded(data: bytes, least: tuple[int, int], background: Background) -> np.ndarray:
    if data[:2] == _JPEG:
        image = _decode_jpeg(data, least)
    elif png.is_png(data):
        image = png.decode(data, background)
    else:
        image = None
    return _decode_pillow(data, background) if image is None else image


def _room(
    data: bytes, size: tuple[int, int], budget: int, grid: Grid | None = None, *, result: int = 0
) -> AbstractContextManager[None]:
    """Memory to decode an image in, and `result` bytes to resize it into; raises UndecodableImage beyond the limits."""
    is_jpeg = data[:2] == _JPEG
    if not is_jpeg and size[0] * size[1] <= _SMALL_PIXELS and result <= _SMALL_PIXELS <= budget // _MOST_PER_PIXEL:
        return _NOTHING
    num_scans = 1 if not is_jpeg or grid or grid_of(data) else limits.num_scans(data)
    kind = _kind(data)
    if why := limits.refusal(kind, size[1], size[0], budget, num_scans):
        raise UndecodableImage(f"it has {why}; store it re-encoded, or raise decoded_bytes if more memory is there")
    return limits.room(limits.num_bytes(kind, size[1], size[0], num_scans) + result, budget)


def _kind(data: bytes) -> str:
    if data[8:12] == b"WEBP":
        return "webp"
    return "tif" if data[:2] in (b"II", b"MM") else "jpg" if data[:2] == _JPEG else "image"


def _resized(row: np.ndarray, data: bytes, crop: RandomResizedCrop, spec: ImageSpec, drawn: np.ndarray) -> None:
    grid = grid_of(data) if data[:2] == _JPEG else None
    size = _checked(grid.size) if grid else image_size(data)
    box = random_box(crop, *size, drawn)
    ratio = max(row.shape[0] / box.height, row.shape[1] / box.width)
    least = math.ceil(size[0] * ratio), math.ceil(size[1] * ratio)
    with _room(data, size, spec.decoded_bytes, grid):
        window = _part_window(data, grid, box, least) if grid else None
        if window is None:
            window = _window(data, size, box, least, spec.background)
        _resize(window, row, cv2.INTER_LINEAR)


def _window(
    data: bytes, size: tuple[int, int], box: Box, least: tuple[int, int], background: Background = WHITE
) -> np.ndarray:
    """The pixels of a box, from the whole image decoded at no less than `least`."""
    image = _decoded(data, least, background)
    inside = _scaled(box, size, (image.shape[0], image.shape[1]))
    return image[inside.top : inside.top + inside.height, inside.left : inside.left + inside.width]


def _part_window(data: bytes, grid: Grid, box: Box, least: tuple[int, int]) -> np.ndarray | None:
    """The same pixels from a part of the image alone; None where that can't be cut out or decoded."""
    eighths = _eighths(grid.size, least)
    inside = _scaled(box, grid.size, _reduced(grid.size, eighths))
    # Colours are interpolated between neighbours, which may lie two pixels of the reduced image away.
    top, left = ((at - 2) * 8 // eighths for at in (inside.top, inside.left))
    bottom, right = (-(-(at + 2) * 8 // eighths) for at in (inside.top + inside.height, inside.left + inside.width))
    part = cut(data, grid, top, left, bottom, right) if grid.run else head(data, grid, bottom)
    if part is None:
        return None
    size = _reduced(part.size, eighths)
    if size[1] < _LEAST_COLUMNS:
        return None
    # What libjpeg-turbo warns about in a head is that it is one; damage before its end gives the pixels of the whole.
    image = _turbo(part.data, size, strict=grid.run > 0)
    if image is None or image.shape[:2] != size:
        return None
    down, along = inside.top - part.top * eighths // 8, inside.left - part.left * eighths // 8
    return image[down : down + inside.height, along : along + inside.width]


def _scaled(box: Box, size: tuple[int, int], shape: tuple[int, int]) -> Box:
    """Where a box of an image of `size` lies once that has `shape`; at least one pixel."""
    down, right = shape[0] / size[0], shape[1] / size[1]
    top, bottom = round(box.top * down), round((box.top + box.height) * down)
    left, end = round(box.left * right), round((box.left + box.width) * right)
    return Box(top, left, max(bottom - top, 1), max(end - left, 1))


def _eighths(size: tuple[int, int], least: tuple[int, int]) -> int:
    """The reduction that simplejpeg takes for `least` with a `min_factor` of 2: 1 to 4 eighths, or 8."""
    fits = (n for n in (1, 2, 3, 4) if all(a >= b for a, b in zip(_reduced(size, n), least, strict=True)))
    return next(fits, 8)


def _reduced(size: tuple[int, int], eighths: int) -> tuple[int, int]:
    return -(-size[0] * eighths // 8), -(-size[1] * eighths // 8)


def _centre(row: np.ndarray, data: bytes, resize: int, spec: ImageSpec) -> None:
    size = image_size(data)
    height, width = _short_side(*size, resize)
    if height * width > MAX_PIXELS:
        raise UndecodableImage(
            f"its {size[0]} x {size[1]} pixels would become {height} x {width} with a shorter side of {resize}, more "
            f"than {MAX_PIXELS}; crop it before it is stored"
        )
    with _room(data, size, spec.decoded_bytes, result=3 * height * width):
        image = _decoded(data, (height, width), spec.background)
        if (height, width) != image.shape[:2]:
            image = _resize(image, np.empty((height, width, 3), np.uint8), cv2.INTER_AREA)
        top, left = round((height - row.shape[0]) / 2), round((width - row.shape[1]) / 2)
        row[:] = image[top : top + row.shape[0], left : left + row.shape[1]]


def pad_crop(row: np.ndarray, image: np.ndarray, padding: int, drawn: np.ndarray) -> None:
    """The window that a slot's draws choose in the black-padded image; raises UndecodableImage if it is too small."""
    down, right = (side + 2 * padding - out for side, out in zip(image.shape[:2], row.shape[:2], strict=True))
    if min(down, right) < 0:
        raise UndecodableImage(
            f"its {image.shape[0]} x {image.shape[1]} pixels with {padding} around them are fewer than the crop's "
            f"{row.shape[0]}; use RandomResizedCrop or CenterCrop"
        )
    top, left = int(drawn[1] * (down + 1)) - padding, int(drawn[2] * (right + 1)) - padding
    from_top, from_left, to_top, to_left = max(0, top), max(0, left), max(0, -top), max(0, -left)
    height = min(image.shape[0], top + row.shape[0]) - from_top
    width = min(image.shape[1], left + row.shape[1]) - from_left
    row.data.cast("B")[:] = bytes(row.nbytes)
    if height <= 0 or width <= 0:  # all of it lies in the black
        return
    part = _rows(np.ascontiguousarray(image), from_top, from_left, height, width)
    _rows(row, to_top, to_left, height, width)[:] = part


def pad_crops(
    out: np.ndarray, slots: np.ndarray, images_NHWC: np.ndarray, ids: np.ndarray, padding: int, drawn: np.ndarray
) -> None:
    """`pad_crop` of image `ids[n]` into `out[slots[n]]`, all of one size and contiguous: uint8 [., size, size, 3]."""
    size, num_places = out.shape[1], 2 * padding + 1
    places = (drawn[:, 1:3] * num_places).astype(np.int64)
    frames = _frames.of(size, padding)
    row, (frame, stride, pixel, _) = np.dtype((np.void, 3 * size)), frames.strides
    shape, strides = (len(frames), num_places, num_places, size), (frame, stride, pixel, stride)
    windows = np.ndarray(shape, row, frames, 0, strides)  # every window at every place
    images, crops = (np.ndarray((len(each), size), row, each) for each in (images_NHWC, out))
    for start in range(0, len(ids), len(frames)):
        part = slice(start, start + len(frames))
        numbers = np.arange(len(ids[part]))
        windows[numbers, padding, padding] = images[ids[part]]
        crops[slots[part]] = windows[numbers, places[part, 0], places[part, 1]]


class _Frames(threading.local):
    """Black frames that images are put into, kept by each thread for its next ones: new memory takes as long again."""

    _fits: tuple[int, int] | None = None
    _images = np.empty((0, 0, 0, 3), np.uint8)

    def of(self, size: int, padding: int) -> np.ndarray:
        """Some frames for images of that size, uint8 [n, side, side, 3], black but for the images."""
        if self._fits != (size, padding):
            side = size + 2 * padding
            self._images = np.zeros((max(1, _FRAMES_BYTES // (3 * side**2)), side, side, 3), np.uint8)
            self._fits = size, padding
        return self._images


_frames = _Frames()


def _rows(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """A window of a contiguous image, each of its rows as one element: [height].

    NumPy lets other threads run while it copies more than 500 elements; to be let in again takes longer than the copy.
    """
    stride = 3 * image.shape[1]
    return np.ndarray((height,), (np.void, 3 * width), image.data, top * stride + 3 * left, (stride,))


def _resize(image: np.ndarray, out: np.ndarray, how: int) -> np.ndarray:
    """Linear is seven times faster than area and good enough to train on; it skips pixels beyond a factor of 2."""
    far = image.shape[0] >= 2 * out.shape[0] or image.shape[1] >= 2 * out.shape[1]
    return cv2.resize(image, (out.shape[1], out.shape[0]), dst=out, interpolation=cv2.INTER_AREA if far else how)


def _short_side(height: int, width: int, side: int) -> tuple[int, int]:
    """The size whose shorter side is `side`: torchvision's rounding."""
    if height <= width:
        return side, int(side * width / height)
    return int(side * height / width), side


def _widest_box(crop: RandomResizedCrop, height: int, width: int) -> Box:
    ratio = min(max(width / height, crop.ratio[0]), crop.ratio[1])
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if not 0 < size[0] * size[1] <= MAX_PIXELS:
        raise UndecodableImage(f"it says it has {size[0]} x {size[1]} pixels, expected 1 to {MAX_PIXELS}")
    return size


def _jpeg_size(data: bytes) -> tuple[int, int]:
    header = _turbo_header(data)
    return _pillow_size(data) if header is None else header[:2]


def _turbo_header(data: bytes) -> tuple[int, int, str] | None:
    """(height, width, colour space); None where libjpeg-turbo can't tell or has no name for how colours are sampled."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # KeyError: it has no colour space
        return None
    return height, width, colours


def _decode_jpeg(data: bytes, least: tuple[int, int]) -> np.ndarray | None:
    """None where libjpeg-turbo has no true RGB for it (CMYK), can't read its header or warns; Pillow then decides."""
    if limits.is_cut_jpeg(data):
        raise UndecodableImage("it is truncated: the end mark of a JPEG is missing; restore it")
    header = _turbo_header(data)
    return None if header is None or header[2] in ("CMYK", "YCCK") else _turbo(data, least)


def _turbo(data: bytes | bytearray, least: tuple[int, int], *, strict: bool = True) -> np.ndarray | None:
    try:
        return simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], min_factor=2, strict=strict)
    except ValueError:
        return None


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
