"""Which sample of which set is in a step of a run on a mixture; shardset.stream.timetable knows that of one set."""

import sys
from dataclasses import dataclass, replace

import numpy as np

from shardset.errors import ConfigError
from shardset.stream.stream import Stream
from shardset.stream.timetable import StepVisit, Timetable, TimetableSample
from trainer.data.mixture import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTimetable:
    """The training steps of a run on a mixture. Ids count through its sets, in their order."""

    mixture: Mixture
    num_epochs: int
    num_samples: int

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch of the run."""
        return len(self.mixture)

    def batch(self, global_step: int) -> list[StepVisit]:
        """The global batch of a step, slot by slot; raises ConfigError if the run has no such step."""
        if global_step >= self.num_epochs * self.steps_per_epoch:
            raise ConfigError(f"step {global_step} is not of this run of {self.num_epochs} epochs")
        part, visits = self.mixture.part_of(global_step), list[StepVisit]()
        for source, stream in part.streams():
            for visit in _timetable(stream).batch(global_step - part.steps.start):
                visits.append(replace(visit, slot=len(visits), sample=self._in_mixture(source, visit.sample)))
        return visits

    def samples(self, ids: np.ndarray) -> list[TimetableSample]:
        """Samples by id, in the order of `ids`; reads the rows of their shards' indexes."""
        sources = np.searchsorted(self.mixture.first_ids, ids, side="right") - 1
        streams = {source: stream for part in self.mixture.parts for source, stream in part.streams()}
        found = {}
        for source in np.unique(sources).tolist():
            own_ids = ids[sources == source] - self.mixture.first_ids[source]
            for sample in _timetable(streams[source]).samples(own_ids):
                found[int(self.mixture.first_ids[source]) + sample.id] = self._in_mixture(source, sample)
        return [found[sample_id] for sample_id in ids.tolist()]

    def _in_mixture(self, source: int, sample: TimetableSample) -> TimetableSample:
        return replace(sample, id=int(self.mixture.first_ids[source]) + sample.id)


def _timetable(stream: Stream) -> Timetable:
    """That of a set in a mixture, which begins an epoch of its own whenever one ends."""
    storage, split_name = stream.source.table.storage, stream.spec.split
    return Timetable(
        manifest=stream.manifest, storage=storage, split_name=split_name, order=stream.order, num_epochs=sys.maxsize
    )
