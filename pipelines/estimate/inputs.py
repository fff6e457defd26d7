"""What a shard set is or will be, without reading it through: from its manifest, from the raw input, or from bare
numbers.
"""

import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from pipelines import sources
from pipelines.config import BuildConfig
from pipelines.estimate import archives
from pipelines.estimate.archives import Found
from pipelines.estimate.counts import SplitStats, digits, of_mean, spread
from pipelines.estimate.model import LISTED_AT_ONCE, Assumption, Raw, StoredSet, StoredSplit
from pipelines.plan import layout
from pipelines.plan.assign import refuse_unknown_splits
from pipelines.plan.layout import SplitPlan
from pipelines.sources.base import Rejected
from pipelines.sources.listing import Listing
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.index import index_dtype
from shardset.format.manifest import Split
from shardset.format.tar import END
from shardset.storage.base import Stat, Storage

MANIFEST_BYTES = 1_100
"""About what a manifest holds beside shards and classes."""
SHARD_ENTRY_BYTES = 395
CLASS_ENTRY_BYTES = 55
GUESSED_KEY_BYTES = 16
GUESSED_UNIT = 1_000
_GUESSED = f"images are JPEGs of the given mean size, each with a label and a key of {GUESSED_KEY_BYTES} letters"


def from_manifest(url: str) -> StoredSet:
    """A shard set that stands, by its manifest alone."""
    manifest, _ = manifests.load(url)
    return StoredSet(
        title=url,
        splits={name: _stored_split(name, split) for name, split in sorted(manifest.splits.items())},
        manifest_bytes=len(manifests.to_json(manifest)),
        num_classes=len(manifest.classes),
        raw=None,
    )


def from_listing(config: BuildConfig) -> StoredSet:
    """What `build` would make of its input if every image is good: by names and sizes, of archives by `archives.look`.

    Raises ConfigError for a source that has to be read to know its samples.
    """
    source = sources.open_source(config)
    found = archives.look(source) or _listed(source, config)
    if not any(counted.num_samples for counted in found.splits.values()):
        raise SourceError(f"{config.input}: no sample found; see `python -m pipelines build --help` for what is read")
    splits = _planned_splits(config, found.splits)
    return StoredSet(
        title=f"{config.source}: {config.input}",
        splits=splits,
        manifest_bytes=_manifest_bytes(splits, found.num_classes),
        num_classes=found.num_classes,
        raw=Raw(
            num_reads=found.num_reads,
            num_units=found.num_units,
            num_files=found.num_files,
            num_looks=found.num_looks,
            unit_lists=found.unit_lists,
        ),
        assumptions=found.assumptions,
    )


def _listed(source: Any, config: BuildConfig) -> Found:
    """Single files: a listing says all of them."""
    survey = source.survey()
    names = _Listed(source.input, config)
    listed = replace(source, input=names)
    splits: dict[str, SplitStats] = {}
    for unit in survey.units:
        for sample in listed.index(unit, _NoSpool(config)):
            if not isinstance(sample, Rejected):
                splits.setdefault(sample.split, SplitStats()).add(sample)
    num_samples = sum(counted.num_samples for counted in splits.values())
    largest = max((label for counted in splits.values() for label in counted.strata), default=-1)
    looks = isinstance(source, Listing)
    return Found(
        splits=splits,
        num_classes=len(survey.classes) if survey.classes else 1 + largest,
        num_units=len(survey.units),
        num_files=0 if looks else num_samples,
        num_reads=num_samples,
        num_looks=num_samples if looks else 0,
        unit_lists=names.lists.total(),
    )


def from_numbers(
    config: BuildConfig, num_samples: Mapping[str, int], *, mean_bytes: float, num_classes: int
) -> StoredSet:
    """What `build` would make of so many images of `mean_bytes`, by split; "" stands for train."""
    if not 1 <= mean_bytes < float("inf"):
        raise ConfigError(f"--mean-bytes is {mean_bytes:g}, expected the mean size of an image in bytes, from 1")
    sizes = {"jpg": mean_bytes, "cls": digits(num_classes)}
    found = {
        name or "train": of_mean(spread(count, num_classes), sizes, key_bytes=GUESSED_KEY_BYTES)
        for name, count in num_samples.items()
    }
    if len(found) < len(num_samples):
        raise ConfigError("--samples names the split train twice; a number without a name is that of train")
    for name in found:
        if not naming.is_split(name):
            raise ConfigError(
                f"--samples: {name!r} can't name a split; use letters, digits, - and _ (at most 40, not plan)"
            )
    splits, total = _planned_splits(config, found), sum(num_samples.values())
    return StoredSet(
        title=f"{total:,} images of {mean_bytes:,.0f} bytes",
        splits=splits,
        manifest_bytes=_manifest_bytes(splits, num_classes),
        num_classes=num_classes,
        raw=Raw(num_reads=total, num_units=math.ceil(total / GUESSED_UNIT), num_files=total),
        assumptions=[Assumption("bytes", _GUESSED)],
    )


def _planned_splits(config: BuildConfig, found: Mapping[str, SplitStats]) -> dict[str, StoredSplit]:
    wanted = config.num_shards | config.samples_per_shard | config.target_samples | config.repeat
    refuse_unknown_splits(wanted, sorted(found))
    return {name: _planned_split(config, name, counted) for name, counted in sorted(found.items())}


def _planned_split(config: BuildConfig, name: str, counted: SplitStats) -> StoredSplit:
    plan = layout.plan_split(
        name,
        counted.strata,
        num_bytes=counted.num_bytes,
        fields=list(counted.fields),
        sizing=config.sizing(name),
        balance=config.balance,
    )
    sizes = [plan.shard_size(number) for number in range(plan.num_shards)]
    mean, ends = counted.tar_bytes / counted.num_samples, np.cumsum([0, *sizes])
    copies = plan.num_repeats // plan.num_source + (plan.num_repeats % plan.num_source > 0)
    key_bytes = counted.key_bytes + (len(f"@{copies}") if copies else 0)
    index = {size: _index_bytes(plan, size, key_bytes) for size in set(sizes)}
    return StoredSplit(
        plan=plan,
        shard_sizes=sizes,
        tar_bytes=[len(END) + size for size in np.diff(np.rint(mean * ends).astype(np.int64)).tolist()],
        index_bytes=[index[size] for size in sizes],
    )


def _index_bytes(plan: SplitPlan, num_samples: int, key_bytes: int) -> int:
    dtype = index_dtype(plan.fields, key_bytes)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_samples,)}
    )
    return len(head.getvalue()) + num_samples * dtype.itemsize


def _manifest_bytes(splits: Mapping[str, StoredSplit], num_classes: int) -> int:
    total = MANIFEST_BYTES + CLASS_ENTRY_BYTES * num_classes
    for split in splits.values():
        count = split.plan.num_stored / split.plan.num_shards / max(1, num_classes)
        total += split.plan.num_shards * (SHARD_ENTRY_BYTES + num_classes * (2 + len(str(round(count)))))
    return total


def _stored_split(name: str, split: Split) -> StoredSplit:
    return StoredSplit(
        plan=SplitPlan(
            name=name,
            num_source=split.num_source_samples,
            num_stored=split.num_samples,
            num_shards=split.num_shards,
            num_dropped=split.num_dropped,
            num_repeats=split.num_repeats,
            num_bytes=sum(shard.num_bytes for shard in split.shards),
            fields=split.fields,
            strata={},
        ),
        shard_sizes=[shard.num_samples for shard in split.shards],
        tar_bytes=[shard.num_bytes for shard in split.shards],
        index_bytes=[shard.index.num_bytes for shard in split.shards],
    )


@dataclass(frozen=True, slots=True)
class _Listed:
    """A storage that lists and looks but never reads: what a plan may know before anything is read.

    `lists` counts the requests of its listings, by prefix.
    """

    inner: Storage
    config: BuildConfig
    lists: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return self.inner.url

    def list(self, prefix: str = "") -> Iterator[Stat]:
        for number, stat in enumerate(self.inner.list(prefix)):
            self.lists[prefix] += number % LISTED_AT_ONCE == 0
            yield stat

    def stat(self, name: str) -> Stat:
        return self.inner.stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> NoReturn:
        _refuse(self.config)


@dataclass(frozen=True, slots=True)
class _NoSpool:
    config: BuildConfig

    def add(self, content: bytes) -> NoReturn:
        _refuse(self.config)


def _refuse(config: BuildConfig) -> NoReturn:
    raise ConfigError(
        f"a listing of {config.input} does not say how many samples it holds: {config.source} has to be read; give "
        "--samples and --mean-bytes instead, or let `build --dry-run` look at every sample"
    )
