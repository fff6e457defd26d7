"""Planned steps: the samples of their slots, where their bytes are, and the random numbers of their
crops.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardset.decode.image import draws, is_mirrored
from shardset.decode.memory_cache import MemoryCache
from shardset.errors import ConfigError
from shardset.order.budget import steps_at_once
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.pending import PendingSamples, SampleReader
from shardset.stream.source import StreamSource
from shardset.stream.spec import Batch

Spans = Iterable[tuple[int, range]]
"""(epoch, steps), one after the other; steps may be every n-th."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step: its slots, the draws of their crops and their labels.

    `pending` are the samples that are being read; None where all of them come from the memory
    cache. `drawn_views` has float64 [n, number, m] for each name of views. `rows` are filled while
    they are decoded; `batch` has them too, or what a transform makes of them.
    """

    epoch: int
    step: int
    slots: Slots
    pending: PendingSamples | None
    drawn: np.ndarray
    labels: np.ndarray
    drawn_views: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows: Batch = field(default_factory=dict)
    batch: Batch = field(default_factory=dict)


class StepPlanner:
    """Plans steps and requests their bytes, in the order of the spans."""

    def __init__(
        self,
        source: StreamSource,
        cache: MemoryCache | None,
        reader: SampleReader,
        stopped: threading.Event,
    ) -> None:
        self._source, self._cache, self._reader, self._stopped = source, cache, reader, stopped

    def plan(self, spans: Spans, wait: Callable[[], None]) -> Iterator[PlannedStep]:
        """The steps of the spans; calls `wait` before each.

        Raises ConfigError for a step that no epoch has.
        """
        for epoch, steps in spans if self._source.spec.slots else ():
            self._check_span(epoch, steps)
            most = steps_at_once(self._source.order) // steps.step
            for together in growing_slices(steps, max(1, most)):
                if self._stopped.is_set():
                    return
                yield from self._plan_slice(epoch, together, wait)

    def _plan_slice(
        self, epoch: int, steps: range, wait: Callable[[], None]
    ) -> Iterator[PlannedStep]:
        """Some steps; looks up each index that they need once."""
        part, addresses = self._source.spec.slots, None
        slots = self._source.order.slots(epoch, steps, part.start, part.stop)
        if self._cache is None or not self._cache.holds(slots.ids):
            self._reader.prepare(epoch, slots)
            addresses = self._source.addresses(slots.ids.ravel())
        for number, step in enumerate(steps):
            wait()
            if self._stopped.is_set():
                return
            of_step = addresses and addresses.part(number * len(part), (number + 1) * len(part))
            yield self._plan_step(epoch, step, slots[number], of_step)

    def _check_span(self, epoch: int, steps: range) -> None:
        num_steps = self._source.order.num_batches
        if epoch < 0 or steps.step < 1 or (steps and (steps.start < 0 or steps[-1] >= num_steps)):
            raise ConfigError(
                f"steps {steps} of epoch {epoch} were asked for, expected some of 0 to"
                f" {num_steps - 1}"
            )

    def _plan_step(
        self, epoch: int, step: int, slots: Slots, addresses: SampleAddresses | None
    ) -> PlannedStep:
        spec, seed = self._source.spec, self._source.spec.seed
        drawn, drawn_views, first = np.zeros((len(slots.ids), 0)), {}, 0
        # Rows are counted apart for each repeat; with one of each sample they are the order's.
        rows = slots.rows * self._source.order.augment_repeats + slots.repeats
        if spec.image is not None and spec.image.is_random and seed is not None:
            drawn = draws(spec.image, seed, epoch, rows, slots.lanes)
        for name, (number, image) in spec.views.items():
            flat = draws(image, seed or 0, epoch, rows, slots.lanes, first, number)
            drawn_views[name] = flat.reshape(len(rows), number, -1)
            first += flat.shape[1]
        if addresses is None or (self._cache is not None and self._cache.holds(slots.ids)):
            assert self._cache is not None, "only cached samples have no address"
            return PlannedStep(epoch, step, slots, None, drawn, self._cache.labels[slots.ids])
        pending = self._reader.read_step(epoch, slots, addresses)
        labels = self._source.view.labels_of(slots.ids, addresses.labels)
        return PlannedStep(epoch, step, slots, pending, drawn, labels, drawn_views)


def empty_batch(source: StreamSource, step: PlannedStep) -> Batch:
    """The batch of a step, without its images and stored fields."""
    spec, num_slots = source.spec, len(step.slots.ids)
    weights = step.slots.weights * source.view.weights_of(step.slots.ids)
    batch: Batch = {"label": step.labels, "weight": weights, "id": step.slots.ids.copy()}
    batch |= spec.empty_rows(num_slots)
    if spec.image is not None and spec.image.flip == "device":
        batch["flip"] = is_mirrored(step.drawn)
    if step.pending is not None and step.pending.addresses.keys is not None:
        batch["key"] = list(step.pending.addresses.keys)
    for name in spec.fields:
        batch[name] = [None] * num_slots
    for column, _ in source.columns:
        batch[column.name] = column.empty(num_slots)
    return batch


def growing_slices(steps: range, max_size: int) -> Iterator[range]:
    """Cuts steps into slices of 1, 2, 4 ... of them, so that the first is there at once."""
    start, size = 0, 1
    while start < len(steps):
        yield steps[start : start + size]
        start, size = start + size, min(2 * size, max_size)
