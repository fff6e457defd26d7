"""Measures how well the epoch order mixes.

Prints the table of docs/explanation/order.md; `--write` replaces it there.

    python -m benchmarks.order_quality --write docs/explanation/order.md

The worst case: 1,281,167 samples of 1,000 classes stored class by class in 640 shards. The build
stores them permuted, so real batches are better than these. Every order is a function from the
number of an epoch to all of its ids in turn.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import show
from benchmarks.measuring import parser_of
from pipelines.estimate.reading import classes_in
from shardset.order.epoch import Order

NUM_SAMPLES, NUM_SHARDS, NUM_CLASSES = 1_281_167, 640, 1000
NUM_BATCHES = 11

Ids = NDArray[np.int64]
Epochs = Callable[[int], Ids]


HEAD = (
    "| order | batch | classes in a batch | neighbours meet | pairs meet again | held in memory |\n"
    "|---|---|---|---|---|---|\n"
)


def measured(name: str, epochs: Epochs, held: float, batch: int = 1024) -> str:
    """The row of an order, from eleven batches of its first epoch; `held` is the share of the data
    that all readers hold.

    `neighbours` counts samples that are stored side by side and meet in a batch, `again` pairs of a
    batch that meet in one of the next epoch; both for each that would by chance.
    """
    num_steps = NUM_SAMPLES // batch
    first = epochs(0)
    every = min(100, num_steps // (NUM_BATCHES + 1))  # those of `estimate`
    batches = [
        first[step * batch :][:batch] for step in range(every, (NUM_BATCHES + 1) * every, every)
    ]
    step_of, next_step_of = np.empty((2, NUM_SAMPLES), np.int64)
    step_of[first] = next_step_of[epochs(1)] = np.arange(NUM_SAMPLES) // batch
    chance = (batch - 1) / (NUM_SAMPLES - 1)
    classes = classes_in(batches, NUM_SAMPLES, NUM_CLASSES)
    neighbours = np.mean(step_of[1:] == step_of[:-1]) / chance
    pairs = np.mean([_pairs(next_step_of[ids]) for ids in batches])
    again = pairs / (chance * batch * (batch - 1) / 2)
    return (
        f"| {name} | {batch:,} | {classes:.0f} | {neighbours:.1f}x | {again:.2f}x |"
        f" {100 * min(1.0, held):.1f} % |\n"
    )


def _pairs(groups: Ids) -> int:
    """How many pairs are of one group."""
    counts = np.unique(groups, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def shards() -> list[Ids]:
    """The ids of each shard; their numbers are at most one apart."""
    cuts = [NUM_SAMPLES * number // NUM_SHARDS for number in range(1, NUM_SHARDS)]
    return np.split(np.arange(NUM_SAMPLES), cuts)


def in_turns(lines: list[Ids]) -> Ids:
    """One of each line after the other."""
    turns = np.concatenate([np.arange(len(line)) for line in lines])
    return np.concatenate(lines)[np.argsort(turns, kind="stable")]


def ours(lanes: int, window: int, *, block: int = 38, batch: int = 1024, note: str = "") -> str:
    """The row of one choice of L, q and w."""
    order = Order(
        shard_sizes=[len(shard) for shard in shards()],
        seed=1,
        global_batch_size=batch,
        num_lanes=lanes,
        block_size=block,
        window=window,
    )

    def ids(epoch: int) -> Ids:
        found = [
            order.slots(epoch, range(step, min(step + 16, order.num_batches)), 0, batch)
            for step in range(0, order.num_batches, 16)
        ]
        real = [slots.ids[slots.weights > 0] for slots in found]
        return np.concatenate(real)

    held = lanes * (block + window) / NUM_SAMPLES
    return measured(f"q = {block}, w = {window}, {lanes:,} lanes{note}", ids, held, batch)


def uniform(batch: int = 1024) -> str:
    """The row of a permutation of all samples."""
    name = "every sample anywhere (a random read for each; Grain on ArrayRecord)"
    return measured(
        name, lambda epoch: np.random.default_rng(epoch).permutation(NUM_SAMPLES), 0, batch
    )


def buffered(size: int, readers: int, note: str = "") -> str:
    """The row of shuffled shards read in turn by `readers` through a shuffle buffer each, as plain
    tar readers do.
    """

    def ids(epoch: int) -> Ids:
        draw = np.random.default_rng(epoch)
        lines = np.array_split(draw.permutation(NUM_SHARDS), readers)
        return in_turns(
            [
                _through_buffer(np.concatenate([stored[s] for s in line]), size, draw)
                for line in lines
            ]
        )

    stored = shards()

    plural = "" if readers == 1 else "s"
    return measured(
        f"shuffled shards, buffer of {size:,}, {readers} reader{plural}{note}",
        ids,
        size * readers / NUM_SAMPLES,
    )


def _through_buffer(line: Ids, size: int, draw: np.random.Generator) -> Ids:
    held, rest = line[:size].copy(), line[size:]
    out = np.empty_like(line)
    for number, place in enumerate(draw.integers(len(held), size=len(rest)).tolist()):
        out[number], held[place] = held[place], rest[number]
    out[len(rest) :] = draw.permutation(held)
    return out


def expanded(range_of_shard: int, nodes: int, note: str = "") -> str:
    """The row of MosaicML Streaming's py1e: each sample of a shuffled shard moves anywhere in a
    range around it.

    The ranges are 0.75 to 1.25 times `range_of_shard` long; samples stay in their canonical node,
    shards too.
    """
    stored = shards()
    nodes_of_run = np.array_split(np.random.default_rng(7).permutation(NUM_SHARDS), nodes)

    def ids(epoch: int) -> Ids:
        draw = np.random.default_rng(100 + epoch)
        return in_turns(
            [
                _expand([stored[s] for s in draw.permutation(own)], range_of_shard, draw)
                for own in nodes_of_run
            ]
        )

    held = nodes * range_of_shard / NUM_SAMPLES
    return measured(
        f"MosaicML's py1e, ranges of {range_of_shard:,}, {nodes} nodes{note}", ids, held
    )


def _expand(shards: list[Ids], range_of_shard: int, draw: np.random.Generator) -> Ids:
    line = np.concatenate([draw.permutation(shard) for shard in shards])
    places, begin = np.arange(len(line), dtype=np.float64), 0
    for shard in shards:
        room = max(0.0, (draw.uniform(0.75, 1.25) * range_of_shard - len(shard)) / 2)
        low, high = max(-room, -begin), min(room, len(line) - begin - len(shard))
        places[begin : begin + len(shard)] += draw.uniform(low, high, size=len(shard))
        begin += len(shard)
    return line[np.argsort(places)]


def rows() -> list[str]:
    """All rows of the page, in Markdown."""
    held = 256 * (38 + 256)
    return [
        uniform(),
        ours(256, 256, note=" (the default)"),
        ours(256, 19, note=" (lowered by a budget)"),
        ours(256, 0),
        ours(256, 256, block=512, note=" (small samples)"),
        buffered(10_000, 1),
        buffered(1000, 8),
        buffered(held // 64, 64, " (the default's memory)"),
        expanded(held // 8, 8, " (the default's memory)"),
        expanded(500_000, 8, " (its default)"),
        uniform(32_768),
        ours(256, 256, batch=32_768),
        ours(512, 256, batch=32_768, note=" (the default of 16 readers)"),
        ours(2048, 256, batch=32_768, note=" (the default of 64 readers)"),
    ]  # fmt: skip


def main() -> None:
    """Prints the table, or replaces the one between the marks of a page."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", type=Path)
    show({"order": HEAD + "".join(rows())}, parser.parse_args().write)


if __name__ == "__main__":
    main()
