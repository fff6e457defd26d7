"""Several shard sets in every batch of a run, by weights that may change at steps."""

import itertools
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
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
    mixed: MixedStream

    def streams(self) -> Iterator[tuple[int, Stream]]:
        """The stream of each set, with the number of the set."""
        return zip(self.sources, self.mixed.streams, strict=True)


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
        self.first_ids = np.cumsum([0, *sizes[:-1]])
        self.parts: list[MixedSteps] = []
        for start, stop in itertools.pairwise(
            [*sorted({start for one in sets for start, _ in one.weights}), sys.maxsize]
        ):
            weights = [one.weight_at(start) for one in sets]
            sources = [number for number, weight in enumerate(weights) if weight]
            shares = [Share(loaded[number], split, weights[number]) for number in sources]
            own_seed = derive_key(seed, "mixture from step", start) if start else seed
            self.parts.append(MixedSteps(range(start, stop), sources, MixedStream(shares, seed=own_seed, **options)))

        orders = {source: stream.order for part in self.parts for source, stream in part.streams()}
        num_slots = sum(order.num_samples * order.augment_repeats for order in orders.values())
        self._length: int = max(1, num_slots // options["global_batch_size"])

    def __len__(self) -> int:
        """The steps of an epoch."""
        return self._length

    def part_of(self, step: int) -> MixedSteps:
        """The part of the run that has a step."""
        return next(part for part in self.parts if step in part.steps)

    def run(self, spans: Iterator[tuple[int, range]]) -> Generator[tuple[int, int, Batch], None, None]:
        """Yields (epoch, step, batch) for spans (epoch, steps) that follow each other, as a Stream does."""
        places = ((epoch, step) for epoch, steps in spans for step in steps)
        for part, own in itertools.groupby(places, lambda place: self.part_of(place[0] * len(self) + place[1])):
            for done in self.parts[: self.parts.index(part)]:
                for stream in done.mixed.streams:  # whose memory this part takes
                    stream.close()
            epoch, step = next(own)
            own = itertools.chain([(epoch, step)], own)
            with closing(part.mixed.batches(epoch * len(self) + step - part.steps.start)) as batches:
                for (epoch, step), (_, batch) in zip(own, batches, strict=False):
                    batch["id"] = batch["id"] + self.first_ids[part.sources][batch["source"]]
                    yield epoch, step, batch

    def ids(self, epoch: int) -> Iterator[np.ndarray]:
        """The ids that the steps of an epoch train on, by the orders of the sets."""
        for part in self.parts:
            start = max(epoch * len(self), part.steps.start) - part.steps.start
            stop = min((epoch + 1) * len(self), part.steps.stop) - part.steps.start
            for source, stream in part.streams():
                at, size = start, stream.order.global_batch_size
                while at < stop:
                    own_epoch, step = divmod(at, len(stream))
                    steps = range(step, min(step + STEPS_AT_ONCE, len(stream), step + stop - at))
                    yield self.first_ids[source] + stream.order.slots(own_epoch, steps, 0, size).ids.ravel()
                    at += len(steps)

    def state(self, epoch: int, step: int) -> list[OrderState]:
        """The state before a step: one for each set of each part."""
        steps = [epoch * len(self) + step - part.steps.start for part in self.parts]
        return [state for part, at in zip(self.parts, steps, strict=True) for state in part.mixed.state(max(0, at))]

    def resume(self, states: list[OrderState]) -> None:
        """Takes the orders of a state, for any number of hosts. Raises ConfigError naming what differs."""
        rest = iter(states)
        for part in self.parts:
            part.mixed.resume(list(itertools.islice(rest, len(part.sources))))

    def stop(self) -> None:
        """Stops a running iteration; safe to call from any thread."""
        for part in self.parts:
            for stream in part.mixed.streams:
                stream.stop()
