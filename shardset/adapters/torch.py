"""A stream as PyTorch tensors, by itself or behind a DataLoader.

A stream decodes in threads, so it needs no DataLoader; use one where a framework asks for it. Each
of n workers takes every n-th step, so batches come in the same order with any number of workers,
and each further worker reads the shards again. Samples come in the stream's order with no worker or
one; with several, each keeps the order of its steps, and the loader takes one sample of each in
turn.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shardset.errors import ConfigError, brought_by, require_int
from shardset.order.state import OrderState, StateCount, state_from_values
from shardset.prepared import prepared

with brought_by("torch"):
    import torch
    from torch.utils.data import IterableDataset, get_worker_info

    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream, StreamAdapter

_NEVER = -1

_log = logging.getLogger(__name__)


class TensorStream(StreamAdapter):
    """A stream whose batches hold tensors; iterate over it and save it like the stream.

    Arrays become tensors of the same shape and dtype: `image` uint8 [n, size, size, 3], `label` and
    `id` int64 [n], `weight` float32 [n]. Lists stay lists.

    Args:
        stream: The Stream.
        pin_memory: Copies the tensors to page-locked memory, from which a GPU fetches them while it
            computes. None does it if there is a CUDA device.

    Raises:
        ConfigError: Another process has a stream with other options or another set.

    Examples:
        >>> import shardset
        >>> from shardset.adapters.torch import TensorStream
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image_size=32)
        >>> for batch in TensorStream(stream):
        ...     images_NHWC = batch["image"]  # .to("cuda", non_blocking=True)
        >>> images_NHWC.shape
        torch.Size([8, 32, 32, 3])
    """

    def __init__(self, stream: Stream, *, pin_memory: bool | None = None) -> None:
        super().__init__(stream)
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory

    def converted(self, batch: Batch) -> dict[str, Any]:
        """The batch with tensors.

        Args:
            batch: A batch of the stream.
        """
        return as_tensors(batch, pin_memory=self.pin_memory)


@prepared
class _StepState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of a worker: its own step, of which it has given some items."""

    stream: OrderState
    num_given: StateCount
    worker: tuple[StateCount, StateCount]
    batch_sizes: tuple[StateCount, StateCount]


class _Place(NamedTuple):
    """The next item of a worker of so many. From the end of the epoch on, it has none left."""

    epoch: int
    step: int
    num_given: int
    worker: tuple[int, int]


class _Shared(NamedTuple):
    """Numbers that reach workers that persist and those that start later: tensors without axes in
    one shared memory.
    """

    epoch: torch.Tensor
    """Where an iteration begins that has no place."""
    num_chosen: torch.Tensor
    """How often an epoch was chosen."""
    num_chosen_before: torch.Tensor
    """How often one was when workers began last."""


class StepDataset(IterableDataset[dict[str, Any]]):
    """The steps of a stream, divided among DataLoader workers; the base of the datasets below.

    The first iteration gives `epoch`, each further one the next epoch, after a `break` too. Workers
    that a DataLoader starts again for each epoch all begin with the first: call `set_epoch` before,
    as with a DistributedSampler. `state_dict` and `load_state_dict` are what StatefulDataLoader
    calls in each worker.

    Args:
        stream: The Stream.
        epoch: The number of the first epoch, from 0.

    Raises:
        ConfigError: Another process has another stream.
    """

    def __init__(self, stream: Stream, epoch: int = 0) -> None:
        super().__init__()
        stream.check_same()
        self.stream = stream
        self._shared = _Shared(*torch.tensor([epoch, 0, _NEVER]).share_memory_())
        self._place: _Place | None = None
        self._begun, self._num_seen = False, 0

    @abstractmethod
    def items(self, batch: Batch) -> Sequence[dict[str, Any]]:
        """The items that the dataset makes of a batch.

        Args:
            batch: A batch of the stream.
        """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Moves now and not with the first item: a state may be saved before that. A loader may drop
        # an iterator unused and make another one; so the place counts as left only once an item was
        # asked for.
        """The items of an epoch that fall to this worker.

        Yields:
            An item, as `items` gives it.
        """
        self._place = self._next_place()
        self._begun, self._num_seen = False, int(self._shared.num_chosen)
        return self._items_left(self._place)

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration give this epoch, in all workers.

        A state that was loaded resumes in its epoch.

        Args:
            epoch: The number of the epoch, from 0.
        """
        self._shared.epoch.fill_(require_int("epoch", epoch))
        self._shared.num_chosen.add_(1)

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker, after the last item that it gave.

        Returns:
            Numbers, strings, lists and dicts by name.
        """
        place = self._place or self._start()
        return {
            "stream": self.stream.state(place.epoch, min(place.step, len(self.stream))),
            "num_given": place.num_given,
            "worker": list(place.worker),
            "batch_sizes": self._batch_sizes(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration continue at a position.

        It gives nothing if the state was saved at the end of an epoch, before its loop.

        Args:
            state: The result of `state_dict`.

        Raises:
            ConfigError: The state is of another set, order, batch size or number of workers; the
                message names the difference.
        """
        saved = state_from_values(state, _StepState)
        sizes = self._batch_sizes()
        if list(saved.batch_sizes) != sizes and (saved.num_given or saved.worker != (0, 1)):
            raise ConfigError(
                f"the global batch and this process's part of it are {sizes} here and were"
                f" {list(saved.batch_sizes)} there; a state of samples, or of workers, resumes with"
                " the same"
            )
        epoch, step = self.stream.load_state_dict(saved.stream)
        if epoch != saved.stream.epoch:
            epoch, step = saved.stream.epoch, len(self.stream)
        self._place = _Place(epoch, step, saved.num_given, saved.worker)
        self._begun, self._num_seen = False, int(self._shared.num_chosen)
        # For workers that start later: a loader that was saved after its loop drops those that
        # loaded the state.
        self._shared.epoch.fill_(epoch + 1)
        self._shared.num_chosen_before.fill_(_NEVER)

    def _batch_sizes(self) -> list[int]:
        return [self.stream.order.global_batch_size, self.stream.batch_size]

    def _start(self) -> _Place:
        """Where an iteration begins that has no place."""
        epoch, num_chosen, num_chosen_before = map(int, self._shared)
        worker = _which_worker()
        if get_worker_info() is not None and worker[0] == 0 and self._place is None:
            if num_chosen == num_chosen_before:
                _log.warning(
                    "new workers read epoch %d again; call set_epoch before each epoch", epoch
                )
            self._shared.num_chosen_before.fill_(num_chosen)
        return _Place(epoch, worker[0], 0, worker)

    def _next_place(self) -> _Place:
        """Where the next iteration begins."""
        place, worker = self._place, _which_worker()
        is_chosen = int(self._shared.num_chosen) != self._num_seen
        if place is None or (is_chosen and (self._begun or int(self._shared.epoch) != place.epoch)):
            return self._start()
        if self._begun:
            return _Place(place.epoch + 1, worker[0], 0, worker)
        if place.worker != worker:
            raise ConfigError(
                f"the state is of worker {place.worker[0]} of {place.worker[1]} of a DataLoader,"
                f" and this is {worker[0]} of {worker[1]}; use as many workers, and load it through"
                " a StatefulDataLoader"
            )
        return place

    def _items_left(self, place: _Place) -> Iterator[dict[str, Any]]:
        self._begun = True
        epoch, first, num_given, worker = place
        steps = range(first, len(self.stream), worker[1])
        for _, step, batch in self.stream.run([(epoch, steps)]):
            items = self.items(batch)
            for number in range(num_given, len(items)):
                is_last = number + 1 == len(items)
                self._place = _Place(
                    epoch, *((step + worker[1], 0) if is_last else (step, number + 1)), worker
                )
                yield items[number]
            num_given = 0
        # The end of the epoch is the start of the next. A worker stays: others may have items left.
        if get_worker_info() is None:
            self._place = None
            if int(self._shared.num_chosen) == self._num_seen:
                self._shared.epoch.fill_(epoch + 1)


def _which_worker() -> tuple[int, int]:
    """The number of this DataLoader worker, and how many there are; (0, 1) in the process of the
    loader.
    """
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class BatchDataset(StepDataset):
    """The batches of a stream, arrays as tensors; give it to a DataLoader with `batch_size=None`.

    Args:
        stream: The Stream.
        epoch: The number of the first epoch, from 0.

    Raises:
        ConfigError: Another process has another stream.

    Examples:
        >>> import shardset
        >>> from shardset.adapters.torch import BatchDataset
        >>> from torch.utils.data import DataLoader
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image_size=32)
        >>> loader = DataLoader(BatchDataset(stream), batch_size=None)
        >>> next(iter(loader))["label"].shape
        torch.Size([8])
    """

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.stream)

    def items(self, batch: Batch) -> Sequence[dict[str, Any]]:
        """One item: the batch with tensors.

        Args:
            batch: A batch of the stream.
        """
        return [as_tensors(batch)]


class SampleDataset(StepDataset):
    """The samples of a stream as webdataset's stages take them.

    Each is a dict: `__key__` (str), `__url__` (of its tar), `__id__` (int) and bytes by field. Pads
    are left out, so processes may differ by one sample in the last row.

    Args:
        stream: A Stream with `image=None`, `fields` and `with_key=True`.
        epoch: The number of the first epoch, from 0.

    Raises:
        ConfigError: The stream has other options.

    Examples:
        >>> import shardset
        >>> from shardset.adapters.torch import SampleDataset
        >>> stream = shardset.Stream(
        ...     "shards", "train", batch_size=8, image=None, fields=("cls",), with_key=True
        ... )
        >>> sorted(next(iter(SampleDataset(stream))))
        ['__id__', '__key__', '__url__', 'cls']
    """

    def __init__(self, stream: Stream, epoch: int = 0) -> None:
        if stream.spec.image is not None or not stream.spec.with_key or not stream.spec.fields:
            raise ConfigError(
                "samples need a stream of bytes; use Stream(image=None, fields=(...),"
                " with_key=True)"
            )
        super().__init__(stream, epoch)

    def items(self, batch: Batch) -> Sequence[dict[str, Any]]:
        """The samples of a batch.

        Args:
            batch: A batch of the stream.
        """
        return [self._sample(batch, slot) for slot in np.flatnonzero(batch["weight"]).tolist()]

    def _sample(self, batch: Batch, slot: int) -> dict[str, Any]:
        id_ = batch["id"].item(slot)
        shard, _ = self.stream.order.slots_of(id_)
        url = self.stream.source.table.url(int(shard))
        stored = ((name, batch[name][slot]) for name in self.stream.spec.fields)
        present = {name: content for name, content in stored if content is not None}
        return {"__key__": batch["key"][slot], "__url__": url, "__id__": id_} | present


def as_tensors(batch: Batch, *, pin_memory: bool = False) -> dict[str, Any]:
    """The batch with tensors in place of its arrays; lists stay lists.

    Args:
        batch: A batch of a stream.
        pin_memory: Copies the tensors to page-locked memory; otherwise they share the memory of the
            arrays.

    Returns:
        A dict with the same names.
    """
    tensors = {
        name: torch.from_numpy(each) for name, each in batch.items() if isinstance(each, np.ndarray)
    }
    if pin_memory:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {**batch, **tensors}


def as_detections(
    batch: Batch, name: str = "boxes"
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The images and boxes of a batch as the detection models of torchvision take them.

    Rows of weight 0 are left out: padding, repeats and bad samples.

    Args:
        batch: A batch with `targets={name: Boxes(...)}`.
        name: The name of the boxes.

    Returns:
        Images, float32 [3, size, size] from 0 to 1, and for each image `boxes`, float32 [m, 4], and
        `labels`, int64 [m]. Faster R-CNN and SSD count the background as class 0: add 1 to the
        labels for these.
    """
    tensors = as_tensors(batch)
    rows = tensors["weight"] > 0
    boxes, labels = tensors[name][rows], tensors[f"{name}_class"][rows]
    targets = [
        {"boxes": boxes[row][kept], "labels": labels[row][kept]}
        for row, kept in enumerate(labels >= 0)
    ]
    return list(tensors["image"][rows].permute(0, 3, 1, 2) / 255), targets
