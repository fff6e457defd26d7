"""A stream without data: batches with the shapes and ids of real ones, at no cost. Its rate is the ceiling."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardset.errors import ConfigError
from shardset.order.state import OrderState
from shardset.stream.stream import Batch

NUM_SAMPLES = 1_281_167
"""Samples of a synthetic training epoch: as many as ImageNet has; `--max-steps` stops earlier."""

NUM_EVAL_SAMPLES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticStream:
    """One random batch, made once, for every step. The last step of an epoch is padded with samples of weight 0."""

    num_samples: int
    global_batch_size: int
    rank: int
    world_size: int
    image_size: int
    num_classes: int

    def __post_init__(self) -> None:
        if self.global_batch_size % self.world_size:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} does not divide over {self.world_size} processes"
            )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_samples // self.global_batch_size)

    def state(self, epoch: int, step: int) -> OrderState | None:
        """None: there is no order to record."""
        return None

    def resume(self, state: OrderState) -> None:
        """Does nothing: there is no order to compare."""

    def stop(self) -> None:
        """Does nothing: the stream never waits."""

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]:
        """(epoch, step, batch) as a Stream yields them, over some spans (epoch, steps)."""
        per_host = self.global_batch_size // self.world_size
        draw = np.random.default_rng(0)
        image = draw.integers(0, 256, (per_host, self.image_size, self.image_size, 3), dtype=np.uint8)
        label = draw.integers(0, self.num_classes, per_host, dtype=np.int64)
        for epoch, steps in spans:
            for step in steps:
                ids = step * self.global_batch_size + self.rank * per_host + np.arange(per_host)
                batch = {"image": image, "label": label, "flip": label % 2 == 0, "id": ids % self.num_samples}
                yield epoch, step, {**batch, "weight": (ids < self.num_samples).astype(np.float32)}
