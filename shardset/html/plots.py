"""Pure: numbers -> the geometry of a plot, in the units of its own view box. `templates/page.html` draws it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 380, 240
"""Small enough that letters of 12 units stay readable when a telephone shrinks the plot to its width."""

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40
ROW = 20
LABEL_LETTERS = 18
MAX_POINTS = 300

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of an axis: where it stands and what it says."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle; `series` chooses its colour, `title` says its value in words."""

    x: float
    y: float
    width: float
    height: float
    series: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve: `points` as SVG wants them; a few points of it are dots that say their value."""

    points: str
    dots: tuple[Bar, ...]
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot. `description` says in a sentence what is to be seen, for those who don't see it."""

    title: str
    description: str
    x_label: str
    y_label: str
    series: tuple[str, ...]
    height: int
    left: int
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    bars: tuple[Bar, ...] = ()
    lines: tuple[Curve, ...] = ()
    width: int = WIDTH
    right: int = WIDTH - RIGHT
    top: int = TOP

    @property
    def bottom(self) -> int:
        """Where the x axis stands."""
        return self.height - BOTTOM


def short(value: float) -> str:
    """A number for an axis: `1,200`, `1.5M`, `0.25`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def ticks(low: float, high: float, wanted: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers that span [low, high], about as many as wanted and at least two; `whole` ones for counts."""
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
    """Horizontal bars, one row a label, the series stacked in it."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    marks = ticks(0, max(totals, default=0) or 1, 4, whole=True)
    left = 14 + 7 * min(LABEL_LETTERS, max(map(len, labels), default=0))
    scale = (WIDTH - RIGHT - left) / marks[-1]
    bars = []
    for row in range(len(labels)):
        start = 0
        for number, (name, values) in enumerate(series.items()):
            if values[row]:
                bars.append(
                    Bar(
                        x=round(left + start * scale, 2),
                        y=TOP + ROW * row + 3,
                        width=round(values[row] * scale, 2),
                        height=ROW - 6,
                        series=number,
                        title=f"{labels[row]}, {name}: {values[row]:,}",
                    )
                )
            start += values[row]
    return Plot(
        title=title,
        description=_extremes(labels, totals),
        x_label=x_label,
        y_label="",
        series=tuple(series),
        height=TOP + ROW * len(labels) + BOTTOM,
        left=left,
        x_ticks=tuple(Tick(at=left + mark * scale, text=short(mark)) for mark in marks),
        y_ticks=tuple(Tick(at=TOP + ROW * (row + 0.5), text=_cut(label)) for row, label in enumerate(labels)),
        bars=tuple(bars),
    )


def histogram(title: str, edges: Sequence[float], series: Mapping[str, Sequence[int]], *, x_label: str) -> Plot:
    """Vertical bars between `edges`, the series stacked in each."""
    counts = list(zip(*series.values(), strict=True))
    marks = ticks(0, max((sum(count) for count in counts), default=0) or 1, whole=True)
    across = (WIDTH - RIGHT - LEFT) / ((edges[-1] - edges[0]) or 1)
    up = (HEIGHT - BOTTOM - TOP) / marks[-1]
    bars = []
    for bin_, count in enumerate(counts):
        x, width = LEFT + (edges[bin_] - edges[0]) * across, (edges[bin_ + 1] - edges[bin_]) * across
        base = HEIGHT - BOTTOM
        for number, (name, value) in enumerate(zip(series, count, strict=True)):
            base -= value * up
            if value:
                bars.append(
                    Bar(
                        x=round(x, 2),
                        y=round(base, 2),
                        width=round(max(1.0, width - 1), 2),
                        height=round(value * up, 2),
                        series=number,
                        title=f"{short(edges[bin_])} to {short(edges[bin_ + 1])}, {name}: {value:,}",
                    )
                )
    x_marks = [mark for mark in ticks(edges[0], edges[-1]) if edges[0] <= mark <= edges[-1]]
    most = max(range(len(counts)), key=lambda bin_: sum(counts[bin_]), default=0)
    return Plot(
        title=title,
        description=f"From {short(edges[0])} to {short(edges[-1])}; most are between {short(edges[most])} and "
        f"{short(edges[most + 1])}.",
        x_label=x_label,
        y_label="",
        series=tuple(series),
        height=HEIGHT,
        left=LEFT,
        x_ticks=tuple(Tick(at=round(LEFT + (mark - edges[0]) * across, 2), text=short(mark)) for mark in x_marks),
        y_ticks=tuple(Tick(at=round(HEIGHT - BOTTOM - mark * up, 2), text=short(mark)) for mark in marks),
        bars=tuple(bars),
    )


def curves(title: str, series: Mapping[str, Sequence[Point]], *, x_label: str, y_label: str = "") -> Plot:
    """One line a series; of more than MAX_POINTS points each is the mean of several. What is not finite is left out."""
    drawn = {name: thinned([p for p in points if math.isfinite(p[1])]) for name, points in series.items()}
    xs = [x for points in drawn.values() for x, _ in points] or [0.0]
    ys = [y for points in drawn.values() for _, y in points] or [0.0]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    marks = ticks(min(ys), max(ys))
    across = (WIDTH - RIGHT - LEFT) / (x_high - x_low)
    up = (HEIGHT - BOTTOM - TOP) / (marks[-1] - marks[0])

    def pixel(point: Point) -> Point:
        return round(LEFT + (point[0] - x_low) * across, 1), round(HEIGHT - BOTTOM - (point[1] - marks[0]) * up, 1)

    x_marks = [mark for mark in ticks(x_low, x_high) if x_low <= mark <= x_high]
    return Plot(
        title=title,
        description=" ".join(_course(name, points) for name, points in drawn.items() if points) or "No values.",
        x_label=x_label,
        y_label=y_label,
        series=tuple(drawn),
        height=HEIGHT,
        left=LEFT,
        x_ticks=tuple(Tick(at=pixel((mark, 0))[0], text=short(mark)) for mark in x_marks),
        y_ticks=tuple(Tick(at=pixel((0, mark))[1], text=short(mark)) for mark in marks),
        lines=tuple(
            Curve(
                points=" ".join(f"{x},{y}" for x, y in map(pixel, points)),
                dots=tuple(_dot(name, point, pixel(point), number) for point in _dotted(points)),
                series=number,
            )
            for number, (name, points) in enumerate(drawn.items())
        ),
    )


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most that many points: neighbours are replaced by their mean, and the last point stays what it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [*((_mean([p[0] for p in group]), _mean([p[1] for p in group])) for group in groups), points[-1]]


def spread(values: Sequence[float], bins: int = 24) -> list[float]:
    """Edges of equally wide bins from the smallest value to the largest; whole numbers get whole edges."""
    low, high = min(values), max(values)
    if all(value == int(value) for value in values):
        step = max(1, math.ceil((high - low + 1) / bins))
        return [low + step * number for number in range(math.ceil((high - low + 1) / step) + 1)]
    return [low + (high - low) * number / bins for number in range(bins)] + [high]


def _dotted(points: Sequence[Point]) -> Sequence[Point]:
    """The points that get a dot: all where they are few, else the last."""
    return points if len(points) <= 30 else points[-1:]


def _dot(name: str, point: Point, at: Point, series: int) -> Bar:
    title = f"{name} at {short(point[0])}: {point[1]:.5g}"
    return Bar(x=at[0], y=at[1], width=0, height=0, series=series, title=title)


def _course(name: str, points: Sequence[Point]) -> str:
    low, high = min(y for _, y in points), max(y for _, y in points)
    return f"{name}: from {points[0][1]:.4g} to {points[-1][1]:.4g}, between {low:.4g} and {high:.4g}."


def _extremes(labels: Sequence[str], totals: Sequence[int]) -> str:
    if not totals:
        return "No values."
    most, fewest = totals.index(max(totals)), totals.index(min(totals))
    return f"Most: {labels[most]} with {totals[most]:,}; fewest: {labels[fewest]} with {totals[fewest]:,}."


def _cut(label: str) -> str:
    return label if len(label) <= LABEL_LETTERS else label[: LABEL_LETTERS - 1] + "…"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
