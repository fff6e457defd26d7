"""Encoded images to rows of one uint8 batch buffer.

simplejpeg decodes JPEG (`jpeg`), kornia_rs and pyspng 8-bit PNG (`png`), Pillow everything else.
Transparent pixels are put on a background whatever the decoder
(`shardset.format.images.background`); `crops` fills the row. `docs/reference/images.md` states how
far the result may be from Pillow's and torchvision's.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardset.decode import jpeg, png
from shardset.decode.crops import (
    INTERPOLATIONS,
    Crop,
    Placement,
    RandomResizedCrop,
    Region,
    Window,
    flips,
    turned,
)
from shardset.decode.jpeg_restart import Grid, grid_of
from shardset.errors import ConfigError, require_int
from shardset.format.images import background as backgrounds
from shardset.format.images import format_of, limits, pillow
from shardset.format.images.background import WHITE, Background, rgb_pixels
from shardset.format.images.limits import DECODED_BYTES
from shardset.format.images.orientation import APP1, UPRIGHT, orientation_of, upright_size
from shardset.order.epoch import slot_key

_SMALL_PIXELS, _MOST_PER_PIXEL = 2**20, 28
"""Images of up to so many pixels need no budget: their decoder takes at most so many bytes per
pixel.
"""

_TURNED_BYTES = 6
"""For each pixel of an image that is turned: transposed, and then flipped."""

_Header = tuple[str, tuple[int, int], Grid | None, int]
"""The format of an image as a field, its (height, width) as stored, the grid of a JPEG, and the
orientation to undo.

A plain tuple, for speed.
"""

_UNLIMITED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """The form of each decoded image: uint8 [size, size, 3], RGB.

    Args:
        size: Height and width of the result, in pixels.
        crop: Which part of the image is taken: a RandomResizedCrop, CenterCrop or PadCrop.
        flip: "pixels": half of the images come mirrored. "device": the batch says in `flip` (bool
            [n]) which images the device must mirror, and the pixels come unmirrored.
        background: The colour (red, green, blue), 0 to 255 each, that is put below transparent
            pixels.
        decoded_bytes: Limits the memory of the images that a process decodes at the same time. An
            image that needs more is undecodable.
        upright: Turns images as their EXIF data say, before the crop.

    Raises:
        ConfigError: A value is out of range, or the crop can't fill this size.

    Examples:
        >>> import shardset
        >>> spec = shardset.ImageSpec(size=32, crop=shardset.CenterCrop(36), flip="device")
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image=spec)
        >>> batch = next(iter(stream))
        >>> batch["image"].shape, batch["flip"].shape
        ((8, 32, 32, 3), (8,))
    """

    size: int
    crop: Crop = field(default_factory=RandomResizedCrop)
    flip: Literal[False, "pixels", "device"] = False
    background: Background = WHITE
    decoded_bytes: int = DECODED_BYTES
    upright: bool = True

    def __post_init__(self) -> None:
        if require_int("image size", self.size) < 1:
            raise ConfigError(f"image size is {self.size}, expected at least 1")
        if not isinstance(self.crop, Crop):
            raise ConfigError(
                f"crop is {self.crop!r}, expected a RandomResizedCrop(), CenterCrop(...) or"
                " PadCrop(...)"
            )
        interpolation = getattr(self.crop, "interpolation", "area")
        if interpolation not in INTERPOLATIONS:
            raise ConfigError(
                f"interpolation is {interpolation!r}, expected one of {', '.join(INTERPOLATIONS)}"
            )
        if self.flip not in ("pixels", "device", False):
            raise ConfigError(f"flip is {self.flip!r}, expected 'pixels', 'device' or False")
        self.crop.check(self.size)
        backgrounds.check(self.background)
        limits.check(self.decoded_bytes)

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn."""
        return bool(self.flip) or self.crop.num_draws > 0


def draws(
    spec: ImageSpec,
    seed: int,
    epoch: int,
    rows: np.ndarray,
    lanes: np.ndarray,
    first: int = 0,
    times: int = 1,
) -> np.ndarray:
    """Uniform numbers in [0, 1) for each slot: float64 [n, times * m], the draws of the slot from
    number `first` on. Of each m, the first is the flip, the others are the crop's.
    """
    numbers = np.arange(first, first + times * (1 + spec.crop.num_draws))
    keys = slot_key(seed, epoch, rows[:, None], lanes[:, None], numbers)
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def is_mirrored(drawn: np.ndarray) -> np.ndarray:
    """Whether each image is mirrored: bool [...] for draws [..., m]."""
    return drawn[..., 0] < 0.5


def mirror(images_NHWC: np.ndarray, drawn: np.ndarray) -> None:
    """Mirrors the images whose draws say so, left to right, in place."""
    import cv2  # a stream of bytes needs none of it

    for number in np.flatnonzero(is_mirrored(drawn)):
        images_NHWC[number] = cv2.flip(images_NHWC[number], 1)


def decode_into(row: np.ndarray, data: bytes, spec: ImageSpec, drawn: np.ndarray) -> Placement:
    """Decodes and crops one image into `row`, uint8 [size, size, 3]; raises UndecodableImage.

    It lies where the result says once it is mirrored as `flip="pixels"` asks.
    """
    header = _read_header(data, spec.upright)
    size = upright_size(header[1], header[3])
    region = spec.crop.region(size, row.shape[0], drawn)
    with _memory_for(data, header, spec.decoded_bytes, region.num_bytes):
        region.put(row, _decode_window(data, header, region, spec.background))
    mirrored = spec.flip == "pixels" and bool(is_mirrored(drawn))
    return Placement(size, region, spec.size, mirrored, spec.upright, spec.decoded_bytes)


def crop_into(row: np.ndarray, pixels: np.ndarray, spec: ImageSpec, drawn: np.ndarray) -> None:
    """Crops a decoded image, uint8 [height, width, 3], into `row`; raises UndecodableImage."""
    region = spec.crop.region(pixels.shape[:2], spec.size, drawn)
    region.put(row, jpeg.window_of(pixels, region.box))


def decode(
    data: bytes,
    least: tuple[int, int] = (0, 0),
    *,
    background: Background = WHITE,
    decoded_bytes: int = DECODED_BYTES,
    upright: bool = True,
) -> np.ndarray:
    """The image: uint8 [height, width, 3], RGB; raises UndecodableImage.

    With `least`, a JPEG may be reduced to no less than that height and width. Transparent pixels
    are put on the background; 16 bits become the upper 8. `decoded_bytes` and `upright` are those
    of ImageSpec.
    """
    header = _read_header(data, upright)
    with _memory_for(data, header, decoded_bytes):
        return _decode_whole(data, header, least, background)


def image_size(data: bytes, *, upright: bool = True) -> tuple[int, int]:
    """(height, width) of the image that `decode` returns, from the header; raises UndecodableImage
    above MAX_PIXELS.
    """
    _, size, _, orientation = _read_header(data, upright)
    return upright_size(size, orientation)


def _read_header(data: bytes, upright: bool) -> _Header:
    kind, grid, size, image = format_of(data), None, None, None
    if kind == "jpg":
        grid = grid_of(data)
        size = grid.size if grid else jpeg.size(data)
    elif png.is_png(data):
        size = png.size(data)
    if not (size and all(size)):
        image = pillow.header(data, kind)
        size = image.height, image.width
    limits.check_pixels(size[1], size[0])
    if upright and not (grid and APP1 not in data[: grid.begin]):
        return kind, size, grid, orientation_of(data, image)
    return kind, size, grid, UPRIGHT


def _memory_for(
    data: bytes, header: _Header, budget: int, result_bytes: int = 0
) -> AbstractContextManager[None]:
    """Memory to decode an image and to resize it into `result_bytes`; raises UndecodableImage
    beyond the limits.
    """
    kind, (height, width), grid, orientation = header
    if orientation != UPRIGHT:
        result_bytes += _TURNED_BYTES * height * width
    is_small = (
        height * width <= _SMALL_PIXELS
        and result_bytes <= _SMALL_PIXELS <= budget // _MOST_PER_PIXEL
    )
    if is_small and kind != "jpg":
        return _UNLIMITED
    # A grid means one scan. Other JPEGs may have thousands, each as slow as decoding the image
    # once.
    num_scans = limits.num_scans(data) if kind == "jpg" and not grid else 1
    needed = limits.needed_bytes(kind, width, height, budget, num_scans)
    return limits.room(needed + result_bytes, budget)


def _decode_window(data: bytes, header: _Header, region: Region, background: Background) -> Window:
    """The window of a region; decodes a part of an upright JPEG where its grid allows that."""
    kind, size, grid, orientation = header
    least, whole = region.least, upright_size(size, orientation)
    if grid and orientation == UPRIGHT:
        window = jpeg.decode_window(data, grid, region.box, least)
        if window is not None:
            return window
    image = _decode_whole(data, header, least, background)
    if kind != "jpg" or image.shape[:2] == whole:
        return jpeg.window_of(image, region.box)
    eighths = jpeg.reduction(size, upright_size(least, orientation))
    # A flipped image begins behind what reaches beyond it.
    down, right = (
        (pixels - side * eighths / 8) * is_flipped
        for pixels, side, is_flipped in zip(image.shape, whole, flips(orientation), strict=False)
    )
    return jpeg.window_of(image, region.box, eighths, (down, right))


def _decode_whole(
    data: bytes,
    header: _Header,
    least: tuple[int, int],
    background: Background,
) -> np.ndarray:
    """`decode` without its limits, which the caller checks."""
    kind, _, grid, orientation = header
    pixels = None
    if kind == "jpg":
        pixels = jpeg.decode(data, upright_size(least, orientation), grid)
    elif kind == "png":
        pixels = png.decode(data, background)
    if pixels is None:
        with pillow.header(data, kind) as image:
            pillow.load(image, data, kind)
            pixels = rgb_pixels(image, background)
    return turned(pixels, orientation)
