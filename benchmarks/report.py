"""The page of the build benchmark: a table and a plot for each input, from the raw measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.sax.saxutils import escape

from benchmarks.measuring import Run

PLAIN = "shardset, --verify none"
CHECKED = "shardset, --verify decode"
DECODING = "decoding alone, full size"
DECODING_EIGHTH = "decoding alone, 1/8 size"
ENCODING = "encoding alone"
HASHING = "reading, hashing and writing alone"
STORED = "MosaicML MDSWriter, PNGs not compressed"
TITLES = {
    "cifar": "CIFAR-size pictures from the published form of archive, encoded as PNG",
    "folders": "JPEGs of about 110 KB in class folders",
    "imagenet": "The same JPEGs in a tar of tars, as ImageNet is published",
}
_COLOURS = {"ours": "#2b6cb0", "peer": "#a0aec0", "tuned": "#a0aec0", "limit": "#e2e8f0"}
_BAR, _LEFT, _WIDTH = 20, 250, 420


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All runs of one contestant on one input: pairs of (whole input, a fifth), which hold `num_images`."""

    kind: str
    name: str
    role: str
    shuffles: bool
    num_images: tuple[int, int]
    runs: list[tuple[Run, Run]]

    @property
    def seconds(self) -> float:
        """Median of a whole run."""
        return median(whole.seconds for whole, _ in self.runs)

    @property
    def rate(self) -> float:
        """Images a second of a whole run."""
        return self.num_images[0] / self.seconds

    @property
    def steady_rate(self) -> float | None:
        """Images a second without the start-up; None if the difference is lost in noise."""
        return self._additional("seconds")

    @property
    def best_steady_rate(self) -> float | None:
        """The same from the fastest run of each kind, which other work on the machine slowed least."""
        return self._additional("seconds", min)

    @property
    def steady_cpu_rate(self) -> float | None:
        """Images a second of processor time, start-up left out; other load on the machine hardly changes it."""
        return self._additional("cpu_s")

    @property
    def first_byte_s(self) -> float | None:
        """Median time to the first byte of output, of the runs on a fifth."""
        found = [part.first_byte_s for _, part in self.runs if part.first_byte_s is not None]
        return median(found) if found else None

    @property
    def peak_bytes(self) -> float:
        """Median peak memory of the largest process."""
        return median(whole.peak_bytes for whole, _ in self.runs)

    @property
    def megabytes(self) -> float:
        """What a whole run wrote, in MB."""
        return median(whole.num_bytes for whole, _ in self.runs) / 1e6

    def _additional(self, cost: str, of: Callable[[Iterable[float]], float] = median) -> float | None:
        additional = of(getattr(whole, cost) for whole, _ in self.runs) - of(
            getattr(part, cost) for _, part in self.runs
        )
        return (self.num_images[0] - self.num_images[1]) / additional if additional > 0 else None


def write(path: Path, facts: Mapping[str, str], results: Sequence[Result]) -> None:
    """`.md` and `.svg`."""
    path.with_suffix(".md").write_text(page(path.name, facts, results))
    path.with_suffix(".svg").write_text(plot(results))


def page(name: str, facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """The Markdown page."""
    machine = facts["machine"]
    others = ", ".join(
        f"{key} {value}" for key, value in facts.items() if key not in ("machine", "commit", "folder", "load")
    )
    text = f"""# How fast shards are made

Written by `python -m benchmarks.build`; medians, the contestants in turns.
{machine}; {others}; commit {facts["commit"]} at the last call; files in `{facts["folder"]}`, read before (warm).
{facts["load"]}

- **whole**: the process from its start to its end. **steady**: the additional images of the whole input against a
  fifth of it, by the additional time (of the medians); so it holds all work on images and no start-up. Where other
  work slowed some runs, the difference of two medians says little; that of the fastest runs stands beside it.
- **CPU**: processor time of all processes for an additional image. On a machine with other work to do it is the
  figure that repeats best. The limits "alone" use all cores; `tar cf` uses one.
- **first byte**: when the output folder first held one, on a fifth of the input; with `--verify decode` that is after
  all images were decoded, by design.
- **peak**: resident memory of the largest process. Tools that import torch carry about 450 MiB of it.
- `--verify decode` decodes JPEGs at an eighth of the size: all compressed data is read, so it finds what a full decode
  finds. It is compared with decoding alone of the same kind and at full size.
- What shuffles got a list shuffled with a seed, and read each sample where it is stored. Shards of this project
  also carry a SHA-256 and two CRC32C, an index, and were flushed to the disk (`fsync`); nobody else's did.
- Peers make PNGs as Pillow does by default, compressed, which `encoding alone` does too; the build stores them without
  compression, and so does the contestant of that name.
- Builds ran with `--no-report`, since nobody else makes a page about the set; it looks at 4,000 images at most.

![steady rates of the fastest runs]({name}.svg)
"""
    for kind in dict.fromkeys(one.kind for one in results):
        text += f"\n## {TITLES[kind]}\n\n{table([one for one in results if one.kind == kind])}"
    return text


def table(results: Sequence[Result]) -> str:
    """One row for each contestant, and the ratios with their targets."""
    lines = [
        "| | images | runs | shuffled | whole, s | whole, images/s | steady, images/s | of the fastest runs "
        "| CPU, µs an image | first byte, s | peak, MiB | written, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        shuffled = "yes" if one.shuffles else "no" if one.role == "peer" else ""
        cpu = _number(one.steady_cpu_rate and 1e6 / one.steady_cpu_rate)
        first = "" if one.first_byte_s is None else f"{one.first_byte_s:.1f}"
        numbers = [
            f"{one.seconds:.1f}", _number(one.rate), _number(one.steady_rate), _number(one.best_steady_rate), cpu,
            first, _number(one.peak_bytes / 2**20), _number(one.megabytes),
        ]  # fmt: skip
        lines.append(f"| {one.name} | {one.num_images[0]:,} | {len(one.runs)} | {shuffled} | {' | '.join(numbers)} |")
    return "\n".join([*lines, "", *sentences(results), ""])


def sentences(results: Sequence[Result]) -> list[str]:
    """The ratios to the limits, and to the best peer that also shuffles."""
    found = {one.name: one for one in results}
    peers = [one for one in results if one.role == "peer" and one.shuffles]
    if not peers or not {PLAIN, CHECKED} <= {*found}:
        return []
    plain, checked = found[PLAIN], found[CHECKED]
    best = max(peers, key=lambda one: one.best_steady_rate or 0)
    pairs = [(plain, "tar cf"), (plain, HASHING), (plain, ENCODING), (plain, STORED)]
    pairs += [(checked, DECODING_EIGHTH), (checked, DECODING)]
    lines = [
        f"- {a.name}: {_ratio(a, found[b])} of {b}, steady; of the fastest runs {_best_ratio(a, found[b])}, "
        f"by processor time {_cpu_ratio(a, found[b])}."
        for a, b in pairs
        if b in found
    ]
    lines += [
        f"- {one.name}: {_ratio(one, best)} times the best peer that shuffles ({best.name}), steady; "
        f"of the fastest runs {_best_ratio(one, best)}, by processor time {_cpu_ratio(one, best)}."
        for one in (plain, *(found[name] for name in [HASHING] if name in found))
    ]
    quickest = max(peers, key=lambda one: one.rate)
    lines.append(
        f"- {plain.name}: {plain.rate / quickest.rate:.2f} times the quickest peer that shuffles ({quickest.name}), "
        "whole process."
    )
    return lines


def plot(results: Sequence[Result]) -> str:
    """Bars of the steady rates of the fastest runs, one panel an input, as an SVG."""
    parts, top = [], 10
    for kind in dict.fromkeys(one.kind for one in results):
        mine = [one for one in results if one.kind == kind]
        parts += _panel(TITLES[kind], mine, top)
        top += (len(mine) + 2) * _BAR
    size = f'width="{_LEFT + _WIDTH + 90}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _panel(title: str, results: Sequence[Result], top: int) -> list[str]:
    largest = max([1.0, *(one.best_steady_rate or 0 for one in results)])
    parts = [
        f'<text x="10" y="{top + 14}" font-weight="bold">{escape(title)}, steady images/s of the fastest runs</text>'
    ]
    for number, one in enumerate(results, start=1):
        y, rate = top + number * _BAR, one.best_steady_rate or 0
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 14}" text-anchor="end">{escape(one.name)}</text>')
        width = f"{_WIDTH * rate / largest:.1f}"
        parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{width}" height="{_BAR - 6}" fill="{_COLOURS[one.role]}"/>')
        parts.append(f'<text x="{_LEFT + 5 + float(width):.1f}" y="{y + 14}">{_number(one.best_steady_rate)}</text>')
    return parts


def _ratio(a: Result, b: Result) -> str:
    return _quotient(a.steady_rate, b.steady_rate)


def _best_ratio(a: Result, b: Result) -> str:
    return _quotient(a.best_steady_rate, b.best_steady_rate)


def _cpu_ratio(a: Result, b: Result) -> str:
    return _quotient(a.steady_cpu_rate, b.steady_cpu_rate)


def _quotient(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "not measurable"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
