"""A stream as a Hugging Face IterableDataset of rows.

    dataset = iterable_dataset(stream, epoch=3).map(augment).with_format("torch").batch(64)

Its own `state_dict` and `load_state_dict` resume in the middle of an epoch, and DataLoader workers share its steps.
"""

import os
import threading
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from shardset.errors import brought_by

with brought_by("huggingface"):
    import datasets

    from shardset.stream.decode_batch.finish import row_of
    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream

_Run = Generator[tuple[int, int, Batch], None, None]


def iterable_dataset(stream: Stream, epoch: int = 0) -> datasets.IterableDataset:
    """The samples of one epoch, each once, in the stream's order: a dict for each, without the pads of the last batch.

    Give the stream its rank and world_size instead of calling `split_dataset_by_node`.
    """
    stream.check_same()
    rows = StepRows(stream, epoch)
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"steps": list(stream.steps_from(0))})


class StepRows:
    """The rows of some steps of an epoch. `datasets` asks for one step after the other, so that it can skip some."""

    def __init__(self, stream: Stream, epoch: int) -> None:
        self._stream, self._epoch = stream, epoch
        # By process: the threads of a run are in the process that began it, and forked workers leave it alone.
        self._readers: dict[int, _StepReader] = {}

    def __call__(self, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The rows of these steps; safe to iterate over from several threads."""
        reader = self._readers.setdefault(os.getpid(), _StepReader(self._stream, self._epoch))
        for step in steps:
            batch = reader.batch(step)
            for slot in np.flatnonzero(batch["weight"]).tolist():
                yield row_of(batch, slot)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}


class _StepReader:
    """One run at a time over an epoch, which reads ahead where steps are asked for at equal distances."""

    def __init__(self, stream: Stream, epoch: int) -> None:
        self._stream, self._epoch = stream, epoch
        self._run: _Run | None = None
        self._steps = range(0)
        self._lock = threading.Lock()

    def batch(self, step: int) -> Batch:
        """The batch of a step, from the run that is open if that comes to it next."""
        with self._lock:
            if self._run is None or step not in self._steps[:1]:
                expected, stride = self._steps.start, self._steps.step
                if step == expected:
                    self._steps = range(step, len(self._stream), stride)
                else:  # of n workers each asks for every n-th step
                    self._steps = range(step, step + 1, max(1, step - expected + stride))
                self._run = self._stream.run(iter([(self._epoch, self._steps)]))
            batch = next(self._run)[2]
            self._steps = self._steps[1:]
            if not self._steps:
                self._run = None  # ends its threads
            return batch
