"""The short spellings of a stream's arguments, and what they stand for: `batch_size`, `image_size`,
named images.
"""

from typing import Literal

from shardset.decode.crops import CenterCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError, require_int

DEFAULT_SEED = 0

ImageChoice = ImageSpec | Literal["auto", "train", "eval"] | None
"""An ImageSpec, the name of one, None to decode nothing; `auto` is the one that suits the order."""

_EVAL_SHARE = 0.875
"""The share of the shorter side that evaluation sees: timm's `crop_pct`."""


def choose_image(
    image: ImageChoice, image_size: int | None, seed: int | None, *, has_views: bool = False
) -> ImageSpec | None:
    """The ImageSpec that the arguments mean: one as it is, or a preset of timm for a size.

    `train` takes a random crop of 8 to 100 % of the area and mirrors half of the crops; `eval`
    resizes the shorter side to `size / 0.875` and takes the centre. `auto` is the one that suits
    the order, or None where there are views.
    Raises ConfigError where they contradict each other or leave the size open.
    """
    if image == "auto":
        if image_size is None and has_views:
            return None
        image = "eval" if seed is None else "train"
    if not isinstance(image, str):
        if image_size is None:
            return image
        raise ConfigError(
            f"image_size={image_size} and image={image!r} say two things; give image_size alone or"
            " with image='train' or 'eval', or the size in ImageSpec"
        )
    if image not in ("train", "eval"):
        raise ConfigError(
            f"image is {image!r}, expected 'train', 'eval', an ImageSpec, or None to decode nothing"
        )
    if image_size is None:
        raise ConfigError(
            "the size of the images is missing; give image_size=224, or image=None to decode"
            " nothing"
        )
    size = require_int("image_size", image_size)
    if image == "train":
        return ImageSpec(size=size, crop=RandomResizedCrop(), flip="pixels")
    return ImageSpec(size=size, crop=CenterCrop(int(size / _EVAL_SHARE)))


def choose_global_batch(
    batch_size: int | None, global_batch_size: int | None, world_size: int
) -> int:
    """Samples of a step over all processes, from that number or from the number per process.

    Raises ConfigError unless exactly one is given.
    """
    given = [number for number in (batch_size, global_batch_size) if number is not None]
    if len(given) != 1:
        raise ConfigError(
            "a stream needs one of batch_size (of each process) and global_batch_size (of all);"
            f" {len(given)} are given"
        )
    if batch_size is None:
        return require_int("global_batch_size", *given)
    return require_int("batch_size", batch_size) * world_size
