"""Splits by keyed hash: a sample is held out by its own key and the seed, unless its class would
lack a split.

A share of each class, not an exact number of its samples: an exact number would move samples
whenever the set grows.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from shardset.checksum import crc32c_of
from shardset.errors import ConfigError
from shardset.format.naming import SPLIT_NAMES, is_split
from shardset.order.permutation import derive_key, hash_text

REST = "train"
"""The split of the samples that are not held out."""


@dataclass(frozen=True)
class Holdout:
    """Which samples go to which held-out split: `fractions` by split.

    Empty: all samples go to `train`. `splits` are sorted, `train` last; all but the last end at
    `bounds`, between 0 and 1. Raises ConfigError unless the names can name splits and the fractions
    are above 0 and below 1 in sum.
    """

    fractions: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for split, fraction in self.fractions.items():
            if not is_split(split) or split == REST:
                raise ConfigError(
                    f"--holdout {split}={fraction}: {split!r} can't be held out; "
                    f"use {SPLIT_NAMES}; {REST} is what is not held out"
                )
            if not 0 < fraction < 1:
                raise ConfigError(
                    f"--holdout {split}={fraction}: expected a fraction between 0 and 1, such as"
                    f" {split}=0.1"
                )
        if sum(self.fractions.values()) >= 1:
            total = sum(self.fractions.values())
            raise ConfigError(
                f"--holdout: the fractions add up to {total:g}, which leaves no {REST}"
            )

    def __bool__(self) -> bool:
        return bool(self.fractions)

    def place(self, key: str, image: bytes) -> tuple[str, int, int]:
        """The split of a sample by its key alone, where that falls from 0 to 2**64, and a number
        that equal images share.

        The order in which the fractions are given does not matter.
        """
        draw = hash_text(key, key=self._key)
        number = crc32c_of(image) << 32 | len(image) & 0xFFFFFFFF if image else draw
        return self.splits[bisect_right(self.bounds, draw / 2**64)], draw, number

    @cached_property
    def splits(self) -> list[str]:
        """All splits, in the order of their bounds."""
        return [*sorted(self.fractions), REST]

    @cached_property
    def bounds(self) -> list[float]:
        """Where each split but the last one ends, between 0 and 1."""
        return list(accumulate(self.fractions[split] for split in self.splits[:-1]))

    @cached_property
    def _key(self) -> int:
        return derive_key(self.seed, "holdout")
