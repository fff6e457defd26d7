"""`bench-input --sweep`: the rate of the training stream for every combination of some settings.

Every round runs the real stream for some seconds at every point, and the tables show medians over the rounds. So a
machine that is busy for a moment slows all points alike.
"""

import difflib
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any
from xml.sax.saxutils import escape

from shardset.errors import ConfigError
from shardset.storage.open import local_folder, open_storage
from shardset.stream.stream import Stream
from shardset.version import __version__
from trainer.config import TrainConfig
from trainer.data.splits import train_spec, train_transform

AXES: dict[str, tuple[str, int]] = {
    "shard": ("manifest", 0),
    "q": ("block_size", 1),
    "w": ("window", 0),
    "L": ("num_lanes", 1),
    "threads": ("num_threads", 1),
    "batch": ("global_batch_size", 1),
}
"""The setting of each axis, and its smallest value."""

Value = str | int
Point = dict[str, Value]
Axes = Mapping[str, Sequence[Value]]

FILES = ("sweep.json", "sweep.md", "sweep.svg")

ROW, LETTER, WIDTH, MARGIN, MAX_LABEL = 20, 7, 420, 10, 60
"""Sizes in the bar chart, in pixels; the last one in letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of one point: samples a second after the first batch, and CPU seconds per 1,000 samples.

    `first_s` is the time from the start of the stream to its first batch. `epochs` is how often it read the split;
    above 1 it read samples again.
    """

    rate: float
    cpu: float
    first_s: float
    epochs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """A point, its runs, and the most memory that its stream takes."""

    point: Point
    memory_bytes: int
    runs: list[SweepRun]

    @property
    def rate(self) -> float:
        """The median of the runs."""
        return median(run.rate for run in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest run."""
        return min(run.rate for run in self.runs), max(run.rate for run in self.runs)


def parse_axes(texts: Sequence[str]) -> dict[str, list[Value]]:
    """The values of each axis, from texts such as `["q=4,8", "threads=1,2"]`. Raises ConfigError."""
    axes: dict[str, list[Value]] = {}
    for setting in texts:
        name, equals, values_text = setting.partition("=")
        if name not in AXES:
            close = difflib.get_close_matches(name, AXES, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"--sweep {setting!r}: no axis {name!r}{hint}; there are {', '.join(AXES)}")
        if not equals or name in axes:
            raise ConfigError(
                f"--sweep {setting!r}: expected AXIS=VALUE,VALUE once for each axis, for example q=4,8,16"
            )
        values = [_value(name, text) for text in values_text.split(",")]
        if len(set(values)) < len(values):
            raise ConfigError(f"--sweep {setting!r}: a value is given twice; name each once")
        axes[name] = values
    return axes


def _value(axis: str, text: str) -> Value:
    if axis == "shard":
        if not text:
            raise ConfigError("--sweep shard: an empty name, expected manifests or their folders, separated by commas")
        return text
    least = AXES[axis][1]
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"--sweep {axis}: {text!r} is not a whole number from {least}")
    return int(text)


def points_of(axes: Axes) -> list[Point]:
    """Every combination of values; the last axis changes fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def open_stream(config: TrainConfig, point: Point) -> Stream:
    """The training stream of one host with the settings of a point. Its ConfigErrors name the point."""
    options: dict[str, Any] = {"global_batch_size": config.global_batch_size, "manifest": config.manifest}
    options |= {AXES[axis][0]: value for axis, value in point.items()}
    manifest = options.pop("manifest")
    try:
        return Stream(
            manifest,
            config.train_split,
            rank=0,
            world_size=1,
            seed=config.seed,
            image=train_spec(config.image),
            budget_bytes=config.budget_bytes,
            transform=train_transform(config.image),
            augment_repeats=config.image.augment_repeats,
            **options,
        )
    except ConfigError as error:
        raise ConfigError(f"{label_of(point)}: {error}") from error


def check(config: TrainConfig, axes: Axes) -> None:
    """Raises ConfigError if there is nothing to read, or if a setting would distort the rates."""
    if config.fake_data:
        raise ConfigError("--fake-data reads nothing, so there is nothing to sweep; leave one of them out")
    if config.cache_dir is not None:
        raise ConfigError("a sweep can't use the disk cache, which later rounds would find full; unset cache_dir")
    if (config.manifest is None) == ("shard" not in axes):
        raise ConfigError("name the shard set with --manifest URL, or several with --sweep shard=URL,URL, and not both")


def measure(stream: Stream, seconds: float, clock: Callable[[], float] = time.perf_counter) -> SweepRun:
    """The rate of a stream over some seconds after its first batch, and over at least one more batch."""
    start = clock()
    batches = stream.epochs()
    try:
        next(batches)
        # The first batch, which waits for indexes and connections, does not count.
        first, cpu, num_samples = clock(), time.process_time(), 0
        while (now := clock()) < first + seconds or not num_samples:
            num_samples += int((next(batches)[2]["weight"] > 0).sum())
        now, cpu = clock(), time.process_time() - cpu
    finally:
        batches.close()
    return SweepRun(
        rate=num_samples / (now - first),
        cpu=1000 * cpu / num_samples,
        first_s=first - start,
        epochs=(num_samples + stream.batch_size) / stream.split.num_samples,
    )


def sweep(
    config: TrainConfig, axes: Axes, *, seconds: float, rounds: int, log: Callable[[str], None]
) -> list[SweepResult]:
    """Measures every point once a round, in reverse order every second round. First opens every stream once."""
    check(config, axes)
    points = points_of(axes)
    results = [
        SweepResult(point=point, memory_bytes=open_stream(config, point).memory.total, runs=[]) for point in points
    ]
    log(f"{len(points)} points x {rounds} rounds x {seconds:g} s: at least {len(points) * rounds * seconds:.0f} s")
    start = time.perf_counter()
    for round_ in range(rounds):
        # Back and forth, so that a machine that slows down or warms up favours no point.
        for number, result in enumerate(results if round_ % 2 == 0 else results[::-1], start=1):
            result.runs.append(measure(open_stream(config, result.point), seconds))
            done = round_ * len(results) + number
            left = (time.perf_counter() - start) / done * (len(results) * rounds - done)
            rate = f"{label_of(result.point)}: {result.runs[-1].rate:,.0f}/s"
            log(f"{done} of {len(results) * rounds}, {left:.0f} s left: {rate}")
    return results


def label_of(point: Point) -> str:
    """A point in words."""
    return ", ".join(f"{axis}={value}" for axis, value in point.items())


def effects(results: Sequence[SweepResult]) -> dict[str, dict[Value, float]]:
    """The rate of each value of each axis, relative to the first value: a geometric mean over all other axes."""
    ratios: dict[str, dict[Value, float]] = {}
    for axis in results[0].point:
        rates: dict[Value, list[float]] = {}
        for result in results:
            rates.setdefault(result.point[axis], []).append(result.rate)
        means = {value: geometric_mean(each) for value, each in rates.items()}
        first = next(iter(means.values()))
        ratios[axis] = {value: mean / first for value, mean in means.items()}
    return ratios


def table(results: Sequence[SweepResult]) -> str:
    """A Markdown table of the medians, in the order of the points."""
    axes = list(results[0].point)
    head = [
        *axes,
        "samples/s",
        "slowest to fastest",
        "CPU s per 1,000",
        "first batch, s",
        "epochs read",
        "at most, MiB",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for result in results:
        low, high = result.spread
        cpu, first, epochs = (
            median(getattr(run, name) for run in result.runs) for name in ("cpu", "first_s", "epochs")
        )
        cells = [*map(str, result.point.values()), f"{result.rate:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{cpu:.3f}"]
        cells += [f"{first:.2f}", f"{epochs:.2f}", f"{result.memory_bytes / 2**20:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(results: Sequence[SweepResult]) -> list[str]:
    """The fastest point, and the effect of each axis by itself."""
    best = max(results, key=lambda result: result.rate)
    lines = [f"fastest: {label_of(best.point)}: {best.rate:,.0f} samples/s"]
    for axis, values in effects(results).items():
        (first, _), *others = values.items()
        if others:
            parts = ", ".join(f"{value}: {ratio:.2f}" for value, ratio in others)
            lines.append(f"{axis}, times the rate of {first}, all else alike: {parts}")
    if any(run.epochs > 1 for result in results for run in result.runs):
        lines.append("some points read the split more than once: later passes find it in the memory of the machine")
    return lines


def page(results: Sequence[SweepResult], facts: Mapping[str, Any]) -> str:
    """The Markdown page."""
    listed = "\n".join(f"- {sentence}" for sentence in summary(results))
    stated = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"# A sweep of the input\n\n{stated}\n\n{table(results)}\n{listed}\n\n![samples a second](sweep.svg)\n"


def plot(results: Sequence[SweepResult]) -> str:
    """An SVG bar chart of the medians, each with a line from the slowest to the fastest run."""
    title = "samples a second on this host; the line is the spread of the runs"
    left = MARGIN + LETTER * max(len(_label_of(result)) for result in results)
    scale = WIDTH / max(result.spread[1] for result in results)
    size = f'width="{left + WIDTH + 90}" height="{2 * MARGIN + ROW * (len(results) + 1)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 12}" font-weight="bold">{title}</text>',
    ]
    for number, result in enumerate(results, start=1):
        lines += _bar(result, left + 6, MARGIN + ROW * number, scale)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(result: SweepResult, left: float, top: float, scale: float) -> list[str]:
    low, high = (left + value * scale for value in result.spread)
    middle = top + ROW / 2
    return [
        f'<text x="{left - 6}" y="{top + 14}" text-anchor="end">{escape(_label_of(result))}</text>',
        f'<rect x="{left}" y="{top + 3}" width="{result.rate * scale:.1f}" height="{ROW - 6}" fill="#2b6cb0"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="#1a202c"/>',
        f'<text x="{high + 5:.1f}" y="{top + 14}">{result.rate:,.0f}</text>',
    ]


def _label_of(result: SweepResult) -> str:
    label = label_of(result.point)
    return label if len(label) <= MAX_LABEL else "…" + label[1 - MAX_LABEL :]


def to_json(results: Sequence[SweepResult], facts: Mapping[str, Any]) -> dict[str, Any]:
    """All measurements as JSON values."""
    points = [{**asdict(result), "rate": result.rate} for result in results]
    ratios = {axis: {str(value): ratio for value, ratio in values.items()} for axis, values in effects(results).items()}
    return {"facts": dict(facts), "points": points, "effects": ratios}


def facts_of(config: TrainConfig, axes: Axes, *, seconds: float, rounds: int) -> dict[str, Any]:
    """Everything but the axes that the rates depend on."""
    image = config.image
    fixed = {
        "manifest": config.manifest,
        "split": config.train_split,
        "batch": config.global_batch_size if "batch" not in axes else None,
        "images": f"{image.size} x {image.size}, {image.train_crop} crop",
    }
    return {
        "shardset": __version__,
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "method": f"median of {rounds} rounds of {seconds:g} s, interleaved",
        **{name: value for name, value in fixed.items() if value is not None},
    }


def run(
    config: TrainConfig, texts: Sequence[str], *, seconds: float, rounds: int, output: str | None, as_json: bool
) -> None:
    """Measures, prints the results, and writes FILES into a local folder."""
    if not 0 < seconds < float("inf") or rounds < 1:
        raise ConfigError(f"--seconds is {seconds:g} and --rounds is {rounds}, expected more than 0 s and at least 1")
    axes = parse_axes(texts)
    folder = _folder(output)
    results = sweep(config, axes, seconds=seconds, rounds=rounds, log=lambda line: print(line, file=sys.stderr))
    facts = facts_of(config, axes, seconds=seconds, rounds=rounds)
    values = json.dumps(to_json(results, facts), indent=1)
    print(values if as_json else "\n".join([table(results), *summary(results)]), flush=True)
    if folder is not None:
        for name, text in zip(FILES, (values + "\n", page(results, facts), plot(results)), strict=True):
            with open_storage(str(folder)).writer(name) as writer:
                writer.write(text.encode())


def _folder(output: str | None) -> Path | None:
    """The output folder, created. Raises ConfigError if it holds a sweep already."""
    if output is None:
        return None
    folder = local_folder(output, "--output")
    if (folder / FILES[0]).exists():
        raise ConfigError(f"--output {output}: it holds a sweep already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
