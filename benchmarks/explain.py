"""Measures `python -m trainer explain`: orders of 1.28 million to a thousand million samples, and the digits.

    python -m benchmarks.explain --write docs/explain.md

Milliseconds of processor time: nothing waits, and nothing is read but, for the digits, the indexes. The whole command
is a process of its own, from start to exit; its imports are measured alone. With `--write` the table of the page is
replaced.
"""

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.environment import commit, machine
from examples.demo import write_digits
from pipelines.build import build
from pipelines.config import BuildConfig
from shardset.order.epoch import Order
from shardset.stream.timetable import Timetable
from trainer.config import TrainConfig
from trainer.recipes import digits_smoke
from trainer.tools.explain import explain_step, timetable_of

SIZES = (1_280_000, 128_000_000, 1_000_000_000)
SHARD_SIZE = 2000
RUNS, RUNS_OF_LARGE, LARGE = 9, 3, 500_000_000
IMPORTS = "import trainer.cli, trainer.tools.explain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians in milliseconds; None where it was not measured.

    `first` asks for a step of an epoch that was not asked about before, `sample` and `fresh` for the step of a sample
    in a known epoch and in a new one, `whole` and `imports` are processes.
    """

    name: str
    first: float
    step: float
    sample: float
    fresh: float
    whole: float | None = None
    imports: float | None = None


def milliseconds(call: Callable[[], object], runs: int, clock: Callable[[], float] = time.process_time) -> float:
    """The median of some runs."""
    times = []
    for _ in range(runs):
        start = clock()
        call()
        times.append(1000 * (clock() - start))
    return statistics.median(times)


def of_order(num_samples: int, block_size: int = 38, num_runs: int = RUNS) -> Row:
    """An order over shards of 2,000 samples, batches of 4,096, and nothing to read."""
    order = Order(
        shard_sizes=[SHARD_SIZE] * (num_samples // SHARD_SIZE),
        seed=7, global_batch_size=4096, num_lanes=256, block_size=block_size, window=256,
    )  # fmt: skip
    epochs = count()
    steps, ids = _spread(order.num_batches, num_runs), _spread(order.num_samples, num_runs)
    runs = RUNS_OF_LARGE if num_samples >= LARGE else num_runs
    first = milliseconds(lambda: order.batch(next(epochs), 1), runs)
    known = next(epochs) - 1
    return Row(
        name=f"{num_samples:,} samples, q = {block_size}, order only",
        first=first,
        step=milliseconds(lambda: order.batch(known, next(steps)), num_runs),
        sample=milliseconds(lambda: order.find(known, np.array([next(ids)])), num_runs),
        fresh=milliseconds(lambda: order.find(next(epochs), np.array([5])), runs),
    )


def _spread(stop: int, num_runs: int) -> Iterator[int]:
    return iter(np.linspace(0, stop - 1, num_runs).astype(int).tolist())


def of_set(name: str, config: TrainConfig, num_runs: int) -> Row:
    """A run described by its config. Keys and labels come from the indexes of its shard set."""
    timetable = timetable_of(config)
    described = ["--manifest", config.manifest or "", "--recipe", config.recipe, "--step", "7", "--json"]
    return Row(
        name=name,
        first=milliseconds(lambda: explain_step(timetable_of(config), "7"), num_runs),
        step=milliseconds(lambda: explain_step(timetable, "7"), num_runs),
        sample=milliseconds(lambda: sample_of(timetable), num_runs),
        fresh=milliseconds(lambda: sample_of(timetable_of(config)), num_runs),
        whole=of_process(["-m", "trainer", "explain", *described], num_runs),
        imports=of_process(["-c", IMPORTS], num_runs),
    )


def sample_of(timetable: Timetable) -> None:
    """A sample, and its step in the first epoch."""
    timetable.samples(np.array([7]))
    list(timetable.visits(7, range(1)))


def of_process(words: list[str], num_runs: int) -> float:
    """Processor milliseconds of a whole Python process."""
    command = [sys.executable, *words]
    return milliseconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), num_runs, _children_s)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def of_digits(folder: Path, num_runs: int) -> Row:
    """The digits as `make demo` stores them."""
    raw = write_digits(folder / "raw")
    build(BuildConfig(source="folder", input=str(raw), output=str(folder / "set")), ["--direct_running_mode=in_memory"])
    config = replace(digits_smoke(), manifest=str(folder / "set"))
    return of_set("the digits, with keys and labels", config, num_runs)


def table(rows: list[Row]) -> str:
    """Machine, command and rows in Markdown."""
    date = datetime.now(UTC).date()
    head = f"{machine()}; commit {commit()}, {date}; `python -m benchmarks.explain`.\n\n"
    columns = "| | first step of an epoch | another step | a sample's step in that epoch | in another epoch "
    head += columns + "| whole command | of it Python and imports |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(map(_line, rows))


def _line(row: Row) -> str:
    cells = (row.first, row.step, row.sample, row.fresh, row.whole, row.imports)
    return f"| {row.name} | {' | '.join(map(_number, cells))} |\n"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def put(page: Path, found: str) -> None:
    """Replaces the table of the page."""
    marked = r"(?<=<!-- table: explain.py -->\n).*?(?=<!-- end -->)"
    page.write_text(re.sub(marked, lambda _: found, page.read_text(), flags=re.DOTALL))


def main(words: list[str] | None = None, num_runs: int = RUNS) -> None:
    """Prints the table, or replaces the one between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", metavar="N", default=SIZES,
                        help="the sizes of the orders without a shard set")  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="PAGE")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="shardset-explain-") as name:
        sizes = [*((size, 38) for size in arguments.samples), (max(arguments.samples), 8)]
        rows = [of_order(size, block_size, num_runs) for size, block_size in sizes]
        found = table([*rows, of_digits(Path(name), num_runs)])
    print(found)
    if arguments.write:
        put(arguments.write, found)


if __name__ == "__main__":
    main()
