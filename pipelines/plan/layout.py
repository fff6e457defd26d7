"""Pure functions for the layout of a split: the number of shards, their sizes, and the slot of each
sample.

A split's samples are numbered in source order. Each belongs to a stratum: all samples form one, or
each class is one. The `num_samples` samples of a stratum fill exactly `num_stored` positions; if
there are more positions than samples, some samples fill several. A keyed permutation puts the
copies of a stratum in a sequence, the sequences of the strata follow each other, and the whole
sequence is dealt to the shards like cards: position j goes to shard j mod S. So shard sizes differ
by at most one, and so do the counts of each stratum. The slot of a sample is arithmetic: it takes
neither a sort nor memory that grows with the data set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from pipelines.config import Sizing
from shardset.errors import ConfigError
from shardset.order.permutation import derive_key, hash64, permute

TARGET_SHARD_BYTES = 128 * 2**20
SMALL_SHARDS, SMALL_SHARD_SAMPLES = 4, 100
"""A split of less than 4 x 128 MiB has 4 shards by default, or as many as have 100 samples each, so
that several readers have one each and ten test images are one file.
"""
MIN_GROUP, MAX_GROUP = 2**17, 5 * 2**20
"""The bounds of a group of references, of which a worker holds one: 0.5 KB for each."""
MOST_PASSES = 12
"""The groups between these bounds: for each, a worker reads the tables of all units."""
MAX_PLACEMENTS = 2**19
"""The most placements made at once, or the copies of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """Samples that are dealt together: their number, the positions that they fill, and the start of
    their sequence.
    """

    num_samples: int
    num_stored: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The arithmetic of a split.

    `num_bytes` estimates the contents of its shards from the sizes of the raw images.
    """

    name: str
    num_source: int
    num_stored: int
    num_shards: int
    num_dropped: int
    num_repeats: int
    num_bytes: int
    fields: Sequence[str]
    strata: Mapping[int, Stratum]

    def shard_size(self, shard: int) -> int:
        """The number of samples in a shard."""
        return self.num_stored // self.num_shards + (shard < self.num_stored % self.num_shards)

    @property
    def num_groups(self) -> int:
        """The number of groups of shards; one worker puts the references of a group in order."""
        size = min(MAX_GROUP, max(MIN_GROUP, self.num_stored // MOST_PASSES))
        return min(self.num_shards, math.ceil(self.num_stored / size))

    def group_of(self, shard: np.ndarray) -> np.ndarray:
        """The group of each shard number."""
        return shard * self.num_groups // self.num_shards

    @property
    def max_placed(self) -> int:
        """The samples that are placed at once."""
        pairs = [(part.num_stored, part.num_samples) for part in self.strata.values()]
        most_copies = max(math.ceil(stored / samples) for stored, samples in pairs)
        return max(1, MAX_PLACEMENTS // max(1, most_copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """The destinations of samples: `row` among those that were placed, `serial` and `copy` number,
    `shard`, and `rank`, the order in the shard.
    """

    row: np.ndarray
    serial: np.ndarray
    copy: np.ndarray
    shard: np.ndarray
    rank: np.ndarray


def stored_samples(num_wanted: int, sizing: Sizing, num_shards: int) -> int:
    """The number of samples in all shards under the remainder policy."""
    if sizing.remainder == "spread":
        return num_wanted
    per_shard, remainder = divmod(num_wanted, num_shards)
    if sizing.samples_per_shard is not None:
        per_shard = sizing.samples_per_shard
    elif sizing.remainder == "pad" and remainder:
        per_shard += 1
    return num_shards * per_shard


def count_shards(num_wanted: int, num_bytes: int, sizing: Sizing) -> int:
    """The number of shards for `num_wanted` samples of `num_bytes` in total."""
    if sizing.num_shards is not None:
        return sizing.num_shards
    if sizing.samples_per_shard is None:
        small = min(SMALL_SHARDS, max(1, num_wanted // SMALL_SHARD_SAMPLES))
        return min(num_wanted, max(small, math.ceil(num_bytes / TARGET_SHARD_BYTES)))
    if sizing.remainder == "drop":
        return num_wanted // sizing.samples_per_shard
    return math.ceil(num_wanted / sizing.samples_per_shard)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` divided in proportion to `weights` by the largest remainder; ties go to the first."""
    weight_sum = sum(weights)
    shares = [total * weight // weight_sum for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % weight_sum), i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares


def plan_split(
    name: str,
    strata: Mapping[int, int],
    *,
    num_bytes: int,
    fields: Sequence[str],
    sizing: Sizing,
    balance: Literal["none", "stratified"],
) -> SplitPlan:
    """The plan of a split; `strata` maps each label to its number of samples.

    Raises ConfigError if the samples can't fill the requested shards.
    """
    num_source = sum(strata.values())
    wanted = sizing.target_samples or num_source * sizing.repeat
    num_shards = count_shards(wanted, round(num_bytes * wanted / max(1, num_source)), sizing)
    num_stored = stored_samples(wanted, sizing, num_shards) if num_shards else 0
    if num_stored < num_shards or num_shards < 1:
        raise ConfigError(
            f"split {name!r}: {wanted} samples can't fill {num_shards or 'one'} shard(s)"
            f" ({_asked(sizing)}, remainder {sizing.remainder}); ask for fewer shards or fewer"
            " samples a shard"
        )
    strata = (
        {0: num_source}
        if balance == "none"
        else {label: n for label, n in sorted(strata.items()) if n}
    )
    stored = apportion(num_stored, list(strata.values()))
    added = [kept - count for kept, count in zip(stored, strata.values(), strict=True)]
    return SplitPlan(
        name=name,
        num_source=num_source,
        num_stored=num_stored,
        num_shards=num_shards,
        num_dropped=-sum(number for number in added if number < 0),
        num_repeats=sum(number for number in added if number > 0),
        num_bytes=round(num_bytes * num_stored / num_source),
        fields=list(fields),
        strata={
            label: Stratum(num_samples=count, num_stored=kept, start=stop - kept)
            for (label, count), kept, stop in zip(
                strata.items(), stored, accumulate(stored), strict=True
            )
        },
    )


def place(
    strata: np.ndarray, before: Mapping[int, int], plan: SplitPlan, *, seed: int
) -> Placements:
    """The placements of neighbouring samples of a split, one for each stored copy, in no particular
    order.

    `strata` int [n], n > 0, has the stratum of each sample, in source order, and `before` the
    number of samples of each that come before.
    """
    columns = [
        _place_stratum(
            rows, label, before.get(label, 0), plan, derive_key(seed, "place", plan.name, label)
        )
        for label, rows in _rows_by_stratum(strata)
    ]
    row, copy, sequence = map(np.concatenate, zip(*columns, strict=True))
    return Placements(
        row=row,
        serial=sum(before.values()) + row,
        copy=copy,
        shard=sequence % plan.num_shards,
        rank=hash64(derive_key(seed, "rank", plan.name), sequence),
    )


def _asked(sizing: Sizing) -> str:
    if sizing.num_shards is not None:
        return f"--num-shards {sizing.num_shards}"
    if sizing.samples_per_shard is not None:
        return f"--samples-per-shard {sizing.samples_per_shard}"
    return "default sizes"


def _rows_by_stratum(strata: np.ndarray) -> list[tuple[int, np.ndarray]]:
    order = np.argsort(strata, kind="stable")
    labels, firsts = np.unique(strata[order], return_index=True)
    return list(zip(labels.tolist(), np.split(order, firsts[1:]), strict=True))


def _place_stratum(
    rows: np.ndarray, label: int, first: int, plan: SplitPlan, key: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, copy, position in the split's sequence) of every stored copy."""
    stratum = plan.strata[label]
    serial = np.arange(first, first + len(rows))
    full, extra = divmod(stratum.num_stored, stratum.num_samples)
    row, number, copy = (
        np.tile(rows, full),
        np.tile(serial, full),
        np.repeat(np.arange(full), len(rows)),
    )
    # Every sample is stored `full` times. A keyed choice of `extra` samples is stored once more, or
    # instead of the others if samples are dropped; their ranks number these copies without gaps.
    if extra:
        rank = permute(serial, n=stratum.num_samples, key=derive_key(key, "extra"))
        chosen = np.flatnonzero(rank < extra)
        row = np.concatenate([row, rows[chosen]])
        number = np.concatenate([number, rank[chosen]])
        copy = np.concatenate([copy, np.full(len(chosen), full)])
    number += copy * stratum.num_samples
    return row, copy, permute(number, n=stratum.num_stored, key=key) + stratum.start
