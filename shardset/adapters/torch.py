"""A stream for those who bring their own loop: a PyTorch data set of batches, and a webdataset source of samples.

    loader = DataLoader(BatchDataset(stream, epoch=3), batch_size=None)
    pipeline = webdataset.DataPipeline(SampleDataset(raw_stream, epoch=3), webdataset.decode("rgb8"), ...)

A worker of a DataLoader takes every n-th step, so batches come in the same order with any number of workers. Samples
come in the stream's order from none or one; of several workers each keeps the order of its own steps, and the loader
takes one sample of each in turn. A worker decodes with threads already: one (or none) is enough, and each further one
reads the shards again.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardset.errors import ConfigError
from shardset.stream.stream import Batch, Stream


class BatchDataset(IterableDataset):
    """The batches of one epoch with tensors for arrays; give it to a DataLoader with `batch_size=None`.

    Raises ConfigError for a `start_step` that no epoch has.
    """

    def __init__(self, stream: Stream, epoch: int = 0, start_step: int = 0) -> None:
        super().__init__()
        stream.steps_from(start_step)  # refused here and not in a worker
        self.stream, self.epoch, self.start_step = stream, epoch, start_step

    def __len__(self) -> int:
        """Batches from `start_step` on."""
        return len(self.stream.steps_from(self.start_step))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(as_tensors, _own_steps(self.stream, self.epoch, self.start_step))


class SampleDataset(IterableDataset):
    """The samples of one epoch as webdataset passes them on: `__key__`, `__url__`, `__id__` and bytes by field.

    The stream must have `image=None`, `fields` and `with_key=True`; pads are left out, so replicas may differ by
    one sample in the last row. Of several DataLoader workers each gives the samples of its own steps in order.
    Raises ConfigError for another stream, and for a `start_step` that no epoch has.
    """

    def __init__(self, stream: Stream, epoch: int = 0, start_step: int = 0) -> None:
        super().__init__()
        if stream.image is not None or not stream.with_key or not stream.fields:
            raise ConfigError("samples need a stream of bytes; use Stream(image=None, fields=(...), with_key=True)")
        stream.steps_from(start_step)  # refused here and not in a worker
        self.stream, self.epoch, self.start_step = stream, epoch, start_step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in _own_steps(self.stream, self.epoch, self.start_step):
            for slot in np.flatnonzero(batch["weight"]).tolist():
                yield self._sample(batch, slot)

    def _sample(self, batch: Batch, slot: int) -> dict[str, Any]:
        id_ = batch["id"].item(slot)
        shard = int(np.searchsorted(self.stream.order.first_ids, id_, side="right")) - 1
        sample = {"__key__": batch["key"][slot], "__url__": self.stream.table.url(shard), "__id__": id_}
        return sample | {name: batch[name][slot] for name in self.stream.fields if batch[name][slot] is not None}


def as_tensors(batch: Batch) -> dict[str, Any]:
    """The batch with tensors that share memory with its arrays; lists stay lists."""
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}


def _own_steps(stream: Stream, epoch: int, start_step: int) -> Iterator[Batch]:
    """Every n-th step for each of n workers: a DataLoader takes from them in turn, which keeps the order of batches."""
    info = get_worker_info()
    number, count = (info.id, info.num_workers) if info else (0, 1)
    steps = stream.steps_from(start_step)[number::count]
    return (batch for _, _, batch in stream.run(iter([(epoch, steps)])))
