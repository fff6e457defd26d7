"""Writes and reads the manifests of large sets, as version 1 lists the shards and as version 2 has them in pages.

python -m benchmarks.manifest [--set imagenet-21k --set middle --set large] [--version 1 --version 2]

The commit and the reader are the real ones; the records of the shards are made when they are read, and no shard is
there. Each point is a process of its own. Seconds are of its processor: at a build many workers write the pages of
version 2, each `page_s`; the commit then takes the rest.
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

import msgspec
import numpy as np

from benchmarks import environment
from benchmarks.measuring import peak_bytes_of
from benchmarks.scale import made_files
from pipelines.config import BuildConfig, Sizing
from pipelines.plan import paths
from pipelines.plan.layout import plan_split
from pipelines.plan.records import PlanFile, ShardRecord
from pipelines.plan.slices import ByteRange
from pipelines.write.commit import Committer
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, IndexFile, Shard

SETS = {  # samples, shards, classes
    "imagenet-21k": (14_197_122, 14_000, 21_841),
    "middle": (10**8, 74_506, 1_000),
    "large": (10**9, 745_059, 1_000),
}
NUM_KINDS = 16
"""So many different class counts are drawn: drawing those of every shard would be most of the time."""

SAMPLE_BYTES = 100_000

HEAD = (
    "set | version | read by a reader, MiB | counts, MiB | write, s | one page, s | to write, MiB | read, s "
    "| to read, MiB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What writing or reading one manifest took. `page_s` is the longest that one page took a worker."""

    seconds: float
    page_s: float
    peak_bytes: int


def plan_of(num_samples: int, num_shards: int, num_classes: int) -> PlanFile:
    """A plan with one split."""
    split = plan_split(
        "train", {0: num_samples}, num_bytes=num_samples * SAMPLE_BYTES, fields=["jpg", "cls"],
        sizing=Sizing(num_shards=num_shards), balance="none",
    )  # fmt: skip
    return PlanFile(
        digest="0" * 64, source_digest="0" * 64, num_classes=num_classes,
        classes=[ClassInfo(label=label, name=f"class {label}") for label in range(num_classes)],
        splits={"train": split}, fixes={}, num_rejected=0, rejected=ByteRange(paths.REJECTED, 0, 0, 0), num_units=1,
        notes=[],
    )  # fmt: skip


def committer_of(plan: PlanFile, folder: str, version: int) -> Committer:
    """A commit whose records are made when they are read, and whose files go to `folder`."""
    split, generator = plan.splits["train"], np.random.default_rng(0)
    labels = generator.integers(0, plan.num_classes, (NUM_KINDS, split.shard_size(split.num_shards - 1)))
    counts = [msgspec.Raw(msgspec.json.encode(np.bincount(row, minlength=plan.num_classes).tolist())) for row in labels]

    def record(number: int) -> ShardRecord:
        path, size = naming.shard_path("train", "train", number), split.shard_size(number)
        shard = Shard(
            path=path, num_samples=size, num_bytes=size * SAMPLE_BYTES, crc32c="AAAAAA==", sha256=f"{number:064x}",
            first_id=0, index=IndexFile(path=naming.index_path(path), num_bytes=90 * size, crc32c="AAAAAA=="),
            class_counts=counts[number % NUM_KINDS],
        )  # fmt: skip
        return ShardRecord(
            split="train", number=number, plan_digest=plan.digest, num_content_bytes=size * SAMPLE_BYTES,
            fields=["jpg", "cls"], shard=shard,
        )  # fmt: skip

    limit = 0 if version == manifests.PAGED else split.num_shards
    config = BuildConfig(source="folder", input="synthetic", output=folder, max_listed_shards=limit)
    return Committer(made_files(record, folder), config, suffix="")


def write(plan: PlanFile, folder: str, version: int) -> Point:
    """Writes the manifest of that version."""
    committer = committer_of(plan, folder, version)
    started, before, pages_s = time.process_time(), peak_bytes_of(os.getpid()), [0.0]
    if version == manifests.LISTED:
        committer.write_manifest(plan, {"train": committer.read_records(plan, "train")})
    else:
        parts, writer = [], committer.page_writer
        for split, number in committer.pages(plan, plan.splits["train"].num_shards):
            page_started = time.process_time()
            parts.append(writer.write(plan, split, number))
            pages_s.append(time.process_time() - page_started)
        committer.write_head(plan, parts)
    seconds = time.process_time() - started
    return Point(seconds=seconds, page_s=max(pages_s), peak_bytes=peak_bytes_of(os.getpid()) - before)


def read(folder: str) -> Point:
    """Loads the manifest as a reader does, and takes the sizes of its shards."""
    started, before = time.process_time(), peak_bytes_of(os.getpid())
    split = manifests.load(folder).manifest.split("train")
    assert sum(split.shard_sizes) == split.num_samples
    return Point(seconds=time.process_time() - started, page_s=0.0, peak_bytes=peak_bytes_of(os.getpid()) - before)


def run(what: str, name: str, version: int, folder: str) -> Point:
    """One point, in a process of its own."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.manifest",
        "--one",
        what,
        folder,
        "--set",
        name,
        "--version",
        str(version),
    ]
    return Point(**json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout))


def row(name: str, version: int) -> str:
    """Writes and reads one manifest: a row of the table."""
    num_samples, num_shards, num_classes = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        written, loaded = (run(what, name, version, folder) for what in ("write", "read"))
        files = {path.name: path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}
    counts = sum(size for file, size in files.items() if ".counts." in file)
    sizes = [sum(files.values()) - counts, counts, written.peak_bytes, loaded.peak_bytes]
    mib = [f"{size / 2**20:,.1f}" for size in sizes]
    return (
        f"| {name}: {num_samples:,} samples, {num_shards:,} shards x {num_classes:,} classes | {version} | {mib[0]} "
        f"| {mib[1]} | {written.seconds:,.1f} | {written.page_s:,.1f} | {mib[2]} | {loaded.seconds:,.2f} | {mib[3]} |"
    )


def main() -> None:
    """Measures the chosen sets and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", choices=SETS, help="which manifest; all by default")
    parser.add_argument("--version", action="append", type=int, choices=[1, 2], help="both by default")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, folder = args.one
        point = read(folder) if what == "read" else write(plan_of(*SETS[args.set[0]]), folder, args.version[0])
        print(json.dumps(asdict(point)))
        return
    print(f"{environment.machine()}, commit {environment.commit()}\n")
    print(f"| {HEAD} |\n|{'---|' * 9}")
    for name in args.set or SETS:
        for version in args.version or (1, 2):
            print(row(name, version), flush=True)


if __name__ == "__main__":
    main()
