"""Renders the answers of `inspect` as tables for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pipelines.check.lookups import NO_NAMES, SampleInfo
from pipelines.check.overview import Overview
from pipelines.terminal import plain

MAX_ROWS = 20
"""Longer tables are cut on a terminal, with a note; the JSON is complete."""

_MIN_NAME_LETTERS = 7
"""If name columns would be narrower than this, numbers are folded too."""


def render_overview(overview: Overview) -> RenderableType:
    """The overview as tables: splits, classes, shards, and lines for the rest."""
    fixes = ", ".join(f"{name} {count:,}" for name, count in overview.fixes.items())
    lines = [
        f"{overview.url}: from {overview.source}, seed {overview.seed}, digest {overview.digest[:12]}",
        f"quarantined: {overview.num_quarantined:,}",
        f"fixed: {fixes or 'none'}",
        *(f"note: {note}" for note in overview.notes),
    ]
    first, *others = (plain(line) for line in lines)
    return Group(first, _splits_table(overview), _classes_table(overview), _shards_table(overview), *others)


def render_samples(samples: Sequence[SampleInfo], *, max_rows: int = MAX_ROWS) -> RenderableType:
    """Samples as a table; a single sample as a table of everything known about it."""
    if len(samples) == 1:
        return _sample_table(samples[0])
    rows = [
        (s.split, s.number, s.position, s.key, "" if s.name is None else s.name, s.label, s.class_name, s.num_bytes)
        for s in samples
    ]
    table = _table("samples", ["split", "shard", "position", "key", "name", "label", "class", "bytes"], rows, max_rows)
    return table if all(s.name is not None for s in samples) else Group(table, NO_NAMES)


def _sample_table(sample: SampleInfo) -> RenderableType:
    facts = [
        ("key", sample.key),
        ("original name", NO_NAMES if sample.name is None else sample.name),
        ("label", f"{sample.label} {sample.class_name}".strip()),
        ("stored in", f"{sample.shard} at position {sample.position} (id {sample.id} of split {sample.split})"),
        ("made from", f"raw sample {sample.source} of the split{f', copy {sample.copy}' if sample.copy else ''}"),
        *((field, f"{size:,} bytes at {offset:,}") for field, (offset, size) in sample.byte_ranges.items()),
    ]
    return _table("sample", ["", ""], facts, len(facts))


def _splits_table(overview: Overview) -> RenderableType:
    optional = [name for name in ("dropped", "repeats") if any(getattr(row, f"num_{name}") for row in overview.splits)]
    columns = ["split", "samples", "shards", "per shard", "bytes", "mean", *optional, "fields"]
    rows = [
        (
            row.name,
            row.num_samples,
            row.num_shards,
            row.per_shard,
            row.num_bytes,
            round(row.mean_bytes),
            *(getattr(row, f"num_{name}") for name in optional),
            " ".join(row.fields),
        )
        for row in overview.splits
    ]
    return _table("splits", columns, rows, MAX_ROWS)


def _classes_table(overview: Overview) -> RenderableType:
    names = [row.name for row in overview.splits]
    rows = [(row.label, row.name, row.wnid or "", *(row.counts[name] for name in names)) for row in overview.classes]
    return _table("classes", ["label", "name", "wnid", *names], rows, MAX_ROWS)


def _shards_table(overview: Overview) -> RenderableType:
    columns = ["split", "shard", "path", "samples", "bytes", "first id"]
    rows = [(row.split, row.number, row.path, row.num_samples, row.num_bytes, row.first_id) for row in overview.shards]
    return _table("shards", columns, rows, MAX_ROWS)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], max_rows: int) -> RenderableType:
    shown = [[f"{cell:,}" if isinstance(cell, int) else plain(cell) for cell in row] for row in rows[:max_rows]]
    numeric = [bool(rows) and isinstance(rows[0][number], int) for number in range(len(columns))]
    caption = f"... and {len(rows) - max_rows:,} more (all of them with --json)" if len(rows) > max_rows else None
    return _FoldingTable(title, columns, numeric, shown, caption)


@dataclass(frozen=True, slots=True)
class _FoldingTable:
    """A table that folds long names first and numbers last: rich would truncate `12,345` to another number."""

    title: str
    columns: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[str | Text]]
    caption: str | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.title, title_justify="left", caption=self.caption, caption_justify="left")
        table.show_header = any(self.columns)
        fits = self._min_width() <= options.max_width
        for name, is_number in zip(self.columns, self.numeric, strict=True):
            table.add_column(
                name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number and fits
            )
        for row in self.rows:
            table.add_row(*row)
        yield table

    def _min_width(self) -> int:
        """The width of the table with numbers on one line and names folded."""
        widths = [
            max(map(len, cells)) if is_number else _MIN_NAME_LETTERS
            for is_number, *cells in zip(self.numeric, self.columns, *self.rows, strict=True)
        ]
        return sum(width + 3 for width in widths) + 1
