"""A stream without data: batches with the shapes and ids of real ones that cost no time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardset.order.lanes import rank_part
from shardset.order.state import OrderState
from shardset.stream.spec import Batch

NUM_SAMPLES = 1_281_167
"""Samples of a synthetic training epoch: those of ImageNet. `--max-steps` stops earlier."""

NUM_EVAL_SAMPLES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticStream:
    """Yields one random batch at every step. The last step of an epoch is padded with samples of weight 0."""

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

    def state(self, epoch: int, step: int) -> OrderState | None:
        """None: there is no order to record."""
        return None

    def resume(self, state: OrderState) -> None:
        """Does nothing: there is no order to compare."""

    def stop(self) -> None:
        """Does nothing: the stream never waits."""

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]:
        """Yields (epoch, step, batch) for spans (epoch, steps), as a Stream does."""
        part = rank_part(self.global_batch_size, self.rank, self.world_size)
        per_host = len(part)
        draw = np.random.default_rng(0)
        image = draw.integers(0, 256, (per_host, self.image_size, self.image_size, 3), dtype=np.uint8)
        label = draw.integers(0, self.num_classes, per_host, dtype=np.int64)
        for epoch, steps in spans:
            for step in steps:
                ids = (step * self.global_batch_size + part.start + np.arange(per_host)) // self.augment_repeats
                weight = (ids < self.num_samples).astype(np.float32)
                flip, ids = label % 2 == 0, ids % self.num_samples
                yield epoch, step, {"image": image, "label": label, "flip": flip, "id": ids, "weight": weight}
