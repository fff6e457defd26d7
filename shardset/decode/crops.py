"""Crops: which window of an image becomes a row of a batch, and how its pixels get there.

A new crop is one class here: it states how many numbers it draws, which region of an image it
needs, and how that region fills a row. Draws are keyed by slot, so a slot gets the same crop
whatever decodes its image.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image

from shardset.errors import ConfigError, UndecodableImage, require_int
from shardset.format.images import MAX_PIXELS
from shardset.format.images.limits import DECODED_BYTES

NUM_TRIES = 10
INTERPOLATIONS = {
    "area": None,
    "linear": None,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
"""How a crop resizes: by OpenCV's averages of areas, by its linear interpolation, which is seven
times as fast and good enough to train on, or by a filter of Pillow's, as torchvision and timm do.
"""
_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
"""OpenCV's flip that makes an image upright, by EXIF orientation; from 5 on after it is transposed.
"""

_FRAMES_BYTES = 2**18
"""Bytes of padded images at a time: they stay in the processor's cache."""


class Box(NamedTuple):
    """A window of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Window(NamedTuple):
    """The pixels that a box of an image touches: uint8 [height, width, 3].

    `inside` is the box in them: (top, left, height, width). It begins and ends between pixels if
    the image was reduced while it was decoded.
    """

    pixels: np.ndarray
    inside: tuple[float, float, float, float]


class Region(NamedTuple):
    """What a crop needs of one image, and how that fills a row.

    `box` is a window of the full-size image. It becomes `target` in the row, which may reach beyond
    the row. The image may be decoded smaller, with at least the height and
    width of `least`. `put(row, pixels)` fills a row from the pixels of the box and allocates
    `num_bytes`.
    """

    box: Box
    target: Box
    least: tuple[int, int]
    put: Callable[[np.ndarray, Window], object]
    num_bytes: int = 0


class Placement(NamedTuple):
    """Where an upright image of (height, width) lies in a row of a size, which may be mirrored.

    `upright` and `decoded_bytes` are those of ImageSpec, for other images of the sample.
    """

    image_size: tuple[int, int]
    region: Region
    row_size: int
    is_mirrored: bool
    upright: bool = True
    decoded_bytes: int = DECODED_BYTES

    @property
    def scales(self) -> tuple[float, float, float, float]:
        """(a, b, c, d): a point (x, y) of the upright image is (a x + b, c y + d) in the row."""
        (top, left, height, width), target = self.region.box, self.region.target
        x, y = target.width / width, target.height / height
        shift = target.left - left * x
        if self.is_mirrored:
            x, shift = -x, self.row_size - shift
        return x, shift, y, target.top - top * y

    @property
    def matrix(self) -> np.ndarray:
        """From points (x, y, 1) of the upright image to points of the row: float64 [2, 3].

        Points are as in OpenCV and kornia with pixel edges: (0, 0) is a corner of the image.
        """
        x, right, y, down = self.scales
        return np.array([[x, 0, right], [0, y, down]])


class Crop(ABC):
    """How an image becomes a row: uint8 [size, size, 3]."""

    __slots__ = ()

    num_draws: ClassVar[int] = 0
    """The number of draws per slot; 0 if it takes the same window every time."""

    def check(self, size: int) -> None:  # noqa: B027 - most crops fill rows of any size
        """Raises ConfigError if it can't fill a row of that size."""

    @abstractmethod
    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        """The region of an image (height, width) for a row of `size`.

        `drawn` holds the draws of the slot: one for the flip, then the crop's. Raises
        UndecodableImage.
        """

    def keeps_size(self, size: int) -> bool:
        """Whether it leaves images of that size unresized, so that `put_many` may crop many of them
        at once.
        """
        return False

    def put_many(
        self,
        out: np.ndarray,
        slots: np.ndarray,
        images_NHWC: np.ndarray,
        ids: np.ndarray,
        drawn: np.ndarray,
    ) -> None:
        """Crops image `ids[n]` into `out[slots[n]]`; all images have the size of a row."""
        out[slots] = images_NHWC[ids]


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(Crop):
    """A random window of the image, resized: torchvision's rule.

    Args:
        scale: The smallest and the largest share of the image's area that a window has.
        ratio: The smallest and the largest aspect of a window, width to height.
        interpolation: How it is resized: "linear" (OpenCV's; areas beyond a factor of 2), "area",
            or a filter of Pillow's: "bilinear", "bicubic", "lanczos". ImageSpec raises ConfigError
            for any other.

    Raises:
        ConfigError: A range is not (low, high) with 0 < low <= high.

    Examples:
        >>> import shardset
        >>> crop = shardset.RandomResizedCrop(scale=(0.35, 1.0))
        >>> spec = shardset.ImageSpec(size=224, crop=crop, flip="pixels")
    """

    # the position of the window, then the area and the aspect of each try
    num_draws: ClassVar[int] = 2 + 2 * NUM_TRIES

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "linear"

    def __post_init__(self) -> None:
        for name, ends in (("scale", self.scale), ("ratio", self.ratio)):
            try:
                low, high = ends
                is_range = 0 < low <= high
            except (TypeError, ValueError):
                is_range = False
            if not is_range:
                raise ConfigError(
                    f"crop {name} is {ends!r}, expected (low, high) with 0 < low <= high"
                )

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        box = random_box(self, *image_size, drawn)
        return _resized(image_size, Box(0, 0, size, size), size, self.interpolation, box=box)


@dataclass(frozen=True, slots=True)
class CenterCrop(Crop):
    """The centre of the image, after its shorter side is resized.

    An image that would become larger than the limit on pixels is an UndecodableImage.

    Args:
        resize: Length of the shorter side before the crop, in pixels; at least the size of the
            result.
        interpolation: As in RandomResizedCrop; torchvision and timm use Pillow's filters.

    ImageSpec raises ConfigError for a `resize` below its size.

    Examples:
        >>> import shardset
        >>> spec = shardset.ImageSpec(size=224, crop=shardset.CenterCrop(256, "bicubic"))
    """

    resize: int
    interpolation: str = "area"

    def check(self, size: int) -> None:
        if require_int("resize", self.resize) < size:
            raise ConfigError(
                f"the centre {size} of a side of {self.resize} does not exist; raise resize"
            )

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        short = min(image_size)  # with torchvision's rounding
        height, width = (int(self.resize * side / short) for side in image_size)
        if height * width > MAX_PIXELS:
            raise UndecodableImage(
                f"its {image_size[0]} x {image_size[1]} pixels would become {height} x {width} with"
                f" a shorter side of {self.resize}, more than {MAX_PIXELS}; crop it before it is"
                " stored"
            )
        top, left = round((height - size) / 2), round((width - size) / 2)
        return _resized(image_size, Box(-top, -left, height, width), size, self.interpolation)

    def keeps_size(self, size: int) -> bool:
        return self.resize == size


@dataclass(frozen=True, slots=True)
class Resize(Crop):
    """The complete image, stretched to the row.

    Args:
        interpolation: As in RandomResizedCrop.
    """

    interpolation: str = "area"

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        return _resized(image_size, Box(0, 0, size, size), size, self.interpolation)


@dataclass(frozen=True, slots=True)
class Letterbox(Crop):
    """The complete image, resized until it fits, in the middle of the row.

    Args:
        fill: The level of the rest of the row, 0 to 255.
        interpolation: As in RandomResizedCrop.

    Raises:
        ConfigError: `fill` is out of range.
    """

    fill: int = 114
    interpolation: str = "area"

    def __post_init__(self) -> None:
        if not 0 <= require_int("fill", self.fill) <= 255:
            raise ConfigError(f"fill is {self.fill}, expected 0 to 255")

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        height, width = (max(1, round(side * size / max(image_size))) for side in image_size)
        target = Box((size - height) // 2, (size - width) // 2, height, width)
        return _resized(image_size, target, size, self.interpolation, self.fill)


@dataclass(frozen=True, slots=True)
class PadCrop(Crop):
    """A random window of the image with black pixels around it, not resized: for small images.

    An image that is too small to fill the result, even with the padding, is an UndecodableImage.

    Args:
        padding: Black pixels on each side.

    Raises:
        ConfigError: `padding` is no whole number of 0 or more.

    Examples:
        >>> import shardset
        >>> spec = shardset.ImageSpec(size=32, crop=shardset.PadCrop(4), flip="pixels")
    """

    num_draws: ClassVar[int] = 2  # the position of the window

    padding: int = 4

    def __post_init__(self) -> None:
        if require_int("padding", self.padding) < 0:
            raise ConfigError(f"padding is {self.padding}, expected 0 or more pixels")

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        padding, (height, width) = self.padding, image_size
        down, right = height + 2 * padding - size, width + 2 * padding - size
        if min(down, right) < 0:
            raise UndecodableImage(
                f"its {height} x {width} pixels with {padding} around them are fewer than the"
                f" crop's {size}; use RandomResizedCrop or CenterCrop"
            )
        top, left = int(drawn[1] * (down + 1)), int(drawn[2] * (right + 1))
        target = Box(padding - top, padding - left, height, width)
        box = Box(0, 0, *image_size)
        return Region(box, target, image_size, partial(_put, target=target))

    def keeps_size(self, size: int) -> bool:
        return True

    def put_many(
        self,
        out: np.ndarray,
        slots: np.ndarray,
        images_NHWC: np.ndarray,
        ids: np.ndarray,
        drawn: np.ndarray,
    ) -> None:
        size, num_offsets = out.shape[1], 2 * self.padding + 1
        offsets = (drawn[:, 1:3] * num_offsets).astype(np.int64)
        frames = _black_frames(size, self.padding)
        row, (frame, stride, pixel, _) = np.dtype((np.void, 3 * size)), frames.strides
        shape = len(frames), num_offsets, num_offsets, size
        windows = np.ndarray(shape, row, frames, 0, (frame, stride, pixel, stride))
        images, crops = (np.ndarray((len(each), size), row, each) for each in (images_NHWC, out))
        for start in range(0, len(ids), len(frames)):
            chunk = slice(start, start + len(frames))
            numbers = np.arange(len(ids[chunk]))
            windows[numbers, self.padding, self.padding] = images[ids[chunk]]
            crops[slots[chunk]] = windows[numbers, offsets[chunk, 0], offsets[chunk, 1]]


def random_box(crop: RandomResizedCrop, height: int, width: int, drawn: np.ndarray) -> Box:
    """The window that a slot's draws choose in an image of that size; the largest centred one if
    ten tries miss.
    """
    log_low, log_high = math.log(crop.ratio[0]), math.log(crop.ratio[1])
    down, right, *tries = drawn[1:].tolist()
    for area_draw, aspect in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (crop.scale[0] + area_draw * (crop.scale[1] - crop.scale[0]))
        ratio = math.exp(log_low + aspect * (log_high - log_low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w)
    ratio = min(max(width / height, crop.ratio[0]), crop.ratio[1])
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def turned(image: np.ndarray, orientation: int) -> np.ndarray:
    """The upright image, uint8 [height, width, 3], of one that is stored in an EXIF orientation of
    1 to 8.
    """
    import cv2  # here and below: a stream of bytes needs none of it

    if orientation >= 5:
        image = cv2.transpose(image)
    return cv2.flip(image, _FLIPS[orientation]) if orientation in _FLIPS else image


def flips(orientation: int) -> tuple[bool, bool]:
    """Whether `turned` flips top and bottom, and left and right."""
    code = _FLIPS.get(orientation)
    return code in (0, -1), code in (1, -1)


def use_one_opencv_thread() -> None:
    """Makes OpenCV resize in the calling thread, because every core decodes already."""
    import cv2

    cv2.setNumThreads(1)


def _black_frames(size: int, padding: int) -> np.ndarray:
    """Frames for images of that size: uint8 [n, side, side, 3], black around the images of earlier
    calls.

    Each thread reuses its own: allocating them takes as long as the crop.
    """
    if getattr(_frames, "key", None) != (size, padding):
        side = size + 2 * padding
        num_frames = max(1, _FRAMES_BYTES // (3 * side**2))
        _frames.images = np.zeros((num_frames, side, side, 3), np.uint8)
        _frames.key = size, padding
    images: np.ndarray = _frames.images
    return images


_frames = threading.local()


def _resized(
    image_size: tuple[int, int],
    target: Box,
    size: int,
    interpolation: str,
    fill: int = 0,
    box: Box | None = None,
) -> Region:
    """The region that resizes a box of an image, or all of it, to its target."""
    box = box or Box(0, 0, *image_size)
    height, width = box[2:]
    ratio = max(target.height / height, target.width / width)
    least = math.ceil(image_size[0] * ratio), math.ceil(image_size[1] * ratio)
    num_bytes = 0 if target == (0, 0, size, size) else 3 * target.height * target.width
    if INTERPOLATIONS[interpolation] is not None:
        # Pillow copies the image, into 4 bytes a pixel, and resizes one dimension, then the other.
        num_bytes += 4 * (height * width + height * target.width + target.height * target.width)
    put = partial(_put, target=target, interpolation=interpolation, fill=fill)
    return Region(box, target, least, put, num_bytes)


def _put(
    row: np.ndarray, window: Window, target: Box, interpolation: str = "area", fill: int = 0
) -> None:
    """Fills a row with a window that is resized to `target`, and with `fill` where that is not."""
    top, left, height, width = target
    covers = top <= 0 and left <= 0 and top + height >= len(row) and left + width >= len(row)
    pixels = window.pixels
    if window.inside != (0, 0, height, width):
        is_row = covers and height == width == len(row)
        out = row if is_row else np.empty((height, width, 3), np.uint8)
        _resize_into(out, window, interpolation)
        if is_row:
            return
        pixels = out
    if covers:
        row[:] = pixels[-top : len(row) - top, -left : len(row) - left]
        return
    row[:] = fill
    inside = row[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    inside[:] = pixels[max(0, -top) :, max(0, -left) :][: inside.shape[0], : inside.shape[1]]


def _resize_into(out: np.ndarray, window: Window, interpolation: str) -> None:
    import cv2

    image, (top, left, height, width) = window
    size = out.shape[1], out.shape[0]
    if (resample := INTERPOLATIONS[interpolation]) is not None:
        box = left, top, left + width, top + height
        out[:] = np.asarray(Image.fromarray(image).resize(size, resample, box))
        return
    across, down = width / size[0], height / size[1]
    # Beyond a factor of 2, linear would skip pixels.
    by_area = interpolation == "area" or max(across, down) >= 2
    how = cv2.INTER_AREA if by_area else cv2.INTER_LINEAR
    if top == left == 0:
        scaled = cv2.resize(image, None, out, 1 / across, 1 / down, how)
        out[:] = scaled[: size[1], : size[0]]
        return
    # Points, one or more, stand for the area of each pixel of the row. OpenCV takes twice as long
    # for three colours as for four.
    points = [math.ceil(step) if by_area else 1 for step in (across, down)]
    x, y = across / points[0], down / points[1]
    places = np.array([[x, 0, left + x / 2 - 0.5], [0, y, top + y / 2 - 0.5]])
    dense = cv2.warpAffine(
        cv2.cvtColor(image, cv2.COLOR_RGB2RGBA),
        places,
        (size[0] * points[0], size[1] * points[1]),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    resized = cv2.resize(dense, size, interpolation=cv2.INTER_AREA)
    cv2.cvtColor(resized, cv2.COLOR_RGBA2RGB, dst=out)
