"""Fills the slots of a batch where that is fastest: in the calling thread, in threads, in
processes, from memory.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from shardset.decode.crops import use_one_opencv_thread
from shardset.decode.workers import Worker, WorkerPool
from shardset.stream.decode_batch.slots import SlotWriter, StoredContents, slots_of
from shardset.stream.decode_batch.steps import PlannedStep
from shardset.stream.source import StreamSource

SLICES_PER_THREAD = 4


class BatchDecoder:
    """Decodes the batches of a source, each cut into slices.

    Threads read and decode the slices of large samples. With `workers`, processes decode them, and
    a thread waits for each process and decodes what that can't. Otherwise small samples are decoded
    in the calling thread, because switching threads takes longer; for the same reason it reads what
    the processes decode.
    """

    def __init__(
        self, source: StreamSource, writer: SlotWriter, workers: WorkerPool | None
    ) -> None:
        spec = source.spec
        self._writer, self._workers, self._num_slices = writer, workers, 1
        self._pool: ThreadPoolExecutor | None = None
        if workers is not None:
            num_threads = self._num_slices = workers.num_processes
        elif source.has_small_samples:
            num_threads = 0
        else:
            num_threads = spec.num_decode_threads
            self._num_slices = SLICES_PER_THREAD * num_threads
            if not spec.decodes:
                self._num_slices = 1
        if num_threads:
            begin = None if not spec.decodes else use_one_opencv_thread
            self._pool = ThreadPoolExecutor(num_threads, "shardset-decode", initializer=begin)

    @property
    def has_threads(self) -> bool:
        """Whether jobs run in other threads than the calling one."""
        return self._pool is not None

    def begin(self, step: PlannedStep) -> Sequence[Future[None]]:
        """Begins to decode the batch of a step, which is full when all futures are done.

        Raises what prevents that.
        """
        num_slots = len(step.slots.ids)
        if step.pending is None:
            return self.submit(partial(self._writer.put_cached, step, np.arange(num_slots)))
        futures: list[Future[None]] = []
        for start, stop in even_slices(num_slots, self._num_slices):
            samples = self._writer.read(step, start, stop)
            if self._workers is None and self._pool is not None:
                futures += self.submit(partial(self._writer.write, step, samples))
                continue
            rest = self._writer.write_undecoded(step, list(samples))
            if self._workers is None:
                self._writer.write(step, rest)
            elif rest:
                self._workers.start()
                futures += self.submit(partial(self._decode_in_workers, self._workers, step, rest))
        return futures

    def submit(self, job: Callable[[], None]) -> Sequence[Future[None]]:
        """Runs a job where images are decoded: in a thread, or at once."""
        if self._pool is not None:
            return [self._pool.submit(job)]
        job()
        return ()

    def close(self) -> None:
        """Waits for running jobs and cancels the rest."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _decode_in_workers(
        self, workers: WorkerPool, step: PlannedStep, samples: list[StoredContents]
    ) -> None:
        """Decodes a slice by an idle worker, and the rest in this thread."""
        with workers.idle() as worker:
            if worker is not None and not self._writer.stopped.is_set():
                samples = self._decode_by(worker, step, samples)
        self._writer.write(step, samples)

    def _decode_by(
        self, worker: Worker, step: PlannedStep, samples: list[StoredContents]
    ) -> list[StoredContents]:
        """Decodes what a worker can decode; returns the samples that it can't."""
        slots, cache = slots_of(samples), self._writer.cache
        numbers = np.arange(len(slots)) if cache is None else step.slots.ids[slots]
        done = worker.decode(self._writer.images(samples), step.drawn[slots], numbers)
        slots, numbers = slots[done], numbers[done]
        if cache is None:
            step.batch["image"][slots] = worker.images_NHWC[numbers]
        else:
            cache.mark_filled(numbers, step.labels[slots])
            self._writer.put_cached(step, slots)
        self._writer.pass_through(step, list(itertools.compress(samples, done)))
        return list(itertools.compress(samples, ~done))


def even_slices(size: int, num_slices: int) -> Iterable[tuple[int, int]]:
    """Cuts `range(size)` into (start, stop) of about equal length, none of them empty."""
    return itertools.pairwise(np.linspace(0, size, min(size, num_slices) + 1).astype(int).tolist())
