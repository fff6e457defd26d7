"""Measures how well the epoch order mixes. Prints the table of docs/order.md; `--write` replaces it there.

    python benchmarks/order_quality.py --write docs/order.md

The worst case: 1,281,167 samples of 1,000 classes stored class by class in 640 shards, and batches of 1,024. The
build stores them permuted, so real batches are better than these.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.estimate.mixing import classes_in
from shardset.order.epoch import Order

NUM_SAMPLES, NUM_SHARDS, NUM_CLASSES, BATCH = 1_281_167, 640, 1000, 1024
STEPS = range(100, 1200, 100)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: classes in a batch (mean), and the share of the data that all readers hold."""

    name: str
    classes: float
    held: float


def sizes() -> list[int]:
    """Samples of each shard, at most one apart."""
    cuts = [NUM_SAMPLES * number // NUM_SHARDS for number in range(NUM_SHARDS + 1)]
    return np.diff(cuts).tolist()


def ours(name: str, *, lanes: int, block: int, window: int) -> Row:
    """The row of one choice of L, q and w."""
    order = Order(
        shard_sizes=sizes(), seed=1, global_batch_size=BATCH, num_lanes=lanes, block_size=block, window=window
    )
    held = min(1.0, lanes * (block + window) / NUM_SAMPLES)
    return Row(name, _classes_in(order.batch(0, step).ids for step in STEPS), held)


def uniform() -> Row:
    """The row of a permutation of all samples."""
    draw = np.random.default_rng(0)
    return Row("every sample anywhere (random reads)", _classes_in(draw.choice(NUM_SAMPLES, BATCH) for _ in STEPS), 0)


def buffered(name: str, *, size: int, readers: int) -> Row:
    """The row of shuffled shards read in turn by `readers` through a shuffle buffer each, as plain tar readers do."""
    draw = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(sizes())])
    lines = np.array_split(draw.permutation(NUM_SHARDS), readers)
    streams = [_through_buffer([range(starts[s], starts[s + 1]) for s in line], size, draw) for line in lines]
    batches = [np.array([next(streams[k % readers]) for k in range(BATCH)]) for _ in range(200)]
    return Row(name, _classes_in(iter(batches[::20])), size * readers / NUM_SAMPLES)


def _classes_in(batches: Iterator[np.ndarray]) -> float:
    return classes_in(batches, NUM_SAMPLES, NUM_CLASSES)


def _through_buffer(parts: list[range], size: int, draw: np.random.Generator) -> Iterator[int]:
    source = (id_ for part in parts for id_ in part)
    held = [id_ for id_, _ in zip(source, range(size), strict=False)]
    for id_ in source:
        place = int(draw.integers(size))
        held[place], id_ = id_, held[place]
        yield id_


def table() -> str:
    """The table in Markdown."""
    rows = [
        uniform(),
        ours("q = 38, w = 256, 256 lanes (the default)", lanes=256, block=38, window=256),
        ours("q = 38, w = 19, 256 lanes (lowered by a budget)", lanes=256, block=38, window=19),
        ours("q = 38, w = 0, 256 lanes", lanes=256, block=38, window=0),
        ours("q = 38, w = 256, 64 lanes", lanes=64, block=38, window=256),
        ours("q = 512, w = 256, 256 lanes (small samples)", lanes=256, block=512, window=256),
        buffered("shuffled shards, buffer of 1,000, 1 reader", size=1000, readers=1),
        buffered("shuffled shards, buffer of 10,000, 1 reader", size=10_000, readers=1),
        buffered("shuffled shards, buffer of 1,000, 8 readers", size=1000, readers=8),
    ]
    head = "| order | classes in a batch | held in memory |\n|---|---|---|\n"
    return head + "".join(f"| {row.name} | {row.classes:.0f} | {100 * row.held:.1f} % |\n" for row in rows)


def main() -> None:
    """Prints the table, or replaces the one between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    found = table()
    print(found)
    if arguments.write:
        page = arguments.write.read_text()
        marked = rf"(?<=<!-- table: {Path(__file__).name} -->\n).*?(?=<!-- end -->)"
        arguments.write.write_text(re.sub(marked, found, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
