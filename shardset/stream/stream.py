"""A shard set as decoded batches in the order of shardset.order.epoch: exact, elastic, resumable at
any step.

    stream = Stream("gs://bucket/photos", "train", batch_size=256, image_size=224)
    for batch in stream:                      # one epoch; the next `for` is the next epoch
        batch["image"], batch["label"], batch["weight"], batch["id"]

One thread plans and requests bytes, one begins to decode batches, a pool decodes (`pipeline`,
`decode_batch/`). All end with the generator. An error in one of them is raised at the batch that it
prevented.
"""

import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, Self, Unpack

from shardset.errors import ConfigError, require_int
from shardset.format import manifest as manifests
from shardset.format.manifest import SetUrl
from shardset.order.state import ORDER_NAMES, OrderState, state_from_values, values_of_state
from shardset.stream.decode_batch.steps import Spans
from shardset.stream.defaults import DEFAULT_SEED, ImageChoice, choose_global_batch, choose_image
from shardset.stream.pipeline import Pipeline
from shardset.stream.source import DecodeAids, StreamSource, open_decode_aids, open_source
from shardset.stream.spec import Batch, StreamOptions, StreamSpec, lists_options
from shardset.stream.world import check_same, refuse_copies, refuse_second_division, which_process

_log = logging.getLogger(__name__)


class Stream:
    """The batches of a split, or one process's part of them; `StreamSpec` says what the options
    mean.

    Iterate over it for one epoch; each further iteration is the next epoch. `state_dict` and
    `load_state_dict` save and restore the position. `epoch`, `epochs` and `run` give the batches
    that you name and leave the position alone.

    `manifest_url` is the manifest or its folder, or a view. `batch_size` counts the samples of this
    process in a batch, `global_batch_size` those of all processes: give one. `image_size` gives
    square images of that size, cropped by the preset `image`: "train" or "eval", by default
    "train", or "eval" in the stored order (`seed=None`). For anything else `image` is an ImageSpec;
    with `image=None` nothing is decoded. `rank` and `world_size` default to one process; they are
    required where the environment or torch.distributed says that there are several.

    Raises ConfigError where the options do not fit, ManifestError where there is no whole shard
    set.
    """

    @lists_options
    def __init__(
        self,
        manifest_url: SetUrl,
        split: str,
        *,
        batch_size: int | None = None,
        image_size: int | None = None,
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = DEFAULT_SEED,
        image: ImageChoice = "auto",
        **options: Unpack[StreamOptions],
    ) -> None:
        rank, world_size = which_process(rank, world_size)
        spec = StreamSpec(
            manifest_url=manifest_url,
            split=split,
            global_batch_size=choose_global_batch(batch_size, global_batch_size, world_size),
            rank=rank,
            world_size=world_size,
            seed=seed,
            image=choose_image(image, image_size, seed),
            **options,
        )
        self._asked = spec
        self._owner = os.getpid()
        self._running: set[Pipeline] = set()
        # Batches of the epoch were given up to the step, by an iteration that has been begun or
        # not.
        self._position, self._is_begun = (0, 0), False
        self._is_closed = False
        self._use(open_source(spec))

    def _use(self, source: StreamSource) -> None:
        self.spec, self.source, self.aids = source.spec, source, open_decode_aids(source)
        self.manifest, self.split, self.order, self.memory = (
            source.manifest,
            source.split,
            source.order,
            source.memory,
        )
        _log.info("%s %s: %s", source.table.storage.url, source.spec.split, self.memory)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.order.num_batches

    def __iter__(self) -> Generator[Batch, None, None]:
        """The batches of the epoch at which the stream is; after it, or after a `break`, those of
        the next one.
        """
        epoch, start_step = (self._position[0] + 1, 0) if self._is_begun else self._position
        self._position, self._is_begun = (epoch, start_step), True
        for step, batch in enumerate(self.epoch(epoch, start_step), start_step + 1):
            # before the consumer has the batch: it may save the position next
            self._position = epoch, step
            yield batch
        self._position, self._is_begun = (epoch + 1, 0), False

    def __getitem__(self, index: object) -> NoReturn:
        """Raises ConfigError: a stream has batches in an order, and none by number."""
        raise ConfigError(
            f"stream[{index!r}] was asked for, as a DataLoader does with a map-style dataset, but a"
            " stream gives whole batches in its order; iterate over it, use"
            " DataLoader(shardset.adapters.torch.BatchDataset(stream), batch_size=None), or"
            " shardset.open(...) for single samples"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def batch_size(self) -> int:
        """Samples of this replica in a batch."""
        return len(self.spec.slots)

    @property
    def fingerprint(self) -> str:
        """What must be the same in all processes of a run, as words `name=value`: set, split,
        order, seed, batch.
        """
        here = self.order.state(0, 0, self.manifest.digest)
        own = ("split", "global_batch_size", "world_size", "last_batch", "augment_repeats")
        words = {name: getattr(self.spec, name) for name in own} | {"manifest": here.manifest[:12]}
        words |= {name: getattr(here, name) for name in ("version", "seed", *ORDER_NAMES)}
        words |= {"view": here.view[:12] or "none"}
        return " ".join(f"{name}={value}" for name, value in words.items())

    def check_same(self) -> None:
        """Raises ConfigError if another process has another fingerprint; all processes must call
        it.

        Compares where torch.distributed or jax.distributed runs as many processes as the stream
        has; adapters call it.
        """
        check_same(self.fingerprint, self.spec.rank, self.spec.world_size)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label."""
        return [info.name for info in self.manifest.classes]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that the iteration has given, whatever is prefetched:
        plain values.
        """
        return self.state(*self._position)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """The position before a step, by the count of your loop, as `state_dict` gives it."""
        return values_of_state(self.order.state(epoch, step, self.manifest.digest))

    def load_state_dict(self, state: Mapping[str, Any] | OrderState) -> tuple[int, int]:
        """Has the next iteration continue at a position, on any number of processes; returns it as
        (epoch, step).

        Takes num_lanes, block_size and window from the state where the constructor was given none.
        Raises ConfigError naming what else differs from this stream.
        """
        saved = state_from_values(state, OrderState)
        options = {
            name: getattr(saved, name) for name in ORDER_NAMES if getattr(self._asked, name) is None
        }
        source = self.source
        if any(getattr(self.order, name) != value for name, value in options.items()):
            source = open_source(replace(self._asked, manifest_url=source.loaded, **options))
        position = _position(source, saved)
        if source is not self.source:
            self._use(source)
        self._position, self._is_begun = position, False
        return position

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from a step on.

        `image` uint8 [n, size, size, 3], `label` int64, `weight` float32, `id` int64, with `flip`
        in the spec `flip` bool, when asked `key` (list of str) and fields (lists of bytes). Raises
        DamagedShard, StorageError or UndecodableImage, and at once ConfigError for a step that no
        epoch has.
        """
        refuse_copies(self._owner)
        spans = [(require_int("epoch", epoch), self.steps_from(start_step))]
        return (batch for _, _, batch in self.run(iter(spans)))

    def epochs(
        self, start_epoch: int = 0, start_step: int = 0
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """(epoch, step, batch) for ever; the next epoch is read and decoded while the current one
        ends.

        Raises ConfigError for a step that no epoch has.
        """
        refuse_copies(self._owner)
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
                f"{self.order.num_samples} samples do not fill one batch of"
                f" {self.order.global_batch_size}, and last_batch is 'drop'; lower the global batch"
                " size, or use 'pad'"
            )
        if not 0 <= start_step <= len(self):
            raise ConfigError(
                f"step {start_step} of an epoch was asked for, expected 0 to {len(self)}; the steps"
                " of an epoch are counted from its start, not from that of the run"
            )
        return range(start_step, len(self))

    def run(self, spans: Spans) -> Generator[tuple[int, int, Batch], None, None]:
        """(epoch, step, batch) over some spans (epoch, steps), one after the other; steps may be
        every n-th.

        Raises ConfigError for a step that no epoch has where its batch would be, as it raises all
        else.
        """
        if self._is_closed:
            raise ConfigError("the stream is closed; make a new one, or iterate inside its `with`")
        refuse_second_division(self.spec.rank, self.spec.world_size)
        pipeline = Pipeline(self.source, self.aids, spans)
        self._running.add(pipeline)
        try:
            with pipeline:
                yield from pipeline
        finally:
            self._running.discard(pipeline)

    def stop(self) -> None:
        """Stops all running iterations; safe to call from any thread.

        Blocked consumers get no further batch.
        """
        for pipeline in tuple(self._running):
            pipeline.stop()

    def close(self) -> None:
        """Stops all running iterations for good, and frees the decoded images and the processes
        that decode.
        """
        self._is_closed = True
        self.stop()
        self.aids = DecodeAids()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": set(), "aids": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.aids = open_decode_aids(self.source)


class StreamAdapter(ABC):
    """A stream whose batches are converted: iterate over it, save and restore it as you do the
    stream.
    """

    def __init__(self, stream: Stream) -> None:
        stream.check_same()
        self.stream = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    @abstractmethod
    def converted(self, batch: Batch) -> dict[str, Any]:
        """What the adapter gives for a batch."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.stream)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        """The batches of one epoch; each further iteration is the next epoch."""
        return (self.converted(batch) for batch in self.stream)


def _position(source: StreamSource, state: OrderState) -> tuple[int, int]:
    """The (epoch, step) at which a source resumes; ConfigError says which version a state is of."""
    manifest, storage = source.manifest, source.loaded.storage
    if state.manifest != manifest.digest and (
        saved := manifests.older_with(storage, state.manifest)
    ):
        raise ConfigError(
            f"this run can't resume from that state: it is of version {saved.number} of "
            f"{storage.url}, and this is version {manifest.number}; give {storage.url}@"
            f"{saved.number}, or start a new run"
        )
    return source.order.resume(state, manifest.digest)
