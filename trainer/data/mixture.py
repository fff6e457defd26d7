"""Several shard sets in every batch of a run, by weights that may change at steps."""

import itertools
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from shardset.errors import ConfigError
from shardset.format.manifest import LoadedSet
from shardset.order.permutation import derive_key
from shardset.order.state import OrderState
from shardset.stream.mixed_stream import MixedStream, Share
from shardset.stream.spec import Batch
from shardset.stream.stream import Stream
from trainer.config import Weights

ID_OF_SET, MAX_SETS = 1 << 40, 255
"""The ids of set k in the batches of a mixture are those in the set, plus k times this, and stay
below 2**48.
"""


class Part(NamedTuple):
    """Steps of the run with the same weights, the numbers of the sets in their batches, and those
    batches.
    """

    steps: range
    sources: list[int]
    mixed: MixedStream

    def streams(self) -> Iterator[tuple[int, Stream]]:
        """The number and the stream of each set."""
        return zip(self.sources, self.mixed.streams, strict=True)


class Mixture:
    """The training batches of a run on several sets (see epochs.BatchSource); `options` are those
    of MixedStream.

    An epoch has as many samples as all sets together, in whole batches. Where the weights change,
    each set starts a new epoch. Raises ConfigError where the weights do not fit the
    batch, at any step.
    """

    def __init__(
        self,
        sets: Sequence[LoadedSet],
        by_step: Sequence[Weights],
        split: str,
        *,
        seed: int,
        **options: Any,
    ) -> None:
        if len(sets) > MAX_SETS:
            raise ConfigError(
                f"a mixture of {len(sets)} sets, expected at most {MAX_SETS}; build some of them"
                " as one"
            )
        self.parts: list[Part] = []
        starts = sorted({step for by_start in by_step for step in by_start})
        for start, stop in itertools.pairwise([*starts, sys.maxsize]):
            weights = [
                by_start[max(step for step in by_start if step <= start)] for by_start in by_step
            ]
            sources = [number for number, weight in enumerate(weights) if weight]
            shares = [Share(sets[number], split, weights[number]) for number in sources]
            own_seed = derive_key(seed, "mixture from step", start) if start else seed
            self.parts.append(
                Part(range(start, stop), sources, MixedStream(shares, seed=own_seed, **options))
            )
        num_samples = sum(
            stream.order.num_samples * stream.order.augment_repeats
            for stream in self.streams().values()
        )
        self._length: int = max(1, num_samples // options["global_batch_size"])

    def __len__(self) -> int:
        """The steps of an epoch."""
        return self._length

    def streams(self) -> dict[int, Stream]:
        """A stream of each set, by its number."""
        return dict(itertools.chain(*(part.streams() for part in self.parts)))

    def part_of(self, step: int) -> Part:
        """The part that has a step of the run."""
        return next(part for part in self.parts if step in part.steps)

    def run(
        self, spans: Iterator[tuple[int, range]]
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """Yields (epoch, step, batch) for spans (epoch, steps) that follow each other, as a Stream
        does.
        """
        places = (
            (epoch * len(self) + step, epoch, step) for epoch, steps in spans for step in steps
        )
        for part, of_part in itertools.groupby(places, lambda place: self.part_of(place[0])):
            first = next(of_part)
            with closing(part.mixed.batches(first[0] - part.steps.start)) as batches:
                for (_, epoch, step), (_, batch) in zip(
                    itertools.chain([first], of_part), batches, strict=False
                ):
                    batch["id"] = batch["id"] + ID_OF_SET * np.array(part.sources)[batch["source"]]
                    yield epoch, step, batch
            for stream in part.mixed.streams:  # whose memory the next part takes
                stream.close()

    def ids(self, epoch: int) -> Iterator[np.ndarray]:
        """The ids that the steps of an epoch train on, by the orders of the sets."""
        for at in range(epoch * len(self), (epoch + 1) * len(self)):
            part = self.part_of(at)
            for source, stream in part.streams():
                place = divmod(at - part.steps.start, len(stream))
                yield stream.order.batch(*place).ids + ID_OF_SET * source

    def state(self, epoch: int, step: int) -> list[dict[str, Any]]:
        """The state before a step: one for each set of each part."""
        at = epoch * len(self) + step
        return [
            state
            for part in self.parts
            for state in part.mixed.state(max(0, at - part.steps.start))
        ]

    def load_state_dict(self, states: list[OrderState]) -> None:
        """Takes the orders of a state, for any number of hosts.

        Raises ConfigError naming what differs.
        """
        rest = iter(states)
        for part in self.parts:
            part.mixed.load_state(list(itertools.islice(rest, len(part.sources))))

    def stop(self) -> None:
        """Stops a running iteration; safe to call from any thread."""
        for part in self.parts:
            for stream in part.mixed.streams:
                stream.stop()
