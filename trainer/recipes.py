"""Recipes: functions that return a complete configuration, and say what to expect of it."""

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


def cifar10_fast() -> TrainConfig:
    """CIFAR-10 in 24 epochs with a network of nine layers: 94.1 % is published, nothing was measured here.

    Settings of David Page's "How to train your ResNet" (github.com/davidcpage/cifar10-fast, dawn.py): ResNet-9, batches
    of 512, Nesterov momentum, a rate that rises to 0.4 in 5 epochs and falls linearly to 0, weight decay 5e-4, windows
    of the padded image, mirrored. Two differences: biases and norms have no weight decay, and random erasing in half of
    the images stands for a box of 8x8 black pixels in all.
    """
    return TrainConfig(
        recipe="cifar10_fast",
        epochs=24,
        global_batch_size=512,
        model=ModelConfig(name="trainer.model:resnet9"),
        image=ImageConfig(
            size=32,
            train_crop="pad",
            eval_resize=32,
            erase=0.5,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2471, 0.2435, 0.2616),
        ),
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.4, weight_decay=5e-4),
        schedule=ScheduleConfig(decay="linear", warmup_epochs=5.0),
    )


def imagenet_resnet50() -> TrainConfig:
    """ImageNet in 90 epochs: 76.3 % is published for a step schedule, nothing was measured here.

    4,096 samples a step: 128 for each of the 32 cores of a v3-32, 256 for each of the 16 chips of a v4-32 (the two
    cores of a v4 chip appear as one device). bfloat16 where it is safe; weights and loss stay float32.

    Of Goyal et al. (arXiv:1706.02677): a rate of 0.1 for each 256 samples after 5 epochs of warm-up, Nesterov momentum
    of 0.9 (timm's `sgd`), weight decay 1e-4 and none of norms. Of He et al. (arXiv:1812.01187): cosine decay, label
    smoothing 0.1, no weight decay of biases.
    """
    return TrainConfig(
        recipe="imagenet_resnet50",
        epochs=90,
        global_batch_size=4096,
        precision="bf16",
        log_every_steps=50,
        optimizer=OptimizerConfig(name="sgd", learning_rate=1.6, weight_decay=1e-4),
        regularize=RegularizeConfig(label_smoothing=0.1),
    )


def imagenet_resnet50_a3() -> TrainConfig:
    """ImageNet in 100 epochs at 160 pixels, evaluated at 224: 78.1 % is published, nothing was measured here.

    Procedure A3 of "ResNet strikes back" (arXiv:2110.00476, table 2): LAMB at 8e-3 for 2,048 samples, weight decay
    0.02, 5 epochs of warm-up, cosine, RandAugment 6/0.5, mixup 0.1, cutmix 1, binary cross-entropy without smoothing,
    a centre of 0.95 in the evaluation. The threshold of 0.2 is that of timm's commands for it. timm's LAMB limits the
    norm of the gradients to 1. Difference: mixed in every batch by one draw, not by images of another batch.
    """
    return TrainConfig(
        recipe="imagenet_resnet50_a3",
        epochs=100,
        global_batch_size=2048,
        precision="bf16",
        log_every_steps=50,
        image=ImageConfig(size=160, eval_size=224, eval_resize=236, auto_augment="rand-m6-mstd0.5-inc1"),
        optimizer=OptimizerConfig(name="lamb", learning_rate=8e-3, weight_decay=0.02),
        regularize=RegularizeConfig(loss="bce", bce_threshold=0.2, mixup=0.1, cutmix=1.0),
    )


def imagenet_vit_s16() -> TrainConfig:
    """ImageNet in 90 epochs with a ViT-S/16: 76.5 % is published, nothing was measured here.

    Settings of big_vision (configs/vit_s16_i1k.py; arXiv:2205.01580): batches of 1,024, Adam at 1e-3 after 10,000 steps
    of warm-up (8 epochs), cosine, weight decay 1e-4 (which it does not multiply by the rate: 0.1 here, where it is),
    gradients of norm 1, mixup 0.2, RandAugment(2, 10), windows of 5 to 100 % in values of -1 to 1, the mean over all
    patches. Differences: windows of 8 to 100 %, embeddings of positions that are learned and not sines, no second
    layer in the head, moments in float32.
    """
    return TrainConfig(
        recipe="imagenet_vit_s16",
        epochs=90,
        global_batch_size=1024,
        precision="bf16",
        log_every_steps=50,
        model=ModelConfig(name="vit_small_patch16_224", kwargs={"class_token": False, "global_pool": "avg"}),
        image=ImageConfig(auto_augment="rand-m10-n2-p1", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3, weight_decay=0.1),
        schedule=ScheduleConfig(warmup_epochs=8.0),
        regularize=RegularizeConfig(mixup=0.2, clip_norm=1.0),
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
    cifar10_fast,
    imagenet_resnet50,
    imagenet_resnet50_a3,
    imagenet_vit_s16,
    imagenet_resnet50_gn,
    imagenet_resnet50_smoke,
)
RECIPES: dict[str, Callable[[], TrainConfig]] = {function.__name__: function for function in _FUNCTIONS}


def recipe(name: str) -> TrainConfig:
    """The recipe of that name; raises ConfigError naming the nearest one."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{did_you_mean(name, RECIPES)}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()
