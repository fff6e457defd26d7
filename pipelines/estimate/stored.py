"""The sizes of a shard set that exists or would be built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.plan.layout import SplitPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSplit:
    """One split: its plan, and for each shard the number of samples and the bytes of its tar and its index."""

    plan: SplitPlan
    shard_sizes: Sequence[int]
    tar_bytes: Sequence[int]
    index_bytes: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(self.tar_bytes)

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of a sample in its tar, with headers and padding."""
        return self.num_bytes / self.plan.num_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RawInput:
    """What a build reads before it stores anything.

    `num_reads` counts reads of samples, `num_stats` the images whose size takes a request each, `num_files` the listed
    files, and `unit_lists` the listings that the units repeat.
    """

    num_reads: int
    num_units: int
    num_files: int
    num_stats: int = 0
    unit_lists: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """A shard set. `raw` is None if the set exists already; `assumption` is "" if every size was counted."""

    title: str
    splits: Mapping[str, StoredSplit]
    manifest_bytes: int
    num_classes: int
    raw: RawInput | None
    assumption: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of tars, indexes and manifest."""
        return self.manifest_bytes + sum(split.num_bytes + sum(split.index_bytes) for split in self.splits.values())
