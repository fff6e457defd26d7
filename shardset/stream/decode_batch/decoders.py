"""Fills the slots of a batch where that is fastest: in the calling thread, in threads, in
processes, from memory.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from shardset.decode.crops import use_one_opencv_thread
from shardset.decode.image import mirror
from shardset.decode.workers import Worker
from shardset.stream.decode_batch.finish import StackedRows, transform_rows
from shardset.stream.decode_batch.slots import SlotWriter, StoredContents, slots_of
from shardset.stream.decode_batch.steps import PlannedStep
from shardset.stream.source import DecodeAids, StreamSource

SLICES_PER_THREAD = 4


class BatchDecoder:
    """Decodes the batches of a source, each cut into slices, and mirrors and transforms them as the
    spec says.

    Threads read and decode the slices of large samples. With `workers`, processes decode them, and
    a thread waits for each process and decodes what that can't. Otherwise small samples are decoded
    in the calling thread, because switching threads takes longer; for the same reason it reads what
    the processes decode.
    """

    def __init__(self, source: StreamSource, aids: DecodeAids, stopped: threading.Event) -> None:
        spec = self._spec = source.spec
        self._writer = SlotWriter(source, aids.cache, stopped)
        self._workers, self._stopped = aids.workers, stopped
        self._mirrors = spec.image is not None and spec.image.flip == "pixels"
        self._is_finished_here = self._mirrors or spec.transform is not None
        self._reads_at_once = source.has_small_samples
        num_threads, self._num_slices = 0, 1
        if self._workers is not None:
            num_threads = self._num_slices = self._workers.num_processes
        elif not self._reads_at_once:
            num_threads = spec.num_decode_threads
            if spec.decodes or self._is_finished_here:
                self._num_slices = SLICES_PER_THREAD * num_threads
        self._pool: ThreadPoolExecutor | None = None
        if num_threads:
            begin = use_one_opencv_thread if spec.decodes else None
            self._pool = ThreadPoolExecutor(num_threads, "shardset-decode", initializer=begin)

    def begin(self, step: PlannedStep) -> Sequence[Future[None]]:
        """Begins to decode the batch of a step, which is full when all futures are done.

        Raises what prevents that.
        """
        stacked = None
        if self._spec.transform is not None:
            stacked = StackedRows(step.batch, step.rows)
        is_copied = step.pending is None and not self._is_finished_here
        futures: list[Future[None]] = []
        for slots in even_slices(len(step.slots.ids), 1 if is_copied else self._num_slices):
            samples: Iterable[StoredContents] | None = None
            if step.pending is not None:
                samples = self._writer.read(step, slots)
                if self._reads_at_once:
                    samples = self._writer.write_undecoded(step, list(samples))
                    if not (samples or self._is_finished_here):
                        continue
                    if samples and self._workers is not None:
                        # Here, because a thread that imports OpenCV changes `sys.path` meanwhile.
                        self._workers.start()
            futures += self._submit(partial(self._fill, step, slots, samples, stacked))
        return futures

    def close(self) -> None:
        """Waits for running jobs and cancels the rest."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, job: Callable[[], None]) -> Sequence[Future[None]]:
        """Runs a job in a thread, or at once."""
        if self._pool is not None:
            return [self._pool.submit(job)]
        job()
        return ()

    def _fill(
        self,
        step: PlannedStep,
        slots: range,
        samples: Iterable[StoredContents] | None,
        stacked: StackedRows | None,
    ) -> None:
        """Fills a slice from its samples; from the cache if they are None."""
        if samples is None:
            self._writer.put_cached(step, np.array(slots))
        else:
            if self._workers is not None and samples:
                with self._workers.idle() as worker:
                    if worker is not None and not self._stopped.is_set():
                        samples = self._decode_by(worker, step, list(samples))
            self._writer.write(step, samples)
        if self._mirrors:
            part = slice(slots.start, slots.stop)
            mirror(step.rows["image"][part], step.drawn[part])
        if stacked is not None:
            transform_rows(self._spec, stacked, step, slots, self._stopped)

    def _decode_by(
        self, worker: Worker, step: PlannedStep, samples: list[StoredContents]
    ) -> list[StoredContents]:
        """Decodes what a worker can decode; returns the samples that it can't."""
        slots, cache = slots_of(samples), self._writer.cache
        numbers = np.arange(len(slots)) if cache is None else step.slots.ids[slots]
        done = worker.decode(self._writer.images(samples), step.drawn[slots], numbers)
        slots, numbers = slots[done], numbers[done]
        if cache is None:
            step.rows["image"][slots] = worker.images_NHWC[numbers]
        else:
            cache.mark_filled(numbers, step.labels[slots])
            self._writer.put_cached(step, slots)
        self._writer.pass_through(step, list(itertools.compress(samples, done)))
        return list(itertools.compress(samples, ~done))


def even_slices(size: int, num_slices: int) -> Iterable[range]:
    """Cuts `range(size)` into ranges of about equal length, none of them empty."""
    cuts = np.linspace(0, size, min(size, num_slices) + 1).astype(int).tolist()
    return itertools.starmap(range, itertools.pairwise(cuts))
