"""The tables of the stream benchmark, from the lines that it measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environment
from benchmarks.reading import BATCH

LIBRARIES = ["webdataset", "mosaicml-streaming", "litdata", "grain"]

COLUMNS = {
    "samples/s": ("rate", "{:,.0f}"),
    "CPU s per 1,000": ("cpu_s", "{:.3f}"),
    "of servers": ("servers_s", "{:.3f}"),
    "first batch, s": ("first_s", "{:.2f}"),
    "peak memory, MiB": ("peak_bytes", "{:,.0f}"),
}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians by contestant, the one that takes the least processor time first."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        mine = [line for line in lines if line["name"] == name]
        found[name] = {key: median(line[key] for line in mine) for key, _ in COLUMNS.values()}
        found[name]["peak_bytes"] /= 2**20
        found[name]["runs"] = len(mine)
    return dict(sorted(found.items(), key=lambda pair: pair[1]["cpu_s"]))


def table(found: dict[str, dict[str, float]]) -> str:
    """One row a contestant."""
    rows = [f"| reader | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, numbers in found.items():
        rows.append(
            f"| {name} |"
            f" {' | '.join(shown.format(numbers[key]) for key, shown in COLUMNS.values())} |"
        )
    return "\n".join(rows) + "\n"


ABC_COLUMNS = {
    "samples/s": ("rate", "{:,.0f}"),
    "after the first batch": ("rate_after", "{:,.0f}"),
    "first batch, s": ("first_s", "{:.2f}"),
    "waits for input": ("wait", "{:.1%}"),
    "CPU s per 1,000": ("cpu_s", "{:.3f}"),
    "of servers": ("servers_s", "{:.3f}"),
}
ABC_ROWS = {
    "A": "A, local files (ImageFolder, tuned)",
    "B": "B, local shards",
    "C": "C, far shards",
}
ABC_LOOPS = {"free": "does nothing", "device": "device"}


def abc_table(lines: Sequence[dict[str, Any]]) -> str:
    """Medians of A, B and C by either loop, the rate of the device,
    and what B has of A and C of B.
    """
    rows = [
        f"| loop | reader | {' | '.join(ABC_COLUMNS)} |",
        f"|---|---|{'---|' * len(ABC_COLUMNS)}",
    ]
    sentences = []
    for loop, shown in ABC_LOOPS.items():
        mine = [line for line in lines if line["loop"] == loop]
        found = {
            letter: {
                key: median(line[key] for line in mine if line["letter"] == letter)
                for key, _ in ABC_COLUMNS.values()
            }
            for letter in ABC_ROWS
        }
        for letter, numbers in found.items():
            cells = [form.format(numbers[key]) for key, form in ABC_COLUMNS.values()]
            rows.append(f"| {shown} | {ABC_ROWS[letter]} | {' | '.join(cells)} |")
        if loop == "device":
            rates = " and ".join(
                f"{rate:,.0f}" for rate in sorted({BATCH / line["device_s"] for line in mine})
            )
            shown = f"with a device that takes {rates} samples/s"
        else:
            shown = "with a loop that does nothing"
        ratios = [
            f"{a}/{b} is {found[a]['rate'] / found[b]['rate']:.2f} from the opening on and "
            f"{found[a]['rate_after'] / found[b]['rate_after']:.2f} after the first batch"
            for a, b in (("B", "A"), ("C", "B"))
        ]
        sentences.append(f"- {shown}: {'; '.join(ratios)}.")
    rounds = sum((line["loop"], line["letter"]) == ("free", "C") for line in lines)
    facts = f"{lines[0]['num_samples']:,} samples, medians, rounds: {rounds}."
    return "\n".join([*rows, "", facts, "", *sentences]) + "\n"


def write(path: Path, results: Path) -> None:
    """Replaces the tables between the marks of the page for which there are results."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    contents, runs = {}, []
    for kind in ("jpeg", "png"):
        if mine := [line for line in lines if line["kind"] == kind]:
            found = summary(mine)
            contents[kind] = table(found)
            runs += [int(one["runs"]) for one in found.values()]
    if contents:
        versions = environment.versions(environment.peers_python(), LIBRARIES)
        libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
        contents["facts"] = (
            f"{environment.today()}; {libraries}; medians of {min(runs)} to {max(runs)} runs.\n"
        )
    if abc := [line for line in lines if line["kind"] == "abc"]:
        contents["abc"] = f"{environment.today()}.\n\n{abc_table(abc)}"
    for name, content in contents.items():
        environment.write_between(path, name, content)
