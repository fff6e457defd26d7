"""What views cost: to open a large one, the bytes and requests of an epoch, and the rate of a
stream.

python -m benchmarks.views [open] [reads] [rate]

`open`: 1e7 of 1e9 ids, in a separate process. `reads`: counts what the order of 8 readers asks a
bucket for, at the size of ImageNet, with the samples of the view chosen at random. `rate`: a set on
this machine and nine tenths of it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shardset
from benchmarks import environment
from benchmarks.manifest import SETS, plan_of, write
from benchmarks.measuring import parser_of
from shardset.format import manifest as manifests
from shardset.format.view import ViewHead, ViewRows, view_to_bytes
from shardset.order.budget import OrderOptions, fit_order
from shardset.order.epoch import Order
from shardset.order.selection import Selection
from tests.makers.shardset import jpeg_samples, new_set

NUM_KEPT = 10**7
KEPT = (0.99, 0.9, 0.5, 0.1, 0.01)
SAMPLE_BYTES = (116_000, 3_000)
NUM_IMAGES, NUM_RUNS = 8_000, 9

OPEN = """
import json, os, sys, time
from benchmarks.measuring import peak_bytes_of
from shardset.format import manifest
from shardset.order.budget import OrderOptions, fit_order

times, cpu_s = [time.perf_counter()], time.process_time()
loaded = manifest.load(sys.argv[1])
times = [*times, time.perf_counter()]
cpu_s, peak_bytes = time.process_time() - cpu_s, peak_bytes_of(os.getpid())
split = loaded.manifest.split("train")
options = OrderOptions(seed=0, global_batch_size=1024, world_size=8)
view = loaded.part("train").selection
fit_order(split.shard_sizes, options, stored_bytes=split.num_tar_bytes, view=view).batch(0, 0)
times = [*times, time.perf_counter()]
opened_s, first_s = times[1] - times[0], times[2] - times[1]
found = {"open, s": opened_s, "cpu, s": cpu_s, "MB": peak_bytes / 1e6, "first step, s": first_s}
print(json.dumps(found))
"""
"""Imports no more than it must: it measures the memory of its process."""


def write_view(folder: Path, ids: np.ndarray) -> str:
    """Writes a view of some training samples of the set `set` in a folder; returns its address."""
    digest = manifests.load(str(folder / "set")).manifest.digest
    head = ViewHead(parent="set", parent_digest=digest, split="train")
    (folder / "view.parquet").write_bytes(view_to_bytes(head, {"train": ViewRows(ids)}))
    return str(folder / "view.parquet")


def show_open() -> None:
    """Opens a view of 1e7 of 1e9 ids."""
    with tempfile.TemporaryDirectory() as folder:
        write(plan_of(*SETS["large"]), f"{folder}/set")
        ids = np.unique(np.random.default_rng(0).integers(0, SETS["large"][0], NUM_KEPT))
        words = [sys.executable, "-c", OPEN, write_view(Path(folder), ids)]
        found = [
            json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(3)
        ]
    for name in found[0]:
        print(f"{name}: {' '.join(f'{one[name]:.2f}' for one in found)}")


def cost(order: Order) -> tuple[int, int]:
    """(requests, samples read) of an epoch, in which each lane reads its own."""
    reads = samples = 0
    for lane in range(order.num_lanes):
        start, stop = order.lane_starts(np.array([lane, lane + 1])).tolist()
        found = order.reads_of(0, np.full(stop - start, lane), np.arange(start, stop))
        once = np.unique(found.first, return_index=True)[1]
        reads, samples = reads + len(once), samples + int((found.stop - found.start)[once].sum())
    return reads, samples


def show_reads() -> None:
    """A table of what views cost to read."""
    num_samples, num_shards, _ = SETS["imagenet-1k"]
    cuts = [num_samples * number // num_shards for number in range(num_shards + 1)]
    sizes = np.diff(cuts).tolist()
    print(
        "kept | " + " | ".join(f"{size:,} bytes a sample: bytes, requests" for size in SAMPLE_BYTES)
    )
    options = OrderOptions(seed=0, global_batch_size=1024, world_size=8)
    order_of = {
        size: fit_order(sizes, options, stored_bytes=num_samples * size) for size in SAMPLE_BYTES
    }
    whole = {size: cost(order)[0] for size, order in order_of.items()}
    for share in KEPT:
        ids = np.flatnonzero(np.random.default_rng(0).random(num_samples) < share)
        cells = []
        for size in SAMPLE_BYTES:
            view = Selection.from_kept(ids, num_samples, "a view")
            reads, samples = cost(
                fit_order(sizes, options, stored_bytes=num_samples * size, view=view)
            )
            cells.append(f"{samples / len(ids):.2f}, {reads / whole[size]:.2f}")
        print(f"{share:.0%} | " + " | ".join(cells), flush=True)


def show_rate() -> None:
    """Samples a second from a set and from nine tenths of it, one after the other,
    several times.
    """
    with tempfile.TemporaryDirectory() as folder:
        new_set(jpeg_samples("train", NUM_IMAGES, height=128, width=128), f"{folder}/set")
        ids = np.flatnonzero(np.random.default_rng(0).random(NUM_IMAGES) < 0.9)
        urls = {"set": f"{folder}/set", "view": write_view(Path(folder), ids)}
        rates: dict[str, list[float]] = {name: [] for name in urls}
        for run in range(NUM_RUNS + 1):
            for name, url in urls.items():
                with shardset.Stream(url, "train", batch_size=64, image_size=112) as stream:
                    started = time.perf_counter()
                    num_samples = sum(
                        int((batch["weight"] > 0).sum()) for batch in stream.epoch(run)
                    )
                    rates[name].append(num_samples / (time.perf_counter() - started))
    # the first run reads from the disk
    pairs = zip(rates["set"][1:], rates["view"][1:], strict=True)
    print({name: [round(rate) for rate in found[1:]] for name, found in rates.items()})
    print(f"view / set: {statistics.median(view / whole for whole, view in pairs):.3f}")


SHOW = {"open": show_open, "reads": show_reads, "rate": show_rate}


def main() -> None:
    """Shows the chosen parts, all by default."""
    parser = parser_of(__doc__)
    parser.add_argument("part", nargs="*", choices=[[], *SHOW], default=[])
    args = parser.parse_args()
    print(f"{environment.machine()}, commit {environment.commit()}")
    for part in args.part or SHOW:
        print(f"--- {part}")
        SHOW[part]()


if __name__ == "__main__":
    main()
