"""The pixel operations of RandAugment and TrivialAugment, done by Pillow, and how strong each is at
a level.

The tables follow timm (RandAugment, also in its `inc1` form) and torchvision (TrivialAugmentWide).
Geometric operations interpolate linearly and fill with grey.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

Apply = Callable[[Image.Image, float], Image.Image]
Value = Callable[[float, int], float]

FILL = (128, 128, 128)
"""The color of areas that a geometric operation leaves empty, as in the paper's code."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`apply(image, value)`, where `value(level, side)` follows from a level of 0 to 1 and the
    image's width.

    The level of a signed operation is negated half of the time.
    """

    name: str
    apply: Apply
    value: Value = lambda level, side: 0.0
    is_signed: bool = False


def _affine(*matrix: float | None) -> Apply:
    """An affine transform whose value takes the place of None in the matrix."""

    def apply(image: Image.Image, value: float) -> Image.Image:
        numbers = [value if number is None else number for number in matrix]
        return image.transform(
            image.size, Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR, fillcolor=FILL
        )

    return apply


def _solarize_add(image: Image.Image, add: float) -> Image.Image:
    darker = [min(255, level + int(add)) for level in range(128)]
    return image.point([*darker, *range(128, 256)] * 3)


def _posterize(value: Value) -> Operation:
    return Operation("posterize", lambda image, bits: ImageOps.posterize(image, int(bits)), value)


def _solarize(value: Value) -> Operation:
    return Operation(
        "solarize", lambda image, threshold: ImageOps.solarize(image, math.ceil(threshold)), value
    )


_WITHOUT_VALUE = (
    Operation("auto_contrast", lambda image, _: ImageOps.autocontrast(image)),
    Operation("equalize", lambda image, _: ImageOps.equalize(image)),
)
_INVERT = Operation("invert", lambda image, _: ImageOps.invert(image))


_ENHANCERS: dict[str, Callable[[Image.Image], Any]] = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}


def _enhancing(value: Value, *, is_signed: bool) -> Iterator[Operation]:
    for name, enhancer in _ENHANCERS.items():
        yield Operation(name, partial(_enhance, enhancer), value, is_signed)


def _enhance(
    enhancer: Callable[[Image.Image], Any], image: Image.Image, factor: float
) -> Image.Image:
    enhanced: Image.Image = enhancer(image).enhance(factor)
    return enhanced


GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
"""The operations that move pixels."""


def _geometric(rotate: float, shear: float, translate: Value) -> tuple[Operation, ...]:
    def turn(image: Image.Image, degrees: float) -> Image.Image:
        return image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=FILL)

    def sheared(level: float, side: int) -> float:
        return shear * level

    return (
        Operation("rotate", turn, lambda level, side: rotate * level, is_signed=True),
        Operation("shear_x", _affine(1, None, 0, 0, 1, 0), sheared, is_signed=True),
        Operation("shear_y", _affine(1, 0, 0, None, 1, 0), sheared, is_signed=True),
        Operation("translate_x", _affine(1, 0, None, 0, 1, 0), translate, is_signed=True),
        Operation("translate_y", _affine(1, 0, 0, 0, 1, None), translate, is_signed=True),
    )


_COMMON = (
    *_WITHOUT_VALUE,
    _INVERT,
    *_geometric(30, 0.3, lambda level, side: 0.45 * level * side),
    Operation("solarize_add", _solarize_add, lambda level, side: min(128, int(110 * level))),
)

RAND = (
    *_COMMON,
    _posterize(lambda level, side: int(4 * level)),
    _solarize(lambda level, side: min(256, int(256 * level))),
    *_enhancing(lambda level, side: 1.8 * level + 0.1, is_signed=False),
)
"""RandAugment as in the paper's code: a higher magnitude weakens some of the operations."""

RAND_INCREASING = (
    *_COMMON,
    _posterize(lambda level, side: 4 - int(4 * level)),
    _solarize(lambda level, side: 256 - min(256, int(256 * level))),
    *_enhancing(lambda level, side: max(0.1, 1 + 0.9 * level), is_signed=True),
)
"""timm's `inc1`: a higher magnitude strengthens every operation."""

TRIVIAL = (
    *_WITHOUT_VALUE,
    Operation("identity", lambda image, _: image),
    *_geometric(135, 0.99, lambda level, side: int(32 * level)),
    _posterize(lambda level, side: 8 - round(6 * level)),
    _solarize(lambda level, side: 255 * (1 - level)),
    *_enhancing(lambda level, side: 1 + 0.99 * level, is_signed=True),
)
"""TrivialAugment in the wide form, which is the one that its paper recommends for ImageNet."""
