"""A shard set as decoded batches, in the order that shardset.order.epoch says: exact, elastic, resumable at any step.

    stream = Stream("gs://bucket/imagenet", "train", global_batch_size=1024, rank=0, world_size=1, seed=7,
                    image=ImageSpec(size=224, flip=True))
    for batch in stream.epoch(0):
        batch["image"], batch["label"], batch["weight"], batch["id"], batch["flip"]

One thread plans and asks for bytes, one begins to fill batches, a pool decodes (`pipeline`, `fill`). All end with the
generator. What fails in one of them is raised to whoever iterates, at the place of the batch that it prevented.
"""

import itertools
import logging
import os
from collections.abc import Generator
from typing import Any, Unpack

import numpy as np

from shardset.arguments import require_int
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.format.manifest import LoadedSet
from shardset.order.state import OrderState
from shardset.read.addresses import SampleAddresses
from shardset.stream.batch import Batch
from shardset.stream.pipeline import Pipeline
from shardset.stream.source import open_decode_aids, open_source
from shardset.stream.spec import StreamOptions, StreamSpec
from shardset.stream.steps import Spans

_log = logging.getLogger(__name__)


class Stream:
    """One replica's (or host's) part of the batches of a split; `StreamSpec` says what the options mean.

    `num_bytes_read` counts the bytes of samples that finished runs asked of storage, without indexes.

    Raises ConfigError where the options do not fit, ManifestError where there is no whole shard set.
    """

    def __init__(
        self,
        manifest_url: str | os.PathLike[str] | LoadedSet,
        split: str,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int | None,
        image: ImageSpec | None,
        **options: Unpack[StreamOptions],
    ) -> None:
        self.spec = StreamSpec(
            manifest_url=manifest_url,
            split=split,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            image=image,
            **options,
        )
        self.source = open_source(self.spec)
        self.aids = open_decode_aids(self.source)
        self.manifest, self.split, self.order = self.source.manifest, self.source.split, self.source.order
        self.memory = self.source.memory
        self.num_bytes_read = 0
        self._running: set[Pipeline] = set()
        _log.info("%s %s: %s", self.source.table.storage.url, split, self.memory)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.order.num_batches

    @property
    def batch_size(self) -> int:
        """Samples of this replica in a batch."""
        return len(self.spec.slots)

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from a step on.

        `image` uint8 [n, size, size, 3], `label` int64, `weight` float32, `id` int64, with `flip` in the spec `flip`
        bool, when asked `key` (list of str) and fields (lists of bytes). Raises DamagedShard, StorageError or
        UndecodableImage, and at once ConfigError for a step that no epoch has.
        """
        spans = [(require_int("epoch", epoch), self.steps_from(start_step))]
        return (batch for _, _, batch in self.run(iter(spans)))

    def epochs(self, start_epoch: int = 0, start_step: int = 0) -> Generator[tuple[int, int, Batch], None, None]:
        """(epoch, step, batch) for ever; the next epoch is read and decoded while the last one ends.

        Raises ConfigError for a step that no epoch has.
        """
        start_epoch = require_int("epoch", start_epoch)
        first = iter([(start_epoch, self.steps_from(start_step))])
        rest = ((epoch, range(len(self))) for epoch in itertools.count(start_epoch + 1))
        return self.run(itertools.chain(first, rest))

    def steps_from(self, start_step: int) -> range:
        """The steps of an epoch from one on, none from its end on.

        Raises ConfigError for a step that no epoch has, and where no epoch has a step.
        """
        start_step = require_int("step", start_step)
        if not len(self):
            raise ConfigError(
                f"{self.order.num_samples} samples do not fill one batch of {self.order.global_batch_size}, and "
                "last_batch is 'drop'; lower the global batch size, or use 'pad'"
            )
        if not 0 <= start_step <= len(self):
            raise ConfigError(
                f"step {start_step} of an epoch was asked for, expected 0 to {len(self)}; the steps of an epoch are "
                "counted from its start, not from that of the run"
            )
        return range(start_step, len(self))

    def run(self, spans: Spans) -> Generator[tuple[int, int, Batch], None, None]:
        """(epoch, step, batch) over some spans (epoch, steps), one after the other; steps may be every n-th.

        Raises ConfigError for a step that no epoch has where its batch would be, as it raises all else.
        """
        pipeline = Pipeline(self.source, self.aids, spans)
        self._running.add(pipeline)
        try:
            with pipeline:
                yield from pipeline
        finally:
            self._running.discard(pipeline)
            self.num_bytes_read += pipeline.num_bytes_read

    def stop(self) -> None:
        """Ends the runs that are going on, from any thread: who waits for a batch waits no more, and gets none."""
        for pipeline in tuple(self._running):
            pipeline.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": set()}

    def state(self, epoch: int, step: int) -> OrderState:
        """The state before a step, from the trainer's own count and not from what has been prefetched."""
        return self.order.state(epoch, step, self.manifest.digest)

    def resume(self, state: OrderState) -> tuple[int, int]:
        """(epoch, step) at which to go on; raises ConfigError naming what differs from this stream."""
        return self.order.resume(state, self.manifest.digest)

    def addresses(self, ids: np.ndarray) -> SampleAddresses:
        """Where samples are stored, by id."""
        return self.source.addresses(ids)


def order_options(state: OrderState) -> StreamOptions:
    """What of a state to give to a new Stream so that it has the same order: `Stream(..., **order_options(state))`."""
    return {"num_lanes": state.num_lanes, "block_size": state.block_size, "window": state.window}
