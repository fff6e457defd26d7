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
from shardset.stream.prefetch import Pipeline
from shardset.stream.presets import DEFAULT_SEED, ImageChoice, choose_global_batch, choose_image
from shardset.stream.source import DecodeAids, StreamSource, open_decode_aids, open_source
from shardset.stream.spec import Batch, StreamOptions, StreamSpec, lists_options
from shardset.stream.world import check_same, refuse_copies, refuse_second_division, which_process

_log = logging.getLogger(__name__)


class Stream:
    """The batches of a split, or one process's part of them.

    Iterate over it for one epoch; each further iteration is the next epoch. `state_dict` and
    `load_state_dict` save and restore the position. `epoch`, `epochs` and `run` give the batches
    that you name and leave the position alone. `__iter__` lists the arrays of a batch.

    Args:
        manifest_url: The folder of the set or its manifest, on disk or in a bucket;
            `FOLDER@VERSION`; a view (`.parquet`); or the set that `shardset.load` returned.
        split: The name of the split, such as "train".
        batch_size: Samples of this process in a batch. Give this or `global_batch_size`.
        image_size: Height and width of the images in pixels, for one of the presets of `image`.
        global_batch_size: Samples of all processes in a batch.
        rank: The number of this process, from 0. Give it with `world_size` if the environment or
            torch.distributed says that there are several processes.
        world_size: The number of processes; 1 by default.
        seed: Determines the order and all randomness. None is for evaluation: the stored order,
            each sample once, and nothing random.
        image: "train" takes a random crop and mirrors half of the crops, "eval" takes the centre.
            "auto" is "eval" if `seed` is None, else "train". An ImageSpec replaces both the preset
            and `image_size`. None decodes nothing.
        fields: Stored fields to add to the batch, such as ("json",).
        columns: Columns to add to the batch, from `columns/NAME/` of the set.
        with_key: Adds the keys of the samples to the batch.
        block_size: Most neighbouring samples in one read; q in docs/explanation/order.md. It is
            part of the order. None chooses it by the size of the samples.
        window: How far a sample may move inside its lane, in samples; w in
            docs/explanation/order.md. It is part of the order. None chooses it by `budget_bytes`.
        augment_repeats: Slots that each sample takes in its batch, each with its own crop, flip and
            transform (repeated augmentation).
        bad_samples: "raise" ends the iteration at a sample whose bytes are damaged or no image.
            "mask" gives a black image of weight 0 and logs the sample. Slots never shift.
        num_threads: Threads that decode. None is one per core of this process's share.
        prefetch: Decoded batches that wait for the loop.
        disk_cache: Keeps what is read from a bucket on a local disk.
        transform: Your change of each row, `transform(row, rng)`. It runs in the decoding threads.
            `row` is a dict: `image` uint8 [size, size, 3], `label`, `id` and `weight` as numbers,
            `key` as str, a field as bytes or None. `rng` is a NumPy generator that depends on seed,
            epoch, sample and repeat. Return a dict: arrays and numbers of one shape and type are
            stacked to [n, ...], other values become a list. `id` and `weight` keep their values.
        targets: Stored fields beside the image that follow its crop, by their name in the batch:
            Boxes, Mask, Text.
        views: Several crops of each image, in place of `image`: their number and an ImageSpec by
            name, such as {"local": (6, ImageSpec(size=96))}; a name gives uint8 [n, number, size,
            size, 3]. Each crop has its own draws.
        with_matrix: Adds `matrix` float32 [n, 2, 3], from points (x, y, 1) of the upright image to
            points of the row, and `orig_size` int32 [n, 2], height and width of that image.
        num_lanes: Equal parts of an epoch that are read at the same time; L in
            docs/explanation/order.md. It divides the global batch and is part of the order. None
            chooses it by `budget_bytes`.
        last_batch: "pad" fills the last batch of an epoch with samples of weight 0, "drop" leaves
            out the rows that are not full.
        budget_bytes: Memory of this process for stored bytes, batches and indexes. Small images
            (PadCrop) that all fit into the rest of it are decoded once in the life of the stream.

    Attributes:
        spec: The options as one record. `spec.slots` is the range of slots of this
            process.
        manifest: The Manifest of the set.
        split: The Split that is read.
        order: The order of an epoch: `order.num_samples`, `order.num_batches`, and `num_lanes`,
            `block_size` and `window` as they were chosen.
        memory: The most bytes that the stream holds, by purpose: `raw`, `decoded`, `indexes`,
            `cache`, and their `total`.

    Raises:
        ConfigError: The options don't fit together, the set or the environment.
        BudgetTooSmall: `budget_bytes` is too small; `enough` of the error would do.
        ManifestError: There is no complete shard set, no such version or no such split.
        StorageError: The storage refused or failed.

    Examples:
        >>> import shardset
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image_size=32)
        >>> for batch in stream:  # one epoch; the next `for` is the next epoch
        ...     loss = batch["weight"].sum()  # your step
        >>> batch["image"].shape, batch["image"].dtype
        ((8, 32, 32, 3), dtype('uint8'))
        >>> saved = stream.state_dict()

        >>> again = shardset.Stream("shards", "train", batch_size=8, image_size=32)
        >>> again.load_state_dict(saved)
        (1, 0)
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
            image=choose_image(image, image_size, seed, has_views="views" in options),
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
        self.manifest, self.split = source.manifest, source.split
        self.order, self.memory = source.order, source.memory
        _log.info("%s %s: %s", source.table.storage.url, source.spec.split, self.memory)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.order.num_batches

    def __iter__(self) -> Generator[Batch, None, None]:
        """The batches of the epoch at which the stream is.

        After its last batch, or after a `break`, the next iteration gives the next epoch. A batch
        is a dict. Its names depend on the options; n is `batch_size`:

        - `image`: uint8 [n, size, size, 3], RGB, not normalized; not with `image=None`.
        - `label`: int64 [n]; -1 for a sample without one.
        - `weight`: float32 [n]; 1, or 0 for a slot that must not count. The weights of an epoch add
          up to its number of samples, or to the weights of the view.
        - `id`: int64 [n]; the number of each sample in its split.
        - `flip`: bool [n]; the images that your device must mirror, with `flip="device"`.
        - `key`: n str in a list, with `with_key=True`.
        - each of `fields`: n bytes in a list; None if a sample lacks the field.
        - each of `targets`, `views`, `matrix` and `orig_size`: see these options.
        - each of `columns`: an array [n, ...], or n bytes in a list; NaN or `b""` for a missing
          value.
        - each name that `transform` returns: an array [n, ...], or n values in a list.

        Yields:
            A Batch.

        Raises:
            DamagedShard: Stored bytes differ from their checksum, at the batch that needs them.
            UndecodableImage: The bytes of a sample are no image.
            StorageError: The storage refused or failed, after retries.
            DecoderLost: A decoding process died.
            ConfigError: The stream is closed.
        """
        epoch, start_step = (self._position[0] + 1, 0) if self._is_begun else self._position
        self._position, self._is_begun = (epoch, start_step), True
        for step, batch in enumerate(self.epoch(epoch, start_step), start_step + 1):
            # before the consumer has the batch: it may save the position next
            self._position = epoch, step
            yield batch
        self._position, self._is_begun = (epoch + 1, 0), False

    def __getitem__(self, index: object) -> NoReturn:
        """Raises ConfigError: a stream has batches in an order, and none by number.

        Raises:
            ConfigError: Always; it names the ways to get batches and single samples.
        """
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
        """The values that must be the same in all processes of a run, as words `name=value`.

        They are set, split, order, seed and batch.
        """
        here = self.order.state(0, 0, self.manifest.digest)
        shared = ("split", "global_batch_size", "world_size", "last_batch", "augment_repeats")
        words = {name: getattr(self.spec, name) for name in shared} | {
            "manifest": here.manifest[:12]
        }
        words |= {name: getattr(here, name) for name in ("version", "seed", *ORDER_NAMES)}
        words |= {"view": here.view[:12] or "none"}
        return " ".join(f"{name}={value}" for name, value in words.items())

    def check_same(self) -> None:
        """Compares the fingerprint with the other processes; all of them must call it.

        It compares where torch.distributed or jax.distributed runs as many processes as the stream
        has. The adapters call it.

        Raises:
            ConfigError: Another process has another fingerprint.
        """
        check_same(self.fingerprint, self.spec.rank, self.spec.world_size)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label."""
        return [info.name for info in self.manifest.classes]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that the iteration has given, whatever is prefetched.

        Returns:
            Numbers and strings by name, for any checkpoint format; the same in all processes.
        """
        return self.state(*self._position)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """The position before a step, by the count of your loop, as `state_dict` gives it.

        Args:
            epoch: The number of the epoch, from 0.
            step: The number of the batch in its epoch, from 0.

        Returns:
            Numbers and strings by name.
        """
        return values_of_state(self.order.state(epoch, step, self.manifest.digest))

    def load_state_dict(self, state: Mapping[str, Any] | OrderState) -> tuple[int, int]:
        """Has the next iteration continue at a position, on any number of processes.

        Uses `num_lanes`, `block_size` and `window` of the state where the constructor was given
        none.

        Args:
            state: The result of `state_dict` or `state`.

        Returns:
            The position as (epoch, step).

        Raises:
            ConfigError: The state is of another set, seed or order; the message names the
                difference. The stream keeps its position.
        """
        saved = state_from_values(state, OrderState)
        source, storage = self.source, self.source.loaded.storage
        if saved.manifest != self.manifest.digest and (
            older := manifests.older_with(storage, saved.manifest)
        ):
            raise ConfigError(
                f"this run can't resume from that state: it is of version {older.number} of "
                f"{storage.url}, and this is version {self.manifest.number}; give {storage.url}@"
                f"{older.number}, or start a new run"
            )
        options = {
            name: getattr(saved, name) for name in ORDER_NAMES if getattr(self._asked, name) is None
        }
        if any(getattr(self.order, name) != value for name, value in options.items()):
            source = open_source(replace(self._asked, manifest_url=source.loaded, **options))
        position = source.order.resume(saved, self.manifest.digest)
        if source is not self.source:
            self._use(source)
        self._position, self._is_begun = position, False
        return position

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from a step on; leaves the position of the stream alone.

        Args:
            epoch: The number of the epoch, from 0.
            start_step: The first batch, from 0 to `len(stream)`.

        Yields:
            A Batch, as the iteration over the stream does.

        Raises:
            ConfigError: No epoch has this step; raised at once.
            DamagedShard: Stored bytes differ from their checksum, at the batch that needs them.
            UndecodableImage: The bytes of a sample are no image.
            StorageError: The storage refused or failed, after retries.
        """
        refuse_copies(self._owner)
        spans = [(require_int("epoch", epoch), self._steps_from(start_step))]
        return (batch for _, _, batch in self.run(spans))

    def epochs(
        self, start_epoch: int = 0, start_step: int = 0
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """The batches of all epochs from a position on, for ever.

        The next epoch is read and decoded while the current one ends.

        Args:
            start_epoch: The number of the first epoch, from 0.
            start_step: The first batch in it, from 0 to `len(stream)`.

        Yields:
            (epoch, step, Batch).

        Raises:
            ConfigError: No epoch has this step.
        """
        refuse_copies(self._owner)
        start_epoch = require_int("epoch", start_epoch)
        first = [(start_epoch, self._steps_from(start_step))]
        rest = ((epoch, range(len(self))) for epoch in itertools.count(start_epoch + 1))
        return self.run(itertools.chain(first, rest))

    def _steps_from(self, start_step: int) -> range:
        """The steps of an epoch from one on; none from its end on."""
        start_step = require_int("step", start_step)
        if not 0 <= start_step <= len(self):
            raise ConfigError(
                f"step {start_step} of an epoch was asked for, expected 0 to {len(self)}; the steps"
                " of an epoch are counted from its start, not from the start of the run"
            )
        return range(start_step, len(self))

    def run(self, spans: Spans) -> Generator[tuple[int, int, Batch], None, None]:
        """The batches of the steps that you name, without a pause between them.

        Args:
            spans: Pairs (epoch, steps), read one after the other and each when it is needed; they
                may go on for ever. `steps` is a range, which may take every n-th step.

        Yields:
            (epoch, step, Batch).

        Raises:
            ConfigError: The stream is closed; or no epoch has a step, raised where its batch would
                be.
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
        """Stops all running iterations for good.

        Frees the decoded images and ends the processes that decode. `with Stream(...) as stream:`
        calls it at the end of the block.
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
    """A stream whose batches are converted; iterate over it and save it like the stream."""

    def __init__(self, stream: Stream) -> None:
        stream.check_same()
        self.stream = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    @abstractmethod
    def converted(self, batch: Batch) -> dict[str, Any]:
        """The adapter's form of a batch."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.stream)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        """The batches of one epoch, converted; each further iteration is the next epoch.

        Yields:
            A dict with the names of a Batch, as `Stream.__iter__` lists them.
        """
        return (self.converted(batch) for batch in self.stream)
