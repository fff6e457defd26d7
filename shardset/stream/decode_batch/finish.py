"""The caller's transform of the rows of a batch, in the threads that decode them."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardset.errors import ConfigError
from shardset.order.permutation import Purpose, hash64
from shardset.stream.decode_batch.steps import PlannedStep
from shardset.stream.spec import Batch, StreamSpec

KEPT_NAMES = ("id", "weight")
"""Arrays that a transform can't change: which sample a slot holds, and whether it counts."""

_TYPES = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
"""What Python's numbers become, however large they are."""

_Kind = tuple[tuple[int, ...], np.dtype[Any]] | None
"""Shape and type of a value that is stacked; None for one that goes into a list."""


def transform_rows(
    spec: StreamSpec,
    stacked: "StackedRows",
    step: PlannedStep,
    slots: range,
    stopped: threading.Event,
) -> None:
    """Transforms some rows of a step, which are decoded, and stacks the results."""
    assert spec.transform is not None
    ids = step.slots.ids * spec.augment_repeats + step.slots.repeats
    # They depend on the sample and its epoch, not on who reads it; in the stored order on the
    # sample alone.
    time = (0, 0) if spec.seed is None else (spec.seed, step.epoch)
    keys: np.ndarray = hash64(*time, Purpose.TRANSFORM, ids[slots.start : slots.stop])
    generator = KeyedGenerator()
    for slot, key in zip(slots, keys.tolist(), strict=True):
        if stopped.is_set():
            return
        row = row_of(step.rows, slot)
        try:
            stacked.put(slot, row, spec.transform(dict(row), generator.at(key)))
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
    """The results of a transform for the rows of a batch, stacked by name into the batch, which
    keeps only `id` and `weight`; any thread may put a row.
    """

    def __init__(self, batch: Batch, rows: Batch) -> None:
        for name in rows.keys() - KEPT_NAMES:
            del batch[name]
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
        array, num_slots = self._rows.get(name), len(self._rows["id"])
        if kind is None:
            return [None] * num_slots
        if isinstance(array, np.ndarray) and (array.shape[1:], array.dtype) == kind:
            return array
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
