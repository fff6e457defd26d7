"""Pure: curves and axes, which `templates/parts.html` draws."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MAX_POINTS = 300

_LARGEST, _LEAST = 1e90, 1e-90
"""No measured value is beyond these, and no axis for it overflows."""

Point = tuple[float, float]


class Plot(NamedTuple):
    """Curves over an x axis from `low` to `high` and a y axis as long as its ticks.

    `description` says what they show, for readers who can't see them.
    """

    title: str
    description: str
    x_label: str
    low: float
    high: float
    x_ticks: list[float]
    y_ticks: list[float]
    curves: dict[str, list[Point]]


def curves(title: str, series: Mapping[str, Sequence[Point]], *, x_label: str) -> Plot:
    """One curve per series, thinned to MAX_POINTS; leaves out values that are not finite, or
    as large as no measured value is."""
    drawn = {
        name: thinned([p for p in points if abs(p[1]) < _LARGEST])
        for name, points in series.items()
    }
    points = list(itertools.chain(*drawn.values())) or [(0.0, 0.0)]
    low = min(x for x, _ in points)
    high = max(low + 1, *(x for x, _ in points))
    courses = " ".join(_course(name, points) for name, points in drawn.items() if points)
    return Plot(
        title=title,
        description=courses or "No values.",
        x_label=x_label,
        low=low,
        high=high,
        x_ticks=[value for value in ticks(low, high) if low <= value <= high],
        y_ticks=ticks(min(y for _, y in points), max(y for _, y in points)),
        curves=drawn,
    )


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers, at least two, that span [low, high]."""
    if not high - low > 1e-9 * max(abs(low), _LEAST):
        high = low + (abs(low) if abs(low) > _LEAST else 1.0)
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most that many points: means of neighbours, and the last point itself."""
    if len(points) <= most:
        return list(points)
    groups = np.array_split(points[:-1], most - 1)
    return [*((x, y) for x, y in (group.mean(axis=0).tolist() for group in groups)), points[-1]]


def _course(name: str, points: Sequence[Point]) -> str:
    ys = [y for _, y in points]
    return f"{name}: from {ys[0]:.4g} to {ys[-1]:.4g}, between {min(ys):.4g} and {max(ys):.4g}."
