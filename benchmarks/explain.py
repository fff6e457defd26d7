"""How long `python -m trainer explain` computes: orders of 1.28 million to a thousand million samples, and the digits.

`python -m benchmarks.explain` prints a table; nothing is read but, for the digits, the indexes. The last column is a
whole command in a process of its own, from start to exit.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.environment import commit, machine
from examples.demo import write_digits
from pipelines.build import build
from pipelines.config import BuildConfig
from shardset.order import Order
from trainer import config as configs
from trainer.explain import explain_sample, explain_step, plan_of_config

SIZES = (1_280_000, 128_000_000, 1_000_000_000)
RUNS = 9


def milliseconds(call: Callable[[], object], runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median of some runs."""
    times = []
    for _ in range(runs):
        start = clock()
        call()
        times.append(1000 * (clock() - start))
    return statistics.median(times)


def synthetic(num_samples: int) -> str:
    """One row: an order over shards of 2,000 samples, batches of 4,096."""
    order = Order(
        shard_sizes=[2000] * (num_samples // 2000),
        seed=7, global_batch_size=4096, num_lanes=256, block_size=38, window=256,
    )  # fmt: skip
    first = milliseconds(lambda: order.batch(0, 1), 1)
    steps = iter(np.linspace(0, order.num_batches - 1, RUNS).astype(int).tolist())
    step = milliseconds(lambda: order.batch(0, next(steps)))
    ids = iter(np.linspace(0, num_samples - 1, RUNS).astype(int).tolist())
    found = milliseconds(lambda: order.find(0, np.array([next(ids)])))
    fresh = milliseconds(lambda: order.find(1, np.array([5])), 1, time.process_time)
    return f"| {num_samples:,} samples, order only | {first:,.1f} | {step:,.1f} | {found:,.2f} | {fresh:,.1f} | |"


def of_digits(folder: Path) -> str:
    """One row: the digits as `make demo` stores them, keys and labels included."""
    raw = write_digits(folder / "raw")
    build(BuildConfig(source="folder", input=str(raw), output=str(folder / "set")), ["--direct_running_mode=in_memory"])
    config = configs.with_value(configs.digits_smoke(), "manifest", str(folder / "set"))
    plan = plan_of_config(config)
    first = milliseconds(lambda: explain_step(plan_of_config(config), "7"), 1)
    step = milliseconds(lambda: explain_step(plan, "7"))
    found = milliseconds(lambda: explain_sample(plan, 7, range(1)))
    words = ["explain", "--manifest", str(folder / "set"), "--recipe", "digits_smoke", "--step", "7", "--json"]
    command = [sys.executable, "-m", "trainer", *words]
    whole = milliseconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 5)
    return f"| the digits, with keys and labels | {first:,.1f} | {step:,.1f} | {found:,.2f} | | {whole:,.0f} |"


def main() -> None:
    """Prints the table."""
    print(f"{machine()}, commit {commit()}; medians of {RUNS} runs, milliseconds")
    print("| | first step of an epoch | another step | a sample's step in that epoch "
          "| processor time of one in a fresh epoch | whole command |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for num_samples in SIZES:
        print(synthetic(num_samples), flush=True)
    with tempfile.TemporaryDirectory(prefix="shardset-explain-") as name:
        print(of_digits(Path(name)), flush=True)


if __name__ == "__main__":
    main()
