"""The summary of each unit, and the sums over all units.

Summaries are read one at a time, and none is kept.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.images.check import marks_of
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.tables import QuarantineEntry, SampleRow
from pipelines.sources.base import APART, HIDDEN
from pipelines.sources.tar_fields import count_fields
from shardset.errors import TooManyBad
from shardset.prepared import prepared

MAX_REASONS = 5
"""The number of rejected samples that a summary names as examples."""

ALLOWED_BAD = 10
"""So many bad samples are never too many: in a small split they are more than the usual 1 %."""


@dataclass(slots=True, kw_only=True)
class SplitCount:
    """The counts of a split in one or more units.

    `strata` maps a label (-1: none) to its number of samples.

    Of those that were rejected, `num_hidden` are hidden members of tars.
    """

    num_samples: int = 0
    num_rejected: int = 0
    num_hidden: int = 0
    num_bytes: int = 0
    strata: dict[int, int] = field(default_factory=dict)

    def add(self, other: "SplitCount") -> None:
        """Adds the counts of another unit."""
        for name in ("num_samples", "num_rejected", "num_hidden", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        before = self.strata.get
        for label, number in other.strata.items():  # more than twice as fast as Counter.update
            self.strata[label] = before(label, 0) + number


@dataclass(slots=True, kw_only=True)
class KnownCount:
    """The samples of the input that the set of an append has under their names, by its splits.

    `num_changed` have had another size or generation then; `changed` names a few. `num_images` are
    new samples whose images the set has under other names.
    """

    splits: dict[str, int] = field(default_factory=dict)
    num_changed: int = 0
    changed: list[str] = field(default_factory=list)
    num_images: int = 0

    @property
    def total(self) -> int:
        """The samples that were skipped."""
        return sum(self.splits.values())

    def skip(self, name: str, split: str, *, is_same: bool) -> None:
        """Counts a sample."""
        self.splits[split] = self.splits.get(split, 0) + 1
        if not is_same:
            self.num_changed += 1
            self.changed = [*self.changed, name][:MAX_REASONS]

    def add(self, other: "KnownCount") -> None:
        """Adds the counts of another unit."""
        self.splits = dict(Counter(self.splits) + Counter(other.splits))
        self.num_changed += other.num_changed
        self.changed = [*self.changed, *other.changed][:MAX_REASONS]
        self.num_images += other.num_images


@prepared
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
    """A unit, or all units, in a few numbers: counts and fields by split, fixes, reasons of
    rejected samples, a digest.

    `fields` come from `count_fields`.
    """

    unit: int
    splits: Mapping[str, SplitCount]
    fields: Mapping[str, Mapping[str, int]]
    fixes: Mapping[str, int]
    reasons: Sequence[str]
    known: KnownCount
    digest: str


def summarize(
    unit: int,
    rows: Sequence[SampleRow],
    rejected: Sequence[QuarantineEntry],
    known: KnownCount,
) -> UnitSummary:
    """The summary of a unit."""
    num_rejected = Counter(entry.split for entry in rejected)
    num_hidden = Counter(entry.split for entry in rejected if entry.reason == HIDDEN)
    by_split: dict[str, list[SampleRow]] = {
        split: [] for split in sorted({row.split for row in rows} | {*num_rejected})
    }
    for row in rows:
        by_split[row.split].append(row)
    return UnitSummary(
        unit=unit,
        splits={
            split: SplitCount(
                num_samples=len(some),
                num_rejected=num_rejected[split],
                num_hidden=num_hidden[split],
                num_bytes=sum(row.num_bytes for row in some),
                strata=dict(sorted(Counter(row.label for row in some).items())),
            )
            for split, some in by_split.items()
        },
        fields={
            split: count_fields([field for field, _ in row.fields] for row in some)
            for split, some in by_split.items()
        },
        fixes=dict(sorted(Counter(mark for row in rows for mark in marks_of(row.fix)).items())),
        reasons=_examples(f"{entry.name}: {entry.reason}" for entry in rejected),
        known=known,
        digest=tables.digest_of(rows),
    )


def read_summaries(files: PlanFiles, num_units: int) -> Iterator[UnitSummary]:
    """The summaries of all units, in unit order."""
    return files.read_records(map(paths.summary_path, range(num_units)), UnitSummary)


def merge(summaries: Iterable[UnitSummary]) -> UnitSummary:
    """One summary of all units; its digest covers theirs, in unit order."""
    splits: dict[str, SplitCount] = {}
    fields: dict[str, Counter[str]] = {}
    fixes: Counter[str] = Counter()
    reasons: list[str] = []
    known = KnownCount()
    num_units, digest = 0, hashlib.sha256(b"[")
    for summary in summaries:
        for name, count in summary.splits.items():
            splits.setdefault(name, SplitCount()).add(count)
        for name, counts in summary.fields.items():
            fields.setdefault(name, Counter()).update(counts)
        fixes.update(summary.fixes)
        reasons = _examples([*reasons, *summary.reasons])
        known.add(summary.known)
        digest.update((", " if num_units else "").encode() + json.dumps(summary.digest).encode())
        num_units += 1
    digest.update(b"]")
    return UnitSummary(
        unit=num_units,
        splits=splits,
        fields=fields,
        fixes=dict(sorted(fixes.items())),
        reasons=reasons,
        known=known,
        digest=digest.hexdigest(),
    )


def refuse_too_many_bad(total: UnitSummary, max_bad_fraction: float) -> None:
    """Raises TooManyBad if more than that fraction of a split was rejected, and more than a few
    samples.

    A few are ALLOWED_BAD, at most half of the split, and none if the fraction is 0.
    """
    for split, count in sorted(total.splits.items()):
        num_bad = count.num_rejected - (count.num_hidden if count.num_samples else 0)
        num_raw = num_bad + count.num_samples + total.known.splits.get(split, 0)
        allowed, limit = 0.0, "none"
        if max_bad_fraction:
            allowed = max(max_bad_fraction * num_raw, min(ALLOWED_BAD, num_raw / 2))
            limit = f"{max_bad_fraction:.2%}, or {ALLOWED_BAD} in a small split"
        if num_bad > allowed:
            advice = "nothing is left, so check --source and --input"
            if num_bad < num_raw:
                advice = "repair or remove them"
                if APART not in total.reasons[0]:
                    fraction = math.ceil(1000 * num_bad / num_raw) / 1000
                    advice += f", or leave them out by --max-bad-fraction {fraction:g}"
            raise TooManyBad(
                f"split {split!r}: {num_bad} of {num_raw} raw samples are bad, allowed are"
                f" {math.floor(allowed)} ({limit}), for example {'; '.join(total.reasons)};"
                f" {advice}; nothing was written"
            )


def _examples(reasons: Iterable[str]) -> list[str]:
    """A few of them, halves of samples first: the advice on these differs."""
    return sorted(reasons, key=lambda reason: APART not in reason)[:MAX_REASONS]
