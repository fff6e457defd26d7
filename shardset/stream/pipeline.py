"""The threads of one run over a stream: plan -> begin to decode -> consumer."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from shardset.order.budget import READ_AHEAD
from shardset.read.joined import JoinedReader
from shardset.read.open import open_sample_reader
from shardset.read.pending import SampleReader
from shardset.stream.decode_batch.decoders import BatchDecoder
from shardset.stream.decode_batch.finish import DecodeAndFinish
from shardset.stream.decode_batch.slots import SlotWriter
from shardset.stream.decode_batch.steps import PlannedStep, Spans, StepPlanner, empty_batch
from shardset.stream.source import DecodeAids, StreamSource
from shardset.stream.spec import Batch

POLL_S = 0.1
JOIN_S = 2.0
"""How long the end of a run waits for a thread.

One that waits for a bucket is left behind and ends with its read.
"""

ROOM_POLL_S = 0.005
"""Interval between checks whether the budget has room for another step."""

T = TypeVar("T")

_Decoding: TypeAlias = tuple[PlannedStep, Sequence[Future[None]]]
"""A step whose batch is full when the futures are done."""
_Item: TypeAlias = T | BaseException | None
"""An item that a thread passes on: a value, the failure that ended it, or None at the end."""


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
        writer = SlotWriter(source, aids.cache, self._stopped)
        spec = source.spec
        self._decoder: BatchDecoder | DecodeAndFinish = BatchDecoder(source, writer, aids.workers)
        if spec.transform is not None or (spec.image is not None and spec.image.flip == "pixels"):
            self._decoder = DecodeAndFinish(self._decoder, spec, self._stopped)
        self._planned: queue.Queue[_Item[PlannedStep]] = queue.Queue(READ_AHEAD)
        self._decoding: queue.Queue[_Item[_Decoding]] = queue.Queue(max(1, source.spec.prefetch))
        self._threads = self._make_threads()

    def __enter__(self) -> "Pipeline":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._decoder.close()

    def __iter__(self) -> Iterator[tuple[int, int, Batch]]:
        for step, futures in self._received(self._decoding):
            for future in futures:
                future.result()
            yield step.epoch, step.step, step.batch

    def stop(self) -> None:
        """Ends all threads, and fails the reads that they wait for."""
        self._stopped.set()
        self._reader.close()

    def _make_threads(self) -> list[threading.Thread]:
        """One thread for planning and decoding if samples are small and local, because nothing
        waits; else two.
        """
        plan = partial(self._planner.plan, self._spans, self._wait_for_budget)
        if self._source.has_small_samples and not self._source.table.storage.is_remote:
            return [self._thread("begin", lambda: map(self._begin, plan()), self._decoding)]
        return [
            self._thread("plan", plan, self._planned),
            self._thread(
                "begin", lambda: map(self._begin, self._received(self._planned)), self._decoding
            ),
        ]

    def _thread(
        self,
        name: str,
        produce: Callable[[], Iterator[T]],
        out: "queue.Queue[_Item[T]]",
    ) -> threading.Thread:
        """A thread that puts what `produce` yields into a queue, then None, or the failure that
        ended it.
        """

        def run() -> None:
            try:
                for item in produce():
                    self._send(out, item)
            except BaseException as error:  # noqa: BLE001 - the iterating thread raises it
                self._send(out, error)
            else:
                self._send(out, None)

        return threading.Thread(target=run, name=f"shardset-{name}", daemon=True)

    def _begin(self, step: PlannedStep) -> _Decoding:
        step = replace(step, batch=empty_batch(self._source, step))
        return step, self._decoder.begin(step)

    def _wait_for_budget(self) -> None:
        """Waits while the budget is used up and a planned step can still free memory."""
        while (
            not self._reader.within_budget()
            and not self._planned.empty()
            and not self._stopped.is_set()
        ):
            self._stopped.wait(ROOM_POLL_S)

    def _send(self, out: "queue.Queue[_Item[T]]", item: "_Item[T]") -> None:
        while not self._stopped.is_set():
            try:
                out.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return

    def _received(self, source: "queue.Queue[_Item[T]]") -> Iterator[T]:
        """The items of a queue; raises the failure that ended it."""
        while not self._stopped.is_set():
            try:
                item = source.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            yield item
