"""How soon the first batch of a set with many shards comes, by this checkout and by another one.

    python -m benchmarks.first_batch --against CHECKOUT [--shards 1024] [--size 1252] [--rounds 7]

Each checkout writes a set of tiny images with its own writer, on a disk and in `gs://` (emulator,
50 ms and 200 MB/s per connection). Whole processes, in turns: import, open, one batch of 256. The
defaults have ImageNet's number of samples and 2.6 GB a set.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.far import relay
from benchmarks.measuring import compare, of_checkout, parser_of
from tests.conftest import BUCKET, REPOSITORY, emulator

WRITE = """
import io, sys
from PIL import Image
import shardset
url, shards, size = sys.argv[1], *map(int, sys.argv[2:])
file = io.BytesIO()
Image.new("RGB", (8, 8), (9, 99, 199)).save(file, "PNG")
with shardset.Writer(url, samples_per_shard=size) as writer:
    for number in range(shards * size):
        writer.write(image=file.getvalue(), label=number % 1000)
"""
FIRST = """
import sys
import shardset
world = {"global_batch_size": 256, "rank": 0, "world_size": 1}
stream = shardset.Stream(sys.argv[1], "train", seed=1, image=shardset.ImageSpec(size=8), **world)
next(iter(stream.epoch(0)))
"""
"""Separate programs, so that they also run with checkouts that have other benchmarks."""


def against(other: Path, shards: int, size: int, rounds: int, folder: Path) -> None:
    """Compares the first batch of both checkouts, each of the set that it wrote."""
    checkouts = {"this checkout": REPOSITORY, str(other): other}
    with emulator(folder / "emulator.log") as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        places = {"disk": str(folder), "gs://": f"gs://{BUCKET}"}
        for place in places.values():
            for number, checkout in enumerate(checkouts.values()):
                words = ["-c", WRITE, f"{place}/set-{number}", str(shards), str(size)]
                environ = {**os.environ, **of_checkout(checkout)}
                subprocess.run([sys.executable, *words], check=True, env=environ)
        far = relay(url.removeprefix("http://"), delay_s=0.05, bytes_per_s=200e6)
        with far as address:
            os.environ["STORAGE_EMULATOR_HOST"] = f"http://{address}"
            for name, place in places.items():
                commands = {
                    label: ([sys.executable, "-c", FIRST, f"{place}/set-{number}"], checkout)
                    for number, (label, checkout) in enumerate(checkouts.items())
                }
                compare(f"first batch, {name}, {shards} shards", commands, rounds, folder)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", required=True)
    parser.add_argument("--shards", type=int, default=1024)
    parser.add_argument("--size", type=int, default=1252)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        against(options.against, options.shards, options.size, options.rounds, Path(temporary))
