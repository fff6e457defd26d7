"""The sizes of a shard set, from its manifest, a listing of raw files, or bare numbers; reads no sample."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from pipelines import sources
from pipelines.config import BuildConfig
from pipelines.estimate.requests import LISTED_AT_ONCE
from pipelines.estimate.split_stats import SplitStats, even_strata, stats_of_mean
from pipelines.estimate.stored import RawInput, StoredSet, StoredSplit
from pipelines.plan import layout
from pipelines.plan.layout import SplitPlan
from pipelines.plan.splits import refuse_unknown_splits
from pipelines.sources.base import Rejected
from pipelines.sources.imagenet import ImageNet
from pipelines.sources.listing import Listing
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming, table
from shardset.format.index import index_dtype
from shardset.format.manifest import Split
from shardset.format.shards import PAGE_DTYPE
from shardset.format.tar import END
from shardset.storage.base import Stat, Storage

# Measured on manifests of real builds; tests/test_plan_recorded.py holds the sum within 10 %.
MANIFEST_BYTES = 1_100
SHARD_ENTRY_BYTES = 395
CLASS_ENTRY_BYTES = 55

ASSUMED_KEY_BYTES = 16
ASSUMED_UNIT_SAMPLES = 1_000

SIZES = ("num_shards", "samples_per_shard", "remainder", "balance", "repeat", "target_samples")
"""The options of a build that decide the sizes of its shards."""

_ARCHIVES = frozenset({"cifar10", "cifar100", "hf", "webdataset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """One of three kinds of input: `manifest`, a build's `source` and `input`, or `num_samples` of `mean_bytes`.

    `build` holds the source, the input and the sizes; "" in `num_samples` stands for `train`. Raises ConfigError for
    none or several of them, and for options that belong to another one.
    """

    build: BuildConfig
    manifest: str | None = None
    num_samples: Mapping[str, int] = field(default_factory=dict)
    mean_bytes: float | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        kinds = {"MANIFEST": self.manifest, "--source": self.build.source, "--samples": self.num_samples}
        given = [name for name, value in kinds.items() if value]
        if len(given) != 1:
            raise ConfigError(
                f"plan takes {' and '.join(given) or 'nothing'}, expected one of MANIFEST, --source with --input, "
                "or --samples with --mean-bytes"
            )
        self._check_options(given[0])

    def _check_options(self, kind: str) -> None:
        options = {
            "--input": ("--source", self.build.input),
            "--holdout": ("--source", self.build.holdout),
            "--class-depth": ("--source", self.build.class_depth != 1),
            "--path-column": ("--source", self.build.path_column),
            "--label-column": ("--source", self.build.label_column),
            "--mean-bytes": ("--samples", self.mean_bytes),
            "--classes": ("--samples", self.num_classes),
        }
        for flag, (owner, value) in options.items():
            if value and kind != owner:
                raise ConfigError(f"{flag} goes with {owner}, not with {kind}; leave one of them out")
            if kind == owner and not value and flag in ("--input", "--mean-bytes"):
                raise ConfigError(f"{owner} needs {flag} too; see the examples of `plan --help`")
        default = BuildConfig(source="", input="", output="")
        changed = [name for name in SIZES if getattr(self.build, name) != getattr(default, name)]
        if kind == "MANIFEST" and changed:
            flag = "--" + changed[0].replace("_", "-")
            raise ConfigError(f"{flag}: the shards of an existing set have their sizes; leave it out")


def stored_set(asked: PlanInput) -> StoredSet:
    """The shard set that `asked` names or describes."""
    if asked.manifest:
        return from_manifest(asked.manifest)
    if asked.build.source:
        return from_listing(asked.build)
    assert asked.mean_bytes is not None
    return from_numbers(asked.build, asked.num_samples, mean_bytes=asked.mean_bytes, num_classes=asked.num_classes or 1)


def from_manifest(url: str) -> StoredSet:
    """An existing shard set, from its manifest."""
    manifest = manifests.load(url).manifest
    return StoredSet(
        title=url,
        splits={name: _existing_split(name, split) for name, split in sorted(manifest.splits.items())},
        manifest_bytes=manifests.num_bytes(manifest),
        num_classes=len(manifest.classes),
        raw=None,
    )


def from_listing(config: BuildConfig) -> StoredSet:
    """The set that `build` would make of its input if every image is good, from names and sizes.

    Raises ConfigError for archives, whose samples are known only after reading them.
    """
    source = _listed_source(config)
    survey = source.survey()
    listing = _ListingOnly(source.input, config)
    listed = replace(source, input=listing)
    stats: dict[str, SplitStats] = {}
    for unit in survey.units:
        for sample in listed.index(unit, None):  # needs no spool: `listing` refuses the reads that fill one
            if not isinstance(sample, Rejected):
                stats.setdefault(sample.split, SplitStats()).add(sample)
    if not stats:
        raise SourceError(f"{config.input}: no sample found; see `python -m pipelines build --help` for what it reads")
    num_samples = sum(split.num_samples for split in stats.values())
    largest = max(label for split in stats.values() for label in split.strata)
    num_classes = len(survey.classes) if survey.classes else 1 + largest
    is_table = isinstance(source, Listing)  # it has no sizes, so a build sends a request for each
    raw = RawInput(
        num_reads=num_samples,
        num_units=len(survey.units),
        num_files=0 if is_table else num_samples,
        num_stats=num_samples if is_table else 0,
        unit_lists=listing.lists.total(),
    )
    return _planned_set(f"{config.source}: {config.input}", config, stats, num_classes, raw)


def _listed_source(config: BuildConfig) -> Any:
    """The source, if a listing tells its samples: one whose instances have an `input`."""
    if config.source in _ARCHIVES:
        _refuse_to_read(config)
    source = sources.open_source(config)
    if isinstance(source, ImageNet) and source.archives():
        _refuse_to_read(config)
    return source


def from_numbers(
    config: BuildConfig, num_samples: Mapping[str, int], *, mean_bytes: float, num_classes: int
) -> StoredSet:
    """The set that `build` would make of `num_samples` images of `mean_bytes`, by split; "" stands for train."""
    if not 1 <= mean_bytes < float("inf"):
        raise ConfigError(f"--mean-bytes is {mean_bytes:g}, expected the mean size of an image in bytes, from 1")
    longest_label = len(str(num_classes - 1))
    sizes = {"jpg": mean_bytes, "cls": longest_label}
    stats = {
        name or "train": stats_of_mean(even_strata(count, num_classes), sizes, key_bytes=ASSUMED_KEY_BYTES)
        for name, count in num_samples.items()
    }
    if len(stats) < len(num_samples):
        raise ConfigError("--samples names the split train twice; a number without a name is for train")
    for name in stats:
        if not naming.is_split(name):
            raise ConfigError(
                f"--samples: {name!r} can't name a split; use letters, digits, - and _ (at most 40, not plan)"
            )
    total = sum(num_samples.values())
    title = f"{total:,} images of {mean_bytes:,.0f} bytes"
    raw = RawInput(num_reads=total, num_units=math.ceil(total / ASSUMED_UNIT_SAMPLES), num_files=total)
    assumption = f"images are JPEGs of the given mean size, each with a label and a key of {ASSUMED_KEY_BYTES} letters"
    return _planned_set(title, config, stats, num_classes, raw, assumption)


def _planned_set(
    title: str,
    config: BuildConfig,
    stats: Mapping[str, SplitStats],
    num_classes: int,
    raw: RawInput,
    assumption: str = "",
) -> StoredSet:
    sized = config.num_shards | config.samples_per_shard | config.target_samples | config.repeat
    refuse_unknown_splits(sized, sorted(stats))
    splits = {name: _planned_split(config, name, split) for name, split in sorted(stats.items())}
    return StoredSet(
        title=title,
        splits=splits,
        manifest_bytes=_manifest_bytes(splits, num_classes, config.max_listed_shards),
        num_classes=num_classes,
        raw=raw,
        assumption=assumption,
    )


def _planned_split(config: BuildConfig, name: str, stats: SplitStats) -> StoredSplit:
    plan = layout.plan_split(
        name,
        stats.strata,
        num_bytes=stats.num_bytes,
        fields=list(stats.fields),
        sizing=config.sizing(name),
        balance=config.balance,
    )
    sizes = [plan.shard_size(number) for number in range(plan.num_shards)]
    mean, ends = stats.tar_bytes / stats.num_samples, np.cumsum([0, *sizes])
    copies = math.ceil(plan.num_repeats / plan.num_source)
    key_bytes = stats.key_bytes + (len(f"@{copies}") if copies else 0)
    dtype = index_dtype(plan.fields, key_bytes)
    return StoredSplit(
        plan=plan,
        shard_sizes=sizes,
        # Rounds running totals, so that the shards add up to the split.
        tar_bytes=[len(END) + size for size in np.diff(np.rint(mean * ends).astype(np.int64)).tolist()],
        index_bytes=[table.num_bytes(dtype, size) for size in sizes],
    )


def _manifest_bytes(splits: Mapping[str, StoredSplit], num_classes: int, max_listed_shards: int) -> int:
    total = MANIFEST_BYTES + CLASS_ENTRY_BYTES * num_classes
    num_shards = sum(split.plan.num_shards for split in splits.values())
    if num_shards > max_listed_shards:
        return total + PAGE_DTYPE.itemsize * num_shards
    for split in splits.values():
        count = split.plan.num_stored / split.plan.num_shards / max(1, num_classes)
        total += split.plan.num_shards * (SHARD_ENTRY_BYTES + num_classes * (2 + len(str(round(count)))))
    return total


def _existing_split(name: str, split: Split) -> StoredSplit:
    tar_bytes, index_bytes = split.tar_bytes, split.index_bytes
    return StoredSplit(
        plan=SplitPlan(
            name=name,
            num_source=split.num_source_samples,
            num_stored=split.num_samples,
            num_shards=split.num_shards,
            num_dropped=split.num_dropped,
            num_repeats=split.num_repeats,
            num_bytes=sum(tar_bytes),
            fields=split.fields,
            strata={},
        ),
        shard_sizes=split.shard_sizes,
        tar_bytes=tar_bytes,
        index_bytes=index_bytes,
    )


@dataclass(frozen=True, slots=True)
class _ListingOnly:
    """A storage that lists but refuses to read; `lists` counts list requests by prefix."""

    inner: Storage
    config: BuildConfig
    lists: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    def list(self, prefix: str = "") -> Iterator[Stat]:
        for number, stat in enumerate(self.inner.list(prefix)):
            self.lists[prefix] += number % LISTED_AT_ONCE == 0
            yield stat

    def stat(self, name: str) -> Stat:
        return self.inner.stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> NoReturn:
        _refuse_to_read(self.config)


def _refuse_to_read(config: BuildConfig) -> NoReturn:
    raise ConfigError(
        f"plan --source {config.source}: only reading {config.input} tells how many samples it holds; "
        "`build --dry-run` does that and prints the exact plan, or give plan --samples and --mean-bytes instead"
    )
