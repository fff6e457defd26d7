"""Draws named values with their spreads as a bar chart, a standalone SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

ROW, LETTER, WIDTH, MARGIN, MAX_LABEL = 20, 7, 420, 10, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """One bar: its name, its length, and the smallest and largest value behind it."""

    label: str
    value: float
    spread: tuple[float, float]


def bars(title: str, rows: Sequence[BarRow]) -> str:
    """An SVG with one bar a row, and a line on each bar from its smallest to its largest value."""
    left = MARGIN + LETTER * max(len(_cut(row.label)) for row in rows)
    scale = WIDTH / max(row.spread[1] for row in rows)
    height = MARGIN + ROW * (len(rows) + 1) + MARGIN
    size = f'width="{left + WIDTH + 90}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 12}" font-weight="bold">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows, start=1):
        parts += _bar(row, left + 6, MARGIN + ROW * number, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: BarRow, left: float, top: float, scale: float) -> list[str]:
    low, high = (left + value * scale for value in row.spread)
    middle = top + ROW / 2
    return [
        f'<text x="{left - 6}" y="{top + 14}" text-anchor="end">{escape(_cut(row.label))}</text>',
        f'<rect x="{left}" y="{top + 3}" width="{row.value * scale:.1f}" height="{ROW - 6}" fill="#2b6cb0"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="#1a202c"/>',
        f'<text x="{high + 5:.1f}" y="{top + 14}">{row.value:,.0f}</text>',
    ]


def _cut(label: str) -> str:
    return label if len(label) <= MAX_LABEL else "…" + label[1 - MAX_LABEL :]
