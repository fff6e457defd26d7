"""Writes and reads the manifests of large sets: seconds of the processor, memory, and what a reader
fetches.

python -m benchmarks.manifest [--set imagenet-21k --set large]

The commit and the reader are the real ones; the records of the shards are made when they are read,
and no shard is there. Each point is a separate process.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import environment
from benchmarks.measuring import in_process, parser_of, peak_bytes_of
from benchmarks.scale import build_of, plan_file, written_shards
from benchmarks.scale import plan_of as split_of
from pipelines.plan.plan_records import PlanFile
from pipelines.write.commit import write_manifest
from shardset.format import manifest as manifests
from shardset.format import naming

SETS = {  # samples, shards, classes
    "imagenet-1k": (1_281_167, 1_024, 1_000),
    "imagenet-21k": (14_197_122, 14_000, 21_841),
    "large": (10**9, 860_000, 1_000),
}
NUM_TOUCHED = 64
"""A reader's first batch, of samples of so many shards."""

HEAD = (
    "set | manifest.json, kB | shards.npy, MB | write, s | to write, MiB | start, s | to start, MiB"
    " | all rows, s"
)


def plan_of(num_samples: int, num_shards: int, num_classes: int) -> PlanFile:
    """A plan with one split."""
    return plan_file(split_of(num_samples, num_shards), 1, num_classes)


def spent() -> np.ndarray:
    """The processor time of this process, and its peak of memory in bytes."""
    return np.array([time.process_time(), peak_bytes_of(os.getpid())])


def write(plan: PlanFile, folder: str) -> list[float]:
    """Writes the manifest and the table of shards: seconds, and the bytes that the peak grows."""
    split = plan.splits["train"]
    build = build_of(int, folder)
    totals = dict.fromkeys(range(plan.num_classes), split.num_stored // plan.num_classes)
    before = spent()
    write_manifest(build, plan, {"train": written_shards(split)}, {"train": totals})
    return (spent() - before).tolist()


def read(folder: str) -> list[float]:
    """Loads the manifest as a reader does, and takes the shards of its first batch: as for `write`.

    The third number is the seconds that all other shards take after that.
    """
    before = spent()
    split = manifests.load(folder).manifest.split("train")
    assert sum(split.shard_sizes) == split.num_samples
    touched = range(0, split.num_shards, max(1, split.num_shards // NUM_TOUCHED))
    split.shards.load(np.array(touched))
    assert all(split.shards[number].num_samples for number in touched)
    started = spent()
    split.shards.load(np.arange(split.num_shards))
    return [*(started - before).tolist(), (spent() - started).item(0)]


def row(name: str) -> str:
    """Writes and reads one manifest: a row of the table."""
    num_samples, num_shards, num_classes = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        (write_s, to_write), (start_s, to_start, whole_s) = (
            in_process("benchmarks.manifest", "--one", what, folder, "--set", name)
            for what in ("write", "read")
        )
        head = (Path(folder) / naming.MANIFEST).stat().st_size
        table = (Path(folder) / naming.table_path("train")).stat().st_size
    return (
        f"| {name}: {num_samples:,} samples, {num_shards:,} shards, {num_classes:,} classes |"
        f" {head / 1e3:,.0f} | {table / 1e6:,.2f} | {write_s:,.1f} | {to_write / 2**20:,.0f} |"
        f" {start_s:,.2f} | {to_start / 2**20:,.0f} | {whole_s:,.2f} |"
    )


def main() -> None:
    """Measures the chosen sets and prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--set", action="append", choices=SETS, help="which manifest; all by default"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, folder = args.one
        point = read(folder) if what == "read" else write(plan_of(*SETS[args.set[0]]), folder)
        print(json.dumps(point))
        return
    print(f"{environment.machine()}, commit {environment.commit()}\n")
    print(f"| {HEAD} |\n|{'---|' * 8}")
    for name in args.set or SETS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
