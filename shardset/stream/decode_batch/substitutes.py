"""Substitutes for bad samples: the same for any number of replicas."""

from collections.abc import Iterator, Sequence

import numpy as np

from shardset.order.epoch import Order
from shardset.read.indexes import LostShard

MAX_NEAR = 1024
"""Most rows of a lane whose ids are computed together, when its next rows are bad too."""


class Substitutes:
    """The samples that may replace a bad one; those known to be bad are left out."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._bad_ids: set[int] = set()

    def mark_bad(self, id_: int, error: Exception) -> None:
        """Excludes a sample, and all others of its shard if that is lost."""
        if isinstance(error, LostShard) and id_ not in self._bad_ids:
            first_ids = self._order.first_ids
            shard = int(np.searchsorted(first_ids, id_, side="right")) - 1
            self._bad_ids.update(range(first_ids.item(shard), first_ids.item(shard + 1)))
        self._bad_ids.add(id_)

    def candidates(self, epoch: int, lane: int, row: int) -> Iterator[int]:
        """The ids that may stand in for that of a row, best first."""
        return (id_ for id_ in near_ids(self._order, epoch, lane, row) if id_ not in self._bad_ids)


def near_ids(order: Order, epoch: int, lane: int, row: int) -> Iterator[int]:
    """The ids of the next rows of a lane, then of the rows before, then of the same row in the next lanes."""

    def ids(lanes: Sequence[int], start: int, stop: int) -> list[int]:
        positions, _ = order.positions(epoch, np.array(lanes), start, stop)
        return [int(id_) for id_ in order.ids(epoch, positions.ravel())]

    begin, end = order.lane_starts(np.array([lane, lane + 1])).tolist()
    row = min(row, end - begin - 1)  # a pad repeats the last row
    for start, stop in growing_slices(range(row + 1, end - begin), MAX_NEAR):
        yield from ids([lane], start, stop)
    for start, stop in growing_slices(range(row), MAX_NEAR):
        yield from reversed(ids([lane], row - stop, row - start))
    yield from ids([*range(lane + 1, order.num_lanes), *range(lane)], row, row + 1)


def growing_slices(numbers: range, max_size: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into (start, stop) of 1, 2, 4 ... numbers, so that the first is there at once."""
    start, size = numbers.start, 1
    while start < numbers.stop:
        stop = min(numbers.stop, start + size)
        yield start, stop
        start, size = stop, min(2 * size, max_size)
