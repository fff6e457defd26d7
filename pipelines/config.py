"""What a build is asked to do, complete and checked before anything runs."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipelines.holdout import Holdout
from pipelines.images.check import CMYK_TO_RGB
from pipelines.images.options import ImageOptions, Verify
from shardset.errors import ConfigError
from shardset.format.manifest import Remainder

Balance = Literal["none", "stratified"]

_ONLY_IN_SURVEY = ("class_depth", "path_column", "label_column")
"""The options that decide bytes only by what the survey finds."""

_NOT_IN_BYTES = (
    *("input", "output", "overwrite", "only_shards", "on_bad", "max_bad_fraction", "within_input"),
    "max_listed_shards",  # no shard depends on it
    *_ONLY_IN_SURVEY,
)


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
            raise ConfigError("--num-shards and --samples-per-shard say the same twice; give one of them")
        if self.repeat != 1 and self.target_samples is not None:
            raise ConfigError("--repeat and --target-samples say the same twice; give one of them")
        for name in ("num_shards", "samples_per_shard", "repeat", "target_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, expected a whole number from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """One build. `num_shards` and `samples_per_shard` map a split to its number; "" stands for every other split."""

    source: str
    input: str
    output: str
    num_shards: dict[str, int] = field(default_factory=dict)
    samples_per_shard: dict[str, int] = field(default_factory=dict)
    target_samples: dict[str, int] = field(default_factory=dict)
    repeat: dict[str, int] = field(default_factory=dict)
    remainder: Remainder = "spread"
    balance: Balance = "none"
    seed: int = 0
    holdout: dict[str, float] = field(default_factory=dict)
    verify: Verify = "decode"
    on_bad: Literal["quarantine", "fail"] = "quarantine"
    max_bad_fraction: float = 0.01
    image: ImageOptions = field(default_factory=ImageOptions)
    overwrite: bool = False
    only_shards: frozenset[tuple[str, int]] = frozenset()
    max_listed_shards: int = 10_000
    within_input: bool = False
    class_depth: int = 1
    path_column: str | None = None
    label_column: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_fraction <= 1:
            raise ConfigError(f"--max-bad-fraction is {self.max_bad_fraction}, expected a fraction from 0 to 1")
        if self.max_listed_shards < 0:
            raise ConfigError(f"--max-listed-shards is {self.max_listed_shards}, expected a whole number from 0")
        Holdout(self.holdout, self.seed)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}, expected a whole number from 0 to 2**63 - 1")
        if self.image.jpeg_restart and self.verify != "decode":
            raise ConfigError("--jpeg-restart would make a cut JPEG look whole, so it needs --verify decode")
        self.sizing("")

    @property
    def stratified(self) -> bool:
        """Whether every shard gets each class in proportion."""
        return self.balance == "stratified"

    def sizing(self, split: str) -> Sizing:
        """What is asked of one split's size."""
        return Sizing(
            num_shards=_of(self.num_shards, split),
            samples_per_shard=_of(self.samples_per_shard, split),
            remainder=self.remainder,
            repeat=_of(self.repeat, split) or 1,
            target_samples=_of(self.target_samples, split),
        )

    def writes_images(self, fixes: Collection[str]) -> bool:
        """Whether images are written anew, so that libraries decide their bytes; `fixes` are those of the plan."""
        plain = ImageOptions(max_pixels=self.image.max_pixels, decoded_bytes=self.image.decoded_bytes)
        return CMYK_TO_RGB in fixes or self.image != plain

    def what_decides_survey(self) -> dict[str, Any]:
        """The options that change the survey of an unchanged input, JSON-able."""
        return {name: getattr(self, name) for name in (*_ONLY_IN_SURVEY, "seed", "holdout")}

    def what_decides_bytes(self) -> dict[str, Any]:
        """The options that the stored bytes depend on, JSON-able: neither places, nor machines, nor tolerance."""
        options = asdict(self)
        for name in _NOT_IN_BYTES:
            del options[name]
        del options["image"]["max_pixels"]
        for name in ("background", "decoded_bytes"):  # as they are by default, they stand in no set
            if options["image"][name] == getattr(ImageOptions(), name):
                del options["image"][name]
        return options


def _of(numbers: dict[str, int], split: str) -> int | None:
    return numbers.get(split, numbers.get(""))
