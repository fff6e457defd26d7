"""CIFAR-10 upsampled to 1,280,000 samples in 640 shards of exactly 2,000: wall time and peak memory.

`python -m benchmarks.upsampled` makes an archive of 60,000 seeded pictures in the published form (its PNGs are about
as large as CIFAR's), builds the set in a temporary folder, counts what stands there and prints one line.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from shardset import load
from tests.makers.cifar import Batch, batch, python_files, write_archive

ROWS = 10_000


def main() -> None:
    """Prints seconds, images a second and the memory of the largest process."""
    with tempfile.TemporaryDirectory(prefix="shardset-upsampled-") as name:
        folder = Path(name)
        archive = folder / "cifar-10-python.tar.gz"
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        write_archive(archive, python_files([smooth(batch(one, ROWS, 10)) for one in names]), "cifar-10-batches-py")
        words = ["build", "--source", "cifar10", "--input", str(archive), "--output", str(folder / "set"), "--json"]
        sizes = ["--target-samples", "train=1280000", "--samples-per-shard", "train=2000,test=1000"]
        done = subprocess.run([sys.executable, "-m", "pipelines", *words, *sizes], check=True, stdout=subprocess.PIPE)
        manifest, _ = load(str(folder / "set"))
        assert [shard.num_samples for shard in manifest.split("train").shards] == [2000] * 640
        seconds = json.loads(done.stdout)["seconds"]
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"1,290,000 samples in {seconds:.1f} s: {1_290_000 / seconds:,.0f} images/s, {largest:,.0f} MiB at most")


def smooth(one: Batch) -> Batch:
    """The pictures with neighbouring pixels averaged: noise would make the PNGs a third larger than photographs'."""
    planes = one.data.reshape(-1, 3, 32, 32)
    total = planes.astype(np.uint16) + np.roll(planes, 1, 2) + np.roll(planes, 1, 3) + np.roll(planes, 2, 3)
    planes[:] = (total // 4).astype(np.uint8)
    return one


if __name__ == "__main__":
    main()
