"""Which sample a run sees in which step, from manifest, order and indexes, without listing an epoch."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from shardset.errors import ConfigError
from shardset.format.manifest import Manifest, Split
from shardset.format.originals import read_origins
from shardset.order.epoch import Order, Slots
from shardset.read.index_rows import read_rows
from shardset.read.indexes import read_index
from shardset.storage.base import Storage

THREADS = 16
NEAREST = 3


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
    """A sample in its slot of a global batch. A `pad` is a repeat with weight 0 that fills the last batch."""

    slot: int
    lane: int
    row: int
    pad: bool
    sample: TimetableSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A step that sees a sample: in which slot, and whether only as a pad of weight 0."""

    epoch: int
    step: int
    global_step: int
    slot: int
    lane: int
    row: int
    pad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """The training steps of a run, and the samples of its split; `num_epochs` are those that it plans."""

    manifest: Manifest
    storage: Storage
    split_name: str
    order: Order
    num_epochs: int

    @property
    def split(self) -> Split:
        """The split that is trained on."""
        return self.manifest.split(self.split_name)

    @property
    def num_steps(self) -> int:
        """The steps of all epochs."""
        return self.num_epochs * self.order.num_batches

    def place_of(self, global_step: int) -> tuple[int, int]:
        """(epoch, step) of a step counted over all epochs; raises ConfigError if the run has no such step."""
        if not 0 <= global_step < self.num_steps:
            raise ConfigError(
                f"step {global_step} is not of this run: {self.num_epochs} epochs of {self.order.num_batches} steps "
                f"are the steps 0 to {self.num_steps - 1}"
            )
        return divmod(global_step, self.order.num_batches)

    def step_of(self, epoch: int, step: int) -> int:
        """The step counted over all epochs; raises ConfigError if the run has no such epoch, or epochs no such step."""
        self.check_epochs(range(epoch, epoch + 1))
        if not 0 <= step < self.order.num_batches:
            raise ConfigError(f"an epoch has the steps 0 to {self.order.num_batches - 1}, not {step}")
        return epoch * self.order.num_batches + step

    def check_epochs(self, epochs: range) -> None:
        """Raises ConfigError unless the run plans all of these."""
        if not 0 <= epochs.start < epochs.stop <= self.num_epochs:
            raise ConfigError(
                f"epochs {epochs.start + 1}:{epochs.stop + 1} are not of this run, which plans "
                f"1:{self.num_epochs + 1}; they are counted from 1, and the second number is "
                "the first epoch after the range"
            )

    def batch(self, global_step: int) -> list[StepVisit]:
        """The global batch of a step, slot by slot."""
        slots = self.order.batch(*self.place_of(global_step))
        return [
            StepVisit(slot=slot, lane=lane, row=row, pad=weight == 0, sample=sample)
            for slot, (lane, row, weight, sample) in enumerate(
                zip(
                    slots.lanes.tolist(),
                    slots.rows.tolist(),
                    slots.weights.tolist(),
                    self.samples(slots.ids),
                    strict=True,
                )
            )
        ]

    def visits(self, sample_id: int, epochs: range) -> Iterator[Visit]:
        """The steps of these epochs in which a sample is seen, pads included, in order."""
        self.check_epochs(epochs)
        for epoch in epochs:
            rows, lanes = self.order.find(epoch, np.array([sample_id]))
            row, lane = int(rows[0]), int(lanes[0])
            step, item = divmod(row, self.order.rows_per_step)
            if step < self.order.num_batches:
                slot = (lane * self.order.rows_per_step + item) * self.order.augment_repeats
                for repeat in range(self.order.augment_repeats):
                    yield self._visit(epoch, step, slot + repeat, lane, row, pad=False)
            yield from self._pads(epoch, sample_id)

    def samples(self, ids: np.ndarray) -> list[TimetableSample]:
        """Samples by id, in the order of `ids`; reads the rows of their shards' indexes."""
        shards = np.searchsorted(self.order.first_ids, ids, side="right") - 1
        ids_by_shard = [np.unique(ids[shards == shard]) for shard in np.unique(shards)]
        with ThreadPoolExecutor(THREADS) as threads:
            samples_by_shard = threads.map(self._samples_of_shard, np.unique(shards).tolist(), ids_by_shard)
            by_id = {sample.id: sample for samples in samples_by_shard for sample in samples}
        return [by_id[sample_id] for sample_id in ids.tolist()]

    def id_of(self, key: str) -> int:
        """The id of a key, from the split's indexes; raises ConfigError naming the nearest keys if there is none."""
        wanted, near = key.encode("ascii", "replace"), []
        with ThreadPoolExecutor(THREADS) as threads:
            for number, (position, around) in enumerate(
                threads.map(lambda shard: self._find_key(shard, wanted), range(self.split.num_shards))
            ):
                if position is not None:
                    threads.shutdown(wait=False, cancel_futures=True)
                    return int(self.order.first_ids[number]) + position
                near += around
        raise ConfigError(
            f"no sample of split {self.split_name!r} has the key {key!r}; near it are "
            f"{', '.join(_nearest(key, near))}; `python -m pipelines inspect` finds keys in all splits and by name"
        )

    def _visit(self, epoch: int, step: int, slot: int, lane: int, row: int, *, pad: bool) -> Visit:
        global_step = epoch * self.order.num_batches + step
        return Visit(epoch=epoch, step=step, global_step=global_step, slot=slot, lane=lane, row=row, pad=pad)

    def _pads(self, epoch: int, sample_id: int) -> Iterator[Visit]:
        last = self.order.num_batches - 1
        if self.order.num_batches * self.order.global_batch_size <= self.order.num_samples * self.order.augment_repeats:
            return
        slots: Slots = self.order.batch(epoch, last)
        for slot in np.flatnonzero((slots.ids == sample_id) & (slots.weights == 0)).tolist():
            yield self._visit(epoch, last, slot, int(slots.lanes[slot]), int(slots.rows[slot]), pad=True)

    def _samples_of_shard(self, number: int, ids: np.ndarray) -> list[TimetableSample]:
        shard = self.split.shards[number]
        positions = (ids - self.order.first_ids[number]).tolist()
        rows = read_rows(self.storage, shard, self.split.fields, positions)
        origins = read_origins(self.storage, self.split_name, number, rows["key"], positions)
        return [
            TimetableSample(
                id=sample_id,
                key=key.decode("ascii", "replace"),
                name=origins[number].name if origins else None,
                label=label,
                class_name=self.manifest.classes[label].name if 0 <= label < len(self.manifest.classes) else "",
                shard=shard.path,
                position=position,
            )
            for number, (sample_id, position, key, label) in enumerate(
                zip(ids.tolist(), positions, rows["key"].tolist(), rows["label"].tolist(), strict=True)
            )
        ]

    def _find_key(self, number: int, wanted: bytes) -> tuple[int | None, list[str]]:
        """The position of a key in a shard, or None and the keys that would stand next to it."""
        keys = read_index(self.storage, self.split.shards[number])["key"]
        here = np.flatnonzero(keys == wanted)
        if here.size:
            return int(here[0]), []
        ordered = np.sort(keys)
        at = int(np.searchsorted(ordered, wanted))
        around = ordered[max(0, at - NEAREST) : at + NEAREST].tolist()
        return None, [key.decode("ascii", "replace") for key in around]


def _nearest(key: str, keys: Sequence[str]) -> list[str]:
    """The keys that share the longest prefix with `key`."""
    return sorted(keys, key=lambda other: (-_prefix_length(key, other), other))[:NEAREST]


def _prefix_length(key: str, other: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(key, other, strict=False)))
