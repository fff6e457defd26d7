"""What archives hold, without reading them through.

By the size of an archive as it was published, by the manifest and the indexes of a shard set, or by the first MiB of a
few archives. What is only assumed stands in `assumptions`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from pipelines.estimate.counts import SplitStats, digits, member_bytes, of_mean, of_size, spread
from pipelines.estimate.model import Assumption
from pipelines.sources import Source
from pipelines.sources.base import Extent, RawSample, Unit
from pipelines.sources.cifar import Cifar10, Cifar100
from pipelines.sources.formats.range_file import WINDOW_BYTES
from pipelines.sources.imagenet import (
    DEVKIT,
    PUBLISHED_BYTES,
    PUBLISHED_SAMPLES,
    TRAIN,
    TRAIN_TAR,
    VALIDATION,
    VALIDATION_TAR,
    ImageNet,
)
from pipelines.sources.webdataset import WebDataset, common_start
from shardset.errors import ConfigError, SourceError
from shardset.format import naming, stored_png
from shardset.format.index import index_from_bytes
from shardset.format.manifest import Manifest, Split
from shardset.format.tar import BLOCK, END
from shardset.read.indexes import read_record_type
from shardset.storage.base import Stat, Storage

SAMPLED_BYTES = 1 << 20
SAMPLED_ARCHIVES = 8

PICKLED_BYTES = 3_104
"""A row of a python version: data_batch_1 has 31,035,704 bytes for 10,000, CIFAR-100's train 155,249,918 for 50,000."""
CIFAR_SAMPLES = {"train": 50_000, "test": 10_000}
COARSE_BYTES = 48
"""About {"coarse_label":12,"coarse_name":"vehicles 1"}."""
NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
WALKED_AT_ONCE = 8 << 20
"""What a build reads at a time of a tar in a bucket, to find its headers."""

_GIVE_NUMBERS = "give --samples and --mean-bytes instead, or let `build --dry-run` look at every sample"


@dataclass(slots=True, kw_only=True)
class Found:
    """What a source holds, as far as it is known before anything is read through; what is read as in `forecast.Raw`."""

    splits: dict[str, SplitStats]
    num_classes: int
    num_units: int
    num_files: int
    num_reads: int
    num_looks: int = 0
    unit_lists: int = 0
    assumptions: list[Assumption] = field(default_factory=list)


def look(source: Source) -> Found | None:
    """What archives hold; None for a source of single files, whose listing says everything."""
    match source:
        case Cifar10() | Cifar100():
            return _cifar(source)
        case ImageNet() if archives := source.archives():
            return _imagenet(source, archives)
        case WebDataset():
            return _webdataset(source)
    return None


# --- CIFAR: pictures of one size, encoded by the build ----------------------------------------------------------------


def _cifar(source: Cifar10 | Cifar100) -> Found:
    counts, num_units, num_reads, note = _in_archive(source) if source.archive else _in_folder(source)
    num_classes = NUM_CLASSES[source.name]
    sizes = {"png": stored_png.num_bytes(32, 32), "cls": digits(num_classes)}
    if source.name == "cifar100":
        sizes["json"] = COARSE_BYTES
        note = [*note, Assumption("bytes", f"coarse labels take {COARSE_BYTES} bytes each")]
    prefixes = {prefix.partition("-")[0]: len(prefix) for prefix in source.forms[0].batches.values()}
    return Found(
        splits={
            split: of_size(spread(count, num_classes), sizes, key_bytes=prefixes[split] + len("-00000"))
            for split, count in counts.items()
        },
        num_classes=num_classes,
        num_units=num_units,
        num_files=1 if source.archive else num_units,
        num_reads=num_reads,
        assumptions=note,
    )


def _in_archive(source: Cifar10 | Cifar100) -> tuple[dict[str, int], int, int, list[Assumption]]:
    assert source.archive is not None
    size = source.input.stat(source.archive).num_bytes
    named = next((form for form in source.forms if form.archive == source.archive), source.forms[0])
    form = next((form for form in source.forms if form.archive_bytes == size), named)
    # The survey reads all of it, each unit as far as its batch: of batches of one size half of it and half a batch.
    reads = math.ceil((1 + (len(form.batches) + 1) / 2) * math.ceil(size / WINDOW_BYTES))
    if size == form.archive_bytes:
        text = f"{_count(CIFAR_SAMPLES)} pictures: {source.archive} has the {size:,} bytes of the published archive"
        return dict(CIFAR_SAMPLES), len(form.batches), reads, [Assumption("samples", text)]
    total = sum(CIFAR_SAMPLES.values())
    counts = {split: max(1, round(size / form.archive_bytes * count)) for split, count in CIFAR_SAMPLES.items()}
    text = (
        f"{source.archive} has {size:,} bytes and the published archive {form.archive_bytes:,} for {total:,} pictures, "
        "so it is another one, or cut; as many pictures to a byte"
    )
    return counts, len(form.batches), reads, [Assumption("samples", text)]


def _in_folder(source: Cifar10 | Cifar100) -> tuple[dict[str, int], int, int, list[Assumption]]:
    """Of extracted files: a binary one has records of one size, a pickle of the published size what was published."""
    counts: Counter[str] = Counter()
    odd: list[str] = []
    units = source.survey().units
    for unit in units:
        split = unit["prefix"].partition("-")[0]
        rows, is_sure = _rows(source, unit)
        counts[split] += rows
        odd += [] if is_sure else [unit["batch"]]
    text = f"a pickled picture takes {PICKLED_BYTES:,} bytes, as in the published files ({', '.join(odd)})"
    reads = sum(math.ceil(unit["num_bytes"] / WINDOW_BYTES) for unit in units)
    return dict(counts), len(units), reads, [Assumption("samples", text)] if odd else []


def _rows(source: Cifar10 | Cifar100, unit: Unit) -> tuple[int, bool]:
    form = next(form for form in source.forms if form.version == unit["version"])
    if form.version == "binary":
        return unit["num_bytes"] // form.record_bytes, True
    published = next((rows for rows in (10_000, 50_000) if abs(unit["num_bytes"] / rows - PICKLED_BYTES) < 2), None)
    return published or max(1, unit["num_bytes"] // PICKLED_BYTES), False


# --- ImageNet: a tar of tars, a tar of images, and a table of labels --------------------------------------------------


def _imagenet(source: ImageNet, archives: dict[str, Stat]) -> Found:
    tars = {TRAIN: archives[TRAIN_TAR]} | ({VALIDATION: found} if (found := archives.get(VALIDATION_TAR)) else {})
    if VALIDATION in tars and DEVKIT not in archives:
        source.survey()  # raises what a build would
    if all(tar.num_bytes == PUBLISHED_BYTES[split] for split, tar in tars.items()):
        return _published_imagenet(tars)
    return _sampled_imagenet(source, tars)


def _published_imagenet(tars: dict[str, Stat]) -> Found:
    num_classes = NUM_CLASSES["imagenet"]
    counts = {split: PUBLISHED_SAMPLES[split] for split in tars}
    splits = {
        split: of_mean(
            spread(counts[split], num_classes),
            {"jpg": tar.num_bytes / counts[split] - 1.5 * BLOCK, "cls": digits(num_classes)},
            key_bytes=len("n01440764_10026") if split == TRAIN else len("ILSVRC2012_val_00000001"),
        )
        for split, tar in tars.items()
    }
    sizes = " and ".join(f"{tar.num_bytes:,}" for tar in tars.values())
    text = f"{_count(counts)} images of 1,000 classes alike: the archives have the {sizes} bytes of the published ones"
    return Found(
        splits=splits,
        num_classes=num_classes,
        num_units=num_classes + 4 * (VALIDATION in tars),
        num_files=len(tars),
        num_reads=sum(counts.values()) + _walks(tars.values()),
        assumptions=[Assumption("samples", text)],
    )


def _sampled_imagenet(source: ImageNet, tars: dict[str, Stat]) -> Found:
    """The headers of the outer tar and the devkit, which a build's launching machine reads too, and some first MiB."""
    survey = source.survey()
    inner = [unit for unit in survey.units if unit["kind"] == "inner tar"]
    train, notes = _sampled(
        source, [_Tar(unit, unit["num_bytes"], {unit["label"]}) for unit in inner], f"{TRAIN}: inner archives"
    )
    splits = {TRAIN: train}
    if VALIDATION in tars:
        units = [unit for unit in survey.units if unit["kind"] == "validation tar"]
        splits[VALIDATION], more = _validation(source, units)
        notes += more
    assert survey.classes is not None
    return Found(
        splits=splits,
        num_classes=len(survey.classes),
        num_units=len(survey.units),
        num_files=len(tars),
        num_reads=sum(counted.num_samples for counted in splits.values()) + _walks(tars.values()),
        assumptions=notes,
    )


def _validation(source: ImageNet, units: Sequence[Unit]) -> tuple[SplitStats, list[Assumption]]:
    """All units share one archive, whose images the devkit numbers."""
    num_bytes = units[0]["num_bytes"]
    if num_bytes <= SAMPLED_BYTES:
        counted = SplitStats()
        for unit in units:
            counted.join(_read(source, unit).counted)
        return counted, []
    strata = Counter(label for unit in units for label in unit["labels"] if label >= 0)
    mean = {"jpg": num_bytes / strata.total() - 1.5 * BLOCK, "cls": float(digits(max(strata) + 1))}
    text = f"{VALIDATION}: every image is there that {DEVKIT} labels, {strata.total():,}"
    return of_mean(strata, mean, key_bytes=len("ILSVRC2012_val_00000001")), [Assumption("samples", text)]


# --- WebDataset tars, ours or others' ---------------------------------------------------------------------------------


def _webdataset(source: WebDataset) -> Found:
    survey = source.survey()
    if known := source.manifest():
        return _known(source.input, known)
    beside = [naming.index_path(unit["tar"]) for unit in survey.units]
    indexes = {stat.name for stat in source.input.list(common_start(beside))} & {*beside}
    splits: dict[str, SplitStats] = {}
    notes: list[Assumption] = []
    for split in sorted({unit["split"] for unit in survey.units}):
        units = [unit for unit in survey.units if unit["split"] == split]
        counted, tars = SplitStats(), []
        for unit in units:
            if (index := naming.index_path(unit["tar"])) in indexes:
                counted.join(_indexed(source.input, index, unit))
            else:
                tars.append(_Tar(unit, unit["num_bytes"], set()))
        if tars:
            rest, more = _sampled(source, tars, f"{split}: tars")
            counted.join(rest)
            notes += more
        splits[split] = counted
    labels = {label for counted in splits.values() for label in counted.strata}
    if notes and max(labels) >= 0:
        notes.append(Assumption("classes", f"labels go up to {max(labels)}, the largest that was read"))
    return Found(
        splits=splits,
        num_classes=1 + max(labels),
        num_units=len(survey.units),
        num_files=len(survey.objects),
        num_reads=sum(counted.num_samples for counted in splits.values()) + _walked(survey.objects.values()),
        assumptions=notes,
    )


def _known(storage: Storage, manifest: Manifest) -> Found:
    sizes = [shard.num_bytes for split in manifest.splits.values() for shard in split.shards]
    return Found(
        splits={name: _stored(storage, split) for name, split in manifest.splits.items()},
        num_classes=len(manifest.classes),
        num_units=len(sizes),
        num_files=len(sizes),
        num_reads=sum(split.num_samples for split in manifest.splits.values()) + _walked(sizes),
    )


def _stored(storage: Storage, split: Split) -> SplitStats:
    """A split of a shard set, by its manifest and the first bytes of one index, which say how long keys are."""
    counts = np.sum([[*shard.class_counts] for shard in split.shards], axis=0).astype(int).tolist()
    strata = Counter({label: count for label, count in enumerate(counts) if count})
    if without := split.num_samples - strata.total():
        strata[-1] = without
    return SplitStats(
        num_samples=split.num_samples,
        num_bytes=split.num_content_bytes,
        tar_bytes=sum(shard.num_bytes - len(END) for shard in split.shards),
        key_bytes=read_record_type(storage, split.shards[0])["key"].itemsize,
        fields=dict.fromkeys(split.fields),
        strata=strata,
    )


def _indexed(storage: Storage, name: str, unit: Unit) -> SplitStats:
    """A tar by the index that stands beside it; raises SourceError if that is of another tar."""
    index = index_from_bytes(storage.read(name), f"{storage.url}/{name}")
    columns = [column for column in index.dtype.names or () if column.startswith(".")]
    sizes = [index[column]["num_bytes"][index[column]["offset"] > 0].tolist() for column in columns]
    tar_bytes = sum(member_bytes(size) for column in sizes for size in column)
    if tar_bytes + len(END) != unit["num_bytes"]:
        raise SourceError(
            f"{storage.url}/{name}: its samples take {tar_bytes + len(END)} bytes, {unit['tar']} has "
            f"{unit['num_bytes']}; it is the index of another tar, remove it"
        )
    return SplitStats(
        num_samples=len(index),
        num_bytes=sum(map(sum, sizes)),
        tar_bytes=tar_bytes,
        key_bytes=index.dtype["key"].itemsize,
        fields=dict.fromkeys(column[1:] for column in columns),
        strata=Counter(index["label"].tolist()),
    )


# --- the first MiB of some --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tar:
    """A tar that a unit reads alone; `labels` of all its samples where they are known before."""

    unit: Unit
    num_bytes: int
    labels: set[int]


@dataclass(slots=True)
class _Beginning:
    """What stands in the first MiB of a tar, and from which to which byte whole samples follow each other."""

    counted: SplitStats = field(default_factory=SplitStats)
    span: int = 0
    num_strides: int = 0


def _sampled(source: Source, tars: Sequence[_Tar], what: str) -> tuple[SplitStats, list[Assumption]]:
    """All samples of some tars: those of small ones counted, the others by the bytes that a sample takes."""
    chosen = {round(at) for at in np.linspace(0, len(tars) - 1, SAMPLED_ARCHIVES)}
    total, seen = SplitStats(), _Beginning()
    rest: list[_Tar] = []
    for number, tar in enumerate(tars):
        if number not in chosen:
            rest.append(tar)
            continue
        found = _read(source, tar.unit)
        seen.counted.join(found.counted)
        seen.span, seen.num_strides = seen.span + found.span, seen.num_strides + found.num_strides
        if tar.num_bytes <= SAMPLED_BYTES:
            total.join(found.counted)
        else:
            rest.append(tar)
    if not rest:
        return total, []
    if not seen.counted.num_samples:
        raise ConfigError(f"{what}: no whole sample in the first MiB of {len(chosen)} of them; {_GIVE_NUMBERS}")
    stride = seen.span / seen.num_strides if seen.num_strides else seen.counted.tar_bytes / seen.counted.num_samples
    known: Counter[int] = Counter()
    for tar in rest:
        count = max(1, round((tar.num_bytes - len(END)) / stride))
        known += Counter(dict.fromkeys(tar.labels, count)) or spread(count, 1 + max(seen.counted.strata))
    total.join(seen.counted.like(known))
    text = (
        f"{what}: {len(rest):,} of {len(tars):,} hold as many samples to a byte as was read in the first MiB of "
        f"{len(chosen):,}, one in {stride:,.0f}"
    )
    return total, [Assumption("samples", text)]


def _read(source: Any, unit: Unit) -> _Beginning:
    """The whole samples in the first MiB of a tar; raises SourceError for a small one that is damaged."""
    begun = _Beginning()
    starts: list[int] = []
    try:
        for sample in source.index(_first_mib(unit), _NoSpool()):
            if isinstance(sample, RawSample):
                begun.counted.add(sample)
                starts += [min(_offsets(sample))] if _offsets(sample) else []
    except SourceError:
        # A cut is what is expected here; damage shows when the archive is built.
        if unit["num_bytes"] <= SAMPLED_BYTES:
            raise
    if len(starts) > 1:
        begun.span, begun.num_strides = starts[-1] - starts[0], len(starts) - 1
    return begun


def _offsets(sample: RawSample) -> list[int]:
    return [content.offset for content in sample.fields.values() if isinstance(content, Extent)]


def _first_mib(unit: Unit) -> Unit:
    cut = min(unit["num_bytes"], SAMPLED_BYTES)
    return {**unit, "num_bytes": cut} | ({"outer_bytes": unit["offset"] + cut} if "offset" in unit else {})


class _NoSpool:
    def add(self, content: bytes) -> NoReturn:
        raise AssertionError("tars are read by range")


def _walks(tars: Any) -> int:
    return _walked(tar.num_bytes for tar in tars)


def _walked(sizes: Any) -> int:
    return sum(math.ceil(size / WALKED_AT_ONCE) for size in sizes)


def _count(counts: dict[str, int]) -> str:
    return " and ".join(f"{count:,} {split}" for split, count in counts.items())
