"""What readers of tiny images read of indexes: by their rows, and whole as without checks of rows.

python -m benchmarks.index_rows [--n 1280000,1e9] [--size 20000] [--world 1,8,512] [--bytes 2265]

Order, indexes and their reads are the real ones; the tars are not there. All shards have the same
index, so that a thousand million samples fit into memory. The first batch is that of a fresh
reader; the rows after it are planned as a running stream plans them.
"""

import itertools
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pyarrow as pa

from benchmarks import environment
from benchmarks.measuring import numbers, parser_of
from benchmarks.scale import shard_of
from shardset.checksum import crc32c_of, crc32c_text
from shardset.format import naming, rows
from shardset.format.manifest import Split
from shardset.format.shards import StoredShards, pattern_of
from shardset.format.tar import BLOCK, END
from shardset.format.write import WrittenShard, write_split
from shardset.order.budget import OrderOptions, fit_order, steps_at_once
from shardset.order.epoch import Order
from shardset.order.lanes import rank_part
from shardset.read.addresses import stops_of
from shardset.read.indexes import ShardTable
from shardset.storage.base import Stat
from shardset.storage.memory import MemoryStorage
from shardset.stream.decode_batch.steps import growing_slices

MIN_BATCH = 1024
INDEX = naming.index_path(naming.shard_path("train", "train", 0))
PER_READER = 4
NUM_ROWS = 1500
"""Rows of each lane that are planned after the first batch: about three blocks."""


@dataclass(frozen=True)
class OneIndexStorage(MemoryStorage):
    """A bucket in which all shards have the index of the first; `asked` are the bytes of each
    read.
    """

    asked: list[int] = field(default_factory=list)

    def _read(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> tuple[bytes, Stat]:
        stored = INDEX if name.endswith(".parquet") else name
        found = super()._read(stored, start, stop, generation)
        self.asked.append(len(found[0]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader reads of samples and of indexes.

    `num_blocks` are reads of samples in the rows that follow.
    """

    first_samples: int
    first_indexes: int
    first_gets: int
    num_blocks: int
    block_bytes: int
    later_indexes: int
    later_gets: int


def made(num_samples: int, shard_size: int, mean_bytes: int) -> tuple[OneIndexStorage, Split]:
    """The storage and the split of a set of equal samples: an image and its class."""
    step = 2 * BLOCK + -(-mean_bytes // BLOCK) * BLOCK + BLOCK
    starts, random = step * np.arange(shard_size), np.random.default_rng(0)
    checks = random.integers(2**32, size=(2, shard_size), dtype=np.uint32)
    keys = [f"{number:016x}" for number in random.integers(2**62, size=shard_size)]
    columns = {
        "crc32c": checks[0],
        "label": random.integers(1000, size=shard_size),
        "png.offset": starts + BLOCK,
        "png.bytes": random.integers(mean_bytes - 511, mean_bytes + 1, size=shard_size),
        "cls.offset": starts + step - BLOCK,
        "cls.bytes": np.full(shard_size, 1),
        "key": keys,
        "image_crc32c": checks[1],
        "width": np.full(shard_size, 32),
        "height": np.full(shard_size, 32),
        "serial": random.permutation(shard_size),
        "copy": np.zeros(shard_size, int),
        "name": [f"train/{key}.png" for key in keys],
    }
    schema = rows.schema_of(["png", "cls"])
    lacking = pa.nulls(shard_size)
    index = pa.table([columns.get(name, lacking) for name in schema.names], schema)
    num_shards = num_samples // shard_size
    storage = OneIndexStorage(f"one-index-{num_samples}-{shard_size}")
    content = rows.to_bytes(index)
    storage.write(INDEX, content)
    crc32c = crc32c_text(crc32c_of(content))
    split = write_split(
        storage.writer,
        [
            WrittenShard(
                shard_of(
                    number,
                    shard_size,
                    num_bytes=step * shard_size + len(END),
                    index_bytes=len(content),
                    crc32c=crc32c,
                    footer=rows.footer_of(content),
                ),
                ["png", "cls"],
                0,
            )
            for number in range(num_shards)
        ],
        pattern=pattern_of("train", "train", num_shards),
        table_path=naming.table_path("train"),
        class_totals=[],
        seed=0,
        plan_digest="0" * 64,
        promises=[],
    )
    shards = StoredShards(split.groups, storage)
    return storage, msgspec.structs.replace(split, shards=shards)


def order_of(split: Split, world_size: int) -> Order:
    """The order that the first run of so many readers would choose."""
    batch = max(MIN_BATCH, PER_READER * world_size)
    options = OrderOptions(seed=7, global_batch_size=batch, world_size=world_size)
    return fit_order(split.shard_sizes, options, stored_bytes=split.num_tar_bytes)


def measure(
    storage: OneIndexStorage, split: Split, order: Order, world_size: int, *, by_rows: bool
) -> Reading:
    """What one reader of them reads, from the middle of the batch."""
    part = rank_part(order.global_batch_size, world_size // 2, world_size)
    table = ShardTable(storage, split, by_rows=by_rows)
    storage.asked.clear()
    own = _look_up(table, order, order.slots(0, range(1), part.start, part.stop).ids)
    first_gets, first_indexes = len(storage.asked), sum(storage.asked)
    num_steps = min(-(-NUM_ROWS // order.rows_per_step), order.num_batches)
    blocks: dict[int, int] = {}
    for steps in growing_slices(range(num_steps), steps_at_once(order)):
        slots = order.slots(0, steps, part.start, part.stop)
        real = slots.weights > 0
        reads = order.reads_of(
            0, np.broadcast_to(slots.lanes, real.shape)[real], slots.positions[real]
        )
        if by_rows:
            table.load(reads)
        _look_up(table, order, slots.ids[real])
        for first, once in zip(*np.unique(reads.first, return_index=True), strict=True):
            begin, end = table.byte_range(
                reads.shard.item(once), reads.start.item(once), reads.stop.item(once)
            )
            blocks[int(first)] = end - begin
    return Reading(
        first_samples=own,
        first_indexes=first_indexes,
        first_gets=first_gets,
        num_blocks=len(blocks),
        block_bytes=sum(blocks.values()),
        later_indexes=sum(storage.asked) - first_indexes,
        later_gets=len(storage.asked) - first_gets,
    )


def _look_up(table: ShardTable, order: Order, ids: np.ndarray) -> int:
    """The bytes of some samples, whose index rows are read."""
    found = table.addresses(*order.slots_of(ids.ravel()))
    return int((stops_of(found.rows) - found.rows["start"]).sum())


def row(
    num_samples: int, shard_size: int, world_size: int, reading: Reading, *, by_rows: bool
) -> str:
    """One line of the table."""
    how = "rows" if by_rows else "whole"
    first = (reading.first_samples + reading.first_indexes) / reading.first_samples
    return (
        f"| {num_samples:,} | {shard_size:,} | {world_size:,} | {how} |"
        f" {reading.first_samples / 1e6:.2f} | {reading.first_indexes / 1e6:.2f} | {first:.1f} |"
        f" {reading.first_gets:,} | {reading.num_blocks:,} |"
        f" {reading.later_gets / reading.num_blocks:.2f} |"
        f" {reading.later_indexes / reading.block_bytes:.3f} |"
    )


def main() -> None:
    """Measures all sets and numbers of readers, and prints the table."""
    parser = parser_of(__doc__)
    for flag, default, shown in (
        ("--n", (1_280_000, 10**9), "numbers of samples, with commas"),
        ("--size", (2000, 20_000), "samples of a shard, with commas"),
        ("--world", (1, 8, 512), "numbers of readers, with commas"),
    ):
        parser.add_argument(flag, type=numbers, default=default, help=shown)
    parser.add_argument("--bytes", type=int, default=2265, help="bytes of an image")
    args = parser.parse_args()
    print(f"{environment.machine()}, commit {environment.commit()}\n")
    print(
        "| samples | a shard | readers | indexes | first batch, MB | its indexes, MB | all, times"
        " the batch | requests for indexes | blocks after it | requests for indexes a block | their"
        f" bytes a byte |\n|{'---|' * 11}"
    )
    for num_samples, shard_size in itertools.product(args.n, args.size):
        storage, split = made(num_samples, shard_size, args.bytes)
        for world_size, by_rows in itertools.product(args.world, (False, True)):
            order = order_of(split, world_size)
            reading = measure(storage, split, order, world_size, by_rows=by_rows)
            print(row(num_samples, shard_size, world_size, reading, by_rows=by_rows), flush=True)


if __name__ == "__main__":
    main()
