"""Renders the answers of `inspect` as tables for a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from pipelines.check.inspect import NO_NAMES, SampleInfo
from pipelines.terminal import plain

MAX_ROWS = 20
"""Longer tables are cut on a terminal, with a note; the JSON is complete."""


def render(answer: dict[str, Any] | Sequence[SampleInfo]) -> RenderableType:
    """An overview or samples as tables."""
    return render_overview(answer) if isinstance(answer, dict) else render_samples(answer)


def render_overview(overview: dict[str, Any]) -> RenderableType:
    """The overview as tables: splits, classes, shards, and lines for the rest."""
    splits = overview["splits"]
    optional = [
        name for name in ("dropped", "repeats") if any(row[f"num_{name}"] for row in splits)
    ]
    tables = [
        _table(
            "splits",
            ["split", "samples", "shards", "per shard", "bytes", "mean", *optional, "fields"],
            [
                (
                    row["name"],
                    row["num_samples"],
                    row["num_shards"],
                    spread(row["smallest"], row["largest"]),
                    row["num_bytes"],
                    round(row["mean_bytes"]),
                    *(row[f"num_{name}"] for name in optional),
                    " ".join(row["fields"]),
                )
                for row in splits
            ],
        ),
        _table(
            "classes",
            ["label", "name", "wnid", *(row["name"] for row in splits)],
            [
                (row["label"], row["name"], row["wnid"] or "", *row["counts"].values())
                for row in overview["classes"]
            ],
        ),
        _table(
            "shards",
            ["split", "shard", "path", "samples", "bytes", "first id"],
            [tuple(row.values()) for row in overview["shards"]],
        ),
    ]
    fixes = ", ".join(f"{name} {count:,}" for name, count in overview["fixes"].items())
    lines = [
        (
            f"{overview['url']}: from {overview['source']}, seed {overview['seed']}, digest"
            f" {overview['digest'][:12]}"
        ),
        f"quarantined: {overview['num_quarantined']:,}",
        f"fixed: {fixes or 'none'}",
        *(f"note: {note}" for note in overview["notes"]),
    ]
    first, *others = (plain(line) for line in lines)
    return Group(first, *tables, *others)


def spread(smallest: int, largest: int) -> str:
    """Samples of a shard: `500`, or `499 to 500`."""
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def render_samples(samples: Sequence[SampleInfo]) -> RenderableType:
    """Samples as a table; a single sample as a table of everything known about it."""
    if len(samples) == 1:
        return _sample_table(samples[0])
    rows = [
        (s.split, s.number, s.position, s.key, s.name or "", s.label, s.class_name,
         sum(num_bytes for _, num_bytes in s.byte_ranges.values()))
        for s in samples
    ]  # fmt: skip
    table = _table(
        "samples",
        ["split", "shard", "position", "key", "name", "label", "class", "bytes"],
        rows,
    )
    return table if all(s.name is not None for s in samples) else Group(table, NO_NAMES)


def _sample_table(sample: SampleInfo) -> RenderableType:
    facts = [
        ("key", sample.key),
        ("original name", NO_NAMES if sample.name is None else sample.name),
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
                f"raw sample {sample.source} of the"
                f" split{f', copy {sample.copy}' if sample.copy else ''}"
            ),
        ),
        *(
            (field, f"{size:,} bytes at {offset:,}")
            for field, (offset, size) in sample.byte_ranges.items()
        ),
    ]
    return _table("sample", ["", ""], facts, len(facts))


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], max_rows: int | None = None
) -> Table:
    max_rows = max_rows or MAX_ROWS
    caption = (
        f"... and {len(rows) - max_rows:,} more (all of them with --json)"
        if len(rows) > max_rows
        else None
    )
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        show_header=any(columns),
    )
    for number, name in enumerate(columns):
        # Where names are folded and a number still does not fit, it ends with an ellipsis: never
        # another number.
        is_number = bool(rows) and isinstance(rows[0][number], int)
        table.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="ellipsis" if is_number else "fold",
            no_wrap=is_number,
        )
    for row in rows[:max_rows]:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else plain(cell) for cell in row))
    return table
