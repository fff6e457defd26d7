"""The data of a run: a training and an evaluation stream from one shard set,
or two synthetic ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import Any

import numpy as np

from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Manifest
from shardset.order.selection import Selection
from shardset.read.disk_cache import DiskCache
from shardset.stream.stream import Stream
from trainer.config import TrainConfig, Weights, mixed_sets
from trainer.data.epochs import BatchSource, SampleDigest, complete_epoch
from trainer.data.mixture import Mixture
from trainer.data.preparation import eval_spec, train_options
from trainer.data.synthetic import SyntheticStream

SYNTHETIC_DIGEST = "fake data"
"""The manifest digest in checkpoints of runs on synthetic data.

It is recorded, so it must never change.
"""


NUM_SAMPLES, NUM_EVAL_SAMPLES = 1_281_167, 50_000
"""Samples of a synthetic epoch and evaluation, as in ImageNet. `--max-steps` stops earlier."""

NUM_CLASSES = 1000
"""Classes of synthetic data, as in ImageNet."""

TUNING_SPLITS = ("val", "validation", "valid", "dev")
"""The split to evaluate on while a run is tuned, where there is also one for the final test."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The streams of a run, and the number of samples of an epoch and of an evaluation.

    An epoch takes each training sample `augment_repeats` times. `train_ids` are theirs, unless a
    mixture, whose weights are `mix`, says for each epoch what it takes.
    """

    train: BatchSource
    evaluation: BatchSource
    class_names: tuple[str, ...]
    manifest_digest: str
    eval_split: str
    num_eval_samples: int
    train_ids: Selection
    augment_repeats: int = 1
    mix: tuple[Weights, ...] = ()

    @property
    def num_classes(self) -> int:
        """The classes of the model."""
        return len(self.class_names)

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


def set_of(config: TrainConfig) -> LoadedSet:
    """The shard set of a run, which it is evaluated on. Raises ConfigError if none is named."""
    if config.manifest is None:
        raise ConfigError(
            "no manifest: name a shard set with --manifest URL, or measure without one by"
            " --fake-data"
        )
    return load_once(config.manifest)


def open_data(config: TrainConfig, host: int, num_hosts: int) -> Data:
    """This host's part of the data. Raises ConfigError if the config does not fit the shard set."""
    if config.fake_data:
        return synthetic_data(config, host, num_hosts)
    loaded, mixed = set_of(config), mixed_sets(config.mix)
    manifest = loaded.manifest
    eval_split = eval_split_of(config, manifest)
    check_split("eval_split", eval_split, loaded)
    if not manifest.classes:
        raise ConfigError(
            "the shard set has no classes; it has images only, and this trainer needs labels"
        )
    training = _training_sets(config, loaded, [url for url, _ in mixed])
    options = _stream_options(config, host, num_hosts)
    facts: dict[str, Any] = dict(
        evaluation=Stream(loaded, eval_split, seed=None, image=eval_spec(config.image), **options),
        manifest_digest=manifest.digest,
        eval_split=eval_split,
        augment_repeats=config.image.augment_repeats,
        num_eval_samples=loaded.part(eval_split).selection.num_kept,
        class_names=_class_names(loaded),
    )
    options |= dict(seed=config.seed, window=config.window, **train_options(config.image))
    if mixed:
        weights = tuple(weights for _, weights in mixed)
        mixture = Mixture(training, weights, config.train_split, **options)
        return Data(train=mixture, train_ids=Selection(0), mix=weights, **facts)
    stream = Stream(loaded, config.train_split, **options)
    return Data(train=stream, train_ids=stream.order.selection, **facts)


def _training_sets(config: TrainConfig, loaded: LoadedSet, urls: Sequence[str]) -> list[LoadedSet]:
    """The sets to train on: those of a mixture, or the one that the run is evaluated on, whose
    classes all must have.

    Raises ConfigError.
    """
    sets = [load_once(url) for url in urls] or [loaded]
    names = _class_names(loaded)
    for training_set in sets:
        check_split("train_split", config.train_split, training_set)
        others = _class_names(training_set)
        if others != names:
            which = sorted({*names} ^ {*others})[:5] or "in their order"
            raise ConfigError(
                f"{training_set.storage.url} has other classes than {config.manifest} ({which});"
                " the sets of a mixture need the same classes in the same order: build them with"
                " the same class names"
            )
    return sets


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


def _class_names(loaded: LoadedSet) -> tuple[str, ...]:
    return tuple(each.name for each in loaded.manifest.classes)


def open_evaluation(config: TrainConfig, host: int, num_hosts: int) -> Data:
    """The data of an evaluation, without a split to train on: `train` is of the same one.

    Raises ConfigError.
    """
    if config.manifest is not None:
        split = eval_split_of(config, load_once(config.manifest).manifest)
        config = replace(config, train_split=split, eval_split=split, mix=None)
    return open_data(config, host, num_hosts)


# --- without a shard set --------------------------------------------------------------------------


def synthetic_data(config: TrainConfig, host: int, num_hosts: int) -> Data:
    """Data of the shapes in the config that costs no time: a run on it shows the highest possible
    rate.
    """
    stream = partial(
        SyntheticStream,
        global_batch_size=config.global_batch_size,
        rank=host,
        world_size=num_hosts,
        num_classes=NUM_CLASSES,
    )
    return Data(
        train=stream(
            num_samples=NUM_SAMPLES,
            augment_repeats=config.image.augment_repeats,
            image_size=config.image.size,
        ),
        evaluation=stream(num_samples=NUM_EVAL_SAMPLES, image_size=config.image.size_in_evaluation),
        class_names=tuple(map(str, range(NUM_CLASSES))),
        manifest_digest=SYNTHETIC_DIGEST,
        eval_split=SYNTHETIC_DIGEST,
        train_ids=Selection(NUM_SAMPLES),
        augment_repeats=config.image.augment_repeats,
        num_eval_samples=NUM_EVAL_SAMPLES,
    )


# --- does the shard set fit the config? -----------------------------------------------------------


def check_split(setting: str, name: str, loaded: LoadedSet) -> None:
    """Raises ConfigError unless the split exists and every sample has a label, without which its
    loss means nothing.
    """
    split, labels = loaded.manifest.split(name), loaded.part(name).labels
    num_samples, num_labelled = split.num_samples, sum(split.class_totals)
    if labels is not None:  # a view's labels are read in place of the stored ones
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
