"""What a training run is: frozen records that refuse to be wrong, and recipes that return them."""

import dataclasses
import difflib
import json
import math
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from shardset.errors import ConfigError
from shardset.format import background as backgrounds
from shardset.format.limits import DECODED_BYTES
from shardset.order.budget import BUDGET_BYTES

Strategy = Literal["auto", "spmd", "replica", "ddp", "single"]
Precision = Literal["fp32", "bf16"]
RECORD = "config.json"
"""The file of the run folder that holds the full config."""
ORDER = "order.json"
"""The file of the run folder that holds the order of the training stream."""
MAX_TIMEOUT_S = 1_000_000_000
"""Longer times don't fit into what counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`name` is a timm model or `module:function` (called with `num_classes`).

    `stem="cifar"` replaces the 7x7 stride-2 convolution and the pooling by one 3x3 convolution, for images of about 32
    pixels. `norm="group"` replaces every BatchNorm by a GroupNorm of 32 groups at most. `num_classes=None` takes
    the number from the manifest.
    """

    name: str = "resnet50"
    stem: Literal["imagenet", "cifar"] = "imagenet"
    norm: Literal["batch", "group"] = "batch"
    num_classes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Images are `size` x `size` pixels.

    `train_crop`: "random" is the random resized crop of ImageNet training, "pad" a random window of the image with
    `pad` black pixels around it (for images that have `size` already), "center" what evaluation does: the shorter side
    resized to `eval_resize`, then the centre. `flip` mirrors half of the training images. Transparent images are put on
    `background`: white, black, grey or #rrggbb. `decoded_bytes` is the memory of the images that a process decodes at
    once; one that needs more is a bad sample.
    """

    size: int = 224
    train_crop: Literal["random", "pad", "center"] = "random"
    eval_resize: int = 256
    pad: int = 4
    flip: bool = True
    background: str = "white"
    decoded_bytes: int = DECODED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """`name` as timm's optimizer factory knows it; `learning_rate` is the peak, for the whole global batch."""

    name: str = "sgd"
    learning_rate: float = 0.1
    weight_decay: float = 5e-5
    momentum: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up over `warmup_epochs`, then `decay` (see trainer/model/schedule.py)."""

    decay: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularizeConfig:
    """0 or None turns each of them off; `mixup` and `cutmix` are the alphas of their Beta distributions."""

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    ema_decay: float | None = None
    clip_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A complete run. `manifest` may be None with `fake_data`; `eval_split=None`: the only split besides `train_split`.

    `global_batch_size` counts samples per step over all replicas; `accumulate` cuts each step into that many smaller
    forward and backward passes. `max_steps` stops a run early without changing its schedule. `resume` is
    "auto" (the newest whole checkpoint of the run folder, if any), "never", or the URL of a checkpoint or run folder
    where a run folder without checkpoints begins. `budget_bytes` is the memory of each of the two streams of a host,
    training and evaluation (docs/stream.md). `cache_dir` and `cache_bytes` together keep what comes from a bucket on a
    local disk (docs/stream.md).
    """

    recipe: str = "default"
    manifest: str | None = None
    run_dir: str = "run"
    train_split: str = "train"
    eval_split: str | None = None
    seed: int = 0
    epochs: int = 90
    global_batch_size: int = 256
    accumulate: int = 1
    max_steps: int | None = None
    target_accuracy: float | None = None
    strategy: Strategy = "auto"
    precision: Precision = "fp32"
    resume: str = "auto"
    fake_data: bool = False
    profile_steps: tuple[int, int] | None = None
    log_every_steps: int = 10
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 3
    stall_timeout_s: int = 900
    budget_bytes: int = BUDGET_BYTES
    cache_dir: str | None = None
    cache_bytes: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    regularize: RegularizeConfig = field(default_factory=RegularizeConfig)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.run_dir:
            raise ConfigError(
                "run_dir is empty, expected a folder or gs:// address; is a variable of the shell not set?"
            )
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ConfigError(
                f"target_accuracy is {self.target_accuracy}, expected a share between 0 and 1, such as 0.76"
            )
        backgrounds.parse(self.image.background)
        if self.image.train_crop == "pad" and self.image.pad >= self.image.size:
            raise ConfigError(
                f"image.pad is {self.image.pad}, expected less than image.size, {self.image.size}: a window may show "
                "nothing of the image"
            )
        if self.image.eval_resize < self.image.size and not self.fake_data:
            raise ConfigError(
                f"image.eval_resize is {self.image.eval_resize}, expected at least image.size, {self.image.size}: an "
                f"evaluation resizes to it and takes the centre; add --set image.eval_resize={self.image.size}, or more"
            )
        if self.stall_timeout_s > MAX_TIMEOUT_S:
            raise ConfigError(
                f"stall_timeout_s is {self.stall_timeout_s}, expected at most {MAX_TIMEOUT_S}, which is 31 years"
            )
        if self.profile_steps is not None and not 0 <= self.profile_steps[0] < self.profile_steps[1]:
            raise ConfigError(f"profile_steps is {self.profile_steps}, expected START:STOP with START before STOP")
        if (self.cache_dir is None) != (self.cache_bytes is None):
            raise ConfigError("cache_dir and cache_bytes belong together; give both, or none")
        if self.fake_data and self.manifest is not None:
            raise ConfigError(
                "fake_data reads no shard set, so it can't be given with a manifest; leave one of them out"
            )


_AT_LEAST: dict[int, tuple[str, ...]] = {
    1: (
        "epochs", "global_batch_size", "accumulate", "max_steps", "log_every_steps", "checkpoint_every_steps",
        "keep_checkpoints", "stall_timeout_s", "budget_bytes", "model.num_classes", "image.size", "image.eval_resize",
        "image.decoded_bytes",
    ),
    0: (
        "image.pad", "optimizer.learning_rate", "optimizer.weight_decay", "schedule.warmup_epochs", "regularize.mixup",
        "regularize.cutmix", "regularize.clip_norm",
    ),
}  # fmt: skip
_SHARES = ("optimizer.momentum", "regularize.label_smoothing", "regularize.ema_decay")


def _check_numbers(config: TrainConfig) -> None:
    """Raises ConfigError for a number that no run can have; None is for what is off."""
    given = {key: found for key in keys(config) if (found := value(config, key)) is not None}
    for key, found in given.items():
        if isinstance(found, float) and not math.isfinite(found):
            raise ConfigError(f"{key} is {found}, expected a finite number")
    for least, names in _AT_LEAST.items():
        for key in names:
            if key in given and given[key] < least:
                raise ConfigError(f"{key} is {given[key]}, expected at least {least}")
    for key in _SHARES:
        if key in given and not 0 <= given[key] < 1:
            raise ConfigError(f"{key} is {given[key]}, expected a share from 0 to below 1")


# --- recipes ---------------------------------------------------------------------------------------------------------


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
        raise ConfigError(f"no recipe {name!r}{_nearest(name, RECIPES)}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()


# --- changes by name -------------------------------------------------------------------------------------------------


def keys(config: Any) -> list[str]:
    """All names that `changed` takes, inner ones with a dot: `optimizer.learning_rate`."""
    found: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        inner = keys(value) if dataclasses.is_dataclass(value) else None
        found += [item.name] if inner is None else [f"{item.name}.{name}" for name in inner]
    return found


def changed(config: TrainConfig, settings: Iterable[str]) -> TrainConfig:
    """The config after `KEY=VALUE` settings, each read as its field's type; raises ConfigError."""
    return with_values(config, pairs(settings))


def pairs(settings: Iterable[str]) -> dict[str, str]:
    """The values of `KEY=VALUE` settings by key, the last of each; raises ConfigError."""
    found = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} is not KEY=VALUE, for example --set optimizer.learning_rate=0.2")
        found[key] = text
    return found


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The config with these keys changed all at once, since some belong together; text is read as the field's type."""
    known = keys(config)
    for key in values:
        if key not in known:
            raise ConfigError(f"no setting {key!r}{_nearest(key, known)}; `--help` shows where they are listed")
    return _with(config, values, "")


def value(config: Any, key: str) -> Any:
    """The value of a key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The config as plain JSON values."""
    return msgspec.to_builtins(config)


def to_json(config: TrainConfig) -> str:
    """The config as the run folder holds it."""
    return json.dumps(to_dict(config), indent=1)


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The config that `to_dict` turned into values; raises ConfigError if they are something else."""
    try:
        return msgspec.convert(values, TrainConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}; it was written by another version or changed by hand") from error


def _with(record: Any, values: Mapping[str, Any], outer: str) -> Any:
    hints, own, inner = typing.get_type_hints(type(record)), {}, defaultdict[str, dict[str, Any]](dict)
    for key, value in values.items():
        name, dot, rest = key.partition(".")
        if dot:
            inner[name][rest] = value
        else:
            own[name] = _typed(value, hints[name], outer + key)
    records = {name: _with(getattr(record, name), found, f"{outer}{name}.") for name, found in inner.items()}
    return replace(record, **own, **records)


def _typed(value: Any, hint: Any, key: str) -> Any:
    if isinstance(value, str) and value.lower() == "none":
        value = None
    if isinstance(value, str) and key == "profile_steps":
        value = _span(value)
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key}={value}: {error}".replace("`", "")) from error


def _span(text: str) -> list[int]:
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ConfigError(f"profile_steps={text!r} is not START:STOP, for example 10:15")
    return [int(start), int(stop)]


def _nearest(name: str, names: Iterable[str]) -> str:
    ends = {known.rpartition(".")[2]: known for known in names}
    close = difflib.get_close_matches(name, [*names], n=1) or [
        ends[n] for n in difflib.get_close_matches(name, ends, n=1)
    ]
    return f", did you mean {close[0]!r}?" if close else ""
