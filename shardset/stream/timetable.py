"""Which sample a run sees in which step, from manifest, order and indexes, without listing an
epoch.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardset.errors import ConfigError
from shardset.format.catalog import read_names
from shardset.format.manifest import LoadedSet, Shard, Split
from shardset.order.epoch import Order
from shardset.read.indexes import read_index, read_rows

THREADS = 16


class TimetableSample(NamedTuple):
    """One stored sample. `name` is its name in the raw input, None if the plan was deleted."""

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
        if not 0 <= sample_id < self.split.num_samples:
            raise ConfigError(
                f"no id {sample_id} in split {self.split_name!r}, which has 0 to"
                f" {self.split.num_samples - 1}"
            )
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
        shards, _ = self.order.slots_of(ids)
        by_shard = {shard: np.unique(ids[shards == shard]) for shard in np.unique(shards).tolist()}
        with ThreadPoolExecutor(THREADS) as threads:
            found = threads.map(self._samples_of_shard, by_shard, by_shard.values())
            by_id = {sample.id: sample for samples in found for sample in samples}
        return [by_id[sample_id] for sample_id in ids.tolist()]

    def id_of(self, key: str) -> int:
        """The id of a key; raises ConfigError if the split has none.

        Reads indexes of the split until it finds it.
        """
        wanted = key.encode("ascii", "replace")

        def ids(shard: Shard) -> list[int]:
            keys = read_index(self.loaded.storage, shard)["key"]
            return (shard.first_id + np.flatnonzero(keys == wanted)).tolist()

        with ThreadPoolExecutor(THREADS) as threads:
            for found in threads.map(ids, self.split.shards):
                if found:
                    threads.shutdown(wait=False, cancel_futures=True)
                    return found[0]
        raise ConfigError(
            f"no sample of split {self.split_name!r} has the key {key!r}; `python -m pipelines"
            " inspect` finds samples in all splits, by key and by name"
        )

    def _samples_of_shard(self, number: int, ids: np.ndarray) -> list[TimetableSample]:
        manifest, part = self.loaded.manifest, self.loaded.part(self.split_name)
        shard = self.split.shards[number]
        positions = (ids - self.order.first_ids[number]).tolist()
        rows = read_rows(self.loaded.storage, shard, self.split.index_fields(number), positions)
        labels = part.labels_of(ids, rows["label"])
        known = read_names(self.loaded.storage, shard, rows["key"], positions)
        names: Sequence[str | None] = known or [None] * len(positions)
        classes = map(manifest.class_name, labels.tolist())
        keys = [key.decode("ascii", "replace") for key in rows["key"].tolist()]
        found = zip(ids.tolist(), keys, names, labels.tolist(), classes, strict=True)
        return [
            TimetableSample(*sample, shard.path, position)
            for sample, position in zip(found, positions, strict=True)
        ]
