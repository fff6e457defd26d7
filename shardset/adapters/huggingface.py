"""A stream as a Hugging Face IterableDataset of rows.

    dataset = iterable_dataset(stream, epoch=3).map(augment).with_format("torch").batch(64)

Its own `state_dict` and `load_state_dict` resume in the middle of an epoch, and DataLoader workers
share its steps.
"""

import threading
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from shardset.errors import brought_by
from shardset.per_process import PerProcess

with brought_by("huggingface"):
    import datasets

    from shardset.stream.decode_batch.finish import row_of
    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream

_Run = Generator[tuple[int, int, Batch], None, None]


def iterable_dataset(stream: Stream, epoch: int = 0) -> datasets.IterableDataset:
    """The samples of one epoch, each once, in the stream's order: a dict for each, without the pads
    of the last batch.

    Give the stream its rank and world_size instead of calling `split_dataset_by_node`.
    """
    stream.check_same()
    rows = StepRows(stream, epoch)
    return datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"steps": list(stream.steps_from(0))}
    )


class StepRows:
    """The rows of some steps of an epoch.

    `datasets` asks for one step after the other, so that it can skip some.

    Safe to iterate over from several threads. One run at a time reads ahead where steps are asked
    for at equal distances.
    """

    def __init__(self, stream: Stream, epoch: int) -> None:
        self._stream, self._epoch, self._own = stream, epoch, PerProcess(_Reading)

    def __call__(self, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The rows of these steps."""
        for step in steps:
            own = self._own()
            with own.lock:
                batch = self._batch(step, own)
            for slot in np.flatnonzero(batch["weight"]).tolist():
                yield row_of(batch, slot)

    def _batch(self, step: int, own: "_Reading") -> Batch:
        """The batch of a step, from the run of this process if that comes to it next."""
        run, steps = own.run, own.steps
        if run is None or step not in steps[:1]:
            expected, stride = steps.start, steps.step
            if step == expected:
                steps = range(step, len(self._stream), stride)
            else:  # of n workers each asks for every n-th step
                steps = range(step, step + 1, max(1, step - expected + stride))
            run = self._stream.run(iter([(self._epoch, steps)]))
        batch = next(run)[2]
        own.steps = steps[1:]
        own.run = run if own.steps else None  # without a step left, a run ends its threads
        return batch


class _Reading:
    """The run of a process, and the steps that it comes to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.run: _Run | None = None
        self.steps = range(0)
