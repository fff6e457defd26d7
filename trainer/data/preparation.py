"""How images are prepared: the crops and the augmentation that the settings name."""

from dataclasses import replace
from typing import Any

from shardset.decode.augment import Chain, RandomErasing, augmentation_of
from shardset.decode.crops import CenterCrop, Crop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec
from shardset.format.images import background as backgrounds
from trainer.config import ImageConfig


def eval_spec(image: ImageConfig) -> ImageSpec:
    """How evaluation images are cropped and resized."""
    return ImageSpec(
        size=image.size_in_evaluation,
        crop=CenterCrop(image.eval_resize, image.eval_interpolation),
        background=backgrounds.parse(image.background),
        decoded_bytes=image.decoded_bytes,
        upright=image.upright,
    )


def train_spec(image: ImageConfig) -> ImageSpec:
    """How training images are cropped and resized."""
    evaluation = eval_spec(image)
    crops: dict[str, Crop] = {
        "random": RandomResizedCrop(),
        "pad": PadCrop(image.pad),
        "center": evaluation.crop,
    }
    return replace(
        evaluation,
        size=image.size,
        crop=crops[image.train_crop],
        flip="device" if image.flip else False,
    )


def train_options(image: ImageConfig) -> dict[str, Any]:
    """How a training stream crops, resizes and augments images, and how often it repeats them.

    Raises ConfigError.
    """
    spec, steps = train_spec(image), list[Any]()
    if image.auto_augment is not None:
        steps.append(augmentation_of(image.auto_augment))
    if image.erase:
        steps.append(RandomErasing(probability=image.erase, mean=image.mean, std=image.std))
    return {
        "image": spec,
        "transform": Chain(tuple(steps)) if steps else None,
        "augment_repeats": image.augment_repeats,
    }
