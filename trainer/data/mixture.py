"""Several shard sets in every batch of a run, by weights that may change at steps."""

import itertools
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardset.format.manifest import LoadedSet
from shardset.order.permutation import derive_key
from shardset.order.state import OrderState
from shardset.stream.mixture import MixedStream, Share
from shardset.stream.spec import Batch
from shardset.stream.stream import Stream
from trainer.config import MixedSet

STEPS_AT_ONCE = 64


class MixedSteps(NamedTuple):
    """Steps of the run with the same weights, the numbers of the sets in their batches, and their stream."""

    steps: range
    sources: list[int]
    stream: MixedStream

    def numbered(self) -> Iterator[tuple[int, Stream]]:
        """The stream of each set, with the number of the set."""
        return zip(self.sources, self.stream.streams, strict=True)


class Mixture:
    """The training batches of a run on several sets (see splits.BatchSource); `options` are those of MixedStream.

    An epoch has as many samples as all sets together, in whole batches. Ids count through the sets: `first_ids` has the
    first of each. Where the weights change, each set begins an order of its own anew. Raises ConfigError where the
    weights do not fit the batch, at any step.
    """

    def __init__(
        self, sets: Sequence[MixedSet], loaded: Sequence[LoadedSet], split: str, *, seed: int, **options: Any
    ) -> None:
        sizes = [one.manifest.split(split).num_samples for one in loaded]
        self.first_ids = (0, *itertools.accumulate(sizes[:-1]))
        self._length = max(1, sum(sizes) * options["augment_repeats"] // options["global_batch_size"])
        starts = sorted({start for one in sets for start, _ in one.weights})
        self.parts: list[MixedSteps] = []
        for start, stop in itertools.pairwise([*starts, sys.maxsize]):
            weights = [one.weight_at(start) for one in sets]
            sources = [number for number, weight in enumerate(weights) if weight]
            shares = [Share(loaded[number], split, weights[number]) for number in sources]
            own_seed = derive_key(seed, "mixture from step", start) if start else seed
            self.parts.append(MixedSteps(range(start, stop), sources, MixedStream(shares, seed=own_seed, **options)))

    def __len__(self) -> int:
        """The steps of an epoch."""
        return self._length

    def part_of(self, step: int) -> MixedSteps:
        """The steps of the run with the weights of this one."""
        return next(part for part in self.parts if step in part.steps)

    def run(self, spans: Iterator[tuple[int, range]]) -> Generator[tuple[int, int, Batch], None, None]:
        """Yields (epoch, step, batch) for spans (epoch, steps) that follow each other, as a Stream does."""
        batches: Generator[tuple[int, Batch], None, None] | None = None
        part = None
        try:
            for epoch, step in ((epoch, step) for epoch, steps in spans for step in steps):
                at = epoch * len(self) + step
                if part is None or batches is None or at not in part.steps:
                    if part is not None and batches is not None:
                        batches.close()
                        for stream in part.stream.streams:  # the memory of those that follow
                            stream.close()
                    part = self.part_of(at)
                    batches = part.stream.batches(at - part.steps.start)
                number, batch = next(batches)
                assert part.steps.start + number == at, "spans follow each other"
                batch["id"] = batch["id"] + np.array(self.first_ids)[part.sources][batch["source"]]
                yield epoch, step, batch
        finally:
            if batches is not None:
                batches.close()

    def ids(self, epoch: int) -> Iterator[np.ndarray]:
        """The ids that the steps of an epoch train on, by the orders of the sets."""
        due = range(epoch * len(self), (epoch + 1) * len(self))
        for part in self.parts:
            steps = range(max(due.start, part.steps.start), min(due.stop, part.steps.stop))
            for source, stream in part.numbered():
                at = steps.start - part.steps.start
                while at < steps.stop - part.steps.start:
                    own_epoch, step = divmod(at, len(stream))
                    stop = min(step + STEPS_AT_ONCE, len(stream), step + steps.stop - part.steps.start - at)
                    slots = stream.order.slots(own_epoch, range(step, stop), 0, stream.order.global_batch_size)
                    yield self.first_ids[source] + slots.ids.ravel()
                    at += stop - step

    def state(self, epoch: int, step: int) -> list[OrderState]:
        """The state before a step: one for each set, for each choice of weights."""
        at = epoch * len(self) + step
        places = [min(max(at - part.steps.start, 0), len(part.steps)) for part in self.parts]
        return [state for part, place in zip(self.parts, places, strict=True) for state in part.stream.state(place)]

    def resume(self, states: list[OrderState]) -> None:
        """Takes the orders of a state, for any number of hosts. Raises ConfigError naming what differs."""
        rest = iter(states)
        for part in self.parts:
            part.stream.resume(list(itertools.islice(rest, len(part.sources))))

    def stop(self) -> None:
        """Stops a running iteration; safe to call from any thread."""
        for part in self.parts:
            for stream in part.stream.streams:
                stream.stop()
