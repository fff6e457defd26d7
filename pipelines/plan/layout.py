"""Pure: how many shards, how many samples in each, and which sample stands where. Numbers in, numbers out.

A split's samples are numbered in source order. Each belongs to a stratum: all belong to one, or each class is one. The
`num_samples` samples of a stratum fill exactly `num_stored` positions; if there are more positions than samples, some
samples fill several. A keyed permutation puts the copies of a stratum in a sequence, the sequences of the strata follow
each other, and the whole sequence is dealt to the shards like cards: position j goes to shard j mod S. So shard sizes
differ by at most one, and so do each stratum's counts. Where a sample goes is arithmetic: it takes no sort and no
memory that grows with the data set.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from shardset.errors import ConfigError, SourceError
from shardset.format.index import fits_index
from shardset.format.manifest import Remainder
from shardset.order.permutation import derive_key, hash64, permute

TARGET_SHARD_BYTES = 128 * 2**20
SMALL_SHARDS, SMALL_SHARD_SAMPLES = 4, 100
"""A split of less than 4 x 128 MiB has 4 shards by default, or as many as have 100 samples each, so that several
readers have one each and ten test images are one file."""
MIN_BATCH, MAX_BATCH = 2**17, 2**19
"""Bounds of a batch of references, which bound a worker's memory."""
_PARTITION_ROWS = 400
"""About how many references a group gets from a batch; bounds the number of partitions."""
MAX_PLACEMENTS = 2**19
"""At most this many samples are placed at once."""
BUCKET_KEYS = 2**20
MAX_BUCKETS = 1024


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
    """Samples that are dealt together: their number, the positions that they fill, and where their sequence starts."""

    num_samples: int
    num_stored: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The arithmetic of one split; `num_bytes` estimates what its shards will hold from the sizes of the raw images."""

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
        """The number of samples in shard number `shard`."""
        return self.num_stored // self.num_shards + (shard < self.num_stored % self.num_shards)

    @property
    def num_groups(self) -> int:
        """The number of groups of shards; one worker sorts the references of a group."""
        return min(self.num_shards, math.ceil(self.num_stored / batch_size(self.num_stored)))

    def group_of(self, shard: np.ndarray) -> np.ndarray:
        """The group of each shard number."""
        return shard * self.num_groups // self.num_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOffset:
    """How many samples of a split come before a unit, in all and by stratum."""

    serial: int
    strata: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Where samples go: `row` in the unit, `copy` number, `shard`; `rank` gives the order in the shard."""

    row: np.ndarray = field(repr=False)
    copy: np.ndarray = field(repr=False)
    shard: np.ndarray = field(repr=False)
    rank: np.ndarray = field(repr=False)


def batch_size(num_samples: int) -> int:
    """Batch size for `num_samples`: fits the CPU cache, avoids tiny partitions."""
    return min(MAX_BATCH, max(MIN_BATCH, math.isqrt(_PARTITION_ROWS * num_samples)))


def units_per_batch(num_units: int, splits: Iterable[SplitPlan]) -> int:
    """How many neighbouring units are a batch."""
    num_rows = sum(max(split.num_source, split.num_stored) for split in splits)
    return max(1, batch_size(num_rows) * num_units // max(1, num_rows))


def num_buckets(splits: Iterable[SplitPlan]) -> int:
    """The number of buckets into which key hashes are cut to find duplicates."""
    return min(MAX_BUCKETS, math.ceil(sum(split.num_source for split in splits) / BUCKET_KEYS))


def stored_samples(num_wanted: int, sizing: Sizing, num_shards: int) -> int:
    """The number of samples in all shards together under the remainder policy."""
    if sizing.remainder == "spread":
        return num_wanted
    per_shard, remainder = divmod(num_wanted, num_shards)
    if sizing.samples_per_shard is not None:
        per_shard = sizing.samples_per_shard
    elif sizing.remainder == "pad" and remainder:
        per_shard += 1
    return num_shards * per_shard


def count_shards(num_wanted: int, num_bytes: int, sizing: Sizing) -> int:
    """The number of shards for `num_wanted` samples of `num_bytes` together."""
    if sizing.num_shards is not None:
        return sizing.num_shards
    if sizing.samples_per_shard is None:
        small = min(SMALL_SHARDS, max(1, num_wanted // SMALL_SHARD_SAMPLES))
        return min(num_wanted, max(small, math.ceil(num_bytes / TARGET_SHARD_BYTES)))
    if sizing.remainder == "drop":
        return num_wanted // sizing.samples_per_shard
    return math.ceil(num_wanted / sizing.samples_per_shard)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` divided in proportion to `weights`, exactly (largest remainder; ties go to the first)."""
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
    sequence_starts = np.cumsum([0, *stored]).tolist()
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
            for label, kept, start in zip(labels, stored, sequence_starts, strict=False)
        },
    )


def place(labels: np.ndarray, offset: UnitOffset, plan: SplitPlan, *, seed: int, stratified: bool) -> Placements:
    """Where the samples of one unit and split go.

    `labels` int [n], in source order; the result has one entry for each stored copy, in no particular order.
    """
    strata = labels if stratified else np.zeros(len(labels), np.int64)
    columns = [
        _place_stratum(rows, label, offset.strata.get(label, 0), plan, derive_key(seed, "place", plan.name, label))
        for label, rows in _rows_by_stratum(strata)
    ]
    row, copy, sequence = (
        (np.concatenate(column) for column in zip(*columns, strict=True)) if columns else ([np.zeros(0, int)] * 3)
    )
    rank = hash64(derive_key(seed, "rank", plan.name), sequence)
    return Placements(row=row, copy=copy, shard=sequence % plan.num_shards, rank=rank)


def placements(
    labels: np.ndarray,
    offset: UnitOffset,
    plan: SplitPlan,
    *,
    seed: int,
    stratified: bool,
    max_rows: int = MAX_PLACEMENTS,
) -> Iterator[Placements]:
    """`place` for some of the samples at a time: at most `max_rows` placements, or the copies of one sample."""
    max_copies = max(math.ceil(stratum.num_stored / stratum.num_samples) for stratum in plan.strata.values())
    size = max(1, max_rows // max(1, max_copies))
    for first in range(0, len(labels), size):
        some = labels[first : first + size]
        placed = place(some, offset, plan, seed=seed, stratified=stratified)
        yield replace(placed, row=placed.row + first)
        offset = advance(offset, _count(some) if stratified else {0: len(some)}, len(some))


def advance(offset: UnitOffset, strata: Mapping[int, int], num_samples: int) -> UnitOffset:
    """The offset of the samples that follow `num_samples` others."""
    labels = {**offset.strata, **strata}
    return UnitOffset(
        serial=offset.serial + num_samples,
        strata={label: offset.strata.get(label, 0) + strata.get(label, 0) for label in labels},
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
    """(row, copy, position in the split's sequence) of every stored copy."""
    stratum = plan.strata[label]
    serial = np.arange(first, first + len(rows))
    full, extra = divmod(stratum.num_stored, stratum.num_samples)
    row, number, copy = np.tile(rows, full), np.tile(serial, full), np.repeat(np.arange(full), len(rows))
    if extra:
        rank = permute(serial, n=stratum.num_samples, key=derive_key(key, "extra"))
        chosen = np.flatnonzero(rank < extra)
        row = np.concatenate([row, rows[chosen]])
        number = np.concatenate([number, rank[chosen]])
        copy = np.concatenate([copy, np.full(len(chosen), full)])
    number += copy * stratum.num_samples
    sequence = permute(number, n=stratum.num_stored, key=key) if len(number) else number
    return row, copy, sequence + stratum.start
