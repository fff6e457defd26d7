"""One set read from a disk, `gs://` (emulator), `s3://` (moto) and `https://` (a local server):
rates, processor time.

    python -m benchmarks.buckets [--samples 1000] [--rounds 3]

Each reader is a process that reads two epochs; the second counts. Nothing is decoded. Servers and
readers share the machine: compare the processor time of the readers; the rates are what these
servers give.
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import shardset
from benchmarks.measuring import in_process, parser_of
from tests.conftest import BUCKET, emulator, moto, s3_environment
from tests.makers.shardset import image_sample, new_set
from tests.makers.web import WebServer

SAMPLE_BYTES = 110_000  # a picture of ImageNet


def read(url: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds and bytes of the second of two epochs."""
    stream = shardset.Stream(url, "train", batch_size=50, image=None, fields=("jpg",))
    for _ in stream:
        pass
    began, spent = time.perf_counter(), time.process_time()
    for _ in stream:
        pass
    ended, used = time.perf_counter(), time.process_time()
    return ended - began, used - spent, stream.split.num_tar_bytes


def main() -> None:
    """Writes the set to each place, reads all in turns, prints a table of medians."""
    flags = parser_of(__doc__)
    flags.add_argument("--samples", type=int, default=1000)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--one", help="read this address and print the three numbers")
    asked = flags.parse_args()
    if asked.one:
        print(json.dumps(read(asked.one)))
        return
    chance = random.Random(1)
    samples = [
        image_sample("train", n, chance.randbytes(SAMPLE_BYTES), "jpg", 10)
        for n in range(asked.samples)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        emulator(Path(folder, "gs")) as gs,
        moto(Path(folder, "s3")) as s3,
    ):
        os.environ |= {"STORAGE_EMULATOR_HOST": gs, **s3_environment(s3)}
        places = {
            "disk": f"{folder}/web",
            "gs://": f"gs://{BUCKET}/set",
            "s3://": f"s3://{BUCKET}/set",
        }
        for url in places.values():
            new_set(samples, url, num_shards=4)
        with WebServer(f"{folder}/web") as web:
            places["https://"] = web.url
            found: dict[str, list[list[float]]] = {place: [] for place in places}
            for _ in range(asked.rounds):
                for place, url in places.items():
                    found[place].append(in_process("benchmarks.buckets", "--one", url))
    print("| | MB/s | samples/s | reader's CPU ms per MB |\n|---|---|---|---|")
    for place, runs in found.items():
        rate, cpu = (
            median(run[2] / run[0] for run in runs) / 1e6,
            median(1e9 * run[1] / run[2] for run in runs),
        )
        print(f"| `{place}` | {rate:.0f} | {rate * 1e6 / SAMPLE_BYTES:.0f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
