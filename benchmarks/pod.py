"""What each reader of a pod reads and holds: 1 to 8,192 readers of sets of a million to a thousand
million samples.

python -m benchmarks.pod [--n 1e6,1e9] [--world 1,8,64,512,8192] [--bytes 110000] [--batch 32768]

Order and block reads are the real ones; the samples are not there. Every point is a process of its
own. It plans the first steps of a few readers and counts the samples that the ranged reads of these
steps would bring for each that the reader wants. `one lost` is a run that continues without one of
its readers, in the order of all of them.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np

from benchmarks import environment
from benchmarks.measuring import in_process, numbers, parser_of, peak_bytes_of
from shardset.order.budget import OrderOptions, fit_order, held_bytes
from shardset.order.epoch import Order
from shardset.order.lanes import rank_part

SHARD_BYTES = 128 << 20
SIZES = (10**6, 10**8, 10**9)
WORLDS = (1, 8, 64, 512, 8192)
NUM_READERS = 9
"""Readers whose steps are planned, from the first to the last."""

NUM_ROWS = 1500
"""Rows of each lane that are planned at most: several times the window, so that the ends count for
little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One order and what its readers do. `bytes_factor` is bytes read for each that is wanted.

    `num_lost` of the `world_size` readers that the order was made for are gone.
    """

    num_samples: int
    world_size: int
    num_lost: int
    num_lanes: int
    window: int
    bytes_factor: float
    requests_per_step: float
    held_bytes: int
    first_step_s: float
    peak_bytes: int


def order_of(num_samples: int, world_size: int, mean_bytes: int, batch: int) -> Order:
    """The order that the first run of such a pod would choose."""
    shard_size = max(1, SHARD_BYTES // mean_bytes)
    num_shards = -(-num_samples // shard_size)
    small, left = divmod(num_samples, num_shards)
    # a list would be 1e6 objects
    shard_sizes = np.full(num_shards, small) + (np.arange(num_shards) < left)
    options = OrderOptions(seed=7, global_batch_size=batch, world_size=world_size)
    return fit_order(
        cast(Sequence[int], shard_sizes), options, stored_bytes=num_samples * mean_bytes
    )


def measure(
    num_samples: int, world_size: int, mean_bytes: int, batch: int, num_lost: int = 0
) -> Point:
    """Plans the first steps of a few readers in this process."""
    began = time.process_time()
    order = order_of(num_samples, world_size, mean_bytes, batch)
    num_readers = world_size - num_lost
    part = rank_part(order.global_batch_size, num_readers - 1, num_readers)
    order.slots(0, range(1), part.start, part.stop)
    first_step_s = time.process_time() - began
    # getrusage counts what the process that started this one had
    peak_bytes = peak_bytes_of(os.getpid())
    num_steps = min(-(-NUM_ROWS // order.rows_per_step), order.num_batches)
    ranks = sorted(set(np.linspace(0, num_readers - 1, NUM_READERS).astype(int).tolist()))
    counts = np.sum([_reads(order, rank, num_readers, num_steps) for rank in ranks], axis=0)
    num_wanted, num_read, num_requests = counts.tolist()
    lanes = len(order.part_lanes(part))
    return Point(
        num_samples=num_samples,
        world_size=world_size,
        num_lost=num_lost,
        num_lanes=order.num_lanes,
        window=order.window,
        bytes_factor=num_read / num_wanted,
        requests_per_step=num_requests / num_wanted * order.global_batch_size,
        held_bytes=held_bytes(
            mean_bytes, num_lanes=lanes, block_size=order.block_size, window=order.window
        ),
        first_step_s=first_step_s,
        peak_bytes=peak_bytes,
    )


def _reads(order: Order, rank: int, world_size: int, num_steps: int) -> tuple[int, int, int]:
    """Samples that a reader wants in its first steps, samples of the reads that bring them, and
    these reads.

    Leaves out the end of what was planned, where later steps share the reads, unless the epoch ends
    there.
    """
    part = rank_part(order.global_batch_size, rank, world_size)
    slots = order.slots(0, range(num_steps), part.start, part.stop)
    lanes, positions = np.tile(slots.lanes, num_steps), slots.positions.ravel()
    real = slots.weights.ravel() > 0
    if num_steps < order.num_batches:
        last = num_steps * order.rows_per_step - order.window - order.block_size
        real &= positions - order.lane_starts(lanes) < last
    reads = order.reads_of(0, lanes[real], positions[real])
    first, once = np.unique(reads.first, return_index=True)
    return int(real.sum()), int(reads.num_samples[once].sum()), len(first)


def run_point(*numbers: int) -> Point:
    """`measure` of these arguments, in a fresh process."""
    return Point(**in_process("benchmarks.pod", "--one", *map(str, numbers)))


def table(points: list[Point]) -> str:
    """The points as a Markdown table."""
    head = (
        "| samples | readers | lanes | w | bytes read | requests a step, all readers | held by a"
        " reader | first step, s | process, MiB |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *map(_row, points)])


def _row(point: Point) -> str:
    readers = f"{point.world_size - point.num_lost:,}{' (one lost)' if point.num_lost else ''}"
    return (
        f"| {point.num_samples:,} | {readers} | {point.num_lanes:,} | {point.window} |"
        f" {point.bytes_factor:.2f}x | {point.requests_per_step:,.0f} |"
        f" {point.held_bytes / 2**20:,.0f} MiB | {point.first_step_s:.2f} |"
        f" {point.peak_bytes / 2**20:,.0f} |"
    )


def main() -> None:
    """Measures all points and prints or writes the table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--n", type=numbers, default=SIZES, help="numbers of samples, separated by commas"
    )
    parser.add_argument(
        "--world", type=numbers, default=WORLDS, help="numbers of readers, separated by commas"
    )
    parser.add_argument("--bytes", type=int, default=110_000, help="bytes of a sample")
    parser.add_argument(
        "--batch", type=int, help="samples of a step; default: 4 a reader, at least 1,024"
    )
    parser.add_argument("--one", nargs=5, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(measure(*args.one))))
        return
    points = [
        run_point(n, world, args.bytes, args.batch or max(1024, 4 * world), num_lost)
        for n in args.n
        for world in args.world
        for num_lost in (0, 1)
        if num_lost < world
    ]
    print(f"{environment.today()}\n\n{table(points)}")


if __name__ == "__main__":
    main()
