"""The options of a build, complete and checked before anything runs."""

import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from pipelines.holdout import Holdout
from pipelines.images.options import CMYK_TO_RGB, ImageOptions, Verify
from shardset.errors import ConfigError
from shardset.settings import Count, check, required, setting

Balance = Literal["none", "stratified"]
Remainder = Literal["spread", "drop", "pad"]
Known = Literal["skip", "store"]
"""The samples of an input that an append skips because the set has their name."""

SOURCES = {
    "cifar10": (
        "the published .tar.gz (Python version), or the folder with it or its extracted files"
    ),
    "cifar100": "the same of CIFAR-100",
    "coco": (
        "a folder of images; --annotations names their COCO file, or with train=FILE,val=FILE the"
        " COCO files of its folders train and val"
    ),
    "folder": (
        "SPLIT/CLASS/file, or CLASS/file with --holdout test=0.1; an image in any folder below"
        " CLASS is of that class, unless --class-depth 2 makes classes of CLASS/SUBCLASS"
    ),
    "hf": "the Parquet files of a Hugging Face image dataset: their folder, or one file",
    "imagenet": (
        "a folder with ILSVRC2012_img_train.tar, _img_val.tar and _devkit_t12.tar.gz; the Kaggle"
        " tree; or class folders train/WNID/, validation/WNID/"
    ),
    "listing": (
        "a CSV, TSV, JSONL or Parquet file with the columns path, label (or image, file, filename,"
        " ..., class, category, ...; else --path-column, --label-column) and optionally split, key,"
        " others"
    ),
    "shardset": "a shard set, or a view of one (a .parquet file), which becomes its own set",
    "webdataset": (
        "a folder of tars, one tar, or a pattern such as 'gs://bucket/train-{000000..000099}.tar'"
    ),
}
"""What --input is for each source. `pipelines.sources` opens them."""

INPUT_OPTIONS = {
    "class_depth": ("folder",),
    "path_column": ("hf", "listing"),
    "label_column": ("hf", "listing"),
    "file_column": ("listing",),
    "allow_missing_parts": ("hf", "webdataset"),
    "annotations": ("coco",),
    "masks": ("coco",),
}
"""The options that decide bytes only by what the survey finds, with the sources that take them."""

SIZES = ("num_shards", "samples_per_shard", "remainder", "balance", "repeat", "target_samples")
"""The options that decide the sizes of shards."""

_NOT_IN_BYTES = (
    *("input", "output", "overwrite", "only_shards", "append", "max_bad_fraction"),
    *INPUT_OPTIONS,
)


_MISSING_PARTS = "go on if parts of NAME-00000-of-00004 are missing in a folder"

_BY_SPLIT: dict[str, Any] = {"metavar": "N"}

Shards = frozenset[tuple[str, int]]

_MAX_RANGE = 1_000_000
"""Limit of one range of --only-shards: it becomes a set in memory."""


def shard_numbers(text: str) -> Shards:
    """`train:0,4-7;test:1` as (split, shard number) pairs. Raises ConfigError."""
    shards: set[tuple[str, int]] = set()
    for listed in text.split(";"):
        split, _, ranges = listed.partition(":")
        for piece in ranges.split(","):
            first, _, last = piece.partition("-")
            last = last or first
            is_range = split and first.isdigit() and last.isdigit()
            if not is_range or not 0 <= int(last) - int(first) < _MAX_RANGE:
                raise ConfigError(
                    f"--only-shards {text}: expected SPLIT:NUMBERS;..., for example train:0,4-7 (a"
                    f" range ascends, at most {_MAX_RANGE} long)"
                )
            shards |= {(split, number) for number in range(int(first), int(last) + 1)}
    return frozenset(shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The requested size of a split. `num_shards` and `samples_per_shard` exclude each other."""

    num_shards: int | None = None
    samples_per_shard: int | None = None
    remainder: Remainder = "spread"
    repeat: int = 1
    target_samples: int | None = None

    def __post_init__(self) -> None:
        if self.num_shards is not None and self.samples_per_shard is not None:
            raise ConfigError(
                "--num-shards and --samples-per-shard say the same twice; give one of them"
            )
        if self.repeat != 1 and self.target_samples is not None:
            raise ConfigError("--repeat and --target-samples say the same twice; give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """One build, or one append: then `append` says which samples to skip.

    `num_shards` and `samples_per_shard` map a split to its number; "" stands for every other split.
    """

    source: str = required(f"format of the raw input: {', '.join(SOURCES)}")
    input: str = required("what that source reads: local, gs://, s3:// or az://", metavar="PATH")
    output: str = required("the shard set's folder: local, gs://, s3:// or az://", metavar="URL")
    num_shards: dict[str, Count] = setting(
        {}, "shards of each split; or give --samples-per-shard", **_BY_SPLIT
    )
    samples_per_shard: dict[str, Count] = setting(
        {}, "default: about 128 MiB per shard; up to 4 shards of 100 samples or more", **_BY_SPLIT
    )
    target_samples: dict[str, Count] = setting(
        {}, "store N samples, repeating where there are fewer", **_BY_SPLIT
    )
    repeat: dict[str, Count] = setting({}, "store every sample N times", **_BY_SPLIT)
    remainder: Remainder = setting(
        "spread", "what does not divide evenly: spread, drop, or pad with repeats"
    )
    balance: Balance = setting(
        "none", "stratified: the same class mix in every shard, within one sample"
    )
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = setting(
        0, "seed of the order in which samples are stored"
    )
    holdout: dict[str, float] = setting(
        {},
        "hold out about this fraction of each class, at least one image of two, by a hash of the"
        " keys of the samples",
        metavar="SPLIT=FRACTION",
    )
    verify: Verify = setting("decode", "how to check each image; only decode finds truncated ones")
    max_bad_fraction: Annotated[float, Meta(ge=0, le=1)] = setting(
        0.01, "fail if more than this of a split, and more than 10 samples, are bad; 0: if any is"
    )
    require: str | None = setting(
        None, "quarantine samples without this field, or with nothing in it", metavar="FIELD"
    )
    image: ImageOptions = field(default_factory=ImageOptions)
    overwrite: bool = setting(
        False, "replace the shard set at the output, or restart an unfinished build"
    )
    only_shards: Shards = setting(
        frozenset(),
        "write only these; in a finished set, repair those that are missing or damaged",
        read=shard_numbers,
        action="append",
        metavar="SPLIT:0,4-7",
    )
    class_depth: Count = setting(1, "folder: the first N folders name the class")
    path_column: str | None = setting(
        None,
        "listing, hf: the column of the images (default: path, image, file, ...)",
        metavar="NAME",
    )
    label_column: str | None = setting(
        None,
        "listing, hf: the column of the labels (default: label, class, category, ...); '' stores"
        " images without labels",
        metavar="NAME",
    )
    file_column: dict[str, str] = setting(
        {},
        "listing: a column with the paths of further files, and the field that each is stored as,"
        " such as mask.png=mask",
        metavar="FIELD=COLUMN",
    )
    allow_missing_parts: bool = setting(False, _MISSING_PARTS)
    annotations: dict[str, str] = setting(
        {}, "coco: the JSON file, or one for each split", metavar="SPLIT=FILE"
    )
    masks: str | None = setting(
        None,
        "coco: a folder with a PNG for each image, which is stored as field mask.png",
        metavar="PATH",
    )
    append: Known | None = setting(
        None,
        "samples whose names the set has: skip them, or store them again (default: skip)",
        flag="--known",
    )

    def __post_init__(self) -> None:
        check(self)
        Holdout(self.holdout, self.seed)
        if self.image.jpeg_restart and self.verify != "decode":
            raise ConfigError(
                "--jpeg-restart would make a cut JPEG look whole, so it needs --verify decode"
            )
        self.sizing("")

    @property
    def stratified(self) -> bool:
        """Whether every shard gets each class in proportion."""
        return self.balance == "stratified"

    def sizing(self, split: str) -> Sizing:
        """The requested size of one split."""
        return Sizing(
            num_shards=_for_split(self.num_shards, split),
            samples_per_shard=_for_split(self.samples_per_shard, split),
            remainder=self.remainder,
            repeat=_for_split(self.repeat, split) or 1,
            target_samples=_for_split(self.target_samples, split),
        )

    def writes_images(self, fixes: Collection[str]) -> bool:
        """Whether images are re-encoded, so that libraries decide their bytes; `fixes` are the ones
        of the plan.
        """
        plain = ImageOptions(decoded_bytes=self.image.decoded_bytes)
        return CMYK_TO_RGB in fixes or self.image != plain

    def what_decides_plan(self) -> dict[str, Any]:
        """The options that must be the same where an unfinished build is resumed, JSON-able."""
        only_here = INPUT_OPTIONS if self.append is None else (*INPUT_OPTIONS, "append")
        return self.what_decides_bytes() | {name: getattr(self, name) for name in only_here}

    def what_decides_bytes(self) -> dict[str, Any]:
        """The options that the stored bytes depend on, JSON-able: neither places, nor machines, nor
        tolerance.
        """
        options = asdict(self)
        for name in _NOT_IN_BYTES:
            del options[name]
        if self.require is None:
            del options["require"]
        for name in ("background", "decoded_bytes"):  # as they are by default, they stand in no set
            if options["image"][name] == getattr(ImageOptions(), name):
                del options["image"][name]
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptConfig:
    """Which tars become a set, and the folder of its manifest: by default theirs, else one above
    it.
    """

    input: str = required("a folder of tars, one tar, or a pattern", metavar="PATH")
    output: str | None = setting(
        None, "the folder of the manifest: with the tars (default) or above them", metavar="URL"
    )
    split: str | None = setting(
        None, "the split of all tars (default: as their folders or names say)", metavar="NAME"
    )
    allow_missing_parts: bool = setting(False, _MISSING_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnConfig:
    """One more value for each sample of a set."""

    set: str
    name: str
    source: str = required(
        ".npy: a row per sample, by id; .parquet: by key; a set of tars: by key",
        flag="--from",
        metavar="PATH",
    )
    split: str | None = setting(
        None, "the only split that has values (default: all)", metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BareNumbers:
    """Images that a set would be built of, by split; "" stands for train."""

    samples: dict[str, Count] = setting({}, "number of images, or SPLIT=N,SPLIT=N", metavar="N")
    mean_bytes: Annotated[float, Meta(ge=1, le=sys.float_info.max)] | None = setting(
        None, "mean bytes of an image as it will be stored"
    )
    classes: Count = setting(
        1, "number of classes of --samples; by default there are no labels to mix"
    )


def _for_split(numbers: dict[str, int], split: str) -> int | None:
    return numbers.get(split, numbers.get(""))
