"""Which sample a run sees in which step, from manifest, order and indexes, without listing an
epoch.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from shardset.errors import ConfigError
from shardset.format.catalog import read_names
from shardset.format.manifest import LoadedSet, Split
from shardset.order.epoch import Order
from shardset.read.indexes import read_index, read_rows

THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TimetableSample:
    """One stored sample. `name` is its name in the raw input, None if the plan was deleted."""

    id: int
    key: str
    name: str | None
    label: int
    class_name: str
    shard: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVisit:
    """A sample in its slot of a global batch.

    A `pad` is a repeat with weight 0 that fills the last batch.
    """

    slot: int
    pad: bool
    sample: TimetableSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
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

    def batch(self, global_step: int) -> list[StepVisit]:
        """The global batch of a step, slot by slot;
        raises ConfigError if the run has no such step.
        """
        if not 0 <= global_step < self.num_steps:
            raise ConfigError(
                f"step {global_step} is not of this run: {self.num_epochs} epochs of"
                f" {self.order.num_batches} steps are the steps 0 to {self.num_steps - 1}"
            )
        slots = self.order.batch(*divmod(global_step, self.order.num_batches))
        visits = zip((slots.weights == 0).tolist(), self.samples(slots.ids), strict=True)
        return [
            StepVisit(slot=slot, pad=pad, sample=sample)
            for slot, (pad, sample) in enumerate(visits)
        ]

    def visits(self, sample_id: int, epochs: range) -> Iterator[Visit]:
        """The steps of these epochs that train on a sample, in order; pads, which count nowhere,
        are left out.
        """
        if not 0 <= sample_id < self.split.num_samples:
            raise ConfigError(
                f"no id {sample_id} in split {self.split_name!r}, which has 0 to"
                f" {self.split.num_samples - 1}"
            )
        order = self.order
        for epoch in epochs:
            rows, lanes = order.find(epoch, np.array([sample_id]))
            step, item = divmod(int(rows[0]), order.rows_per_step)
            first = (int(lanes[0]) * order.rows_per_step + item) * order.augment_repeats
            for slot in range(
                first, first + order.augment_repeats if step < order.num_batches else first
            ):
                yield Visit(
                    epoch=epoch, step=step, global_step=epoch * order.num_batches + step, slot=slot
                )

    def samples(self, ids: np.ndarray) -> list[TimetableSample]:
        """Samples by id, in the order of `ids`; reads the rows of their shards' indexes."""
        shards, _ = self.order.slots_of(ids)
        by_shard = {shard: np.unique(ids[shards == shard]) for shard in np.unique(shards).tolist()}
        with ThreadPoolExecutor(THREADS) as threads:
            found = list(
                itertools.chain(*threads.map(self._samples_of_shard, by_shard, by_shard.values()))
            )
        by_id = {sample.id: sample for sample in found}
        return [by_id[sample_id] for sample_id in ids.tolist()]

    def id_of(self, key: str) -> int:
        """The id of a key; raises ConfigError if the split has none.

        Reads indexes of the split until it finds it.
        """
        wanted = key.encode("ascii", "replace")

        def positions(number: int) -> list[int]:
            return np.flatnonzero(
                read_index(self.loaded.storage, self.split.shards[number])["key"] == wanted
            ).tolist()

        with ThreadPoolExecutor(THREADS) as threads:
            for number, found in enumerate(threads.map(positions, range(self.split.num_shards))):
                if found:
                    threads.shutdown(wait=False, cancel_futures=True)
                    return int(self.order.first_ids[number]) + found[0]
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
        names = read_names(self.loaded.storage, shard, rows["key"], positions) or itertools.repeat(
            None, len(positions)
        )
        return [
            TimetableSample(
                id=sample_id,
                key=key.decode("ascii", "replace"),
                name=name,
                label=label,
                class_name=manifest.class_name(label),
                shard=shard.path,
                position=position,
            )
            for sample_id, position, key, label, name in zip(
                ids.tolist(), positions, rows["key"].tolist(), labels.tolist(), names, strict=True
            )
        ]
