"""Which sample a run sees in which step, from manifest, order and indexes, without listing an
epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shardset.errors import ConfigError
from shardset.format.manifest import LoadedSet, Split
from shardset.order.epoch import Order
from shardset.read.indexes import ShardTable, read_index
from shardset.read.threads import results_in_order

THREADS = 16


class TimetableSample(NamedTuple):
    """One stored sample. `name` is its name in the raw input, None if no build made it."""

    id: int
    key: str
    name: str | None
    label: int
    class_name: str
    shard: str
    position: int


class Visit(NamedTuple):
    """A step that trains on a sample, and the slot of the sample in it."""

    epoch: int
    step: int
    global_step: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """The training steps of a run, and the samples of its split; `num_epochs` are those that it
    plans.
    """

    loaded: LoadedSet
    split_name: str
    order: Order
    num_epochs: int

    @property
    def split(self) -> Split:
        """The split that is trained on."""
        return self.loaded.manifest.split(self.split_name)

    @property
    def num_steps(self) -> int:
        """The steps of all epochs."""
        return self.num_epochs * self.order.num_batches

    def batch(self, global_step: int) -> list[tuple[TimetableSample, bool]]:
        """The global batch of a step, slot by slot, and whether each is a pad: a repeat of weight 0
        that fills the last batch.

        Raises ConfigError if the run has no such step.
        """
        if not 0 <= global_step < self.num_steps:
            raise ConfigError(
                f"step {global_step} is not of this run: {self.num_epochs} epochs of"
                f" {self.order.num_batches} steps are the steps 0 to {self.num_steps - 1}"
            )
        slots = self.order.batch(*divmod(global_step, self.order.num_batches))
        return list(zip(self.samples(slots.ids), (slots.weights == 0).tolist(), strict=True))

    def visits(self, sample_id: int) -> Iterator[Visit]:
        """The steps of the run that train on a sample, in order; pads, which count nowhere, are
        left out.
        """
        order, repeats = self.order, self.order.augment_repeats
        for epoch in range(self.num_epochs):
            rows, lanes = order.find(epoch, np.array([sample_id]))
            step, item = divmod(int(rows[0]), order.rows_per_step)
            first = (int(lanes[0]) * order.rows_per_step + item) * repeats
            if step < order.num_batches:
                for slot in range(first, first + repeats):
                    yield Visit(epoch, step, epoch * order.num_batches + step, slot)

    def samples(self, ids: np.ndarray) -> list[TimetableSample]:
        """Samples by id, in the order of `ids`; reads the rows of their shards' indexes."""
        shards, positions = self.order.slots_of(ids)
        found = self._table().addresses(shards, positions)
        labels = self.loaded.part(self.split_name).labels_of(ids, found.labels).tolist()
        wanted, owners = np.unique(shards, return_inverse=True)
        calls = [partial(self._names, shard) for shard in wanted.tolist()]
        names = [*results_in_order("shardset-names", THREADS, calls)]
        columns = (
            ids.tolist(),
            found.keys or (),
            [
                names[owner][position].as_py()
                for owner, position in zip(owners, positions, strict=True)
            ],
            labels,
            map(self.loaded.manifest.class_name, labels),
            (self.split.shards[shard].path for shard in shards.tolist()),
            positions.tolist(),
        )
        return list(map(TimetableSample, *columns))

    def id_of(self, key: str) -> int:
        """The id of a key; raises ConfigError if the split has none.

        Reads all indexes of the split.
        """
        found = np.flatnonzero(self._table().keys() == key.encode("ascii", "replace"))
        if not len(found):
            raise ConfigError(
                f"no sample of split {self.split_name!r} has the key {key!r}; `shardset inspect`"
                " finds samples in all splits, by key and by name"
            )
        return found.item(0)

    def _table(self) -> ShardTable:
        return ShardTable(self.loaded.storage, self.split, with_keys=True)

    def _names(self, shard: int) -> pa.ChunkedArray:
        """The names of a shard's samples in the raw input."""
        return read_index(self.loaded.storage, self.split.shards[shard], ["name"])["name"]
