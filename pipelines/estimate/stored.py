"""The sizes of a shard set, from its manifest or from bare numbers; reads no sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelines.config import BareNumbers, BuildConfig
from pipelines.plan import layout
from pipelines.plan.planner import refuse_unknown_splits
from pipelines.split_table import SplitNumbers, of_plan, of_set
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.tar import BLOCK, END
from shardset.order.selection import Selection
from shardset.program import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSplit:
    """One split: its numbers, the samples in each shard, its view, and
    whether the tars are mixed.
    """

    numbers: SplitNumbers
    shard_sizes: Sequence[int]
    view: Selection | None = None
    is_mixed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """A shard set that exists or would be built; `assumption` is "" if every size was counted."""

    title: str
    splits: Mapping[str, StoredSplit]
    num_classes: int
    assumption: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(split.numbers.num_bytes for split in self.splits.values())

    def name_of_split(self, wanted: str | None) -> str:
        """The split to read: the one asked for, else `train`, else the first.

        Raises ConfigError if it is absent.
        """
        name = wanted or ("train" if "train" in self.splits else min(self.splits))
        if name not in self.splits:
            raise ConfigError(
                f"no split {name!r}{did_you_mean(name, self.splits)}; there are"
                f" {', '.join(sorted(self.splits))}"
            )
        return name


def from_manifest(url: str) -> StoredSet:
    """An existing shard set or a view; reads nothing but its manifest and that."""
    loaded = manifests.load(url)
    manifest = loaded.manifest
    splits = {}
    for numbers in of_set(dict(sorted(manifest.splits.items()))):
        split = manifest.splits[numbers.name]
        splits[numbers.name] = StoredSplit(
            numbers=numbers,
            shard_sizes=split.shard_sizes,
            view=loaded.part(numbers.name).selection,
            is_mixed=all("mixed" in group.promises for group in split.groups),
        )
    return StoredSet(title=url, splits=splits, num_classes=len(manifest.classes))


def from_numbers(config: BuildConfig, numbers: BareNumbers) -> StoredSet:
    """The set that `build` would make of these images. Raises ConfigError."""
    mean_bytes, num_classes = numbers.mean_bytes, numbers.classes
    if mean_bytes is None:
        raise ConfigError("--samples needs --mean-bytes too; see the examples of `estimate --help`")
    if {"", "train"} <= numbers.samples.keys():
        raise ConfigError(
            "--samples names the split train twice; a number without a name is for train"
        )
    counts = {name or "train": count for name, count in sorted(numbers.samples.items())}
    refuse_unknown_splits(config, sorted(counts))
    return StoredSet(
        title=f"{sum(counts.values()):,} images of {mean_bytes:,.0f} bytes",
        splits={
            name: _planned_split(config, name, count, mean_bytes, num_classes)
            for name, count in counts.items()
        },
        num_classes=num_classes,
        assumption="images are JPEGs of the given mean size, each with a label",
    )


def _planned_split(
    config: BuildConfig, name: str, num_samples: int, mean_bytes: float, num_classes: int
) -> StoredSplit:
    if not naming.is_split(name):
        raise ConfigError(f"--samples: {name!r} can't name a split; use {naming.SPLIT_NAMES}")
    ends = [num_samples * label // num_classes for label in range(num_classes + 1)]
    strata = {
        label: stop - start for label, (start, stop) in enumerate(pairwise(ends)) if stop > start
    }
    plan = layout.plan_split(
        name,
        strata,
        num_bytes=round(num_samples * (mean_bytes + len(str(num_classes - 1)))),
        fields=["jpg", "cls"],
        sizing=config.sizing(name),
        balance=config.balance,
    )
    # A header for each of the two fields, the block of the label, and half a block of padding of
    # the image.
    sample_bytes = mean_bytes + 3.5 * BLOCK
    tar_bytes = round(sample_bytes * plan.num_stored) + len(END) * plan.num_shards
    return StoredSplit(
        numbers=of_plan(plan, tar_bytes),
        shard_sizes=[plan.shard_size(number) for number in range(plan.num_shards)],
    )
