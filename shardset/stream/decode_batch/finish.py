"""The last steps of a filled batch, where it was decoded: images are mirrored, rows go through the
caller's transform.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shardset.decode.image import mirror
from shardset.errors import ConfigError
from shardset.order.permutation import Purpose, hash64
from shardset.stream.decode_batch.decoders import BatchDecoder, even_slices
from shardset.stream.decode_batch.steps import PlannedStep
from shardset.stream.spec import Batch, RowTransform, StreamSpec

KEPT_NAMES = ("id", "weight")
"""Arrays that a transform can't change: which sample a slot holds, and whether it counts."""

_TYPES = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
"""What Python's numbers become, however large they are."""

_Kind = tuple[tuple[int, ...], np.dtype[Any]] | None
"""Shape and type of a value that is stacked; None for one that goes into a list."""


class DecodeAndFinish:
    """Decodes batches by another decoder, and mirrors and transforms them in its threads, as the
    spec says.
    """

    def __init__(self, decoder: BatchDecoder, spec: StreamSpec, stopped: threading.Event) -> None:
        self._decoder, self._spec, self._stopped = decoder, spec, stopped
        self._num_slices = spec.num_decode_threads if decoder.has_threads else 1
        self.submit, self.close = decoder.submit, decoder.close

    def begin(self, step: PlannedStep) -> Sequence[Future[None]]:
        """See BatchDecoder."""
        rows, batch = dict(step.batch), step.batch
        step = replace(step, batch=rows)
        filled = self._decoder.begin(step)
        columns = None
        if self._spec.transform is not None:
            for name in rows.keys() - KEPT_NAMES:
                del batch[name]
            columns = StackedRows(batch, rows)
        futures = list(filled)
        # The jobs wait for what was submitted before them. The threads take jobs in that order, so
        # none waits for ever.
        for start, stop in even_slices(len(step.slots.ids), self._num_slices):
            futures += self.submit(partial(self._finish, filled, columns, step, range(start, stop)))
        return futures

    def _finish(
        self,
        filled: Iterable[Future[None]],
        columns: "StackedRows | None",
        step: PlannedStep,
        slots: range,
    ) -> None:
        for future in filled:
            future.result()
        if self._spec.image is not None and self._spec.image.flip == "pixels":
            part = slice(slots.start, slots.stop)
            mirror(step.batch["image"][part], step.drawn[part])
        if columns is not None and self._spec.transform is not None:
            self._transform(self._spec.transform, columns, step, slots)

    def _transform(
        self,
        transform: RowTransform,
        columns: "StackedRows",
        step: PlannedStep,
        slots: range,
    ) -> None:
        ids = step.slots.ids * self._spec.augment_repeats + step.slots.repeats
        # They depend on the sample and its epoch, not on who reads it; in the stored order on the
        # sample alone.
        time = (0, 0) if self._spec.seed is None else (self._spec.seed, step.epoch)
        keys: np.ndarray = hash64(*time, Purpose.TRANSFORM, ids[slots.start : slots.stop])
        generator = KeyedGenerator()
        for slot, key in zip(slots, keys.tolist(), strict=True):
            if self._stopped.is_set():
                return
            row = row_of(step.batch, slot)
            try:
                columns.put(slot, row, transform(dict(row), generator.at(key)))
            except Exception as error:
                error.add_note(
                    f"in the transform of sample {row['id']}, epoch {step.epoch}, step {step.step}"
                )
                raise


class KeyedGenerator:
    """A NumPy generator that is set to key after key: ten times as fast as a new one for each."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, key: int) -> np.random.Generator:
        """`Generator(Philox(key=key))`, until the next call."""
        self._start["state"]["key"][0] = key
        self._bits.state = self._start
        return self._generator


class StackedRows:
    """The results of a transform for the rows of a batch, stacked by name into the batch; any
    thread may put a row.
    """

    def __init__(self, batch: Batch, rows: Batch) -> None:
        self._batch, self._rows = batch, rows
        self._kinds: dict[str, _Kind] | None = None
        self._lock = threading.Lock()

    def put(self, slot: int, given: Mapping[str, Any], returned: Mapping[str, Any]) -> None:
        """Puts a row into its slot; raises ConfigError unless it has the names, shapes and types of
        the others.
        """
        if not isinstance(returned, Mapping):
            raise ConfigError(
                f"transform returned {type(returned).__name__}, expected the row, a dict of values"
                " by name; end it with `return row`"
            )
        values = {name: _value(value) for name, value in returned.items() if name not in KEPT_NAMES}
        kinds = {name: _kind(value) for name, value in values.items()}
        with self._lock:
            if self._kinds is None:
                self._kinds = kinds
                self._batch.update({name: self._column(name, kind) for name, kind in kinds.items()})
        if kinds != self._kinds:
            raise ConfigError(
                f"transform returned {_described(kinds)} for one row and {_described(self._kinds)}"
                " for another; return the same names, shapes and types for every row, because rows"
                " are stacked"
            )
        for name, value in values.items():
            if value is not given.get(name) or self._batch[name] is not self._rows.get(name):
                self._batch[name][slot] = value

    def _column(self, name: str, kind: _Kind) -> Any:
        """The batch's own array where the values still fit it, else a new one."""
        own, num_slots = self._rows.get(name), len(self._rows["id"])
        if kind is None:
            return [None] * num_slots
        if isinstance(own, np.ndarray) and (own.shape[1:], own.dtype) == kind:
            return own
        return np.empty((num_slots, *kind[0]), kind[1])


def row_of(batch: Batch, slot: int) -> dict[str, Any]:
    """One row of a batch: a view of its image, numbers, its key and its stored fields."""
    row = {name: values[slot] for name, values in batch.items()}
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in row.items()
    }


def _value(value: Any) -> Any:
    """Numbers, tensors and pictures as arrays or numbers; anything else as it is."""
    return np.asarray(value) if hasattr(value, "__array__") else value


def _kind(value: Any) -> _Kind:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    return ((), _TYPES[type(value)]) if type(value) in _TYPES else None


def _described(kinds: Mapping[str, _Kind]) -> str:
    shown = (
        f"{name!r} of {'no array' if kind is None else f'{kind[1]} {list(kind[0])}'}"
        for name, kind in kinds.items()
    )
    return ", ".join(shown) or "nothing"
