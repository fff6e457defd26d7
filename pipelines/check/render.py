"""Renders the answers of `inspect` as tables for a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType

from pipelines.check.inspect import NO_NAME, SampleInfo
from pipelines.split_table import split_table
from shardset.terminal import plain, table


def render(answer: dict[str, Any] | Sequence[SampleInfo]) -> RenderableType:
    """An overview or samples as tables."""
    return render_overview(answer) if isinstance(answer, dict) else render_samples(answer)


def render_overview(overview: dict[str, Any]) -> RenderableType:
    """The overview as tables: splits, classes, shards, and lines for the rest."""
    splits = overview["splits"]
    counted = [f"{number:,} samples of {name}" for name, number in overview["boxes_in"].items()]
    classes = table(
        f"boxes of each class, in {', '.join(counted)}" if counted else "classes",
        ["label#", "name", "wnid", *(f"{split.name}#" for split in splits)],
        [
            (row["label"], row["name"], row["wnid"] or "", *row["counts"].values())
            for row in overview["classes"]
        ],
    )
    shards = table(
        "shards",
        ["split", "shard#", "path", "samples#", "bytes#", "first id#"],
        [tuple(row.values()) for row in overview["shards"]],
    )
    tables = [split_table("splits", splits), *(one for one in (classes, shards) if one.rows)]
    fixes = ", ".join(f"{name} {count:,}" for name, count in overview["fixes"].items())
    first = (
        f"{overview['url']}: from {overview['source']}, seed {overview['seed']}, digest"
        f" {overview['digest'][:12]}"
    )
    others = [
        f"quarantined: {overview['num_quarantined']:,}",
        f"fixed: {fixes or 'none'}",
        *(f"note: {note}" for note in overview["notes"]),
    ]
    return Group(plain(first), *tables, *map(plain, others))


def render_samples(samples: Sequence[SampleInfo]) -> RenderableType:
    """Samples as a table; a single sample as a table of everything known about it."""
    if len(samples) == 1:
        return _sample_table(samples[0])
    rows = [
        (s.split, s.number, s.position, s.key, s.name or "", s.label, s.class_name,
         sum(num_bytes for _, num_bytes in s.byte_ranges.values()))
        for s in samples
    ]  # fmt: skip
    found = table(
        "samples",
        ["split", "shard#", "position#", "key", "name", "label#", "class", "bytes#"],
        rows,
    )
    return found if all(s.name is not None for s in samples) else Group(found, NO_NAME)


def _sample_table(sample: SampleInfo) -> RenderableType:
    facts = [
        ("key", sample.key),
        ("original name", NO_NAME if sample.name is None else sample.name),
        ("label", f"{sample.label} {sample.class_name}".strip()),
        (
            "stored in",
            (
                f"{sample.shard} at position {sample.position} (id {sample.id} of split"
                f" {sample.split})"
            ),
        ),
        (
            "made from",
            (
                f"raw sample {sample.serial} of the"
                f" split{f', copy {sample.copy}' if sample.copy else ''}"
            ),
        ),
        *(
            (field, f"{size:,} bytes at {offset:,}")
            for field, (offset, size) in sample.byte_ranges.items()
        ),
    ]
    return table("sample", ["", ""], facts)
