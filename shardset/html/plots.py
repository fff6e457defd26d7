"""Pure: curves as the geometry that `templates/parts.html` draws."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 380, 240
"""Small enough that letters of 12 units stay readable when a phone shrinks the plot to its width.
"""

LEFT, RIGHT, TOP, BOTTOM = 52, 366, 14, 200
"""The frame of the curves."""

MAX_POINTS = 300
MAX_DOTS = 30
"""Curves of more points have a dot at the last one only."""

Point = tuple[float, float]


class Mark(NamedTuple):
    """A position in the units of the plot, and its text: of a mark of an axis, or of a dot of a
    curve.
    """

    x: float
    y: float
    text: str


class Curve(NamedTuple):
    """A curve: `points` in the notation of SVG; `dots` are the points that show their value."""

    points: str
    dots: Sequence[Mark]


class Plot(NamedTuple):
    """Curves over one x axis. `description` says what they show, for readers who can't see them."""

    title: str
    description: str
    x_label: str
    x_marks: list[Mark]
    y_marks: list[Mark]
    curves: dict[str, Curve]


def curves(title: str, series: Mapping[str, Sequence[Point]], *, x_label: str) -> Plot:
    """One curve per series, thinned to MAX_POINTS; leaves out values that are not finite."""
    drawn = {
        name: thinned([p for p in points if math.isfinite(p[1])]) for name, points in series.items()
    }
    points = list(itertools.chain(*drawn.values())) or [(0.0, 0.0)]
    low = min(x for x, _ in points)
    high = max(low + 1, *(x for x, _ in points))
    levels = ticks(min(y for _, y in points), max(y for _, y in points))

    def x(value: float) -> float:
        return round(LEFT + (value - low) * (RIGHT - LEFT) / (high - low), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (value - levels[0]) * (BOTTOM - TOP) / (levels[-1] - levels[0]), 1)

    def curve(name: str, points: Sequence[Point]) -> Curve:
        dots = [Mark(x(px), y(py), f"{name} at {short(px)}: {py:.5g}") for px, py in points]
        return Curve(
            " ".join(f"{dot.x},{dot.y}" for dot in dots),
            dots if len(dots) <= MAX_DOTS else dots[-1:],
        )

    return Plot(
        title=title,
        description=" ".join(_course(name, points) for name, points in drawn.items() if points)
        or "No values.",
        x_label=x_label,
        x_marks=[
            Mark(x(value), BOTTOM, short(value))
            for value in ticks(low, high)
            if low <= value <= high
        ],
        y_marks=[Mark(LEFT, y(value), short(value)) for value in levels],
        curves={name: curve(name, points) for name, points in drawn.items()},
    )


def short(value: float) -> str:
    """A number for an axis: `1,200`, `0.25`."""
    return f"{value:,.10g}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers, at least two, that span [low, high]."""
    if not high - low > 1e-9 * abs(low):
        high = low + (abs(low) or 1.0)
    rough = (high - low) / (wanted - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most that many points: means of neighbours, and the last point itself."""
    if len(points) <= most:
        return list(points)
    groups = np.array_split(points[:-1], most - 1)
    return [*((x, y) for x, y in (group.mean(axis=0).tolist() for group in groups)), points[-1]]


def _course(name: str, points: Sequence[Point]) -> str:
    ys = [y for _, y in points]
    return f"{name}: from {ys[0]:.4g} to {ys[-1]:.4g}, between {min(ys):.4g} and {max(ys):.4g}."
