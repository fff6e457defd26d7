"""Recipes: functions that return a complete configuration.

The first line of each says what it reached.
"""

from collections.abc import Callable
from dataclasses import replace

from shardset.errors import ConfigError
from shardset.program import did_you_mean
from trainer.config import (
    ImageConfig,
    ModelConfig,
    OptimizerConfig,
    RegularizeConfig,
    ScheduleConfig,
    TrainConfig,
)


def default() -> TrainConfig:
    """ResNet-50 on 224-pixel images with plain settings;
    name a manifest and change what differs.
    """
    return TrainConfig(recipe="default")


def digits_smoke() -> TrainConfig:
    """Handwritten digits (1,797 pictures of 8x8): reached 98.5 % in less than a minute on two CPU
    cores.
    """
    return TrainConfig(
        recipe="digits_smoke",
        epochs=30,
        global_batch_size=64,
        model=ModelConfig(name="trainer.model:tiny_resnet"),
        image=ImageConfig(size=8, train_crop="pad", eval_resize=8, pad=1, flip=False),
        optimizer=OptimizerConfig(weight_decay=5e-4),
        schedule=ScheduleConfig(warmup_epochs=1.0),
        regularize=RegularizeConfig(label_smoothing=0.1),
    )


def cifar10_resnet18() -> TrainConfig:
    """CIFAR-10 with a ResNet-18 for 32 pixels, in 30 epochs.

    Our own values: nothing is published, not run here.
    """
    return TrainConfig(
        recipe="cifar10_resnet18",
        epochs=30,
        global_batch_size=512,
        model=ModelConfig(name="resnet18", stem="cifar"),
        image=ImageConfig(size=32, train_crop="pad", eval_resize=32),
        optimizer=OptimizerConfig(learning_rate=0.4, weight_decay=5e-4),
    )


def cifar10_resnet50() -> TrainConfig:
    """CIFAR-10 upsampled to 1,280,000 samples, in 10 epochs on a v3-32 slice.

    Our own values, not run here.
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
    """ImageNet in 90 epochs. Published: 76.3 % for a step schedule, not run here.

    From Goyal et al. (arXiv:1706.02677, section 5.1), with cosine decay, label smoothing and no
    weight decay of biases from He et al. (arXiv:1812.01187). 4,096 samples a step are 128 for each
    of the 32 cores of a v3-32.
    """
    return TrainConfig(
        recipe="imagenet_resnet50",
        epochs=90,
        global_batch_size=4096,
        precision="bf16",
        log_every_steps=50,
        optimizer=OptimizerConfig(learning_rate=1.6),
        regularize=RegularizeConfig(label_smoothing=0.1),
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    function.__name__: function
    for function in (
        default,
        digits_smoke,
        cifar10_resnet18,
        cifar10_resnet50,
        imagenet_resnet50,
    )
}


def recipe(name: str) -> TrainConfig:
    """The recipe of that name; raises ConfigError naming the nearest one."""
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe {name!r}{did_you_mean(name, RECIPES)}; there are {', '.join(RECIPES)}"
        )
    return RECIPES[name]()
