"""Targets beside an image that follow its crop: boxes, masks and captions as rows of a batch.

    Stream(..., targets={"boxes": Boxes("json"), "mask": Mask("mask.png"), "text": Text("txt")})

A new target is one class here: it names a stored field, the rows that it fills and how. A crop is
an affine map (`Placement`), so every target follows every crop.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardset.decode import png
from shardset.decode.crops import Placement
from shardset.errors import BadTarget, ConfigError, UndecodableImage, require_int
from shardset.format.annotations import boxes_in
from shardset.format.images import limits, masks

_LEAST_SIDE = 1e-3
"""Pixels of a row. A box that only touches the row would get about 1e-13 by rounding, and the
float32 that are handed over lie up to 5e-4 apart in rows of 8,192 pixels.
"""

_LEAST_SHARE = 1 - 1e-6
"""The part of `min_visible` that is enough: areas are rounded, too."""


class Target(ABC):
    """What a stored field gives for the row of an image."""

    __slots__ = ()
    field: str

    @abstractmethod
    def empty(self, num_rows: int, size: int) -> dict[str, Any]:
        """Rows without a target, by what is appended to its name: arrays or lists.

        A row of a bad sample is like this.
        """

    def may_lack(self, labels: Mapping[int, int]) -> bool:
        """Whether a sample without the field has an empty row, and is no bad sample."""
        return False

    def bad(self, what: object) -> BadTarget:
        """The error for content that is no such target."""
        return BadTarget(f"field {self.field!r}: {what}")

    @abstractmethod
    def read(self, content: bytes, placed: Placement, labels: Mapping[int, int]) -> dict[str, Any]:
        """The start of a row of `empty`; `labels` has the label of each category id of the set.

        Raises BadTarget for content that is no such target, ConfigError for more than a row holds.
        """


@dataclass(frozen=True, slots=True)
class Boxes(Target):
    """The boxes of COCO's `annotations` in a JSON field: `bbox` is [left, top, width, height] in
    pixels of the upright image, `category_id` the class.

    A batch gets NAME, float32 [n, max_boxes, 4]: left, top, right, bottom in pixels of the row,
    clipped to it. NAME_class is int64 [n, max_boxes], -1 where there is no box: the label of the
    category, or its id in a set that names no categories. Boxes that are less than 1/1000 of a
    pixel wide or high in the row are left out with their class. In a set of COCO's categories, a
    sample without annotations has no boxes.

    Args:
        field: The field, such as "json".
        max_boxes: Room for boxes in a row. A row with more stops the stream by a ConfigError that
            names the sample.
        min_visible: The share of its area, before it is clipped, that a box needs in the row; a
            millionth of it less is enough.
        crowd: Takes crowds, too (`iscrowd`).

    Raises:
        ConfigError: A value is out of range.

    Examples:
        >>> import shardset
        >>> targets = {"boxes": shardset.Boxes("json", max_boxes=20, min_visible=0.25)}
    """

    field: str
    max_boxes: int = 100
    min_visible: float = 0.0
    crowd: bool = False

    def __post_init__(self) -> None:
        if require_int("max_boxes", self.max_boxes) < 1 or not 0 <= self.min_visible <= 1:
            raise ConfigError(f"{self}: expected max_boxes >= 1 and min_visible 0 to 1")

    def empty(self, num_rows: int, size: int) -> dict[str, Any]:
        boxes = np.zeros((num_rows, self.max_boxes, 4), np.float32)
        return {"": boxes, "_class": np.full((num_rows, self.max_boxes), -1, np.int64)}

    def may_lack(self, labels: Mapping[int, int]) -> bool:
        return bool(labels)

    def read(self, content: bytes, placed: Placement, labels: Mapping[int, int]) -> dict[str, Any]:
        try:
            objects = boxes_in(content, labels)
        except BadTarget as error:
            raise self.bad(error) from error
        # Not by NumPy: a dozen small arrays for each image take longer.
        x, right, y, down = placed.scales
        size, share = placed.row_size, _LEAST_SHARE * self.min_visible
        boxes, classes = [], []
        for left, top, width, height, label, is_crowd in objects:
            if is_crowd and not self.crowd:
                continue
            start, end = sorted((x * left + right, x * (left + width) + right))
            upper, lower = y * top + down, y * (top + height) + down
            box = max(start, 0), max(upper, 0), min(end, size), min(lower, size)
            wide, high = box[2] - box[0], box[3] - box[1]
            enough = share * (end - start) * (lower - upper)
            if min(wide, high) >= _LEAST_SIDE and wide * high >= enough:
                boxes.append(box)
                classes.append(label)
        if len(boxes) > self.max_boxes:
            raise ConfigError(f"{len(boxes)} boxes do not fit max_boxes={self.max_boxes}; raise it")
        return {
            "": np.array(boxes, np.float32).reshape(-1, 4),
            "_class": np.array(classes, np.int64),
        }


@dataclass(frozen=True, slots=True)
class Mask(Target):
    """An image field with a value for each pixel, such as its class or depth.

    A batch gets NAME, [n, size, size] of `dtype`. Values come from nearest neighbours, as in
    torchvision. They are the numbers that the file stores: those of a palette, not its colours,
    and 1 in 2 bits is 1.

    Args:
        field: The field, such as "mask.png". Its image has one channel and, when both are upright,
            the size of the sample's image.
        fill: The value outside of the image.
        dtype: "uint8" or "uint16".

    Raises:
        ConfigError: `dtype` can't be, or does not hold `fill`.

    Examples:
        >>> import shardset
        >>> depth = shardset.Mask("depth.png", fill=0, dtype="uint16")
    """

    field: str
    fill: int = 255
    dtype: Literal["uint8", "uint16"] = "uint8"

    def __post_init__(self) -> None:
        if self.dtype not in ("uint8", "uint16"):
            raise ConfigError(f"dtype is {self.dtype!r}, expected 'uint8' or 'uint16'")
        if not 0 <= require_int("fill", self.fill) <= np.iinfo(self.dtype).max:
            raise ConfigError(f"fill is {self.fill}, expected a number of {self.dtype}")

    def empty(self, num_rows: int, size: int) -> dict[str, Any]:
        return {"": np.full((num_rows, size, size), self.fill, self.dtype)}

    def read(self, content: bytes, placed: Placement, labels: Mapping[int, int]) -> dict[str, Any]:
        try:
            mask = _numbers(content, placed)
        except UndecodableImage as error:
            raise self.bad(error) from None
        if not np.can_cast(mask.dtype, self.dtype):
            raise self.bad(f"numbers of {mask.dtype}, expected {self.dtype}")
        (top, left, height, width), target, size = *placed.region[:2], placed.row_size
        rows = _nearest(top, height, target.top, target.height, size)
        columns = _nearest(left, width, target.left, target.width, size)
        # Mirrored columns cost less than mirrored pixels.
        row = mask.take(rows, 0).take(columns[::-1] if placed.is_mirrored else columns, 1)
        unmirrored = row[:, ::-1] if placed.is_mirrored else row
        _fill_outside(unmirrored, target.top, target.height, self.fill)
        _fill_outside(unmirrored.T, target.left, target.width, self.fill)
        return {"": row}


@dataclass(frozen=True, slots=True)
class Text(Target):
    """The text of a field: a batch gets a list of n str.

    Args:
        field: The field, such as "txt", in UTF-8.

    Examples:
        >>> import shardset
        >>> targets = {"text": shardset.Text("txt")}
    """

    field: str

    def empty(self, num_rows: int, size: int) -> dict[str, Any]:
        return {"": [""] * num_rows}

    def read(self, content: bytes, placed: Placement, labels: Mapping[int, int]) -> dict[str, Any]:
        try:
            return {"": content.decode()}
        except UnicodeDecodeError as error:
            raise self.bad(error) from None


def _numbers(content: bytes, placed: Placement) -> np.ndarray:
    """The numbers of a mask, by the faster decoder if that can; raises UndecodableImage."""
    size, budget = placed.image_size[::-1], placed.decoded_bytes
    if png.is_png(content) and png.size(content) == placed.image_size:
        with limits.room(limits.needed_bytes("png", *size, budget), budget):
            numbers = png.mask(content)
        if numbers is not None:
            return numbers
    return masks.read(content, size, placed.upright, budget)


def _nearest(start: int, length: int, to: int, extent: int, size: int) -> np.ndarray:
    """For each of `size` pixels of a row the nearest pixel of `length` from `start` on, which
    became `extent` from `to` on.

    The scale is a float32, as in torch's interpolate(mode="nearest").
    """
    at = np.arange(-to, size - to, dtype=np.float32)
    pixels = (at * np.float32(length / extent)).astype(np.int64)
    return start + np.maximum(np.minimum(pixels, length - 1), 0)  # np.clip is slower


def _fill_outside(lines: np.ndarray, start: int, length: int, fill: int) -> None:
    """Fills the lines before and behind some of them."""
    lines[: max(0, start)] = fill
    lines[max(0, start + length) :] = fill
