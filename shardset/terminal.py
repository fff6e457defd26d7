"""What both programs show on a terminal: raw names as they are, and tables of one style."""

import os
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardset.errors import printable

_NO_LIMIT = 100_000

MAX_ROWS = 40
"""Longer tables are cut on a terminal, with a note; the JSON is complete."""


def plain(text: str, style: str = "") -> Text:
    """The text, shown as it is even if a raw name holds rich's markup or terminal control
    characters.
    """
    return Text(printable(text), style)


def on_standard_output() -> Console:
    """A console on standard output; it does not wrap lines for a file or another program."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_LIMIT
    return console


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    more: str = "more (all of them with --json)",
) -> Table:
    """The first rows as a table, without columns that are empty; `#` ends the name of a column of
    numbers.
    """
    left_out = len(rows) - MAX_ROWS
    shown = [at for at in range(len(columns)) if any(row[at] != "" for row in rows)]
    made = Table(
        title=plain(title, style="table.title"),
        title_justify="left",
        caption=f"... and {left_out:,} {more}" if left_out > 0 else None,
        caption_justify="left",
        show_header=any(columns),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in (columns[at] for at in shown):
        # Where names are folded and a number still does not fit, it ends with an ellipsis: never
        # another number.
        if name.endswith("#"):
            made.add_column(plain(name[:-1]), justify="right", overflow="ellipsis", no_wrap=True)
        else:
            made.add_column(plain(name), overflow="fold", min_width=5)
    for row in rows[:MAX_ROWS]:
        cells = (row[at] for at in shown)
        made.add_row(*(f"{cell:,}" if isinstance(cell, int) else plain(cell) for cell in cells))
    return made
