"""The sizes of a shard set, from its manifest, a listing of raw files, or bare numbers; reads no sample."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines import sources
from pipelines.config import BuildConfig
from pipelines.plan import layout
from pipelines.plan.index import fields_of
from pipelines.plan.layout import SplitPlan
from pipelines.plan.splits import refuse_unknown_splits
from pipelines.sources.base import Extent, Rejected
from pipelines.sources.imagenet import ImageNet
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.tar import BLOCK, END

_LISTED = ("folder", "listing", "imagenet")
"""The sources whose samples a listing tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSplit:
    """One split: its plan, the number of samples in each shard, and the bytes of all its tars."""

    plan: SplitPlan
    shard_sizes: Sequence[int]
    num_bytes: int

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of a sample in its tar, with headers and padding."""
        return self.num_bytes / self.plan.num_stored


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
        return sum(split.num_bytes for split in self.splits.values())

    def name_of_split(self, wanted: str | None) -> str:
        """The split to read: the one asked for, else `train`, else the only one. Raises ConfigError if it is absent."""
        names = sorted(self.splits)
        if wanted is None and "train" not in names and len(names) > 1:
            raise ConfigError(f"which split is read? there are {', '.join(names)}; name one with --split")
        name = wanted or ("train" if "train" in names else names[0])
        if name not in names:
            raise ConfigError(f"no split {name!r}; there are {', '.join(names)}")
        return name


def from_manifest(url: str) -> StoredSet:
    """An existing shard set; reads nothing but its manifest."""
    manifest, _ = manifests.load(url)
    splits = {}
    for name, split in sorted(manifest.splits.items()):
        num_bytes = split.num_tar_bytes
        plan = SplitPlan(
            name=name,
            num_source=split.num_source_samples,
            num_stored=split.num_samples,
            num_shards=split.num_shards,
            num_dropped=split.num_dropped,
            num_repeats=split.num_repeats,
            num_bytes=num_bytes,
            fields=split.fields,
            strata={},
        )
        splits[name] = StoredSplit(plan=plan, shard_sizes=split.shard_sizes, num_bytes=num_bytes)
    return StoredSet(title=url, splits=splits, num_classes=len(manifest.classes))


def from_listing(config: BuildConfig) -> StoredSet:
    """The set that `build` would make of its input if every image is good, from names and sizes.

    Raises ConfigError for archives, whose samples are known only after reading them.
    """
    source: Any = None if config.source in set(sources.SOURCES) - {*_LISTED} else sources.open_source(config)
    if source is None or (isinstance(source, ImageNet) and source.archives()):
        raise ConfigError(
            f"estimate --source {config.source}: only reading {config.input} tells how many samples it holds; "
            "`build --dry-run` does that and prints the exact plan, or give estimate --samples and --mean-bytes instead"
        )
    survey = source.survey()
    totals: dict[str, _Totals] = {}
    for unit in survey.units:
        for sample in source.index(unit, None):  # a listing fills no spool
            if not isinstance(sample, Rejected):
                sizes = {
                    name: content.num_bytes if isinstance(content, Extent) else len(content)
                    for name, content in fields_of(sample)
                }
                totals.setdefault(sample.split, _Totals()).add({sample.label: 1}, sizes)
    if not totals:
        raise SourceError(f"{config.input}: no sample found; see `python -m pipelines build --help` for what it reads")
    num_classes = len(survey.classes or ()) or 1 + max(label for each in totals.values() for label in each.strata)
    return _planned_set(f"{config.source}: {config.input}", config, totals, num_classes)


def from_numbers(
    config: BuildConfig, num_samples: Mapping[str, int], *, mean_bytes: float, num_classes: int
) -> StoredSet:
    """The set that `build` would make of `num_samples` images of `mean_bytes`, by split; "" stands for train."""
    if not 1 <= mean_bytes < float("inf"):
        raise ConfigError(f"--mean-bytes is {mean_bytes:g}, expected the mean size of an image in bytes, from 1")
    if {"", "train"} <= num_samples.keys():
        raise ConfigError("--samples names the split train twice; a number without a name is for train")
    totals = {}
    for name, count in num_samples.items():
        if not naming.is_split(name or "train"):
            raise ConfigError(
                f"--samples: {name!r} can't name a split; use letters, digits, - and _ (at most 40, not plan)"
            )
        ends = [count * label // num_classes for label in range(num_classes + 1)]
        totals[name or "train"] = split = _Totals()
        split.add(
            {label: ends[label + 1] - ends[label] for label in range(num_classes)},
            {"jpg": float(mean_bytes), "cls": len(str(num_classes - 1))},
        )
    title = f"{sum(num_samples.values()):,} images of {mean_bytes:,.0f} bytes"
    assumption = "images are JPEGs of the given mean size, each with a label"
    return _planned_set(title, config, totals, num_classes, assumption)


@dataclass(slots=True)
class _Totals:
    """Totals of some samples. `tar_bytes` has headers and padding, not the end of a tar; `strata` counts labels."""

    num_bytes: float = 0
    tar_bytes: float = 0
    fields: dict[str, None] = field(default_factory=dict)
    strata: Counter[int] = field(default_factory=Counter)

    def add(self, strata: Mapping[int, int], sizes: Mapping[str, float]) -> None:
        """Counts samples by label, each with fields of these sizes; a mean size has half a block of padding."""
        count = sum(strata.values())
        self.num_bytes += count * sum(sizes.values())
        self.tar_bytes += count * sum(BLOCK + _padded(size) for size in sizes.values())
        self.fields |= dict.fromkeys(sizes)
        self.strata.update({label: number for label, number in strata.items() if number})


def _padded(size: float) -> float:
    return -(-size // BLOCK) * BLOCK if isinstance(size, int) or size <= BLOCK else size + BLOCK / 2


def _planned_set(
    title: str, config: BuildConfig, totals: Mapping[str, _Totals], num_classes: int, assumption: str = ""
) -> StoredSet:
    refuse_unknown_splits(
        config.num_shards | config.samples_per_shard | config.target_samples | config.repeat, sorted(totals)
    )
    splits = {}
    for name, split in sorted(totals.items()):
        plan = layout.plan_split(
            name,
            split.strata,
            num_bytes=round(split.num_bytes),
            fields=list(split.fields),
            sizing=config.sizing(name),
            balance=config.balance,
        )
        num_bytes = round(split.tar_bytes / split.strata.total() * plan.num_stored) + len(END) * plan.num_shards
        sizes = [plan.shard_size(number) for number in range(plan.num_shards)]
        splits[name] = StoredSplit(plan=plan, shard_sizes=sizes, num_bytes=num_bytes)
    return StoredSet(title=title, splits=splits, num_classes=num_classes, assumption=assumption)
