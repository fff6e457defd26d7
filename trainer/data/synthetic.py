"""Batches of made-up images, which cost no time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardset.order.lanes import rank_part
from shardset.order.state import OrderState
from shardset.stream.spec import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticStream:
    """Yields one random batch at every step.

    The last step of an epoch is padded with samples of weight 0.
    """

    num_samples: int
    global_batch_size: int
    rank: int
    world_size: int
    image_size: int
    num_classes: int
    augment_repeats: int = 1

    def __len__(self) -> int:
        """The steps of an epoch."""
        return -(-self.num_samples * self.augment_repeats // self.global_batch_size)

    def state(self, epoch: int, step: int) -> None:
        """None: there is no order to record."""

    def load_state_dict(self, state: OrderState) -> None:
        """Does nothing: there is no order to compare."""

    def stop(self) -> None:
        """Does nothing: the stream never waits."""

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]:
        """Yields (epoch, step, batch) for spans (epoch, steps), as a Stream does."""
        slots = np.array(rank_part(self.global_batch_size, self.rank, self.world_size))
        draw, size = np.random.default_rng(0), self.image_size
        image = draw.integers(0, 256, (len(slots), size, size, 3), dtype=np.uint8)
        label = draw.integers(0, self.num_classes, len(slots), dtype=np.int64)
        batch = {"image": image, "label": label, "flip": label % 2 == 0}
        for epoch, steps in spans:
            for step in steps:
                ids = (step * self.global_batch_size + slots) // self.augment_repeats
                weight = (ids < self.num_samples).astype(np.float32)
                yield epoch, step, {**batch, "id": ids % self.num_samples, "weight": weight}
