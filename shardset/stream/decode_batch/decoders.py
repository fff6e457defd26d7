"""Ways to fill a batch, a class for each: in the calling thread, in threads, in processes, from memory."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from shardset.decode.crops import use_one_opencv_thread
from shardset.decode.memory_cache import MemoryCache
from shardset.decode.workers import Worker, WorkerPool
from shardset.stream.decode_batch.slots import SlotWriter, StoredContents, slots_of
from shardset.stream.decode_batch.steps import PlannedStep
from shardset.stream.source import StreamSource
from shardset.stream.spec import Batch

SLICES_PER_THREAD = 4


class BatchDecoder(Protocol):
    """A way to decode the slots of a batch."""

    def begin(self, batch: Batch, step: PlannedStep) -> Sequence[Future[None]]:
        """Begins to decode a batch, which is full when all futures are done. Raises what prevents that."""

    def submit(self, job: Callable[[], None]) -> Sequence[Future[None]]:
        """Runs a job where images are decoded; by default at once, in the calling thread."""
        job()
        return ()

    def close(self) -> None:
        """Waits for running jobs and cancels the rest; by default there are none."""
        return None


class DecodeHere(BatchDecoder):
    """Decodes in the calling thread: for small samples, switching threads takes longer than decoding."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer

    def begin(self, batch: Batch, step: PlannedStep) -> Sequence[Future[None]]:
        """See BatchDecoder."""
        samples = list(self._writer.read(batch, step, 0, len(step.slots.ids)))
        _write_all(self._writer, batch, step, self._writer.write_undecoded(batch, step, samples))
        return ()


class _PoolDecoder(BatchDecoder):
    """What decoders with a pool of threads share."""

    def __init__(self, writer: SlotWriter, num_threads: int) -> None:
        self._writer = writer
        begin = None if writer.spec.image is None else use_one_opencv_thread
        self._pool = ThreadPoolExecutor(num_threads, "shardset-decode", initializer=begin)

    def submit(self, job: Callable[[], None]) -> Sequence[Future[None]]:
        """See BatchDecoder."""
        return [self._pool.submit(job)]

    def close(self) -> None:
        """See BatchDecoder."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class DecodeInThreads(_PoolDecoder):
    """Cuts a batch into slices that threads read and decode."""

    def __init__(self, writer: SlotWriter, num_threads: int, num_slices: int) -> None:
        super().__init__(writer, num_threads)
        self._num_slices = num_slices

    def begin(self, batch: Batch, step: PlannedStep) -> Sequence[Future[None]]:
        """See BatchDecoder."""
        slices = even_slices(len(step.slots.ids), self._num_slices)
        return [
            self._pool.submit(_write_all, self._writer, batch, step, self._writer.read(batch, step, start, stop))
            for start, stop in slices
        ]


class DecodeInProcesses(_PoolDecoder):
    """Decodes the slices of a batch in processes. A thread waits for each process and decodes what that can't.

    The calling thread reads the bytes, as in DecodeHere and for the same reason.
    """

    def __init__(self, writer: SlotWriter, workers: WorkerPool) -> None:
        super().__init__(writer, workers.num_processes)
        self._workers = workers

    def begin(self, batch: Batch, step: PlannedStep) -> Sequence[Future[None]]:
        """See BatchDecoder."""
        futures = []
        for start, stop in even_slices(len(step.slots.ids), self._workers.num_processes):
            samples = list(self._writer.read(batch, step, start, stop))
            samples = self._writer.write_undecoded(batch, step, samples)
            if samples:
                self._workers.start()
                futures.append(self._pool.submit(self._decode_in_workers, batch, step, samples))
        return futures

    def _decode_in_workers(self, batch: Batch, step: PlannedStep, samples: list[StoredContents]) -> None:
        """Decodes a slice from an idle worker, and decodes the rest in this thread."""
        with self._workers.idle() as worker:
            if worker is not None and not self._writer.stopped.is_set():
                samples = self._decode_by(worker, batch, step, samples)
        for slot, contents in samples:
            if self._writer.stopped.is_set():
                return
            self._writer.write(batch, step, slot, contents)

    def _decode_by(
        self, worker: Worker, batch: Batch, step: PlannedStep, samples: list[StoredContents]
    ) -> list[StoredContents]:
        """Decodes what a worker can decode; returns the samples that it can't."""
        slots, cache = slots_of(samples), self._writer.cache
        numbers = np.arange(len(slots)) if cache is None else step.slots.ids[slots]
        done = worker.decode(self._writer.images(samples), step.drawn[slots], numbers)
        slots, numbers = slots[done], numbers[done]
        if cache is None:
            batch["image"][slots] = worker.images_NHWC[numbers]
        else:
            cache.mark_filled(numbers, step.labels[slots])
            cache.crop_into(batch["image"], slots, numbers, step.drawn[slots])
        self._writer.pass_through(batch, list(itertools.compress(samples, done)))
        return list(itertools.compress(samples, ~done))


class DecodeFromMemory:
    """Crops the images of a step that the memory cache holds; leaves the other steps to another decoder."""

    def __init__(self, cache: MemoryCache, others: BatchDecoder) -> None:
        self._cache, self._others = cache, others
        self.submit, self.close = others.submit, others.close

    def begin(self, batch: Batch, step: PlannedStep) -> Sequence[Future[None]]:
        """See BatchDecoder."""
        if step.pending is not None:
            return self._others.begin(batch, step)
        slots = np.arange(len(step.slots.ids))
        return self.submit(partial(self._cache.crop_into, batch["image"], slots, step.slots.ids, step.drawn))


def open_decoder(source: StreamSource, writer: SlotWriter, workers: WorkerPool | None) -> BatchDecoder:
    """The fastest decoder for the batches of a source."""
    decoder: BatchDecoder
    if workers is not None:
        decoder = DecodeInProcesses(writer, workers)
    elif source.has_small_samples:
        decoder = DecodeHere(writer)
    else:
        num_threads = source.spec.num_decode_threads
        num_slices = 1 if source.spec.image is None else SLICES_PER_THREAD * num_threads
        decoder = DecodeInThreads(writer, num_threads, num_slices)
    return decoder if writer.cache is None else DecodeFromMemory(writer.cache, decoder)


def even_slices(size: int, num_slices: int) -> Iterable[tuple[int, int]]:
    """Cuts `range(size)` into (start, stop) of about equal length, none of them empty."""
    return itertools.pairwise(np.linspace(0, size, min(size, num_slices) + 1).astype(int).tolist())


def _write_all(writer: SlotWriter, batch: Batch, step: PlannedStep, samples: Iterable[StoredContents]) -> None:
    for slot, contents in samples:
        writer.write(batch, step, slot, contents)
