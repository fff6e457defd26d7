"""The configuration of a run: frozen records that refuse wrong values."""

import json
import os
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardset import settings
from shardset.decode import augment
from shardset.errors import DOCS, ConfigError
from shardset.format.images import background as backgrounds
from shardset.format.images.limits import DECODED_BYTES
from shardset.order.budget import BUDGET_BYTES
from shardset.prepared import prepared
from shardset.settings import Count, Size, setting
from shardset.storage.base import Storage
from shardset.storage.open import is_address
from shardset.verbs import RUN

Strategy = Literal["auto", "spmd", "replica", "ddp", "single"]
Precision = Literal["fp32", "bf16", "fp16"]
Seconds = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Part = Annotated[float, Meta(gt=0, le=1)]
Filter = Literal["area", "bilinear", "bicubic", "lanczos"]
TrainCrop = Literal["random", "pad", "center"]
Decay = Literal["cosine", "linear", "step", "constant"]
Loss = Literal["cross_entropy", "bce"]
Channels = tuple[Amount, Amount, Amount]
Spread = tuple[Positive, Positive, Positive]
Weights = dict[int, float]
"""The weight of a set in a mixture, by the step of the run from which it counts; the first one is
0.
"""

Name = Annotated[str, Meta(pattern=r"^[^\W\d]\w*$")]
Kwargs = dict[Name, bool | int | float | str | list[float]]

_WEIGHTS = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?@\d+)*")

RECORD, CLASSES, ORDER = RUN, "classes.json", "order.json"
"""The files of the run folder with the configuration, the names of the classes by label, and the
order of training.
"""

SIDECAR = "model.json"
"""The file of an exported model that says how images are prepared and what the classes are."""


def mixed_sets(mix: str | None) -> list[tuple[str, Weights]]:
    """The sets of `config.mix`, such as `A=3;B=1,0.5@1000`, and their weights.

    Raises ConfigError.
    """
    sets = []
    for text in mix.split(";") if mix is not None else ():
        url, _, weights = text.rpartition("=")
        if not (url and _WEIGHTS.fullmatch(weights)):
            raise ConfigError(
                f"mix has {text!r}, expected SET=WEIGHT or SET=WEIGHT,WEIGHT@STEP,..."
            )
        pairs = [part.partition("@") for part in weights.split(",")]
        sets.append((url, {int(step or 0): float(weight) for weight, _, step in pairs}))
    return sets


def check_addresses(config: "TrainConfig") -> None:
    """Raises ConfigError unless machines of a cloud can read all sets and folders of a run."""
    resumed = None if config.resume in ("auto", "never") else config.resume
    others = ("--run-dir", config.run_dir), ("--manifest", config.manifest), ("--resume", resumed)
    for flag, url in (*(("--mix", url) for url, _ in mixed_sets(config.mix)), *others):
        if url and not is_address(url):
            raise ConfigError(
                f"{flag} {url}: expected an address, such as gs://BUCKET/FOLDER; the machines of"
                " the run don't have this disk"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The network. A GroupNorm, which replaces a BatchNorm, has at most 32 groups."""

    name: str = setting(
        "resnet50", "a timm model, or module:function(num_classes); auto", flag="--model"
    )
    stem: Literal["imagenet", "cifar"] = setting(
        "imagenet", "cifar: one 3x3 convolution, for images of about 32 pixels"
    )
    norm: Literal["batch", "group"] = setting(
        "batch", "normalization layers: group keeps no batch statistics"
    )
    pretrained: str | None = setting(
        None,
        "weights to start from: timm (downloads its own) or a file; none: random",
        nargs="?",
        const="timm",
    )
    freeze: bool = setting(False, "train the last layer only")
    kwargs: Kwargs | None = setting(None, "further arguments of the model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What the model sees of an image.

    An evaluation resizes the shorter side and takes the centre.
    """

    size: Count = setting(224, "width and height in pixels; auto", flag="--image-size")
    train_crop: TrainCrop = setting(
        "random",
        "random: resized crop; pad: window of the padded image; center: as evaluated; auto",
    )
    eval_resize: Count = setting(
        256, "length of the shorter side before an evaluation takes the centre; auto"
    )
    eval_interpolation: Filter = setting(
        "area", "how an evaluation resizes: averages of areas, or by Pillow's filter"
    )
    eval_size: Count | None = setting(None, "width and height in an evaluation; none: image.size")
    pad: Size = setting(4, "black pixels around an image, for train_crop=pad")
    flip: bool = setting(True, "mirror half of the images, drawn again in each epoch; auto")
    auto_augment: str | None = setting(
        None, "trivial, or RandAugment as timm writes it: rand-m9-mstd0.5-inc1"
    )
    augment_repeats: Count = setting(
        1, "repeated augmentation: copies of each training image per batch"
    )
    erase: Annotated[float, Meta(ge=0, le=1)] = setting(
        0.0, "share of training images with a random box of noise"
    )
    mean: Channels = setting(
        (0.485, 0.456, 0.406), "mean of red, green and blue, from 0 to 1, that is subtracted"
    )
    std: Spread = setting(
        (0.229, 0.224, 0.225), "standard deviation of each colour, which the rest is divided by"
    )
    background: str = setting(
        "white", "colour behind transparent images: white, black, grey or #rrggbb"
    )
    upright: bool = setting(
        True, "turn images as their EXIF data say; no: take them as they are stored"
    )
    decoded_bytes: Count = setting(
        DECODED_BYTES, "memory of the images that a process decodes at once"
    )

    @property
    def size_in_evaluation(self) -> int:
        """Width and height of the images that an evaluation, and a trained model, sees."""
        return self.eval_size or self.size


AUGMENTATION = frozenset(
    ["train_crop", "pad", "flip", "auto_augment", "augment_repeats", "erase", "decoded_bytes"]
)
"""The settings of ImageConfig that concern training only. All others belong to a trained model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, made by timm's factory."""

    name: str = setting("sgd", "an optimizer of timm's factory; auto: adamw")
    learning_rate: Amount = setting(
        0.1, "peak learning rate for the global batch; auto", flag="--lr"
    )
    weight_decay: Amount = setting(1e-4, "weight decay, not of biases and norms; auto: 0.05")
    head_learning_rate: Positive | None = setting(
        None, "learning rate of the last layer; none: --lr", flag="--head-lr"
    )
    kwargs: Kwargs | None = setting(None, "further arguments of the optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time (trainer/plan.py)."""

    decay: Decay = setting("cosine", "decay of the learning rate after the warm-up")
    warmup_epochs: Amount = setting(5.0, "epochs of linear warm-up; auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularizeConfig:
    """Regularization. 0 or None turns each of them off."""

    loss: Loss = setting(
        "cross_entropy", "training loss; bce: binary cross-entropy, each class a yes or no"
    )
    bce_threshold: Share | None = setting(
        None, "targets of bce above this share count as 1 and the others as 0"
    )
    label_smoothing: Share = setting(0.0, "label smoothing; 0 turns it off; auto: 0.1")
    mixup: Amount = setting(0.0, "alpha of mixup's Beta distribution; 0 turns it off")
    cutmix: Amount = setting(0.0, "alpha of cutmix's Beta distribution; 0 turns it off")
    ema_decay: Share | None = setting(
        None, "decay of the moving average of the weights; none turns it off"
    )
    clip_norm: Amount | None = setting(
        None, "largest norm of the gradients; none turns clipping off"
    )


@prepared
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A complete run.

    Raises ConfigError for a value, or a combination of values, that no run can have.
    """

    recipe: str = setting("default", "the recipe that these settings started from")
    manifest: str | None = setting(None, "shard set: its folder or manifest.json")
    mix: str | None = setting(
        None,
        "several sets, each with its share of each batch; WEIGHT,WEIGHT@STEP changes it at a step;"
        " evaluates on --manifest, by default the first",
        action="append",
        metavar="SET=WEIGHT",
    )
    run_dir: str = setting("run", "folder or address for checkpoints and logs (default run)")
    train_split: str = setting("train", "split to train on")
    eval_split: str | None = setting(
        None, "split to evaluate on; none takes the only other split, or val before test"
    )
    seed: int = setting(0, "seed of weights, order and augmentation (default 0)")
    epochs: Count = setting(90, "passes over the training split; auto")
    global_batch_size: Count = setting(256, "samples per step over all replicas; auto")
    accumulate: Count = setting(1, "forward and backward passes that each step is cut into")
    max_steps: Count | None = setting(None, "stop after so many steps; the schedule stays")
    target_accuracy: Part | None = setting(None, "stop at this accuracy, such as 0.76")
    strategy: Strategy = setting("auto", "how to use the devices; start ddp with torchrun")
    precision: Precision = setting(
        "fp32", "bf16, fp16: compute in 16 bits where autocast does; fp16 scales the loss; auto"
    )
    compile: bool | None = setting(
        None, "compile the model with torch.compile; none: on GPUs and with TorchTPU"
    )
    tf32: bool = setting(
        True,
        "on CUDA devices, compute what is float32 in TF32, which keeps 10 bits of the mantissa",
    )
    sync_batch_norm: bool = setting(
        False, "under ddp on CUDA devices, BatchNorm sees the global batch"
    )
    resume: str = setting("auto", "auto (default), never, or a checkpoint or run to begin from")
    fake_data: bool = setting(False, "made-up images: the highest rate possible")
    profile_steps: tuple[int, int] | None = setting(None, "trace these steps into RUN_DIR/profile")
    log_every_steps: Count = setting(10, "steps between two lines of the log")
    wandb: bool = setting(False, "send the numbers to Weights & Biases too")
    record_losses: bool = setting(False, "write the loss of each sample to RUN_DIR/losses")
    show_steps: bool = setting(False, "print a line per logged step, not only per epoch")
    checkpoint_every_steps: Count | None = setting(
        None, "steps between two checkpoints; none saves after each epoch"
    )
    keep_checkpoints: Count = setting(
        3, "number of newest checkpoints to keep, besides the best one"
    )
    stall_timeout_s: Seconds = setting(900, "seconds without progress after which a run fails")
    budget_bytes: Count = setting(
        BUDGET_BYTES, "memory of each of a host's two streams, training and evaluation"
    )
    num_decode_threads: Count | None = setting(
        None,
        "decoding threads of each process; none: its cores",
        flag="--decode-threads",
    )
    num_lanes: Count | None = setting(
        None,
        f"lanes ({DOCS}/explanation/order.md); none follows the batch, the hosts and budget_bytes",
    )
    block_size: Count | None = setting(
        None, f"samples of a read ({DOCS}/explanation/order.md); none makes reads of about 4 MiB"
    )
    window: Size | None = setting(
        None,
        f"shuffle window ({DOCS}/explanation/order.md); none takes 256, or what budget_bytes holds",
    )
    cache_dir: str | None = setting(
        None, "local folder for blocks from a bucket; goes with cache_bytes"
    )
    cache_bytes: Count | None = setting(None, "bytes that cache_dir may hold; goes with cache_dir")
    model: ModelConfig = field(default_factory=ModelConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    regularize: RegularizeConfig = field(default_factory=RegularizeConfig)

    def __post_init__(self) -> None:
        settings.check(self)
        if not self.run_dir:
            raise ConfigError(
                "run_dir is empty, expected a folder or gs:// address; is a shell variable unset?"
            )
        if (
            self.profile_steps is not None
            and not 0 <= self.profile_steps[0] < self.profile_steps[1]
        ):
            raise ConfigError(
                f"profile_steps is {self.profile_steps}, expected START:STOP with START before STOP"
            )
        if (self.cache_dir is None) != (self.cache_bytes is None):
            raise ConfigError("cache_dir and cache_bytes belong together; give both, or neither")
        if self.fake_data and self.manifest is not None:
            raise ConfigError(
                "fake_data reads no shard set, but a manifest is given; leave one of them out"
            )
        if mixed_sets(self.mix) and self.manifest is None:
            raise ConfigError("mix goes with manifest, the set to evaluate on; name it")
        if self.optimizer.head_learning_rate is not None and not self.optimizer.learning_rate:
            raise ConfigError(
                "optimizer.learning_rate is 0, so the last layer can't have another rate; to"
                " train only that layer, set model.freeze=true"
            )
        if self.regularize.bce_threshold is not None and self.regularize.loss != "bce":
            raise ConfigError(
                "regularize.bce_threshold is of regularize.loss=bce; set that too, or leave it out"
            )
        if self.global_batch_size % self.image.augment_repeats:
            raise ConfigError(
                f"global_batch_size is {self.global_batch_size}, expected a multiple of"
                f" image.augment_repeats, {self.image.augment_repeats}: a batch holds each of its"
                " images as often"
            )
        _check_image(self.image, needs_resize=not self.fake_data)


def _check_image(image: ImageConfig, *, needs_resize: bool) -> None:
    backgrounds.parse(image.background)
    if image.auto_augment is not None:
        augment.augmentation_of(image.auto_augment)
    if image.train_crop == "pad" and image.pad >= image.size:
        raise ConfigError(
            f"image.pad is {image.pad}, expected less than image.size, {image.size}: a window could"
            " miss the image"
        )
    size = image.size_in_evaluation
    name = "image.size" if image.eval_size is None else "image.eval_size"
    if needs_resize and image.eval_resize < size:
        raise ConfigError(
            f"image.eval_resize is {image.eval_resize}, expected at least {name}, {size}: an"
            f" evaluation resizes to it and takes the centre; add --set image.eval_resize={size},"
            " or more"
        )


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return values


def to_json(config: TrainConfig) -> str:
    """The configuration as the run folder holds it."""
    return json.dumps(to_dict(config), indent=1)


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The configuration that `to_dict` turned into values. Raises ConfigError for anything else."""
    try:
        return msgspec.convert(values, TrainConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{RECORD}: {error}; it was written by another version or changed by hand"
        ) from error


def recorded(folder: Storage) -> TrainConfig:
    """The configuration in a run folder.

    Raises NotFound if there is none, ConfigError if it is damaged.
    """
    return from_dict(read_json(folder, RECORD))


def not_a_run(folder: Storage, *names: str) -> ConfigError:
    """The error for a folder without these files of a run."""
    return ConfigError(
        f"{folder.url}: no {' and '.join(names)} there, expected the folder of a run; give the"
        " --run-dir of `shardset train`"
    )


def read_json(folder: Storage, name: str) -> Any:
    """The values in a JSON file of a run folder.

    Raises NotFound without it, ConfigError if it is damaged.
    """
    try:
        return json.loads(folder.read(name))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{folder.url}/{name}: not JSON ({error}); restore it") from error


def continued(config: TrainConfig, run_dir: str) -> TrainConfig:
    """A recorded run as a new command resumes it: without what was said about one command only."""
    return replace(
        config,
        run_dir=run_dir,
        resume="auto",
        strategy="auto",
        max_steps=None,
        target_accuracy=None,
        profile_steps=None,
    )


def from_anywhere(config: TrainConfig) -> TrainConfig:
    """The config with absolute local paths, so that it can be read from any folder."""
    manifest = config.manifest and absolute(config.manifest)
    cache_dir = config.cache_dir and absolute(config.cache_dir)
    mix = config.mix and ";".join(map(absolute, config.mix.split(";")))
    return replace(config, manifest=manifest, cache_dir=cache_dir, mix=mix)


def absolute(url: str) -> str:
    """An address as it is, a local path from the root of the disk."""
    return url if is_address(url) else os.path.abspath(url)
