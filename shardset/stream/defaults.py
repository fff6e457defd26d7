"""The short spellings of a stream's arguments, and what they stand for: `batch_size`, `image_size`,
named images.
"""

from typing import Literal, get_args

from shardset.decode.crops import CenterCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError, require_int

DEFAULT_SEED = 0

ImagePreset = Literal["auto", "train", "eval"]
ImageChoice = ImageSpec | ImagePreset | None
"""An ImageSpec, the name of one, None to decode nothing; `auto` is the one that suits the order."""

_EVAL_SHARE = 0.875
"""The share of the shorter side that evaluation sees: timm's `crop_pct`."""


def preset(name: ImagePreset, size: int) -> ImageSpec:
    """The preset of timm for images of a size.

    `train` takes a random crop of 8 to 100 % of the area and mirrors half of the crops; `eval`
    resizes the shorter side to `size / 0.875` and takes the centre.
    """
    size = require_int("image_size", size)
    if name == "train":
        return ImageSpec(size=size, crop=RandomResizedCrop(), flip="pixels")
    return ImageSpec(size=size, crop=CenterCrop(int(size / _EVAL_SHARE)))


def choose_image(
    image: ImageChoice, image_size: int | None, seed: int | None, *, has_views: bool = False
) -> ImageSpec | None:
    """The ImageSpec that the arguments mean; `auto` is the preset that suits the order, or None
    where there are views.

    Raises ConfigError where they contradict each other or leave the size open.
    """
    if isinstance(image, str) and image not in get_args(ImagePreset):
        raise ConfigError(
            f"image is {image!r}, expected 'train', 'eval', an ImageSpec, or None to decode nothing"
        )
    if image_size is None:
        if has_views and image == "auto":
            return None
        if isinstance(image, str):
            what = "" if image == "auto" else f" of image={image!r}"
            raise ConfigError(
                f"the size{what} is missing; give image_size=224, or image=None to decode nothing"
            )
        return image
    if image == "auto":
        image = "eval" if seed is None else "train"
    if not isinstance(image, str):
        raise ConfigError(
            f"image_size={image_size} and image={image!r} say two things; give image_size alone or"
            " with image='train' or 'eval', or the size in ImageSpec"
        )
    return preset(image, image_size)


def choose_global_batch(
    batch_size: int | None, global_batch_size: int | None, world_size: int
) -> int:
    """Samples of a step over all processes, from that number or from the number per process.

    Raises ConfigError unless exactly one is given.
    """
    if (batch_size is None) == (global_batch_size is None):
        what = (
            "neither is given"
            if batch_size is None
            else f"both are given ({batch_size} and {global_batch_size})"
        )
        raise ConfigError(
            "a stream needs batch_size (of each process) or global_batch_size (of all), and"
            f" {what}; give one"
        )
    if global_batch_size is not None:
        return require_int("global_batch_size", global_batch_size)
    assert batch_size is not None
    return require_int("batch_size", batch_size) * world_size
