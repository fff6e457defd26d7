"""The threads of one run over a stream: plan -> begin to decode -> consumer."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardset.order.budget import READ_AHEAD
from shardset.read.joined import JoinedReader
from shardset.read.pending import SampleReader
from shardset.read.sample_reader import open_sample_reader
from shardset.storage.many import Threads
from shardset.stream.decode_batch.decoders import BatchDecoder
from shardset.stream.decode_batch.steps import PlannedStep, Spans, StepPlanner, empty_batch
from shardset.stream.source import DecodeAids, StreamSource
from shardset.stream.spec import Batch

JOIN_S = 2.0
"""How long the end of a run waits for a thread.

One that waits for a bucket is left behind and ends with its read.
"""

ROOM_POLL_S = 0.005
"""Interval between checks whether the budget has room for another step."""

T = TypeVar("T")


def _open_reader(source: StreamSource) -> SampleReader:
    """The reader of the samples and their columns, which share the budget by their sizes."""
    tables = [source.table, *(table for _, table in source.columns)]
    sizes = [table.split.num_tar_bytes for table in tables]
    caches = [source.disk_cache, *(None for _ in source.columns)]
    readers = [
        open_sample_reader(source.order, table, source.memory.raw * size // sum(sizes), cache)
        for table, size, cache in zip(tables, sizes, caches, strict=True)
    ]
    return JoinedReader(tables, readers) if source.columns else readers[0]


class Pipeline:
    """One run: iterate over it for (epoch, step, batch), inside `with`."""

    def __init__(self, source: StreamSource, aids: DecodeAids, spans: Spans) -> None:
        self._source, self._spans = source, spans
        self._stopped = threading.Event()
        self._reader = _open_reader(source)
        self._planner = StepPlanner(source, aids.cache, self._reader, self._stopped)
        self._decoder = BatchDecoder(source, aids, self._stopped)
        self._num_planned = self._num_begun = 0
        # One thread for both if samples are small and local, because nothing waits.
        is_one = source.has_small_samples and not source.table.storage.is_remote
        names = ("begin",) if is_one else ("begin", "plan")
        self._threads = {name: Threads(f"shardset-{name}", 1) for name in names}

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        for threads in self._threads.values():
            threads.join(JOIN_S)
        self._decoder.close()

    def __iter__(self) -> Iterator[tuple[int, int, Batch]]:
        steps = self._planner.plan(self._spans, self._wait_for_budget)
        if "plan" in self._threads:
            steps = _ahead(steps, READ_AHEAD, self._threads["plan"])
        size = self._source.spec.prefetch + 1  # those that wait, and the one that is begun
        try:
            for step, futures in _ahead(map(self._begin, steps), size, self._threads["begin"]):
                for future in futures:
                    future.result()
                if self._stopped.is_set():
                    return
                yield step.epoch, step.step, step.batch
        except CancelledError:
            if not self._stopped.is_set():  # otherwise it is a read that `stop` made fail
                raise

    def stop(self) -> None:
        """Ends all threads, and fails the reads that they wait for."""
        self._stopped.set()
        self._reader.close()
        for threads in self._threads.values():
            threads.close()

    def _begin(self, step: PlannedStep) -> tuple[PlannedStep, Sequence[Future[None]]]:
        """Begins to decode a step; its batch is full when the futures are done."""
        self._num_begun += 1
        rows = empty_batch(self._source, step)
        step = replace(step, rows=rows, batch=dict(rows))
        return step, self._decoder.begin(step)

    def _wait_for_budget(self) -> None:
        """Waits while the budget is used up and a planned step can still free memory."""
        while (
            not self._reader.within_budget()
            and self._num_planned > self._num_begun
            and not self._stopped.is_set()
        ):
            self._stopped.wait(ROOM_POLL_S)
        self._num_planned += 1


def _ahead(items: Iterator[T], size: int, thread: Threads) -> Iterator[T]:
    """The items of an iterator, of which a thread makes `size` in advance."""
    pending = deque(thread.call(partial(next, items, None)) for _ in range(size))
    while (item := pending.popleft().result()) is not None:
        pending.append(thread.call(partial(next, items, None)))
        yield item
