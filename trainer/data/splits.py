"""The data of a run: a training and an evaluation stream from one shard set,
or two synthetic ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import Any, Protocol

import msgspec
import numpy as np

from shardset.decode.augment import Chain, RandomErasing, augmentation_of
from shardset.decode.crops import CenterCrop, Crop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.images import background as backgrounds
from shardset.format.manifest import LoadedSet, Manifest
from shardset.order.lanes import rank_part
from shardset.order.permutation import derive_key, hash64
from shardset.order.selection import Selection
from shardset.order.state import OrderState
from shardset.read.disk_cache import DiskCache
from shardset.stream.spec import Batch
from shardset.stream.stream import Stream
from trainer.config import DEFAULT_CLASSES, ImageConfig, TrainConfig, mixed_sets
from trainer.data.mixture import Mixture
from trainer.errors import EpochMismatch

SYNTHETIC_DIGEST = "fake data"
"""The manifest digest in checkpoints of runs on synthetic data.

It is recorded, so it must never change.
"""

DIGEST_MASK = (1 << 48) - 1
"""48 bits, so that sums over hosts stay within the integers that every runtime can sum."""

NUM_SAMPLES, NUM_EVAL_SAMPLES = 1_281_167, 50_000
"""Samples of a synthetic epoch and evaluation: those of ImageNet. `--max-steps` stops earlier."""

TUNING_SPLITS = ("val", "validation", "valid", "dev")
"""The split to evaluate on while a run is tuned, where there is also one for the final test."""

IDS_AT_ONCE = 1 << 16
"""Ids that are hashed together: their hashes stay in the processor's cache, whatever the size of
the split.
"""

_KEY = derive_key(0, "samples of an epoch")

Step = tuple[int, int, dict[str, Any]]
"""(epoch, step in the epoch, batch by field)."""


class BatchSource(Protocol):
    """A stream as the training loop uses it (see shardset/stream/stream.py)."""

    def __len__(self) -> int: ...
    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]: ...
    def state(self, epoch: int, step: int) -> Any: ...
    def load_state_dict(self, state: Any) -> object: ...
    def stop(self) -> None: ...


def order_of(stream: BatchSource, epoch: int, step: int) -> str | None:
    """The order of a stream at a position, as JSON; None for synthetic data."""
    state = stream.state(epoch, step)
    return None if state is None else msgspec.json.encode(state).decode()


@dataclass(frozen=True, slots=True)
class SampleDigest:
    """The number of samples, and a digest of their ids: the sum of their hashes, in whatever order
    they come.
    """

    samples: int = 0
    digest: int = 0

    def add(self, ids: np.ndarray) -> "SampleDigest":
        """The digest of these samples and the samples with the ids."""
        hashes = hash64(_KEY, np.asarray(ids, dtype=np.int64)) >> np.uint64(16)
        digest = self.digest + int(hashes.sum(dtype=np.uint64))
        return SampleDigest(self.samples + len(ids), digest & DIGEST_MASK)

    @property
    def text(self) -> str:
        """The digest as 12 hexadecimal digits."""
        return f"{self.digest:012x}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """The streams of a run, and the number of samples of an epoch and of an evaluation.

    An epoch takes each training sample `augment_repeats` times. `train_ids` are theirs, unless a
    mixture says for each epoch what it takes.
    """

    train: BatchSource
    evaluation: BatchSource
    num_classes: int
    manifest_digest: str
    eval_split: str
    num_eval_samples: int
    train_ids: Selection
    augment_repeats: int = 1
    class_names: tuple[str, ...] = ()

    def expected(self, epoch: int) -> SampleDigest:
        """What a training epoch must be."""
        if isinstance(self.train, Mixture):
            return reduce(SampleDigest.add, self.train.ids(epoch), SampleDigest())
        return self._complete_epoch

    @cached_property
    def _complete_epoch(self) -> SampleDigest:
        """Computed at the end of the first epoch, because 1e9 samples take 6 s."""
        return complete_epoch(self.train_ids, self.augment_repeats)

    def weight_of_step(self, step: int, global_batch_size: int) -> int:
        """What the losses of a step are divided by on all hosts: its training samples, without
        pads.

        That is the sum of their weights unless a view has others, which then say how much a sample
        counts.
        """
        if isinstance(self.train, Mixture):
            return global_batch_size
        num_slots = self.augment_repeats * self.train_ids.num_kept
        return min(global_batch_size, num_slots - step * global_batch_size)


# --- opening --------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def load_once(url: str) -> LoadedSet:
    """The set at a URL, parsed once a process: defaults, training and evaluation share it."""
    return manifests.load(url)


def open_data(config: TrainConfig, host: int, num_hosts: int) -> Data:
    """This host's part of the data. Raises ConfigError if the config does not fit the shard set."""
    if config.fake_data:
        return synthetic_data(config, host, num_hosts)
    if config.manifest is None:
        raise ConfigError(
            "no manifest: name a shard set with --manifest URL, or measure without one by"
            " --fake-data"
        )
    loaded = load_once(config.manifest)
    manifest = loaded.manifest
    eval_split = eval_split_of(config, manifest)
    check_split("eval_split", eval_split, loaded, config.manifest)
    num_classes = _num_classes_of(config, manifest)
    options = _stream_options(config, host, num_hosts)
    train = _open_training(config, loaded, options)
    return Data(
        train=train,
        evaluation=Stream(loaded, eval_split, seed=None, image=eval_spec(config.image), **options),
        num_classes=num_classes,
        manifest_digest=manifest.digest,
        eval_split=eval_split,
        train_ids=train.order.selection if isinstance(train, Stream) else Selection(0),
        augment_repeats=config.image.augment_repeats,
        num_eval_samples=loaded.part(eval_split).selection.num_kept,
        class_names=_class_names(manifest),
    )


def _open_training(
    config: TrainConfig, loaded: LoadedSet, options: dict[str, Any]
) -> Stream | Mixture:
    """The training stream of the set, or of the sets of a mixture, whose classes are its own."""
    image = config.image
    training: dict[str, Any] = dict(
        seed=config.seed,
        image=train_spec(image),
        window=config.window,
        transform=train_transform(image),
        augment_repeats=image.augment_repeats,
        **options,
    )
    if not config.mix:
        check_split("train_split", config.train_split, loaded, str(config.manifest))
        return Stream(loaded, config.train_split, **training)
    sets, weights = zip(*mixed_sets(config.mix), strict=True)
    mixed = [load_once(url) for url in sets]
    for url, other in zip(sets, mixed, strict=True):
        check_split("train_split", config.train_split, other, url)
        names, others = _class_names(loaded.manifest), _class_names(other.manifest)
        if others != names:
            which = sorted({*names} ^ {*others})[:5] or "in their order"
            raise ConfigError(
                f"{url} has other classes than {config.manifest} ({which}); the sets of a mixture"
                " need the same classes in the same order: build them with the same class names"
            )
    return Mixture(mixed, weights, config.train_split, **training)


def _stream_options(config: TrainConfig, host: int, num_hosts: int) -> dict[str, Any]:
    """What the training and the evaluation stream of a host have in common."""
    disk_cache = None
    if config.cache_dir is not None and config.cache_bytes is not None:
        disk_cache = DiskCache(folder=config.cache_dir, num_bytes=config.cache_bytes)
    return dict(
        global_batch_size=config.global_batch_size,
        rank=host,
        world_size=num_hosts,
        num_lanes=config.num_lanes,
        block_size=config.block_size,
        budget_bytes=config.budget_bytes,
        num_threads=config.num_decode_threads,
        disk_cache=disk_cache,
    )


def _class_names(manifest: Manifest) -> tuple[str, ...]:
    return tuple(one.name for one in manifest.classes)


def open_evaluation(config: TrainConfig, host: int, num_hosts: int) -> Data:
    """The data of an evaluation, without a split to train on: `train` is of the same one.

    Raises ConfigError.
    """
    if config.manifest is not None:
        split = eval_split_of(config, load_once(config.manifest).manifest)
        config = replace(config, train_split=split, eval_split=split, mix=None)
    return open_data(config, host, num_hosts)


def eval_spec(image: ImageConfig) -> ImageSpec:
    """How evaluation images are cropped and resized."""
    return ImageSpec(
        size=image.size_in_evaluation,
        crop=CenterCrop(image.eval_resize, image.eval_interpolation),
        flip=False,
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
    return replace(evaluation, size=image.size, crop=crops[image.train_crop], flip=image.flip)


def train_transform(image: ImageConfig) -> Chain | None:
    """What happens to the pixels of a cropped training image; None leaves them alone.

    Raises ConfigError.
    """
    steps: list[Any] = []
    if image.auto_augment is not None:
        steps.append(augmentation_of(image.auto_augment))
    if image.erase:
        steps.append(RandomErasing(probability=image.erase, mean=image.mean, std=image.std))
    return Chain(tuple(steps)) if steps else None


# --- without a shard set --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticStream:
    """Yields one random batch at every step.

    The last step of an epoch is padded with samples of weight 0.
    """

    num_samples: int
    global_batch_size: int
    rank: int
    world_size: int
    image_size: int
    num_classes: int
    augment_repeats: int = 1

    def __len__(self) -> int:
        """The steps of an epoch."""
        return -(-self.num_samples * self.augment_repeats // self.global_batch_size)

    def state(self, epoch: int, step: int) -> None:
        """None: there is no order to record."""

    def load_state_dict(self, state: OrderState) -> None:
        """Does nothing: there is no order to compare."""

    def stop(self) -> None:
        """Does nothing: the stream never waits."""

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]:
        """Yields (epoch, step, batch) for spans (epoch, steps), as a Stream does."""
        slots = np.array(rank_part(self.global_batch_size, self.rank, self.world_size))
        draw, size = np.random.default_rng(0), self.image_size
        image = draw.integers(0, 256, (len(slots), size, size, 3), dtype=np.uint8)
        label = draw.integers(0, self.num_classes, len(slots), dtype=np.int64)
        batch = {"image": image, "label": label, "flip": label % 2 == 0}
        for epoch, steps in spans:
            for step in steps:
                ids = (step * self.global_batch_size + slots) // self.augment_repeats
                weight = (ids < self.num_samples).astype(np.float32)
                yield epoch, step, {**batch, "id": ids % self.num_samples, "weight": weight}


def synthetic_data(config: TrainConfig, host: int, num_hosts: int) -> Data:
    """Data of the shapes in the config that costs no time: a run on it shows the highest possible
    rate.
    """
    num_classes = config.model.num_classes or DEFAULT_CLASSES
    stream = partial(
        SyntheticStream,
        global_batch_size=config.global_batch_size,
        rank=host,
        world_size=num_hosts,
        num_classes=num_classes,
    )
    return Data(
        train=stream(
            num_samples=NUM_SAMPLES,
            augment_repeats=config.image.augment_repeats,
            image_size=config.image.size,
        ),
        evaluation=stream(num_samples=NUM_EVAL_SAMPLES, image_size=config.image.size_in_evaluation),
        num_classes=num_classes,
        manifest_digest=SYNTHETIC_DIGEST,
        eval_split=SYNTHETIC_DIGEST,
        train_ids=Selection(NUM_SAMPLES),
        augment_repeats=config.image.augment_repeats,
        num_eval_samples=NUM_EVAL_SAMPLES,
    )


# --- does the shard set fit the config? -----------------------------------------------------------


def check_split(setting: str, name: str, loaded: LoadedSet, url: str) -> None:
    """Raises ConfigError unless the split exists and every sample has a label, without which its
    loss means nothing.
    """
    splits = loaded.manifest.splits
    if name not in splits:
        names = ", ".join(splits)
        raise ConfigError(
            f"{setting} is {name!r}, but the shard set {url} has {names}; name one of them"
        )
    split, labels = splits[name], loaded.part(name).labels
    num_samples, num_labelled = split.num_samples, sum(split.class_totals)
    if labels is not None:  # those of a view are read in place of the stored ones
        num_samples, num_labelled = len(labels), int(np.count_nonzero(labels >= 0))
    if missing := num_samples - num_labelled:
        raise ConfigError(
            f"{setting} is {name!r}, where {missing} of {num_samples} samples have no label, and"
            f" this trainer needs them; name another split with --set {setting}=NAME, build the"
            " shard set without these samples, or give a view of it a column of labels"
        )


def eval_split_of(config: TrainConfig, manifest: Manifest) -> str:
    """The split to evaluate on: the one that was named, the only other one, or one of
    TUNING_SPLITS.

    Raises ConfigError where the choice is not clear.
    """
    if config.eval_split is not None:
        return config.eval_split
    others = [name for name in manifest.splits if name != config.train_split]
    if not others:
        raise ConfigError(
            f"the shard set {config.manifest} has no split to evaluate on, only"
            f" {config.train_split!r}; build it again with --holdout test=0.1, or evaluate on the"
            f" training images: --set eval_split={config.train_split}"
        )
    chosen = others if len(others) == 1 else [name for name in TUNING_SPLITS if name in others]
    if not chosen:
        names = ", ".join(manifest.splits)
        raise ConfigError(
            f"which split to evaluate on? The shard set has {names}; name one with --set"
            " eval_split=NAME"
        )
    return chosen[0]


def _num_classes_of(config: TrainConfig, manifest: Manifest) -> int:
    """The number of classes of the model: that of the config if it suffices, else that of the
    manifest.
    """
    wanted, stored = config.model.num_classes, len(manifest.classes)
    if wanted is not None and wanted < stored:
        raise ConfigError(
            f"model.num_classes is {wanted} but the shard set has {stored} classes; leave it at"
            " none"
        )
    if wanted is None and not stored:
        raise ConfigError(
            "the shard set has no classes; it has images only, and this trainer needs labels"
        )
    return wanted or stored


# --- has a run trained on what it should? ---------------------------------------------------------


def complete_epoch(selection: Selection, repeats: int = 1) -> SampleDigest:
    """The digest of a complete epoch over some ids, each of which it has so many times."""
    once = SampleDigest()
    for start in range(0, selection.num_kept, IDS_AT_ONCE):
        numbers = np.arange(start, min(start + IDS_AT_ONCE, selection.num_kept))
        once = once.add(selection.id_of(numbers))
    return SampleDigest(once.samples * repeats, once.digest * repeats & DIGEST_MASK)


def check_epoch(epoch: int, expected: SampleDigest, seen: SampleDigest) -> None:
    """Raises EpochMismatch unless the run has trained on exactly the samples that are expected."""
    if seen == expected:
        return
    raise EpochMismatch(
        f"epoch {epoch + 1}: trained on {seen.samples} samples with key digest {seen.text}, "
        f"expected {expected.samples} with {expected.text}: samples were lost or repeated; "
        "don't trust this run, and report it with its logs"
    )


def steps_of(stream: BatchSource, start: int, stop: int) -> Iterator[Step]:
    """Yields (epoch, step, batch) for the steps [start, stop) of a run, counted over epochs.

    Prefetches across the end of an epoch. Raises EpochMismatch if the stream skips a step or ends
    early.
    """
    due = start
    size = len(stream)
    epochs = range(start // size, -(-stop // size))
    spans = (
        (epoch, range(max(0, start - epoch * size), min(size, stop - epoch * size)))
        for epoch in epochs
    )
    for epoch, step, batch in stream.run(spans):
        if (epoch, step) != divmod(due, size):
            raise EpochMismatch(
                f"the stream yielded epoch {epoch + 1} step {step} where step {due} of the run"
                " was due"
            )
        yield epoch, step, batch
        due += 1
    if due != stop:
        raise EpochMismatch(f"the stream ended before step {due} of the run, expected {stop}")
