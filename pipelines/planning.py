"""Pure: how many shards, how many samples in each, and which sample stands where. Numbers in, numbers out.

A split's samples are numbered in source order. Each belongs to a stratum (all to one, or each class is one). Of the
`num_samples` of a stratum exactly `num_stored` places are filled, the same sample several times if there are more
places than samples. A keyed permutation puts the copies of a stratum in a line, the strata's lines follow each other,
and the line is dealt to the shards like cards: place j goes to shard j mod S. So sizes differ by at most one, each
stratum's counts too, and where a sample goes is arithmetic: no sort, no memory that grows with the data set.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardset.errors import ConfigError, TooManyBad
from shardset.manifest import Remainder
from shardset.permutation import derive_key, hash64, permute

TARGET_SHARD_BYTES = 128 * 2**20
MIN_SHARDS = 4
GROUP_SAMPLES = 2**17
"""References are gathered in groups of whole shards with about this many samples: bounds a worker's memory."""
ROWS_AT_ONCE = 2**17
"""So many references are cut by group at once, at most: bounds a worker's memory."""
_ROWS_PER_PART = 64
"""Units are taken together until a group's part of them has about this many references: bounds the parts' number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCount:
    """What one unit holds of one split. `strata` maps a label (-1: none) to its number of samples."""

    num_samples: int
    num_rejected: int
    num_bytes: int
    strata: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
    """What the plan needs to know of a unit: counts by split, field names, fixes, a few reasons of rejects, a digest.

    `max_label` is -1 where no sample has a label; `spooled` says whether the source made the bytes itself.
    """

    unit: int
    splits: Mapping[str, SplitCount]
    fields: Mapping[str, Sequence[str]]
    fixes: Mapping[str, int]
    reasons: Sequence[str]
    max_label: int
    spooled: bool
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What a user asks of one split's size. `num_shards` and `samples_per_shard` exclude each other."""

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
class Stratum:
    """Samples that are dealt together: how many there are, how many places they fill, where their line starts."""

    num_samples: int
    num_stored: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The arithmetic of one split; `num_bytes` is about what its shards will hold, by the sizes of the raw images."""

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
        """How many samples shard number `shard` holds."""
        return self.num_stored // self.num_shards + (shard < self.num_stored % self.num_shards)

    @property
    def num_groups(self) -> int:
        """How many groups of shards the references are gathered in."""
        return min(self.num_shards, math.ceil(self.num_stored / GROUP_SAMPLES))

    def group_of(self, shard: np.ndarray) -> np.ndarray:
        """The group of each shard number."""
        return shard * self.num_groups // self.num_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStart:
    """Where a unit's samples start in the count of their split, in all and by stratum."""

    serial: int
    strata: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where samples go: `row` in the unit, `copy` number, `shard`; `rank` gives the order in the shard."""

    row: np.ndarray = field(repr=False)
    copy: np.ndarray = field(repr=False)
    shard: np.ndarray = field(repr=False)
    rank: np.ndarray = field(repr=False)


def units_at_once(num_units: int, splits: Iterable[SplitPlan]) -> int:
    """How many neighbouring units have their references cut together."""
    splits = list(splits)
    rows_per_unit = math.ceil(sum(split.num_stored for split in splits) / num_units)
    wanted = min(ROWS_AT_ONCE, _ROWS_PER_PART * sum(split.num_groups for split in splits))
    return max(1, wanted // max(1, rows_per_unit))


def stored_samples(num_wanted: int, sizing: Sizing, num_shards: int) -> int:
    """How many samples the shards hold together once the remainder policy has spoken."""
    if sizing.remainder == "spread":
        return num_wanted
    per_shard, left = divmod(num_wanted, num_shards)
    if sizing.samples_per_shard is not None:
        per_shard = sizing.samples_per_shard
    elif sizing.remainder == "pad" and left:
        per_shard += 1
    return num_shards * per_shard


def count_shards(num_wanted: int, num_bytes: int, sizing: Sizing) -> int:
    """How many shards `num_wanted` samples of `num_bytes` together become."""
    if sizing.num_shards is not None:
        return sizing.num_shards
    if sizing.samples_per_shard is None:
        return max(min(MIN_SHARDS, num_wanted), math.ceil(num_bytes / TARGET_SHARD_BYTES))
    if sizing.remainder == "drop":
        return num_wanted // sizing.samples_per_shard
    return math.ceil(num_wanted / sizing.samples_per_shard)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` shared out in proportion to `weights`, exactly (largest remainder; ties to the first)."""
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
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
    """The plan of one split; `strata` maps each label to its number of samples.

    Raises ConfigError if the samples can't fill the shards that were asked for.
    """
    num_source = sum(strata.values())
    wanted = sizing.target_samples or num_source * sizing.repeat
    num_shards = count_shards(wanted, round(num_bytes * wanted / max(1, num_source)), sizing)
    num_stored = stored_samples(wanted, sizing, num_shards) if num_shards else 0
    if num_stored < num_shards or num_shards < 1:
        raise ConfigError(
            f"split {name!r}: {wanted} samples can't fill {num_shards or 'one'} shard(s) "
            f"({_asked(sizing)}, remainder {sizing.remainder}); ask for fewer shards or fewer samples a shard"
        )
    if balance == "none":
        strata = {0: num_source}
    labels = sorted(label for label, count in strata.items() if count)
    stored = apportion(num_stored, [strata[label] for label in labels])
    starts = np.cumsum([0, *stored]).tolist()
    return SplitPlan(
        name=name,
        num_source=num_source,
        num_stored=num_stored,
        num_shards=num_shards,
        num_dropped=sum(max(0, strata[label] - kept) for label, kept in zip(labels, stored, strict=True)),
        num_repeats=sum(max(0, kept - strata[label]) for label, kept in zip(labels, stored, strict=True)),
        num_bytes=round(num_bytes * num_stored / num_source),
        fields=list(fields),
        strata={
            label: Stratum(num_samples=strata[label], num_stored=kept, start=start)
            for label, kept, start in zip(labels, stored, starts, strict=False)
        },
    )


def place(labels: np.ndarray, start: UnitStart, plan: SplitPlan, *, seed: int, stratified: bool) -> Places:
    """Where the samples of one unit and split go.

    `labels` int [n], in source order; the result has one entry for each stored copy, in no particular order.
    """
    strata = labels if stratified else np.zeros(len(labels), np.int64)
    parts = [
        _place_stratum(rows, label, start.strata[label], plan, derive_key(seed, "place", plan.name, label))
        for label, rows in _rows_by_stratum(strata)
    ]
    row, copy, line = (
        (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else ([np.zeros(0, int)] * 3)
    )
    rank = hash64(derive_key(seed, "rank", plan.name), line)
    return Places(row=row, copy=copy, shard=line % plan.num_shards, rank=rank)


def rank_order(shard: np.ndarray, rank: np.ndarray, source: np.ndarray, copy: np.ndarray) -> np.ndarray:
    """The row order of stored samples: by shard, then rank; equal ranks (1 in 2**64) by source and copy."""
    return np.lexsort((copy, source, rank, shard))


def unit_starts(summaries: Sequence[UnitSummary], *, stratified: bool) -> list[dict[str, UnitStart]]:
    """For each unit, in unit order, where its samples of each split start."""
    serials: dict[str, int] = {}
    counts: dict[str, dict[int, int]] = {}
    starts = []
    for summary in summaries:
        mine = {}
        for split, count in summary.splits.items():
            seen = counts.setdefault(split, {})
            strata = count.strata if stratified else {0: count.num_samples}
            mine[split] = UnitStart(
                serial=serials.get(split, 0), strata={label: seen.get(label, 0) for label in strata}
            )
            serials[split] = serials.get(split, 0) + count.num_samples
            for label, number in strata.items():
                seen[label] = seen.get(label, 0) + number
        starts.append(mine)
    return starts


def sum_strata(summaries: Sequence[UnitSummary], split: str) -> dict[int, int]:
    """How many samples of each label a split has."""
    total: dict[int, int] = {}
    for summary in summaries:
        if split in summary.splits:
            for label, number in summary.splits[split].strata.items():
                total[label] = total.get(label, 0) + number
    return total


def merge_fields(summaries: Sequence[UnitSummary], split: str) -> list[str]:
    """All fields of a split in order of first appearance."""
    return list(dict.fromkeys(name for summary in summaries for name in summary.fields.get(split, ())))


def refuse_too_many_bad(summaries: Sequence[UnitSummary], max_bad_fraction: float) -> None:
    """Raises TooManyBad if more than that fraction of a split was rejected."""
    for split in sorted({name for summary in summaries for name in summary.splits}):
        counts = [summary.splits[split] for summary in summaries if split in summary.splits]
        bad = sum(count.num_rejected for count in counts)
        seen = bad + sum(count.num_samples for count in counts)
        if bad > max_bad_fraction * seen:
            examples = "; ".join([reason for summary in summaries for reason in summary.reasons][:5])
            raise TooManyBad(
                f"split {split!r}: {bad} of {seen} raw samples are bad, allowed are {max_bad_fraction:.2%} "
                f"(for example {examples}); mend the input or raise --max-bad-fraction; nothing was written"
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
    return list(zip(labels.tolist(), np.split(order, firsts[1:]), strict=True)) if len(order) else []


def _place_stratum(
    rows: np.ndarray, label: int, first: int, plan: SplitPlan, key: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stratum = plan.strata[label]
    serial = np.arange(first, first + len(rows))
    full, extra = divmod(stratum.num_stored, stratum.num_samples)
    turn = permute(serial, n=stratum.num_samples, key=derive_key(key, "extra"))
    lucky = np.flatnonzero(turn < extra)
    row = np.concatenate([np.tile(rows, full), rows[lucky]])
    copy = np.concatenate([np.repeat(np.arange(full), len(rows)), np.full(len(lucky), full)])
    number = np.concatenate([np.tile(serial, full), turn[lucky]]) + copy * stratum.num_samples
    line = permute(number, n=stratum.num_stored, key=key) if len(number) else number
    return row, copy, line + stratum.start
