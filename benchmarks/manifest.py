"""Writes and reads the manifests of large sets: seconds of the processor, memory, and what a reader
fetches.

python -m benchmarks.manifest [--set imagenet-21k --set large]

The commit and the reader are the real ones; the records of the shards are made when they are read,
and no shard is there. Each point is a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import environment
from benchmarks.measuring import peak_bytes_of
from benchmarks.scale import A_BUILD, made_files
from pipelines.config import BuildConfig, Sizing
from pipelines.plan.layout import plan_split
from pipelines.plan.records import PlanFile, ShardRecord
from pipelines.write.commit import Committer
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, IndexFile, Shard
from shardset.format.write import WrittenShard

SETS = {  # samples, shards, classes
    "imagenet-1k": (1_281_167, 1_024, 1_000),
    "imagenet-21k": (14_197_122, 14_000, 21_841),
    "large": (10**9, 860_000, 1_000),
}
SAMPLE_BYTES = 100_000
NUM_TOUCHED = 64
"""A reader's first batch, of samples of so many shards."""

HEAD = (
    "set | manifest.json, kB | shards.npy, MB | write, s | to write, MiB | start, s | to start, MiB"
    " | all rows, s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What writing or starting took; `whole_s` is what reading all rows takes after that."""

    seconds: float
    peak_bytes: int
    whole_s: float = 0.0


def plan_of(num_samples: int, num_shards: int, num_classes: int) -> PlanFile:
    """A plan with one split."""
    split = plan_split(
        "train", {0: num_samples}, num_bytes=num_samples * SAMPLE_BYTES, fields=["jpg", "cls"],
        sizing=Sizing(num_shards=num_shards), balance="none",
    )  # fmt: skip
    return PlanFile(
        digest="0" * 64,
        source_digest="0" * 64,
        num_classes=num_classes,
        classes=[ClassInfo(label=label, name=f"class {label}") for label in range(num_classes)],
        splits={"train": split},
        fixes={},
        num_rejected=0,
        num_units=1,
        notes=[],
    )


def write(plan: PlanFile, folder: str) -> Point:
    """Writes the manifest and the table of shards whose records are made when they are read."""
    split = plan.splits["train"]

    def record(number: int) -> ShardRecord:
        path, size = naming.shard_path("train", "train", number), split.shard_size(number)
        shard = Shard(
            path=path,
            num_samples=size,
            num_bytes=size * SAMPLE_BYTES,
            crc32c="AAAAAA==",
            sha256=f"{number:064x}",
            first_id=0,
            index=IndexFile(path=naming.index_path(path), num_bytes=90 * size, crc32c="AAAAAA=="),
        )
        return ShardRecord(
            plan_digest=plan.digest,
            written=WrittenShard(shard, ["jpg", "cls"], size * SAMPLE_BYTES),
        )

    config = BuildConfig(source="folder", input="synthetic", output=folder)
    committer = Committer(made_files(record, folder), config, A_BUILD)
    totals = np.full(plan.num_classes, split.num_stored // plan.num_classes)
    started, before = time.process_time(), peak_bytes_of(os.getpid())
    committer.write_manifest(plan, {"train": dict(enumerate(totals.tolist()))})
    return Point(
        seconds=time.process_time() - started, peak_bytes=peak_bytes_of(os.getpid()) - before
    )


def read(folder: str) -> Point:
    """Loads the manifest as a reader does, and takes the shards of its first batch; then all
    others.
    """
    started, before = time.process_time(), peak_bytes_of(os.getpid())
    split = manifests.load(folder).manifest.split("train")
    assert sum(split.shard_sizes) == split.num_samples
    touched = [*range(0, split.num_shards, max(1, split.num_shards // NUM_TOUCHED))]
    split.shards.load(np.array(touched))
    assert all(split.shards[number].num_samples for number in touched)
    point = Point(
        seconds=time.process_time() - started, peak_bytes=peak_bytes_of(os.getpid()) - before
    )
    started = time.process_time()
    split.shards.load(np.arange(split.num_shards))
    return Point(**asdict(point) | {"whole_s": time.process_time() - started})


def run(what: str, name: str, folder: str) -> Point:
    """One point, in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.manifest", "--one", what, folder, "--set", name]
    return Point(**json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout))


def row(name: str) -> str:
    """Writes and reads one manifest: a row of the table."""
    num_samples, num_shards, num_classes = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        written, loaded = (run(what, name, folder) for what in ("write", "read"))
        head = (Path(folder) / naming.MANIFEST).stat().st_size
        table = (Path(folder) / naming.table_path("train")).stat().st_size
    return (
        f"| {name}: {num_samples:,} samples, {num_shards:,} shards, {num_classes:,} classes |"
        f" {head / 1e3:,.0f} | {table / 1e6:,.2f} | {written.seconds:,.1f} |"
        f" {written.peak_bytes / 2**20:,.0f} | {loaded.seconds:,.2f} |"
        f" {loaded.peak_bytes / 2**20:,.0f} | {loaded.whole_s:,.2f} |"
    )


def main() -> None:
    """Measures the chosen sets and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--set", action="append", choices=SETS, help="which manifest; all by default"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, folder = args.one
        point = read(folder) if what == "read" else write(plan_of(*SETS[args.set[0]]), folder)
        print(json.dumps(asdict(point)))
        return
    print(f"{environment.machine()}, commit {environment.commit()}\n")
    print(f"| {HEAD} |\n|{'---|' * 8}")
    for name in args.set or SETS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
