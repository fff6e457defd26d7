"""Which sample of which set a run on a mixture sees in which step; shardset.stream.timetable does so for one set."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from shardset.errors import ConfigError
from shardset.stream.stream import Stream
from shardset.stream.timetable import StepVisit, Timetable, TimetableSample, Visit
from trainer.data.mixture import Mixture


@dataclass(frozen=True, kw_only=True)
class MixedTimetable:
    """The training steps of a run on a mixture: a Timetable whose ids count through the sets, in their order."""

    mixture: Mixture
    num_epochs: int
    sets: dict[int, Timetable] = field(init=False)

    def __post_init__(self) -> None:
        streams = {source: stream for part in self.mixture.parts for source, stream in part.numbered()}
        object.__setattr__(self, "sets", {source: _timetable(streams[source]) for source in sorted(streams)})

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch of the run."""
        return len(self.mixture)

    @property
    def num_samples(self) -> int:
        """The samples of all sets."""
        return sum(one.num_samples for one in self.sets.values())

    def batch(self, global_step: int) -> list[StepVisit]:
        """The global batch of a step, slot by slot; raises ConfigError if the run has no such step."""
        if global_step >= self.num_epochs * self.steps_per_epoch:
            raise ConfigError(f"step {global_step} is not of this run of {self.num_epochs} epochs")
        part = self.mixture.part_of(global_step)
        visits = [
            replace(visit, sample=self._in_mixture(source, visit.sample))
            for source, stream in part.numbered()
            for visit in _timetable(stream).batch(global_step - part.steps.start)
        ]
        return [replace(visit, slot=slot) for slot, visit in enumerate(visits)]

    def visits(self, sample_id: int, epochs: range) -> Iterator[Visit]:
        """The steps of these epochs of the run that train on a sample, in order."""
        source, length = self._source(sample_id), self.steps_per_epoch
        for part in self.mixture.parts:
            first_slot = 0
            start = max(epochs.start * length, part.steps.start) - part.steps.start
            stop = min(epochs.stop * length, part.steps.stop) - part.steps.start
            for number, stream in part.numbered():
                if number == source and start < stop:
                    own_epochs = range(start // len(stream), -(-stop // len(stream)))
                    for visit in _timetable(stream).visits(sample_id - self.mixture.first_ids[source], own_epochs):
                        if start <= visit.global_step < stop:
                            step = part.steps.start + visit.global_step
                            epoch, step_in_epoch = divmod(step, length)
                            slot = first_slot + visit.slot
                            yield Visit(epoch=epoch, step=step_in_epoch, global_step=step, slot=slot)
                first_slot += stream.order.global_batch_size

    def samples(self, ids: np.ndarray) -> list[TimetableSample]:
        """Samples by id, in the order of `ids`; reads the rows of their shards' indexes."""
        sources = np.array([self._source(one) for one in ids.tolist()])
        found: dict[int, TimetableSample] = {}
        for source in np.unique(sources).tolist():
            own_ids = ids[sources == source] - self.mixture.first_ids[source]
            samples = [self._in_mixture(source, one) for one in self.sets[source].samples(own_ids)]
            found |= {one.id: one for one in samples}
        return [found[one] for one in ids.tolist()]

    def id_of(self, key: str) -> int:
        """The id of a key, in the first set that has it; raises ConfigError if none has."""
        for source, timetable in self.sets.items():
            try:
                return self.mixture.first_ids[source] + timetable.id_of(key)
            except ConfigError:
                continue
        raise ConfigError(f"no set of the mixture has the key {key!r} in its training split")

    def _source(self, sample_id: int) -> int:
        if not 0 <= sample_id < self.num_samples:
            raise ConfigError(f"no id {sample_id} in this mixture, whose sets have 0 to {self.num_samples - 1}")
        return int(np.searchsorted(self.mixture.first_ids, sample_id, side="right")) - 1

    def _in_mixture(self, source: int, sample: TimetableSample) -> TimetableSample:
        return replace(sample, id=self.mixture.first_ids[source] + sample.id)


def _timetable(stream: Stream) -> Timetable:
    """The endless timetable of a set in a mixture, which begins an epoch of its own whenever one ends."""
    storage, split_name = stream.source.table.storage, stream.spec.split
    return Timetable(
        manifest=stream.manifest, storage=storage, split_name=split_name, order=stream.order, num_epochs=sys.maxsize
    )
