"""A shard set in memory with a record of what is read from it, and readers of it gone through."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardset.order.epoch import Order
from shardset.order.lanes import rank_part
from shardset.read import remote
from shardset.storage.base import Stat, Storage
from shardset.stream.stream import Stream

NUM_SAMPLES = 60


class BytesRead:
    """Counts the bytes of shards that come from buckets while its block runs."""

    def __enter__(self):
        self._sizes, self._read = [], remote._listed_range
        remote._listed_range = self._count
        return self

    def __exit__(self, *exc):
        remote._listed_range = self._read

    def _count(self, *wanted):
        data = self._read(*wanted)
        self._sizes.append(len(data))
        return data

    @property
    def total(self):
        return sum(self._sizes)


@dataclass
class RecordingStorage:
    """Another storage, with a record of its reads and looks, and a hook that may delay or fail each
    read.
    """

    inner: Storage
    reads: list = field(default_factory=list)
    before: Callable = lambda number, name: None
    looks: list = field(default_factory=list)
    is_throttled: bool = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def stat(self, name) -> Stat:
        self.looks.append(name)
        return self.inner.stat(name)

    def read(self, name, start=0, stop=None, *, generation=None):
        number = len(self.reads)
        self.reads.append((name, start, stop, generation))
        self.before(number, name)
        return self.inner.read(name, start, stop, generation=generation)

    def read_with_stat(self, name, start=0, stop=None):
        return self.read(name, start, stop), self.inner.stat(name)


def order_of(split, **options):
    choices = {"seed": 3, "global_batch_size": 6, "num_lanes": 3, "block_size": 5, "window": 4}
    return Order(
        shard_sizes=[shard.num_samples for shard in split.shards], **{**choices, **options}
    )


def addresses_of(table, order, ids):
    return table.addresses(*order.slots_of(ids))


def rank_slots(order, epoch, step, rank, world):
    """The slots of one replica in one global batch."""
    part = rank_part(order.global_batch_size, rank, world)
    return order.slots(epoch, range(step, step + 1), part.start, part.stop)[0]


def read_epoch(reads, table, order, *, epoch=0, start=0, rank=0, world=1):
    """The fields of all samples of an epoch, by id."""
    contents = {}
    for step in range(start, order.num_batches):
        slots = rank_slots(order, epoch, step, rank, world)
        pending = reads.read_step(epoch, slots, addresses_of(table, order, slots.ids))
        contents |= {id_: pending.take(number) for number, id_ in enumerate(slots.ids.tolist())}
    return contents


def same(one, other):
    """Whether two batches or rows have the same names and values."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


def all_same(some, others):
    """Whether two iterables have the same batches or rows."""
    return all(same(one, other) for one, other in zip(some, others, strict=True))


def together(batches):
    """The parts of one global batch as one, or the batches of an epoch."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def stream_of(url, split="train", **options):
    """A stream of one replica with small blocks, unless the options say otherwise."""
    choices = {"rank": 0, "world_size": 1, "seed": 7, "block_size": 5, "window": 6}
    return Stream(url, split, **{**choices, "num_threads": 2, **options})
