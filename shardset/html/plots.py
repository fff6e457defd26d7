"""Pure: numbers -> the geometry of a plot, in the units of its own view box. `templates/parts.html` draws it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from shardset.html.page import clip

WIDTH, HEIGHT = 380, 240
"""Small enough that letters of 12 units stay readable when a phone shrinks the plot to its width."""

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40
ROW = 20
LABEL_LETTERS = 18
MAX_POINTS = 300
MAX_DOTS = 30
"""Curves of more points have a dot at the last one only."""

Point = tuple[float, float]


class Tick(NamedTuple):
    """A mark of an axis: its position and its text."""

    at: float
    text: str


class Bar(NamedTuple):
    """A rectangle; `series` chooses its colour, `title` states its value."""

    x: float
    y: float
    width: float
    height: float
    series: int
    title: str


class Curve(NamedTuple):
    """A curve: `points` in the notation of SVG; `dots` are the points that show their value."""

    points: str
    dots: tuple[Bar, ...]
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot. `description` says in a sentence what it shows, for readers who can't see it.

    Plots that are not `upright` have a row per label: their bars grow to the right.
    """

    title: str
    description: str
    x_label: str
    series: tuple[str, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    bars: tuple[Bar, ...] = ()
    lines: tuple[Curve, ...] = ()
    upright: bool = True
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP

    @property
    def bottom(self) -> int:
        """The position of the x axis."""
        return self.height - BOTTOM


class _Axes(NamedTuple):
    """The linear axes of an upright plot; the y axis spans its marks."""

    x_low: float
    x_high: float
    y_marks: Sequence[float]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) * (WIDTH - RIGHT - LEFT) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        low, high = self.y_marks[0], self.y_marks[-1]
        return HEIGHT - BOTTOM - (value - low) * (HEIGHT - BOTTOM - TOP) / (high - low)

    def plot(self, title: str, description: str, x_label: str, series: Iterable[str]) -> Plot:
        """The plot without its bars and curves."""
        x_marks = [mark for mark in ticks(self.x_low, self.x_high) if self.x_low <= mark <= self.x_high]
        return Plot(
            title=title,
            description=description,
            x_label=x_label,
            series=tuple(series),
            x_ticks=tuple(Tick(round(self.x(mark), 2), short(mark)) for mark in x_marks),
            y_ticks=tuple(Tick(round(self.y(mark), 2), short(mark)) for mark in self.y_marks),
        )


def short(value: float) -> str:
    """A number for an axis: `1,200`, `1.5M`, `0.25`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def ticks(low: float, high: float, wanted: int = 5, *, whole: bool = False) -> list[float]:
    """About `wanted` round numbers, at least two, that span [low, high]; `whole` ones for counts."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = max((high - low) / max(1, wanted - 1), 1 if whole else 0)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(
        size * factor for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if size * factor >= rough * 0.999
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def rows(title: str, labels: Sequence[str], series: Mapping[str, Sequence[int]], *, x_label: str) -> Plot:
    """Horizontal bars, one row per label, the series stacked in it."""
    columns = list(zip(*series.values(), strict=True))
    totals = [sum(column) for column in columns]
    marks = ticks(0, max(totals, default=0), 4, whole=True)
    left = 14 + 7 * min(LABEL_LETTERS, max(map(len, labels), default=0))
    scale = (WIDTH - RIGHT - left) / marks[-1]
    bars = tuple(
        _bar(left + start * scale, TOP + ROW * row + 3, value * scale, ROW - 6, number, f"{label}, {name}: {value:,}")
        for row, (label, column) in enumerate(zip(labels, columns, strict=True))
        for number, name, start, value in _stack(series, column)
    )
    return Plot(
        title=title,
        description=_extremes(labels, totals),
        x_label=x_label,
        series=tuple(series),
        x_ticks=tuple(Tick(left + mark * scale, short(mark)) for mark in marks),
        y_ticks=tuple(Tick(TOP + ROW * (row + 0.5), clip(label, LABEL_LETTERS)) for row, label in enumerate(labels)),
        bars=bars,
        upright=False,
        height=TOP + ROW * len(labels) + BOTTOM,
        left=left,
    )


def histogram(title: str, edges: Sequence[float], series: Mapping[str, Sequence[int]], *, x_label: str) -> Plot:
    """Vertical bars between `edges`, the series stacked in each."""
    bins = list(itertools.pairwise(edges))
    columns = list(zip(*series.values(), strict=True))
    axes = _Axes(edges[0], edges[-1], ticks(0, max(map(sum, columns)), whole=True))
    base, bars = axes.y(0), []
    for (low, high), column in zip(bins, columns, strict=True):
        left, right, title_of_bin = axes.x(low), axes.x(high), f"{short(low)} to {short(high)}"
        for number, name, start, value in _stack(series, column):
            top, height = axes.y(start + value), base - axes.y(value)
            bars.append(
                _bar(left, top, max(1.0, right - left - 1), height, number, f"{title_of_bin}, {name}: {value:,}")
            )
    low, high = max(zip(bins, columns, strict=True), key=lambda each: sum(each[1]))[0]
    description = f"From {short(edges[0])} to {short(edges[-1])}; most are between {short(low)} and {short(high)}."
    return replace(axes.plot(title, description, x_label, series), bars=tuple(bars))


def curves(title: str, series: Mapping[str, Sequence[Point]], *, x_label: str) -> Plot:
    """One curve per series, thinned to MAX_POINTS; leaves out values that are not finite."""
    drawn = {name: thinned([p for p in points if math.isfinite(p[1])]) for name, points in series.items()}
    xs, ys = zip(*(list(itertools.chain(*drawn.values())) or [(0.0, 0.0)]), strict=True)
    axes = _Axes(min(xs), max(*xs, min(xs) + 1), ticks(min(ys), max(ys)))
    description = " ".join(_course(name, points) for name, points in drawn.items() if points) or "No values."
    lines = tuple(_curve(axes, name, points, number) for number, (name, points) in enumerate(drawn.items()))
    return replace(axes.plot(title, description, x_label, drawn), lines=lines)


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most that many points: means of neighbours, and the last point itself."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [*((fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups), points[-1]]


def spread(values: Sequence[float], bins: int = 24) -> list[float]:
    """Edges of bins of equal width from the smallest value to the largest; whole numbers get whole edges."""
    low, high = min(values), max(values)
    if all(value == int(value) for value in values):
        step = max(1, math.ceil((high - low + 1) / bins))
        return [low + step * number for number in range(math.ceil((high - low + 1) / step) + 1)]
    return [low + (high - low) * number / bins for number in range(bins)] + [high]


def _stack(names: Iterable[str], values: Sequence[int]) -> Iterator[tuple[int, str, int, int]]:
    """(series, name, sum of the values before it, value) of each value that is not 0."""
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        if value:
            yield number, name, sum(values[:number]), value


def _bar(x: float, y: float, width: float, height: float, series: int, title: str) -> Bar:
    return Bar(round(x, 2), round(y, 2), round(width, 2), round(height, 2), series, title)


def _curve(axes: _Axes, name: str, points: Sequence[Point], series: int) -> Curve:
    pixels = [(round(axes.x(x), 1), round(axes.y(y), 1)) for x, y in points]
    dots = tuple(
        Bar(*pixel, 0, 0, series, f"{name} at {short(x)}: {y:.5g}")
        for (x, y), pixel in zip(points, pixels, strict=True)
    )
    return Curve(" ".join(f"{x},{y}" for x, y in pixels), dots if len(dots) <= MAX_DOTS else dots[-1:], series)


def _course(name: str, points: Sequence[Point]) -> str:
    ys = [y for _, y in points]
    return f"{name}: from {ys[0]:.4g} to {ys[-1]:.4g}, between {min(ys):.4g} and {max(ys):.4g}."


def _extremes(labels: Sequence[str], totals: Sequence[int]) -> str:
    if not totals:
        return "No values."
    most, fewest = totals.index(max(totals)), totals.index(min(totals))
    return f"Most: {labels[most]} with {totals[most]:,}; fewest: {labels[fewest]} with {totals[fewest]:,}."
