"""A stream as a Hugging Face IterableDataset of rows.

    dataset = iterable_dataset(stream, epoch=3).map(augment).with_format("torch").batch(64)

Its own `state_dict` and `load_state_dict` resume in the middle of an epoch, and DataLoader workers
share its steps.
"""

import os
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from shardset.errors import brought_by
from shardset.read.threads import ProcessLock

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
        self._stream, self._epoch, self._lock = stream, epoch, ProcessLock()
        # By process: the threads of a run are in the process that began it, and forked workers
        # leave it alone.
        self._runs: dict[int, tuple[_Run | None, range]] = {}

    def __call__(self, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The rows of these steps."""
        for step in steps:
            with self._lock:
                batch = self._batch(step)
            for slot in np.flatnonzero(batch["weight"]).tolist():
                yield row_of(batch, slot)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}

    def _batch(self, step: int) -> Batch:
        """The batch of a step, from the run of this process if that comes to it next."""
        run, steps = self._runs.get(os.getpid(), (None, range(0)))
        if run is None or step not in steps[:1]:
            expected, stride = steps.start, steps.step
            if step == expected:
                steps = range(step, len(self._stream), stride)
            else:  # of n workers each asks for every n-th step
                steps = range(step, step + 1, max(1, step - expected + stride))
            run = self._stream.run(iter([(self._epoch, steps)]))
        batch = next(run)[2]
        steps = steps[1:]
        # without a step left, a run ends its threads
        self._runs[os.getpid()] = run if steps else None, steps
        return batch
