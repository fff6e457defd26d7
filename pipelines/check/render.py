"""Renders the answers of `inspect` as tables for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType

from pipelines.check.inspect import NO_NAME
from pipelines.split_table import split_table
from shardset.terminal import plain, table


def render(answer: dict[str, Any] | Sequence[Mapping[str, Any]]) -> RenderableType:
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
    tables = [split_table("splits", splits), *(each for each in (classes, shards) if each.rows)]
    fixes = ", ".join(f"{name} {count:,}" for name, count in overview["fixes"].items())
    first = (
        f"{overview['url']}: version {overview['version']}, from {overview['source']}, seed"
        f" {overview['seed']}, digest {overview['digest'][:12]}"
    )
    others = [
        f"quarantined: {overview['num_quarantined']:,}",
        f"fixed: {fixes or 'none'}",
        *_column_lines(overview["columns"]),
        *(f"note: {note}" for note in overview["notes"]),
    ]
    return Group(plain(first), *tables, *map(plain, others))


def _column_lines(columns: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    if columns is None:
        yield "columns: a web server lists none; Stream(columns=...) finds one by its name"
    for column in columns or ():
        if "problem" in column:
            yield f"column {column['problem']}"
            continue
        kind = f"{np.dtype(column['dtype'])} {column['shape']}" if column["dtype"] else "bytes"
        splits = ", ".join(f"{name} {number:,}" for name, number in column["splits"].items())
        lacking = f"; none of {', '.join(column['lacking'])}" if column["lacking"] else ""
        yield (
            f"column {column['name']}: version {column['version']}, {kind}, values of"
            f" {column['num_values']:,} samples; covers {splits}{lacking}"
        )


def render_samples(samples: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Samples as a table; a single sample as a table of everything known about it."""
    if len(samples) == 1:
        return _sample_table(samples[0])
    shown = ("split", "number", "position", "key", "name", "label", "class_name")
    rows = [
        [
            *("" if sample[fact] is None else sample[fact] for fact in shown),
            sum(num_bytes for _, num_bytes in sample["byte_ranges"].values()),
        ]
        for sample in samples
    ]
    columns = ["split", "shard#", "position#", "key", "name", "label#", "class", "bytes#"]
    listed = table("samples", columns, rows)
    has_names = all(sample["name"] is not None for sample in samples)
    return listed if has_names else Group(listed, NO_NAME)


def _sample_table(sample: Mapping[str, Any]) -> RenderableType:
    copy = f", copy {sample['copy']}" if sample["copy"] else ""
    facts = {
        "key": sample["key"],
        "original name": NO_NAME if sample["name"] is None else sample["name"],
        "label": f"{sample['label']} {sample['class_name']}".strip(),
        "stored in": (
            f"{sample['shard']} at position {sample['position']} (id {sample['id']} of split"
            f" {sample['split']})"
        ),
        "made from": f"raw sample {sample['serial']} of the split{copy}",
    }
    ranges = {
        field: f"{size:,} bytes at {offset:,}"
        for field, (offset, size) in sample["byte_ranges"].items()
    }
    return table("sample", ["", ""], [*facts.items(), *ranges.items()])
