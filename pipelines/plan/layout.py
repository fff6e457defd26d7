"""Pure: how many shards, how many samples in each, and which sample stands where. Numbers in, numbers out.

A split's samples are numbered in source order. Each belongs to a stratum (all to one, or each class is one). Of the
`num_samples` of a stratum exactly `num_stored` places are filled, the same sample several times if there are more
places than samples. A keyed permutation puts the copies of a stratum in a line, the strata's lines follow each other,
and the line is dealt to the shards like cards: place j goes to shard j mod S. So sizes differ by at most one, each
stratum's counts too, and where a sample goes is arithmetic: no sort, no memory that grows with the data set.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from shardset.errors import ConfigError, SourceError, TooManyBad
from shardset.format.index import fits_index
from shardset.format.manifest import Remainder
from shardset.order.permutation import derive_key, hash64, permute

TARGET_SHARD_BYTES = 128 * 2**20
MIN_SHARDS = 4
MIN_AT_ONCE, MAX_AT_ONCE = 2**17, 2**19
"""So many references are a batch of units or a group of shards: bounds a worker's memory."""
_ROWS_PER_PART = 400
"""What a group gets from a batch has about this many references: bounds the number of parts."""
ROWS_AT_ONCE = 2**19
"""So many references are placed at once, at most."""
BUCKET_KEYS = 2**20
MAX_BUCKETS = 1024
MAX_REASONS = 5
"""Of rejects, so many are told where a number of them is."""


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

    `max_label` is -1 where no sample has a label.
    """

    unit: int
    splits: Mapping[str, SplitCount]
    fields: Mapping[str, Sequence[str]]
    fixes: Mapping[str, int]
    reasons: Sequence[str]
    max_label: int
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
        return min(self.num_shards, math.ceil(self.num_stored / samples_at_once(self.num_stored)))

    def group_of(self, shard: np.ndarray) -> np.ndarray:
        """The group of each shard number."""
        return shard * self.num_groups // self.num_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOffset:
    """Where a unit's samples start in the count of their split, in all and by stratum."""

    serial: int
    strata: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Where samples go: `row` in the unit, `copy` number, `shard`; `rank` gives the order in the shard."""

    row: np.ndarray = field(repr=False)
    copy: np.ndarray = field(repr=False)
    shard: np.ndarray = field(repr=False)
    rank: np.ndarray = field(repr=False)


def samples_at_once(num_samples: int) -> int:
    """How many samples of so many are treated together: few enough for a cache, as long as parts do not get tiny."""
    return min(MAX_AT_ONCE, max(MIN_AT_ONCE, math.isqrt(_ROWS_PER_PART * num_samples)))


def units_at_once(num_units: int, splits: Iterable[SplitPlan]) -> int:
    """How many neighbouring units are treated together."""
    rows = sum(max(split.num_source, split.num_stored) for split in splits)
    return max(1, samples_at_once(rows) * num_units // max(1, rows))


def num_buckets(splits: Iterable[SplitPlan]) -> int:
    """How many buckets the keys' hashes are grouped in to find those that are wanted twice."""
    return min(MAX_BUCKETS, math.ceil(sum(split.num_source for split in splits) / BUCKET_KEYS))


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
        return min(num_wanted, max(MIN_SHARDS, math.ceil(num_bytes / TARGET_SHARD_BYTES)))
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

    Raises ConfigError if the samples can't fill the shards that were asked for, SourceError if they have more kinds of
    fields than an index can list.
    """
    if not fits_index(fields):
        raise SourceError(
            f"split {name!r}: {len(fields):,} kinds of fields ({', '.join(fields[:3])}, ...) are more than an index "
            "can list; a field is what follows the first dot of a file's name: rename files with dots in their keys"
        )
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


def place(labels: np.ndarray, start: UnitOffset, plan: SplitPlan, *, seed: int, stratified: bool) -> Placements:
    """Where the samples of one unit and split go.

    `labels` int [n], in source order; the result has one entry for each stored copy, in no particular order.
    """
    strata = labels if stratified else np.zeros(len(labels), np.int64)
    parts = [
        _place_stratum(rows, label, start.strata.get(label, 0), plan, derive_key(seed, "place", plan.name, label))
        for label, rows in _rows_by_stratum(strata)
    ]
    row, copy, line = (
        (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else ([np.zeros(0, int)] * 3)
    )
    rank = hash64(derive_key(seed, "rank", plan.name), line)
    return Placements(row=row, copy=copy, shard=line % plan.num_shards, rank=rank)


def placements(
    labels: np.ndarray, start: UnitOffset, plan: SplitPlan, *, seed: int, stratified: bool
) -> Iterator[Placements]:
    """`place`, a piece of the samples after the other: at most ROWS_AT_ONCE places, or those of one sample, at once."""
    most = max(math.ceil(stratum.num_stored / stratum.num_samples) for stratum in plan.strata.values())
    at_once = max(1, ROWS_AT_ONCE // max(1, most))
    for first in range(0, len(labels), at_once):
        mine = labels[first : first + at_once]
        found = place(mine, start, plan, seed=seed, stratified=stratified)
        yield replace(found, row=found.row + first)
        start = advance(start, _count(mine) if stratified else {0: len(mine)}, len(mine))


def advance(start: UnitOffset, strata: Mapping[int, int], num_samples: int) -> UnitOffset:
    """Where the samples start that follow `num_samples` others."""
    labels = {**start.strata, **strata}
    return UnitOffset(
        serial=start.serial + num_samples,
        strata={label: start.strata.get(label, 0) + strata.get(label, 0) for label in labels},
    )


def rank_order(shard: np.ndarray, rank: np.ndarray, source: np.ndarray, copy: np.ndarray) -> np.ndarray:
    """The row order of stored samples: by shard, then rank; equal ranks (1 in 2**64) by source and copy."""
    order = np.argsort(rank)
    order = order[by_shard(shard[order])]
    same = (shard[order][1:] == shard[order][:-1]) & (rank[order][1:] == rank[order][:-1])
    return np.lexsort((copy, source, rank, shard)) if same.any() else order


def by_shard(shard: np.ndarray) -> np.ndarray:
    """The stable order of shard numbers; NumPy sorts 16 bits at once, which is ten times as fast as all."""
    order = np.argsort(shard.astype(np.uint16), kind="stable")
    if not len(shard) or shard.max() < 2**16:
        return order
    return order[np.argsort((shard >> 16).astype(np.uint16)[order], kind="stable")]


def batch_offsets(
    summaries: Iterable[UnitSummary], splits: Iterable[str], *, at_once: int, stratified: bool
) -> Iterator[dict[str, UnitOffset]]:
    """For each `at_once` units, in unit order, where their samples of each split start."""
    seen = {split: _Count() for split in splits}
    for number, summary in enumerate(summaries):
        if number % at_once == 0:
            yield {split: _start_after(count, stratified=stratified) for split, count in seen.items()}
        for split in seen.keys() & summary.splits.keys():
            seen[split].add(summary.splits[split])


def merge(summaries: Iterable[UnitSummary]) -> UnitSummary:
    """One summary of all units; its digest is of theirs, in unit order. Holds none of them."""
    splits: dict[str, _Count] = {}
    fields: dict[str, dict[str, None]] = {}
    fixes: Counter[str] = Counter()
    reasons: list[str] = []
    max_label, num_units, digest = -1, 0, hashlib.sha256(b"[")
    for summary in summaries:
        for name, count in summary.splits.items():
            splits.setdefault(name, _Count()).add(count)
        for name, found in summary.fields.items():
            fields.setdefault(name, {}).update(dict.fromkeys(found))
        fixes.update(summary.fixes)
        reasons += summary.reasons[: MAX_REASONS - len(reasons)]
        max_label = max(max_label, summary.max_label)
        digest.update((", " if num_units else "").encode() + json.dumps(summary.digest).encode())
        num_units += 1
    digest.update(b"]")
    return UnitSummary(
        unit=num_units,
        splits={name: count.frozen() for name, count in splits.items()},
        fields={name: list(found) for name, found in fields.items()},
        fixes=dict(sorted(fixes.items())),
        reasons=reasons,
        max_label=max_label,
        digest=digest.hexdigest(),
    )


@dataclass(slots=True)
class _Count:
    """The running sum of SplitCounts."""

    num_samples: int = 0
    num_rejected: int = 0
    num_bytes: int = 0
    strata: dict[int, int] = field(default_factory=dict)

    def add(self, count: SplitCount) -> None:
        self.num_samples += count.num_samples
        self.num_rejected += count.num_rejected
        self.num_bytes += count.num_bytes
        seen = self.strata.get
        for label, number in count.strata.items():  # more than twice as fast as Counter.update
            self.strata[label] = seen(label, 0) + number

    def frozen(self) -> SplitCount:
        return SplitCount(
            num_samples=self.num_samples,
            num_rejected=self.num_rejected,
            num_bytes=self.num_bytes,
            strata=dict(self.strata),
        )


def refuse_too_many_bad(whole: UnitSummary, max_bad_fraction: float) -> None:
    """Raises TooManyBad if more than that fraction of a split was rejected."""
    for split, count in sorted(whole.splits.items()):
        seen = count.num_rejected + count.num_samples
        if count.num_rejected > max_bad_fraction * seen:
            raise TooManyBad(
                f"split {split!r}: {count.num_rejected} of {seen} raw samples are bad, allowed are "
                f"{max_bad_fraction:.2%} (for example {'; '.join(whole.reasons)}); mend the input or raise "
                "--max-bad-fraction; nothing was written"
            )


def _start_after(count: _Count, *, stratified: bool) -> UnitOffset:
    return UnitOffset(serial=count.num_samples, strata=dict(count.strata) if stratified else {0: count.num_samples})


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


def _count(labels: np.ndarray) -> dict[int, int]:
    values, numbers = np.unique(labels, return_counts=True)
    return dict(zip(values.tolist(), numbers.tolist(), strict=True))


def _place_stratum(
    rows: np.ndarray, label: int, first: int, plan: SplitPlan, key: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stratum = plan.strata[label]
    serial = np.arange(first, first + len(rows))
    full, extra = divmod(stratum.num_stored, stratum.num_samples)
    row, number, copy = np.tile(rows, full), np.tile(serial, full), np.repeat(np.arange(full), len(rows))
    if extra:
        turn = permute(serial, n=stratum.num_samples, key=derive_key(key, "extra"))
        lucky = np.flatnonzero(turn < extra)
        row = np.concatenate([row, rows[lucky]])
        number = np.concatenate([number, turn[lucky]])
        copy = np.concatenate([copy, np.full(len(lucky), full)])
    number += copy * stratum.num_samples
    line = permute(number, n=stratum.num_stored, key=key) if len(number) else number
    return row, copy, line + stratum.start
