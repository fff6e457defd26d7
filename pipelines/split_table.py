"""Tables for a terminal, and the numbers of splits as every verb shows them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.filesize import decimal
from rich.table import Table

from pipelines.plan.layout import SplitPlan
from shardset.format.manifest import Split
from shardset.terminal import table


class SplitNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A split that is stored or planned; `num_bytes` counts its tars, or its input before
    these are written.
    """

    name: str
    num_source_samples: int
    num_samples: int
    num_shards: int
    smallest: int
    largest: int
    num_bytes: int
    num_dropped: int
    num_repeats: int
    fields: Sequence[str]

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of a sample in its tar, with headers and padding."""
        return self.num_bytes / max(1, self.num_samples)


def of_plan(plan: SplitPlan, num_bytes: int | None = None) -> SplitNumbers:
    """The numbers of a planned split, with the bytes of its tars if they are known."""
    return SplitNumbers(
        name=plan.name,
        num_source_samples=plan.num_source,
        num_samples=plan.num_stored,
        num_shards=plan.num_shards,
        smallest=plan.shard_size(plan.num_shards - 1),
        largest=plan.shard_size(0),
        num_bytes=plan.num_bytes if num_bytes is None else num_bytes,
        num_dropped=plan.num_dropped,
        num_repeats=plan.num_repeats,
        fields=plan.fields,
    )


def of_set(splits: Mapping[str, Split]) -> list[SplitNumbers]:
    """The numbers of the splits of a manifest."""
    return [
        SplitNumbers(
            name=name,
            num_source_samples=split.num_source_samples,
            num_samples=split.num_samples,
            num_shards=split.num_shards,
            smallest=min(split.shard_sizes, default=0),
            largest=max(split.shard_sizes, default=0),
            num_bytes=split.num_tar_bytes,
            num_dropped=split.num_dropped,
            num_repeats=split.num_repeats,
            fields=split.fields,
        )
        for name, split in splits.items()
    ]


def split_table(title: str, splits: Iterable[SplitNumbers], size: str = "size") -> Table:
    """The table of splits for a terminal."""
    cells = columns(splits, size)
    return table(title, [*cells], [*zip(*cells.values(), strict=True)])


def columns(splits: Iterable[SplitNumbers], size: str = "size") -> dict[str, list[Any]]:
    """The columns of the table of splits, without those that are 0 everywhere.

    The raw samples are those, without repeats and with the dropped ones. `#` ends the name of a
    column of numbers.
    """
    rows = [
        {
            "split": split.name,
            "samples#": split.num_samples,
            "shards#": split.num_shards,
            "per shard#": _spread(split.smallest, split.largest),
            f"{size}#": decimal(split.num_bytes),
            "dropped#": split.num_dropped,
            "repeats#": split.num_repeats,
            "fields": " ".join(split.fields),
        }
        for split in splits
    ]
    cells_by_name = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return {name: cells for name, cells in cells_by_name.items() if any(cells)}


def _spread(smallest: int, largest: int) -> str:
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
