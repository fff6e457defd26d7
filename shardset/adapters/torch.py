"""A stream as PyTorch tensors, by itself or behind a DataLoader.

    for batch in TensorStream(stream):                                      # pinned where there is a GPU
        images_NHWC = batch["image"].to("cuda", non_blocking=True)

    loader = StatefulDataLoader(BatchDataset(stream), batch_size=None)      # torchdata's, or PyTorch's DataLoader

A stream decodes in threads, so it needs no DataLoader; use one where a framework asks for it. Each of n workers takes
every n-th step, so batches come in the same order with any number of workers, and each further worker reads the shards
again. Samples come in the stream's order with no worker or one; with several, each keeps the order of its own steps,
and the loader takes one sample of each in turn.
"""

import logging
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardset.errors import ConfigError
from shardset.stream.batch import Batch
from shardset.stream.position import state_of_values, values_of_state
from shardset.stream.stream import Stream

_NEVER = -1

_log = logging.getLogger(__name__)


class TensorStream:
    """A stream whose batches hold tensors: iterate over it, save and restore it as you do the stream.

    `pin_memory` copies them to page-locked memory, from which a GPU fetches them while it computes; by default where
    there is a CUDA device.
    """

    def __init__(self, stream: Stream, *, pin_memory: bool | None = None) -> None:
        self.stream = stream
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.stream)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        """The batches of one epoch; each further iteration is the next epoch."""
        for batch in self.stream:
            yield as_tensors(batch, pin_memory=self.pin_memory)

    def state_dict(self) -> dict[str, Any]:
        """The stream's position after the last batch: plain values."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration go on there; raises ConfigError naming what differs from this stream."""
        self.stream.load_state_dict(state)


class StepDataset(IterableDataset[dict[str, Any]]):
    """The steps of a stream, divided among DataLoader workers; the base of the datasets below.

    The first iteration gives `epoch` from `start_step` on, each further one the next epoch. Workers that a DataLoader
    starts anew for each epoch all begin with the first: call `set_epoch` before, as with a DistributedSampler.
    `state_dict` and `load_state_dict` are what StatefulDataLoader calls in each worker.

    Raises ConfigError for a `start_step` that no epoch has.
    """

    def __init__(self, stream: Stream, epoch: int = 0, start_step: int = 0) -> None:
        super().__init__()
        stream.steps_from(start_step)  # raises here instead of in a worker
        self.stream, self.epoch, self.start_step = stream, epoch, start_step
        # The epoch that was chosen last, how often one was, and how often one was when workers began last: shared, so
        # that it reaches workers that persist, and so that new ones know of those before.
        self._chosen = torch.tensor([epoch, 0, _NEVER]).share_memory_()
        self._num_seen = 0
        self._begun = False
        self._reached: tuple[int, int] | None = None

    @abstractmethod
    def items(self, batch: Batch) -> Sequence[dict[str, Any]]:
        """What the dataset makes of a batch."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._begin()  # now and not with the first item, so that a state saved before that has the right epoch
        return self._own_items()

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration give this epoch, in all workers."""
        self._chosen[:2] = torch.tensor([epoch, int(self._chosen[1]) + 1])

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker, after the last item that it gave: plain values."""
        position = {"start_step": self.start_step, "reached": list(self._reached) if self._reached else None}
        return {"stream": values_of_state(self.stream.state(self.epoch, 0)), **position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration go on there, or at the next epoch if no item was left: see `Stream.restore`.

        A DataLoader worker does not know whether other workers have items left: if none has, an iteration without
        items comes first.
        """
        self.epoch, _ = self.stream.restore(state_of_values(state["stream"]))
        self.start_step = state["start_step"]
        self._reached = tuple(state["reached"]) if state["reached"] else None
        self._begun, self._num_seen = False, int(self._chosen[1])
        self._chosen[2] = _NEVER

    def _own_items(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        # A worker does not know whether its loader has ended, which then begins the next iteration itself.
        may_go_on = self._reached is not None and info is None
        for item in self._items_left(worker, num_workers):
            may_go_on = False
            yield item
        if may_go_on:
            self.epoch, self.start_step, self._reached = self.epoch + 1, 0, None
            yield from self._items_left(worker, num_workers)

    def _items_left(self, worker: int, num_workers: int) -> Iterator[dict[str, Any]]:
        first, num_given = self._reached or (self.start_step + worker, 0)
        steps = range(first, len(self.stream), num_workers)
        for _, step, batch in self.stream.run(iter([(self.epoch, steps)])):
            items = self.items(batch)
            for number in range(num_given, len(items)):
                is_last = number + 1 == len(items)
                self._reached = (step + num_workers, 0) if is_last else (step, number + 1)
                yield items[number]
            num_given = 0

    def _begin(self) -> None:
        """Moves to the epoch of a new iteration."""
        chosen_epoch, num_chosen, num_chosen_before = self._chosen.tolist()
        info = get_worker_info()
        if info is not None and info.id == 0:
            if num_chosen == num_chosen_before and not self._begun:
                _log.warning("new workers read epoch %d again; call set_epoch before each epoch", self.epoch)
            self._chosen[2] = num_chosen
        if self._begun or num_chosen != self._num_seen:
            self.epoch = self.epoch + 1 if num_chosen == self._num_seen else chosen_epoch
            self.start_step, self._reached = 0, None
        self._begun, self._num_seen = True, num_chosen


class BatchDataset(StepDataset):
    """The batches of a stream, arrays as tensors; give it to a DataLoader with `batch_size=None`."""

    def __len__(self) -> int:
        """Batches of the epoch that is being read, or is read next, from `start_step` on."""
        return len(self.stream.steps_from(self.start_step))

    def items(self, batch: Batch) -> Sequence[dict[str, Any]]:
        """See StepDataset."""
        return [as_tensors(batch)]


class SampleDataset(StepDataset):
    """The samples of a stream as webdataset stages take them: `__key__`, `__url__`, `__id__` and bytes by field.

    The stream must have `image=None`, `fields` and `with_key=True`. Pads are left out, so replicas may differ by one
    sample in the last row. Raises ConfigError for another stream, and for a `start_step` that no epoch has.
    """

    def __init__(self, stream: Stream, epoch: int = 0, start_step: int = 0) -> None:
        if stream.spec.image is not None or not stream.spec.with_key or not stream.spec.fields:
            raise ConfigError("samples need a stream of bytes; use Stream(image=None, fields=(...), with_key=True)")
        super().__init__(stream, epoch, start_step)

    def items(self, batch: Batch) -> Sequence[dict[str, Any]]:
        """See StepDataset."""
        return [self._sample(batch, slot) for slot in np.flatnonzero(batch["weight"]).tolist()]

    def _sample(self, batch: Batch, slot: int) -> dict[str, Any]:
        id_ = batch["id"].item(slot)
        shard = int(np.searchsorted(self.stream.order.first_ids, id_, side="right")) - 1
        url = self.stream.source.table.url(shard)
        stored = ((name, batch[name][slot]) for name in self.stream.spec.fields)
        present = {name: content for name, content in stored if content is not None}
        return {"__key__": batch["key"][slot], "__url__": url, "__id__": id_} | present


def as_tensors(batch: Batch, *, pin_memory: bool = False) -> dict[str, Any]:
    """The batch with tensors, which share memory with its arrays unless they are pinned; lists stay lists."""
    tensors = {name: torch.from_numpy(each) for name, each in batch.items() if isinstance(each, np.ndarray)}
    if pin_memory:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {**batch, **tensors}
