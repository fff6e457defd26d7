"""A shard set as decoded batches, in the order that shardset.order.epoch says: exact, elastic, resumable at any step.

    stream = Stream("gs://bucket/imagenet", "train", global_batch_size=1024, rank=0, world_size=1, seed=7,
                    image=ImageSpec(size=224, flip=True))
    for batch in stream.epoch(0):
        batch["image"], batch["label"], batch["weight"], batch["id"], batch["flip"]

One thread plans and asks for bytes, one hands out work, a pool decodes; all end with the generator, and whatever
fails in them is raised to whoever iterates, at the place of the batch that it prevented.
"""

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import cv2
import numpy as np

from shardset.arguments import require_int
from shardset.decode.image import (
    CenterCrop,
    ImageSpec,
    PadCrop,
    RandomResizedCrop,
    decode,
    decode_into,
    draws,
    pad_crop,
    pad_crops,
)
from shardset.decode.memory_cache import MemoryCache
from shardset.decode.shared import SharedImages
from shardset.decode.workers import Decoder, Decoders
from shardset.errors import ConfigError, DamagedShard, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format import stored_png
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.manifest import LoadedSet
from shardset.order.budget import BUDGET_BYTES, PREFETCH, READ_AHEAD, fit_memory, fit_order, steps_at_once
from shardset.order.epoch import LastBatch, Order, Slots
from shardset.order.lanes import check_world, rank_part
from shardset.order.state import OrderState
from shardset.read.addresses import SampleAddresses
from shardset.read.disk_cache import BlockCache, DiskCache
from shardset.read.indexes import LostShard, ShardTable
from shardset.read.local import SMALL_BYTES
from shardset.read.open import open_sample_reader
from shardset.read.pending import Contents, PendingSamples, SampleReader

SLICES_PER_THREAD = 4
MAX_NEAR = 1024
"""Rows of a lane whose ids are looked up together, at most, where its next ones are no substitute."""

MAX_DECODERS = 8
"""Processes that decode small images: more would wait for the one that feeds them."""

MIN_DECODED = 20_000
"""Small images from which on it pays to start such processes, which takes 0.2 s of a core each."""

BATCH_NAMES = frozenset({"image", "label", "weight", "id", "flip", "key", "source"})
"""What a batch holds beside the fields that were asked for; `source` in a mixture."""

BadSamples = Literal["raise", "substitute", "mask"]
Batch = dict[str, Any]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_PATIENCE_S = 2.0
"""How long the end of a run waits for a thread: one that reads an index may wait for a bucket, and ends with that."""


class Stream:
    """One replica's (or host's) part of the batches of a split.

    The set is given by its URL, or as `shardset.format.manifest.load` returned it for several streams.
    `part` are other slots of the global batch than the even share of `rank`. `seed=None` is evaluation: stored order,
    every sample once. `image=None` decodes nothing. `fields` pass through as lists of bytes (None where a sample has
    none). `num_lanes`, `block_size` and `window` (L, q, w of docs/order.md) are part of the order: give those of the
    state to go on with a run. `bad_samples` says what happens to a sample whose bytes are damaged or no image: `raise`,
    take another one, of its lane if it has one (`substitute`), or a black image of weight 0 (`mask`); slots never
    shift, and it is logged. Where all small images (PadCrop) fit the rest of the budget decoded, they are decoded once
    in the life of the stream. `disk_cache` keeps what comes from a bucket on a local disk. `num_bytes_read` counts the
    bytes of samples that finished runs asked of storage, without indexes.

    Raises ConfigError where the numbers do not fit, ManifestError where there is no whole shard set.
    """

    def __init__(
        self,
        manifest_url: str | os.PathLike[str] | LoadedSet,
        split: str,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        part: range | None = None,
        seed: int | None,
        image: ImageSpec | None,
        fields: Sequence[str] = (),
        with_key: bool = False,
        num_lanes: int | None = None,
        block_size: int | None = None,
        window: int | None = None,
        quarantined: Sequence[int] = (),
        last_batch: LastBatch = "pad",
        bad_samples: BadSamples = "raise",
        num_threads: int | None = None,
        prefetch: int = PREFETCH,
        budget_bytes: int = BUDGET_BYTES,
        disk_cache: DiskCache | None = None,
    ) -> None:
        rank, world_size = require_int("rank", rank), require_int("world_size", world_size)
        global_batch_size, prefetch = (
            require_int("global_batch_size", global_batch_size),
            require_int("prefetch", prefetch),
        )
        budget_bytes = require_int("budget_bytes", budget_bytes)
        num_threads = None if num_threads is None else require_int("num_threads", num_threads)
        check_world(global_batch_size, rank, world_size)
        _check_choice("bad_samples", bad_samples, get_args(BadSamples))
        _check_choice("last_batch", last_batch, get_args(LastBatch))
        if (num_threads is not None and num_threads < 1) or prefetch < 0:
            raise ConfigError(f"num_threads is {num_threads} and prefetch {prefetch}, expected at least 1 and 0")
        loaded = manifest_url if isinstance(manifest_url, LoadedSet) else manifests.load(os.fspath(manifest_url))
        self.manifest, storage = loaded
        self.split = self.manifest.split(split)
        if image is not None and not isinstance(image, ImageSpec):
            raise ConfigError(f"image is {image!r}, expected ImageSpec(size=...), or None to decode nothing")
        _check_fields(self.split.fields, fields, image)
        if seed is None and image is not None and image.is_random:
            raise ConfigError(
                "the stored order (seed None) takes no random crop or flip; use CenterCrop, or give a seed"
            )
        self.rank, self.world_size, self.seed, self.image = rank, world_size, seed, image
        self.fields, self.with_key, self.bad_samples = tuple(fields), with_key, bad_samples
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        self.prefetch = prefetch
        self.num_bytes_read = 0
        self._running: set[_Pipeline] = set()
        self.table = ShardTable(storage, self.split, with_keys=with_key)
        if disk_cache is not None and not storage.is_remote:
            raise ConfigError(f"{storage.url} lies on a local disk already; leave the disk cache out")
        self.disk_cache = None if disk_cache is None else BlockCache(disk_cache, self.split)
        self.stored_bytes = sum(shard.num_bytes for shard in self.split.shards)

        def order_within(budget: int) -> Order:
            return fit_order(
                [shard.num_samples for shard in self.split.shards],
                stored_bytes=self.stored_bytes,
                seed=seed,
                global_batch_size=global_batch_size,
                num_lanes=num_lanes,
                block_size=block_size,
                window=window,
                quarantined=quarantined,
                last_batch=last_batch,
                budget_bytes=budget,
            )

        self.order = order_within(budget_bytes)
        self.part = rank_part(global_batch_size, rank, world_size) if part is None else part
        if self.part.step != 1 or not 0 <= self.part.start <= self.part.stop <= global_batch_size:
            raise ConfigError(f"part is {part}, expected consecutive slots of a global batch of {global_batch_size}")
        self.memory = fit_memory(
            self.order,
            self.part,
            order_within=order_within,
            stored_bytes=self.stored_bytes,
            image_bytes=3 * image.size**2 if image else 0,
            cache_bytes=self._cache_bytes(),
            prefetch=prefetch,
            budget_bytes=budget_bytes,
        )
        self.cache: MemoryCache | None = None
        self.decoders: Decoders | None = None
        self._prepare_decoding()
        _log.info("%s %s: %s", storage.url, split, self.memory)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.order.num_batches

    @property
    def batch_size(self) -> int:
        """Samples of this replica in a batch: its slots are `part` of the global batch."""
        return len(self.part)

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

    def run(self, spans: Iterator[tuple[int, range]]) -> Generator[tuple[int, int, Batch], None, None]:
        """(epoch, step, batch) over some spans (epoch, steps), one after the other; steps may be every n-th.

        Raises ConfigError for a step that no epoch has, as it raises all else: where its batch would be.
        """
        with _Pipeline(self, spans) as pipeline:
            self._running.add(pipeline)
            try:
                yield from pipeline
            finally:
                self._running.discard(pipeline)

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
        shards = np.searchsorted(self.order.first_ids, ids, side="right") - 1
        return self.table.addresses(shards, ids - self.order.first_ids[shards])

    @property
    def has_small_samples(self) -> bool:
        """Whether a sample takes little more than giving Python's interpreter from thread to thread."""
        return self.stored_bytes <= SMALL_BYTES * self.split.num_samples

    def _prepare_decoding(self) -> None:
        if self.image is None:
            return
        num_images, shared = self.split.num_samples, None
        by_others = self.has_small_samples and num_images >= MIN_DECODED and self.num_threads > 1
        if self.memory.cache and isinstance(self.image.crop, PadCrop):
            shared = SharedImages(num_images, self.image.size) if by_others else None
            self.cache = MemoryCache(num_images, self.image.size, self.image.crop.padding, shared)
        if by_others:
            self.decoders = Decoders(self.image, min(self.num_threads, MAX_DECODERS), self.batch_size, shared)

    def _cache_bytes(self) -> int | None:
        if self.image is None or self.fields or self.with_key:
            return None
        return MemoryCache.num_bytes(self.split.num_samples, self.image)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step as planned: what stands in its slots and the promises of their bytes; None if all of it is cached."""

    epoch: int
    step: int
    slots: Slots
    tickets: PendingSamples | None
    drawn: np.ndarray


@dataclass(frozen=True, slots=True)
class _Work:
    """A step whose parts are being decoded."""

    plan: _Step
    batch: Batch
    parts: "list[Future[None]]"


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


_Found = tuple[int, Contents]
"""A slot and what is stored for it."""

_Job = tuple[str, Callable[[], None], "queue.Queue[Any]"]
"""The name of a thread, what it does, and the queue in which its failure or its end is told."""


class _Pipeline:
    """The threads of one run over a stream: plan -> hand out -> decode -> whoever iterates."""

    def __init__(self, stream: Stream, spans: Iterator[tuple[int, range]]) -> None:
        self.stream = stream
        self.reads: SampleReader = open_sample_reader(stream.order, stream.table, stream.memory.raw, stream.disk_cache)
        self._spans = spans
        self._stopped = threading.Event()
        self._planned: queue.Queue[_Step | _Failure | None] = queue.Queue(READ_AHEAD)
        self._begun: queue.Queue[_Work | _Failure | None] = queue.Queue(max(1, stream.prefetch))
        self._columns = [(name, stream.split.fields.index(name)) for name in stream.fields]
        self._image_columns = [at for at, name in enumerate(stream.split.fields) if name in FIELD_OF_EXTENSION]
        self._whole_side = _whole_side(stream.image)
        self._bad: set[int] = set()
        """Ids of samples that were found to be bad, and of all in shards that were: they replace no other one."""
        num_threads, self._parts = stream.num_threads, SLICES_PER_THREAD * stream.num_threads
        if stream.image is None:
            self._parts = 1
        elif stream.decoders is not None:
            num_threads = self._parts = stream.decoders.num_processes
        elif stream.has_small_samples:
            # Such a sample takes less time than handing Python's interpreter from thread to thread.
            num_threads = self._parts = 1
        self._pool = ThreadPoolExecutor(num_threads, "shardset-decode", initializer=_one_opencv_thread)
        jobs: list[_Job] = [("plan", self._plan, self._planned), ("hand-out", self._hand_out, self._begun)]
        if stream.has_small_samples and not stream.table.storage.is_remote:
            jobs = [("fill", self._plan_and_begin, self._begun)]
        self._threads = [
            threading.Thread(target=self._guard, args=(work, out), name=f"shardset-{name}", daemon=True)
            for name, work, out in jobs
        ]

    def __enter__(self) -> "_Pipeline":
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Has all threads end, and fails the reads that one of them may be waiting for."""
        self._stopped.set()
        self.reads.close()

    def __exit__(self, *exc: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.stream.num_bytes_read += self.reads.num_bytes_read

    def __iter__(self) -> Iterator[tuple[int, int, Batch]]:
        while (work := self._receive(self._begun)) is not None:
            if isinstance(work, _Failure):
                raise work.error
            for part in work.parts:
                part.result()
            yield work.plan.epoch, work.plan.step, work.batch

    def _guard(self, work: Callable[[], None], out: "queue.Queue[Any]") -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that iterates
            self._offer(out, _Failure(error))
        else:
            self._offer(out, None)

    def _plan(self) -> None:
        for plan in self._plans():
            self._offer(self._planned, plan)

    def _plan_and_begin(self) -> None:
        for plan in self._plans():
            self._offer(self._begun, self._begin(plan, alone=self.stream.decoders is None))

    def _plans(self) -> Iterator[_Step]:
        for epoch, steps in self._spans if self.stream.part else ():
            self._check_span(epoch, steps)
            for start, stop in _growing(steps, steps_at_once(self.stream.order)):
                part = self.stream.part
                slots = self.stream.order.slots(epoch, range(start, stop), part.start, part.stop)
                own = [step for step in range(start, stop) if step in steps]
                if not own:
                    continue
                addresses = self._addresses(slots.ids[[step - start for step in own]])
                for number, step in enumerate(own):
                    self._wait_for_room()
                    if self._stopped.is_set():
                        return
                    place = addresses and addresses.part(number * len(part), (number + 1) * len(part))
                    yield self._plan_step(epoch, step, slots[step - start], place)

    def _check_span(self, epoch: int, steps: range) -> None:
        num_steps = len(self.stream)
        if epoch < 0 or steps.step < 1 or (steps and (steps.start < 0 or steps[-1] >= num_steps)):
            raise ConfigError(f"steps {steps} of epoch {epoch} were asked for, expected some of 0 to {num_steps - 1}")

    def _addresses(self, ids: np.ndarray) -> SampleAddresses | None:
        """Where the samples of several steps are stored, every index looked into once; None if all are cached."""
        cache = self.stream.cache
        return None if cache is not None and cache.holds(ids) else self.stream.addresses(ids.ravel())

    def _plan_step(self, epoch: int, step: int, slots: Slots, addresses: SampleAddresses | None) -> _Step:
        stream = self.stream
        cached = addresses is None or (stream.cache is not None and stream.cache.holds(slots.ids))
        drawn = np.zeros((len(slots.ids), 0))
        if stream.image is not None and stream.image.is_random and stream.seed is not None:
            drawn = draws(stream.image, stream.seed, epoch, slots.rows, slots.lanes)
        tickets = None if addresses is None or cached else self.reads.read_step(epoch, slots, addresses)
        return _Step(epoch, step, slots, tickets, drawn)

    def _wait_for_room(self) -> None:
        """Waits while the budget is full and a planned step can still empty it."""
        while not self.reads.within_budget() and not self._planned.empty() and not self._stopped.is_set():
            self._stopped.wait(0.005)

    def _hand_out(self) -> None:
        while (plan := self._receive(self._planned)) is not None:
            if isinstance(plan, _Failure):
                raise plan.error
            self._offer(self._begun, self._begin(plan))

    def _begin(self, plan: _Step, *, alone: bool = False) -> _Work:
        """Hands out the parts of a step; `alone` does all of it here instead."""
        batch, parts = _empty_batch(self.stream, plan), []
        for job in self._jobs(plan, batch):
            if alone:
                job()
            else:
                parts.append(self._pool.submit(job))
        return _Work(plan, batch, parts)

    def _jobs(self, plan: _Step, batch: Batch) -> Iterator[Callable[[], None]]:
        if self.stream.cache is not None and plan.tickets is None:
            slots = np.arange(len(plan.slots.ids))
            yield partial(self.stream.cache.crop, batch["image"], slots, plan.slots.ids, plan.drawn)
            return
        size = len(plan.slots.ids)
        for start, stop in itertools.pairwise(np.linspace(0, size, min(size, self._parts) + 1).astype(int).tolist()):
            contents = self._contents(batch, plan, start, stop)
            if not self.stream.has_small_samples:
                yield partial(self._fill, batch, plan, contents)
                continue
            found = self._fill_stored(batch, plan, list(contents))  # read here, for the same reason
            if self.stream.decoders is None:
                yield partial(self._fill, batch, plan, found)
            elif found:
                self.stream.decoders.start()
                yield partial(self._fill_by_others, self.stream.decoders, batch, plan, found)

    def _fill(self, batch: Batch, plan: _Step, found: Iterable[_Found]) -> None:
        for slot, contents in found:
            self._fill_slot(batch, plan, slot, contents)

    def _fill_stored(self, batch: Batch, plan: _Step, found: list[_Found]) -> list[_Found]:
        """Fills the slots whose images are taken whole and need no decoder (see `stored_png`); returns the others."""
        if self._whole_side is None:
            return found
        done, pixels = stored_png.pixels(self._images(found), self._whole_side, self._whole_side)
        if not done.any():
            return found
        self._put_whole(batch, plan, _slots(found)[done], pixels)
        for (slot, contents), is_done in zip(found, done, strict=True):
            if is_done:
                self._pass_through(batch, slot, contents)
        return [one for one, is_done in zip(found, done, strict=True) if not is_done]

    def _put_whole(self, batch: Batch, plan: _Step, slots: np.ndarray, pixels: np.ndarray) -> None:
        """Crops images of the wanted size, uint8 [n, size, size, 3], into the batch, and keeps them if that is done."""
        assert self.stream.image is not None
        assert plan.tickets is not None
        cache, crop = self.stream.cache, self.stream.image.crop
        if cache is not None:
            cache.put(plan.slots.ids[slots], pixels, plan.tickets.addresses.labels[slots])
        if isinstance(crop, PadCrop):
            pad_crops(batch["image"], slots, pixels, np.arange(len(slots)), crop.padding, plan.drawn[slots])
        else:
            batch["image"][slots] = pixels

    def _fill_by_others(self, decoders: Decoders, batch: Batch, plan: _Step, found: list[_Found]) -> None:
        """Fills a part with what another process decodes, if one is ready; does itself what that can't."""
        with decoders.idle() as decoder:
            done = None if decoder is None or self._stopped.is_set() else self._fill_by(decoder, batch, plan, found)
        if done is not None and all(done) and not self._columns:
            return
        for number, (slot, contents) in enumerate(found):
            if done is not None and done[number]:
                self._pass_through(batch, slot, contents)
            elif not self._stopped.is_set():
                self._fill_slot(batch, plan, slot, contents)

    def _fill_by(self, decoder: Decoder, batch: Batch, plan: _Step, found: list[_Found]) -> list[bool]:
        """Fills what another process can decode, and says which of them those are."""
        slots, cache = _slots(found), self.stream.cache
        numbers = np.arange(len(slots)) if cache is None else plan.slots.ids[slots]
        done = decoder.decode(self._images(found), plan.drawn[slots], numbers)
        slots, numbers = slots[done], numbers[done]
        if cache is None:
            batch["image"][slots] = decoder.images_NHWC[numbers]
        else:
            assert plan.tickets is not None
            cache.note(numbers, plan.tickets.addresses.labels[slots])
            cache.crop(batch["image"], slots, numbers, plan.drawn[slots])
        return done.tolist()

    def _contents(self, batch: Batch, plan: _Step, start: int, stop: int) -> Iterator[_Found]:
        """The slots [start, stop) with what is stored for them; those that are damaged are treated and left out."""
        assert plan.tickets is not None
        slot = start
        while slot < stop:
            try:
                for contents in plan.tickets.contents(slot, stop):
                    if self._stopped.is_set():
                        return
                    yield slot, contents
                    slot += 1
            except DamagedShard as error:
                self._treat(batch, plan, slot, error)
                slot += 1

    def _fill_slot(self, batch: Batch, plan: _Step, slot: int, contents: Contents) -> None:
        assert plan.tickets is not None
        try:
            self._put_sample(batch, plan, slot, contents, plan.tickets, slot)
        except UndecodableImage as error:
            self._treat(batch, plan, slot, error)

    def _put_sample(
        self, batch: Batch, plan: _Step, slot: int, contents: Contents, tickets: PendingSamples, number: int
    ) -> None:
        self._pass_through(batch, slot, contents)
        if self.stream.image is None:
            return
        image = self._image(contents)
        if image is None:
            found = [name for name, one in zip(self.stream.split.fields, contents, strict=True) if one is not None]
            raise UndecodableImage(f"{tickets.describe(number)}: it has no image among {found}")
        try:
            self._decode(batch["image"][slot], image, self.stream.image, plan.drawn[slot], tickets.addresses, number)
        except UndecodableImage as error:
            raise UndecodableImage(f"{tickets.describe(number)}: {error}") from error

    def _pass_through(self, batch: Batch, slot: int, contents: Contents) -> None:
        for name, column in self._columns:
            batch[name][slot] = contents[column]

    def _images(self, found: Sequence[_Found]) -> list[bytes]:
        """The images of samples; empty where there is none."""
        if len(self._image_columns) == 1:
            [column] = self._image_columns
            return [contents[column] or b"" for _, contents in found]
        return [self._image(contents) or b"" for _, contents in found]

    def _image(self, contents: Contents) -> bytes | None:
        return next((contents[column] for column in self._image_columns if contents[column] is not None), None)

    def _decode(
        self, row: np.ndarray, data: bytes, spec: ImageSpec, drawn: np.ndarray, addresses: SampleAddresses, number: int
    ) -> None:
        cache = self.stream.cache
        if cache is None:
            decode_into(row, data, spec, drawn)
            return
        image = decode(data, background=spec.background, decoded_bytes=spec.decoded_bytes)
        first = self.stream.order.first_ids.item(addresses.shards.item(number))
        cache.put(first + addresses.positions.item(number), image, addresses.label(number))
        pad_crop(row, image, cache.padding, drawn)

    def _treat(self, batch: Batch, plan: _Step, slot: int, error: DamagedShard | UndecodableImage) -> None:
        if self.stream.bad_samples == "raise":
            raise error
        _log.warning("epoch %d step %d slot %d: %s: %s", plan.epoch, plan.step, slot, self.stream.bad_samples, error)
        if self.stream.bad_samples == "mask":
            _blank(batch, slot)
        else:
            self._note_bad(plan.slots.ids.item(slot), error)
            self._substitute(batch, plan, slot, error)

    def _note_bad(self, id_: int, error: DamagedShard | UndecodableImage) -> None:
        if isinstance(error, LostShard) and id_ not in self._bad:
            first_ids = self.stream.order.first_ids
            shard = int(np.searchsorted(first_ids, id_, side="right")) - 1
            self._bad.update(range(first_ids.item(shard), first_ids.item(shard + 1)))
        self._bad.add(id_)

    def _substitute(self, batch: Batch, plan: _Step, slot: int, error: Exception) -> None:
        lane, row = plan.slots.lanes.item(slot), plan.slots.rows.item(slot)
        for id_ in _near(self.stream.order, plan.epoch, lane, row):
            if id_ in self._bad:
                continue
            other = self.reads.read_single(self.stream.addresses(np.array([id_])))
            try:
                self._put_sample(batch, plan, slot, other.take(0), other, 0)
            except (DamagedShard, UndecodableImage) as again:
                _log.warning("the substitute is bad too: %s", again)
                self._note_bad(id_, again)
                continue
            _put(batch, slot, id_, other.addresses)
            return
        raise error

    def _offer(self, out: "queue.Queue[Any]", item: Any) -> None:
        while not self._stopped.is_set():
            try:
                out.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return

    def _receive(self, source: "queue.Queue[Any]") -> Any:
        while not self._stopped.is_set():
            try:
                return source.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        return None


def order_options(state: OrderState) -> dict[str, int]:
    """What of a state to give to a new Stream so that it has the same order: `Stream(..., **order_options(state))`."""
    return {"num_lanes": state.num_lanes, "block_size": state.block_size, "window": state.window}


def _empty_batch(stream: Stream, plan: _Step) -> Batch:
    batch: Batch = {
        "label": _labels(stream.cache, plan),
        "weight": plan.slots.weights.copy(),
        "id": plan.slots.ids.copy(),
    }
    if stream.image is not None:
        batch["image"] = np.empty((len(plan.slots.ids), stream.image.size, stream.image.size, 3), dtype=np.uint8)
        if stream.image.flip:
            batch["flip"] = plan.drawn[:, 0] < 0.5
    if plan.tickets is not None and plan.tickets.addresses.keys is not None:
        batch["key"] = list(plan.tickets.addresses.keys)
    return batch | {name: [None] * len(plan.slots.ids) for name in stream.fields}


def _labels(cache: MemoryCache | None, plan: _Step) -> np.ndarray:
    if plan.tickets is not None:
        return plan.tickets.addresses.labels
    assert cache is not None, "only what is cached needs no ticket"
    return cache.labels[plan.slots.ids]


def _whole_side(spec: ImageSpec | None) -> int | None:
    """The side of square images that are not resized, if they may be stored without a need for a decoder."""
    if spec is None or isinstance(spec.crop, RandomResizedCrop) or not stored_png.fits(spec.size, spec.size):
        return None
    return None if isinstance(spec.crop, CenterCrop) and spec.crop.resize != spec.size else spec.size


def _slots(found: Sequence[_Found]) -> np.ndarray:
    return np.array([slot for slot, _ in found], dtype=np.int64)


def _blank(batch: Batch, slot: int) -> None:
    batch["weight"][slot] = 0
    if "image" in batch:
        batch["image"][slot] = 0


def _put(batch: Batch, slot: int, id_: int, found: SampleAddresses) -> None:
    batch["id"][slot], batch["label"][slot] = id_, found.labels.item(0)
    if found.keys is not None:
        batch["key"][slot] = found.keys[0]


def _near(order: Order, epoch: int, lane: int, row: int) -> Iterator[int]:
    """The ids that may stand in for that of a row, the same for any world size.

    First those of the next rows of its lane, then of the rows before, then of the same row in the next lanes.
    """

    def ids(lanes: Sequence[int], start: int, stop: int) -> list[int]:
        positions, _ = order.positions(epoch, np.array(lanes), start, stop)
        return order.ids(epoch, positions.ravel()).tolist()

    begin, end = order.lane_starts(np.array([lane, lane + 1])).tolist()
    row = min(row, end - begin - 1)  # a pad repeats the last row
    for start, stop in _growing(range(row + 1, end - begin), MAX_NEAR):
        yield from ids([lane], start, stop)
    for start, stop in _growing(range(row), MAX_NEAR):
        yield from reversed(ids([lane], row - stop, row - start))
    yield from ids([*range(lane + 1, order.num_lanes), *range(lane)], row, row + 1)


def _growing(steps: range, most: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into parts of 1, 2, 4 ... steps: the first batch waits for its own plan only."""
    start, size = steps.start, 1
    while start < steps.stop:
        stop = min(steps.stop, start + size)
        yield start, stop
        start, size = stop, min(2 * size, most)


def _check_fields(stored: Sequence[str], wanted: Sequence[str], image: ImageSpec | None) -> None:
    if isinstance(wanted, str):
        raise ConfigError(f"fields is {wanted!r}, expected several, such as ({wanted!r},)")
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ConfigError(f"no field {missing[0]!r} in this split; it has {', '.join(stored)}")
    own = [name for name in wanted if name in BATCH_NAMES]
    if own:
        raise ConfigError(f"a batch has a {own[0]!r} of its own; build the set with another name for that field")
    if image is not None and FIELD_OF_EXTENSION.keys().isdisjoint(stored):
        raise ConfigError(f"this split has no images, only {', '.join(stored)}; use image=None")


def _check_choice(name: str, found: str, choices: Sequence[str]) -> None:
    if found not in choices:
        raise ConfigError(f"{name} is {found!r}, expected {' or '.join(choices)}")


def _one_opencv_thread() -> None:
    cv2.setNumThreads(1)
