"""Measures the cost of writing a shard for each image: of the whole step, and of the parts that no writer can avoid.

python -m benchmarks.writing [--images N] [--rounds N] [--folder DIR]

JPEGs of 110 KB in a tar of tars, `--verify none`. Processor time, the parts in turns, medians. `tar cf` of the same
files reads and writes, and sums nothing.
"""

import argparse
import hashlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import google_crc32c

from benchmarks import environment, inputs
from pipelines.build import build, prepare
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.plan.records import PlanFile
from pipelines.write.shard import ShardWriter
from shardset.storage.base import Storage
from shardset.storage.open import open_storage

NUM_SHARDS = 8
SPLIT = "train"


def processor_s() -> float:
    """Of this process and of the children that ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


def planned(folder: Path, num_images: int) -> tuple[ShardWriter, PlanFile]:
    """A build of that many images, as the step that writes shards sees it."""
    inputs.make("imagenet", folder / "raw", num_images)
    config = BuildConfig(
        source="imagenet",
        input=str(folder / "raw"),
        output=str(folder / "set"),
        num_shards={"": NUM_SHARDS},
        verify="none",
    )
    build(config)
    output = open_storage(config.output)
    prepared = prepare(config, output)
    plan = prepared.files.find_record(paths.PLAN, PlanFile)
    assert plan
    return ShardWriter(prepared.files, prepared.source.input, config.image, prepared.file.suffix), plan


def write_all(writer: ShardWriter, plan: PlanFile) -> None:
    """Writes every shard again."""
    for number in range(NUM_SHARDS):
        writer.write(plan, SPLIT, number)


def forget(output: Storage) -> None:
    """Deletes all shards."""
    for stat in [*output.list(f"{SPLIT}/"), *output.list(paths.RECORDS)]:
        output.delete(stat.name)


def parts(folder: Path) -> dict[str, Callable[[], None]]:
    """What the bytes of the images cost by themselves."""
    tars = sorted((folder / "raw").glob("*.tar"))
    image = tars[0].read_bytes()[: 110 * 1024]
    extents = [(path, start) for path in tars for start in range(0, path.stat().st_size - len(image), len(image))]

    def read() -> None:
        files = {path: os.open(path, os.O_RDONLY) for path in tars}
        for path, start in extents:
            os.pread(files[path], len(image), start)
        for file in files.values():
            os.close(file)

    def sha256() -> None:
        hasher = hashlib.sha256()
        for _ in extents:
            hasher.update(image)

    def crc32c() -> None:
        for _ in extents:
            google_crc32c.value(image)

    def write() -> None:
        with open(folder / "written", "wb", buffering=1 << 20) as file:
            for _ in extents:
                file.write(image)

    def tar() -> None:
        subprocess.run(["tar", "cf", str(folder / "written"), "-C", str(folder), "raw"], check=True)

    return {"read": read, "SHA-256": sha256, "CRC32C, once": crc32c, "write": write, "tar cf": tar}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where files are kept meanwhile (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        writer, plan = planned(folder, args.images)
        works = {"write_shard": lambda: write_all(writer, plan), **parts(folder)}
        costs: dict[str, list[float]] = {what: [] for what in works}
        for _ in range(args.rounds):
            for what, work in works.items():
                forget(writer.files.output)
                (folder / "written").unlink(missing_ok=True)
                before = processor_s()
                work()
                costs[what].append(processor_s() - before)
        shutil.rmtree(folder / "set")
    print(f"{environment.machine()}; commit {environment.commit()}; {args.images:,} images\n")
    print("| | µs an image |\n|---|---|")
    for what, found in costs.items():
        print(f"| {what} | {1e6 * median(found) / args.images:.0f} |")


if __name__ == "__main__":
    main()
