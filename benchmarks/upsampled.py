"""CIFAR-10 upsampled to 1,280,000 samples in shards of exactly 2,000: wall time and peak memory.

python -m benchmarks.upsampled [--target 1280000] [--rows 10000] [--plan-only] [--folder DIR]

Makes an archive of 60,000 seeded pictures in the published form, builds the set, counts what stands there and prints
one line. With --plan-only just the first shard is written, for targets whose
set would not fit here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import POLL_S, family, peak_bytes_of
from shardset import load
from tests.makers.cifar import batch, python_files, write_archive

SHARD_SIZE = 2_000


def main(argv: Sequence[str] | None = None) -> None:
    """Prints seconds, images a second, and the peak memory of the launching process and of the largest worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, default=1_280_000, help=f"a multiple of {SHARD_SIZE}")
    parser.add_argument("--rows", type=int, default=10_000, help="pictures in each of the six batch files")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--folder", help="where a temporary folder is made; default: the system's")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shardset-upsampled-", dir=args.folder) as name:
        folder = Path(name)
        archive = folder / "cifar-10-python.tar.gz"
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        write_archive(archive, python_files([batch(one, args.rows, 10) for one in names]), "cifar-10-batches-py")
        words = ["build", "--source", "cifar10", "--input", str(archive), "--output", str(folder / "set"), "--json"]
        words += [
            "--target-samples",
            f"train={args.target}",
            "--samples-per-shard",
            f"train={SHARD_SIZE},test={args.rows // 10}",
        ]
        words += ["--only-shards", "train:0"] if args.plan_only else ["--no-report"]
        done, launcher, worker = run([sys.executable, "-m", "pipelines", *words])
        if not args.plan_only:
            manifest, _ = load(str(folder / "set"))
            sizes = [shard.num_samples for shard in manifest.split("train").shards]
            assert sizes == [SHARD_SIZE] * (args.target // SHARD_SIZE)
    total, seconds = args.target + args.rows, done["seconds"]
    what = "planned" if args.plan_only else "written"
    print(
        f"{total:,} samples {what} in {seconds:.1f} s, {total / seconds:,.0f} a second; at most "
        f"{launcher / 2**20:,.0f} MiB in the launching process, {worker / 2**20:,.0f} MiB in a worker"
    )


def run(words: Sequence[str]) -> tuple[dict, int, int]:
    """What a command printed as JSON, its own peak memory in bytes, and that of the largest process below it."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        launcher = worker = 0
        while process.poll() is None:
            first, *others = family(process.pid)
            launcher = max(launcher, peak_bytes_of(first))
            worker = max([worker, *map(peak_bytes_of, others)])
            time.sleep(POLL_S)
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return json.loads(printed), launcher, worker


if __name__ == "__main__":
    main()
