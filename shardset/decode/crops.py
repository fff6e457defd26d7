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
from typing import NamedTuple

import numpy as np
from PIL import Image

from shardset.errors import ConfigError, UndecodableImage, require_int
from shardset.format.images import MAX_PIXELS

NUM_TRIES = 10
INTERPOLATIONS = {
    "area": None,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
"""How `CenterCrop` resizes: by OpenCV's averages of areas, or by a filter of Pillow's, as
torchvision and timm do.
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


class Region(NamedTuple):
    """What a crop needs of one image, and how that fills a row.

    `box` is a window of the full-size image; None is all of it. The image may be decoded smaller,
    with at least the height and width of `least`. `put(row, pixels)` fills a row from the pixels of
    the box and allocates `num_bytes`.
    """

    box: Box | None
    least: tuple[int, int]
    put: Callable[[np.ndarray, np.ndarray], object]
    num_bytes: int = 0


class Crop(ABC):
    """How an image becomes a row: uint8 [size, size, 3]."""

    __slots__ = ()

    @property
    def num_draws(self) -> int:
        """The number of draws per slot; 0 if it takes the same window every time."""
        return 0

    def check(self, size: int) -> None:  # noqa: B027 - most crops fill rows of any size
        """Raises ConfigError if it can't fill a row of that size."""

    @abstractmethod
    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        """The region of an image (height, width) for a row of `size`.

        `drawn` holds the draws of the slot: one for the flip, then those of the crop. Raises
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

    Raises:
        ConfigError: A range is not (low, high) with 0 < low <= high.

    Examples:
        >>> import shardset
        >>> crop = shardset.RandomResizedCrop(scale=(0.35, 1.0))
        >>> spec = shardset.ImageSpec(size=224, crop=crop, flip="pixels")
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

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

    @property
    def num_draws(self) -> int:
        # the position of the window, then the area and the aspect of each try
        return 2 + 2 * NUM_TRIES

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        box = random_box(self, *image_size, drawn)
        ratio = max(size / box.height, size / box.width)
        # Linear is seven times faster than area and good enough to train on.
        put = partial(_resize_into, by_area=False)
        return Region(
            box, (math.ceil(image_size[0] * ratio), math.ceil(image_size[1] * ratio)), put
        )


@dataclass(frozen=True, slots=True)
class CenterCrop(Crop):
    """The centre of the image, after its shorter side is resized.

    An image that would become larger than the limit on pixels is an UndecodableImage.

    Args:
        resize: Length of the shorter side before the crop, in pixels; at least the size of the
            result.
        interpolation: "area" (OpenCV's averages), or "bilinear", "bicubic" or "lanczos" (Pillow's
            filters, as torchvision and timm use them).

    Raises:
        ConfigError: `resize` is no whole number, or the interpolation is not known. ImageSpec
            raises it for a `resize` below its size.

    Examples:
        >>> import shardset
        >>> spec = shardset.ImageSpec(size=224, crop=shardset.CenterCrop(256, "bicubic"))
    """

    resize: int
    interpolation: str = "area"

    def __post_init__(self) -> None:
        require_int("resize", self.resize)
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(
                f"interpolation is {self.interpolation!r}, expected one of"
                f" {', '.join(INTERPOLATIONS)}"
            )

    def check(self, size: int) -> None:
        if self.resize < size:
            raise ConfigError(
                f"the centre {size} of a side of {self.resize} does not exist; raise resize"
            )

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        if image_size == (size, size) and self.resize == size:
            return _UNCHANGED
        height, width = short_side(*image_size, self.resize)
        if height * width > MAX_PIXELS:
            raise UndecodableImage(
                f"its {image_size[0]} x {image_size[1]} pixels would become {height} x {width} with"
                f" a shorter side of {self.resize}, more than {MAX_PIXELS}; crop it before it is"
                " stored"
            )
        num_bytes = 3 * height * width
        if (resample := INTERPOLATIONS[self.interpolation]) is not None:
            # Pillow copies the image, into 4 bytes a pixel, and resizes one dimension, then the
            # other.
            num_bytes += 4 * (math.prod(image_size) + image_size[0] * width + height * width)
        put = partial(_put_centre, (height, width), resample=resample)
        return Region(None, (height, width), put, num_bytes)

    def keeps_size(self, size: int) -> bool:
        return self.resize == size


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

    padding: int = 4

    def __post_init__(self) -> None:
        if require_int("padding", self.padding) < 0:
            raise ConfigError(f"padding is {self.padding}, expected 0 or more pixels")

    @property
    def num_draws(self) -> int:
        return 2  # the position of the window

    def region(self, image_size: tuple[int, int], size: int, drawn: np.ndarray) -> Region:
        return Region(None, (0, 0), partial(self._put, drawn))

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
        frames = _frames.of(size, self.padding)
        row, (frame, stride, pixel, _) = np.dtype((np.void, 3 * size)), frames.strides
        shape = len(frames), num_offsets, num_offsets, size
        windows = np.ndarray(shape, row, frames, 0, (frame, stride, pixel, stride))
        images, crops = (np.ndarray((len(each), size), row, each) for each in (images_NHWC, out))
        for start in range(0, len(ids), len(frames)):
            chunk = slice(start, start + len(frames))
            numbers = np.arange(len(ids[chunk]))
            windows[numbers, self.padding, self.padding] = images[ids[chunk]]
            crops[slots[chunk]] = windows[numbers, offsets[chunk, 0], offsets[chunk, 1]]

    def _put(self, drawn: np.ndarray, row: np.ndarray, image: np.ndarray) -> None:
        """Raises UndecodableImage if the image is too small."""
        padding, (height, width) = self.padding, image.shape[:2]
        down, right = height + 2 * padding - row.shape[0], width + 2 * padding - row.shape[1]
        if min(down, right) < 0:
            raise UndecodableImage(
                f"its {height} x {width} pixels with {padding} around them are fewer than the"
                f" crop's {row.shape[0]}; use RandomResizedCrop or CenterCrop"
            )
        padded = np.zeros((height + 2 * padding, width + 2 * padding, 3), np.uint8)
        padded[padding : padding + height, padding : padding + width] = image
        top, left = int(drawn[1] * (down + 1)), int(drawn[2] * (right + 1))
        row[:] = padded[top : top + row.shape[0], left : left + row.shape[1]]


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


def short_side(height: int, width: int, side: int) -> tuple[int, int]:
    """The (height, width) whose shorter side is `side`, with torchvision's rounding."""
    if height <= width:
        return side, int(side * width / height)
    return int(side * height / width), side


def turned(image: np.ndarray, orientation: int) -> np.ndarray:
    """The upright image, uint8 [height, width, 3], of one that is stored in an EXIF orientation of
    1 to 8.
    """
    import cv2  # here and below: a stream of bytes needs none of it

    if orientation >= 5:
        image = cv2.transpose(image)
    return cv2.flip(image, _FLIPS[orientation]) if orientation in _FLIPS else image


def use_one_opencv_thread() -> None:
    """Makes OpenCV resize in the calling thread, because every core decodes already."""
    import cv2

    cv2.setNumThreads(1)


class _Frames(threading.local):
    """Black frames around images, reused by each thread:
    allocating them takes as long as the crop.
    """

    _key: tuple[int, int] | None = None
    _images = np.empty((0, 0, 0, 3), np.uint8)

    def of(self, size: int, padding: int) -> np.ndarray:
        """Frames for images of that size: uint8 [n, side, side, 3], black around the images of
        earlier calls.
        """
        if self._key != (size, padding):
            side = size + 2 * padding
            self._images = np.zeros(
                (max(1, _FRAMES_BYTES // (3 * side**2)), side, side, 3), np.uint8
            )
            self._key = size, padding
        return self._images


_frames = _Frames()


def _put_unchanged(row: np.ndarray, pixels: np.ndarray) -> None:
    row[:] = pixels  # for a small image, np.copyto takes a fifth longer


_UNCHANGED = Region(None, (0, 0), _put_unchanged)


def _put_centre(
    resized: tuple[int, int],
    row: np.ndarray,
    pixels: np.ndarray,
    resample: Image.Resampling | None,
) -> None:
    if resized != pixels.shape[:2]:
        if resample is None:
            pixels = _resize_into(np.empty((*resized, 3), np.uint8), pixels, by_area=True)
        else:
            pixels = np.asarray(Image.fromarray(pixels).resize(resized[::-1], resample))
    top, left = round((resized[0] - row.shape[0]) / 2), round((resized[1] - row.shape[1]) / 2)
    row[:] = pixels[top : top + row.shape[0], left : left + row.shape[1]]


def _resize_into(out: np.ndarray, image: np.ndarray, *, by_area: bool) -> np.ndarray:
    import cv2

    # Beyond a factor of 2, linear would skip pixels.
    is_small = image.shape[0] < 2 * out.shape[0] and image.shape[1] < 2 * out.shape[1]
    interpolation = cv2.INTER_LINEAR if is_small and not by_area else cv2.INTER_AREA
    return cv2.resize(image, (out.shape[1], out.shape[0]), dst=out, interpolation=interpolation)
