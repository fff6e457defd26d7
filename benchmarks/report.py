"""The tables of the build benchmark, one for each input, from the raw measurements."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.environment import write_between
from benchmarks.measuring import Run

PLAIN = "shardset, --verify none"
CHECKED = "shardset, --verify decode"
DECODING = "decoding alone, 1/8 size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All runs of one contestant on one input: pairs of (whole input, a fifth), which hold
    `num_images`.
    """

    kind: str
    name: str
    role: str
    shuffles: bool
    num_images: list[int]
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
    def steady_cpu_rate(self) -> float | None:
        """Images a second of processor time, start-up left out; other load on the machine hardly
        changes it.
        """
        return self._additional("cpu_s")

    @property
    def peak_bytes(self) -> float:
        """Median peak memory of the largest process."""
        return median(whole.peak_bytes for whole, _ in self.runs)

    @property
    def megabytes(self) -> float:
        """What a whole run wrote, in MB."""
        return median(whole.num_bytes for whole, _ in self.runs) / 1e6

    def _additional(self, cost: str) -> float | None:
        whole, part = (
            median(getattr(run, cost) for run in runs) for runs in zip(*self.runs, strict=True)
        )
        return (self.num_images[0] - self.num_images[1]) / (whole - part) if whole > part else None


def write(page: Path, results: Path) -> None:
    """The tables between the marks of the page,
    from lines of facts (the last count) and of runs.
    """
    facts: dict[str, str] = {}
    found: dict[tuple[str, str], Result] = {}
    for line in map(json.loads, results.read_text().splitlines()):
        if "facts" in line:
            facts = line["facts"]
            continue
        whole, part = (Run(**run) for run in line.pop("runs"))
        found.setdefault((line["kind"], line["name"]), Result(**line, runs=[])).runs.append(
            (whole, part)
        )
    versions = ", ".join(
        f"{key} {value}"
        for key, value in facts.items()
        if key not in ("machine", "commit", "folder", "load")
    )
    write_between(
        page,
        "facts",
        f"{facts['machine']}; {versions}; commit {facts['commit']} at the last call; files in"
        f" `{facts['folder']}`, read before (warm).\n{facts['load']}\n",
    )
    for kind in dict.fromkeys(kind for kind, _ in found):
        write_between(page, kind, table([one for one in found.values() if one.kind == kind]))


def table(results: Sequence[Result]) -> str:
    """One row for each contestant, and the ratios."""
    lines = [
        (
            "| | images | runs | shuffled | whole, s | whole, images/s | steady, images/s | CPU, µs"
            " an image | peak, MiB | written, MB |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        shuffled = "yes" if one.shuffles else "no" if one.role == "peer" else ""
        cpu = one.steady_cpu_rate and 1e6 / one.steady_cpu_rate
        values = [one.rate, one.steady_rate, cpu, one.peak_bytes / 2**20, one.megabytes]
        numbers = " | ".join("" if value is None else f"{value:,.0f}" for value in values)
        lines.append(
            f"| {one.name} | {one.num_images[0]:,} | {len(one.runs)} | {shuffled} |"
            f" {one.seconds:.1f} | {numbers} |"
        )
    return "\n".join([*lines, "", *sentences(results), ""])


def sentences(results: Sequence[Result]) -> list[str]:
    """The ratios to the limits, and to the best peers that also shuffle."""
    found = {one.name: one for one in results}
    peers = [one for one in results if one.role == "peer" and one.shuffles]
    if not peers or not {PLAIN, CHECKED} <= {*found}:
        return []
    plain, checked = found[PLAIN], found[CHECKED]
    pairs = [(plain, "tar cf"), (checked, DECODING)]
    lines = [
        f"- {a.name}: {_quotient(a.steady_rate, found[b].steady_rate)} of {b}, steady; "
        f"by processor time {_quotient(a.steady_cpu_rate, found[b].steady_cpu_rate)}."
        for a, b in pairs
        if b in found
    ]
    for how, rate in (
        ("steady", "steady_rate"),
        ("by processor time", "steady_cpu_rate"),
        ("whole process", "rate"),
    ):
        best = max(peers, key=lambda one: getattr(one, rate) or 0)
        ratio = _quotient(getattr(plain, rate), getattr(best, rate))
        lines.append(
            f"- {plain.name}: {ratio} times the best peer that shuffles ({best.name}), {how}."
        )
    return lines


def _quotient(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "not measurable"
