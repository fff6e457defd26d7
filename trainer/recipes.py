"""Recipes: functions that return a complete configuration, and say what to expect of it."""

from collections.abc import Callable
from dataclasses import replace

from shardset.errors import ConfigError
from trainer.config import (
    ImageConfig,
    ModelConfig,
    OptimizerConfig,
    RegularizeConfig,
    ScheduleConfig,
    TrainConfig,
)
from trainer.settings import did_you_mean


def default() -> TrainConfig:
    """ResNet-50 on 224-pixel images with plain settings; name a manifest and change what differs."""
    return TrainConfig(recipe="default")


def digits_smoke() -> TrainConfig:
    """Handwritten digits (1,797 pictures of 8x8): about 98.5 %, in less than a minute on two CPU cores."""
    return TrainConfig(
        recipe="digits_smoke",
        epochs=30,
        global_batch_size=64,
        model=ModelConfig(name="trainer.model:tiny_resnet"),
        image=ImageConfig(size=8, train_crop="pad", eval_resize=8, pad=1, flip=False),
        optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=5e-4),
        schedule=ScheduleConfig(warmup_epochs=1.0),
        regularize=RegularizeConfig(label_smoothing=0.1),
    )


def cifar10_resnet18() -> TrainConfig:
    """CIFAR-10 (50,000 images) with a ResNet-18 made for 32 pixels; expect about 94 to 95 % after 30 epochs."""
    return TrainConfig(
        recipe="cifar10_resnet18",
        epochs=30,
        global_batch_size=512,
        model=ModelConfig(name="resnet18", stem="cifar"),
        image=ImageConfig(size=32, train_crop="pad", eval_resize=32),
        optimizer=OptimizerConfig(learning_rate=0.4, weight_decay=5e-4),
    )


def cifar10_resnet50() -> TrainConfig:
    """CIFAR-10 upsampled to 1,280,000 training and 50,000 test samples (build it with `--target-samples`).

    Made for a v3-32 slice: 32 replicas of 128 samples. One epoch sees each picture about 26 times.
    """
    return replace(
        cifar10_resnet18(),
        recipe="cifar10_resnet50",
        epochs=10,
        global_batch_size=4096,
        model=ModelConfig(name="resnet50", stem="cifar"),
        optimizer=OptimizerConfig(learning_rate=1.6, weight_decay=5e-5),
        schedule=ScheduleConfig(warmup_epochs=1.0),
        precision="bf16",
    )


def imagenet_resnet50() -> TrainConfig:
    """ImageNet in 90 epochs; expect about 76 % top-1.

    4,096 samples a step: 128 for each of the 32 cores of a v3-32, 256 for each of the 16 chips of a v4-32 (the two
    cores of a v4 chip appear as one device). The learning rate is 0.1 for each 256 samples. bfloat16 where it is safe;
    weights and loss stay float32.
    """
    return TrainConfig(
        recipe="imagenet_resnet50",
        epochs=90,
        global_batch_size=4096,
        precision="bf16",
        log_every_steps=50,
        optimizer=OptimizerConfig(learning_rate=1.6, weight_decay=5e-5),
        regularize=RegularizeConfig(label_smoothing=0.1),
    )


def imagenet_resnet50_gn() -> TrainConfig:
    """`imagenet_resnet50` with GroupNorm: no statistic of the batch, so the same numbers under every strategy."""
    return replace(imagenet_resnet50(), recipe="imagenet_resnet50_gn", model=ModelConfig(norm="group"))


def imagenet_resnet50_smoke() -> TrainConfig:
    """Ten small steps on one CPU: does the wiring hold?"""
    return replace(
        imagenet_resnet50(),
        recipe="imagenet_resnet50_smoke",
        epochs=1,
        global_batch_size=8,
        max_steps=10,
        precision="fp32",
        log_every_steps=1,
        image=ImageConfig(size=64, eval_resize=73),
    )


_FUNCTIONS: tuple[Callable[[], TrainConfig], ...] = (
    default,
    digits_smoke,
    cifar10_resnet18,
    cifar10_resnet50,
    imagenet_resnet50,
    imagenet_resnet50_gn,
    imagenet_resnet50_smoke,
)
RECIPES: dict[str, Callable[[], TrainConfig]] = {function.__name__: function for function in _FUNCTIONS}


def recipe(name: str) -> TrainConfig:
    """The recipe of that name; raises ConfigError naming the nearest one."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{did_you_mean(name, RECIPES)}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()
