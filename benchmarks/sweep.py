"""The rate of the stream for every combination of some settings, as a table and a plot.

    python -m benchmarks.sweep --axes shard=set-4,set-64 threads=1,2 batch=64,256 --output sweep

Every round reads some seconds at every point, and the figures are medians over the rounds. Every second round runs
backwards, so a machine that slows down or warms up favours no point. See docs/sweep.md.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

import shardset
from benchmarks.environment import machine

AXES = {
    "shard": "manifest_url",
    "q": "block_size",
    "w": "window",
    "L": "num_lanes",
    "threads": "num_threads",
    "batch": "batch_size",
}
"""The argument of a Stream that each axis sets."""
BAR, LABEL, WIDTH = 20, 420, 420
"""Sizes in the plot, in pixels."""

Point = dict[str, str | int]


@dataclass(frozen=True)
class Swept:
    """A point, and of each of its runs: samples and CPU seconds a second, seconds to the first batch, epochs read."""

    point: Point
    memory_bytes: int
    runs: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Samples a second of each run, the slowest first."""
        return sorted(run[0] for run in self.runs)

    def __str__(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.point.items())


def points_of(texts: Sequence[str]) -> list[Point]:
    """Every combination of the values in texts such as `q=4,8`; the last axis changes fastest."""
    axes: dict[str, list[str | int]] = {}
    for text in texts:
        axis, _, values = text.partition("=")
        if axis not in AXES or not values:
            raise SystemExit(f"--axes {text}: expected AXIS=VALUE,VALUE; there are {', '.join(AXES)}")
        axes[axis] = [value if axis == "shard" else int(value) for value in values.split(",")]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def open_stream(point: Point, fixed: dict[str, Any]) -> shardset.Stream:
    """The stream of one host with the settings of a point."""
    options = fixed | {AXES[axis]: value for axis, value in point.items()}
    return shardset.Stream(options.pop("manifest_url"), options.pop("split"), rank=0, world_size=1, **options)


def measure(stream: shardset.Stream, seconds: float) -> tuple[float, float, float, float]:
    """One run (see Swept) of so many seconds, and of one batch at least, after the first batch."""
    start = time.perf_counter()
    batches = stream.epochs()
    try:
        next(batches)  # waits for indexes and connections
        first, cpu, num_samples = time.perf_counter(), time.process_time(), 0
        while (now := time.perf_counter()) < first + seconds or not num_samples:
            num_samples += int((next(batches)[2]["weight"] > 0).sum())
        took, cpu = now - first, time.process_time() - cpu
    finally:
        batches.close()
    epochs = (num_samples + stream.batch_size) / stream.split.num_samples
    return num_samples / took, cpu / num_samples, first - start, epochs


def sweep(points: list[Point], fixed: dict[str, Any], *, seconds: float, rounds: int) -> list[Swept]:
    """Measures every point once a round. First opens every stream once, so numbers that don't fit end it at once."""
    results = [Swept(point, open_stream(point, fixed).memory.total) for point in points]
    for number in range(rounds):
        for result in results[:: -1 if number % 2 else 1]:
            result.runs.append(measure(open_stream(result.point, fixed), seconds))
            print(f"round {number + 1} of {rounds}, {result}: {result.runs[-1][0]:,.0f}/s", file=sys.stderr)
    return results


def table(results: list[Swept]) -> str:
    """A Markdown table of the medians, and the fastest point."""
    measured = ["samples/s", "slowest to fastest", "CPU s per 1,000", "first batch, s", "epochs read", "at most, MiB"]
    head = [*results[0].point, *measured]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for result in results:
        rate, cpu, first, epochs = (median(values) for values in zip(*result.runs, strict=True))
        cells = [*map(str, result.point.values()), f"{rate:,.0f}", f"{result.rates[0]:,.0f} to {result.rates[-1]:,.0f}"]
        cells += [f"{1000 * cpu:.3f}", f"{first:.2f}", f"{epochs:.2f}", f"{result.memory_bytes / 2**20:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    best = max(results, key=lambda result: median(result.rates))
    return "\n".join([*lines, "", f"Fastest: {best}: {median(best.rates):,.0f} samples/s"]) + "\n"


def plot(results: list[Swept]) -> str:
    """An SVG bar chart of the medians, each with a line from the slowest to the fastest run."""
    scale, size = WIDTH / max(result.rates[-1] for result in results), (LABEL + WIDTH + 90, BAR * (len(results) + 1))
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" font-size="12">']
    lines += ["<title>samples a second</title>", '<rect width="100%" height="100%" fill="white"/>']
    for top, result in zip(itertools.count(BAR // 2, BAR), results, strict=False):
        low, middle, high = (value * scale for value in (result.rates[0], median(result.rates), result.rates[-1]))
        lines += [
            f'<text x="{LABEL - 6}" y="{top + 14}" text-anchor="end">{escape(str(result)[-60:])}</text>',
            f'<rect x="{LABEL}" y="{top + 3}" width="{middle:.1f}" height="{BAR - 6}" fill="#2b6cb0"/>',
            f'<path d="M{LABEL + low:.1f} {top + BAR / 2}H{LABEL + high:.1f}" stroke="#1a202c"/>',
            f'<text x="{LABEL + high + 5:.1f}" y="{top + 14}">{median(result.rates):,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Prints the table; writes it and the plot with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", required=True, metavar="AXIS=VALUE,VALUE", help=", ".join(AXES))
    parser.add_argument("--manifest", help="the shard set, unless `shard` is an axis")
    parser.add_argument("--split", default="train")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a folder for sweep.md and sweep.svg")
    args = parser.parse_args()
    fixed = {"split": args.split, "batch_size": args.batch, "image_size": args.image_size}
    fixed |= {"manifest_url": args.manifest} if args.manifest else {}
    results = sweep(points_of(args.axes), fixed, seconds=args.seconds, rounds=args.rounds)
    print(page := f"{machine()}\n\n{table(results)}")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "sweep.md").write_text(f"{page}\n![samples a second](sweep.svg)\n")
        (args.output / "sweep.svg").write_text(plot(results))


if __name__ == "__main__":
    main()
