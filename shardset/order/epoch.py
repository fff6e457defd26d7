"""The epoch order: (epoch, step, slots) -> sample ids, weights and the reads that bring them.

Pure integers, one function of (shard sizes, ids that are left out, seed, epoch, L, q, w), whatever
the number of replicas, hosts or threads. `docs/explanation/order.md` explains it. The vectors in
`tests/shardset/order/test_epoch.py` fix the numbers; changing any of them raises
`permutation.ORDER_VERSION`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, require_int
from shardset.order.blocks import BlockLayout, Ints, RangeReads
from shardset.order.lanes import default_lanes
from shardset.order.permutation import ORDER_VERSION, Purpose, hash64
from shardset.order.selection import Selection
from shardset.order.state import OrderState, check_same_order

_AFTER_ALL = np.uint64((1 << 64) - 1)  # the key of what is past the end of a lane
_HIGH = np.uint64(32)  # keys are offset plus random displacement, with 32 fractional bits

LastBatch = Literal["pad", "drop"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Consecutive slots of a global batch, lane by lane: arrays [n], or [batches, n] for several
    batches.

    `weights` are 0 where a slot repeats a sample only to keep the shape. `lanes` and `rows` locate
    the slots in the epoch, whatever the world size, `positions` in its sequence of samples.
    `repeats` counts the slots of one sample.
    """

    ids: Ints
    weights: NDArray[np.float32]
    lanes: Ints
    rows: Ints
    positions: Ints
    repeats: Ints

    def __getitem__(self, batch: int | Sequence[int]) -> "Slots":
        """The slots of one batch of several, or of some of them."""
        return Slots(
            self.ids[batch],
            self.weights[batch],
            self.lanes,
            self.rows[batch],
            self.positions[batch],
            self.repeats,
        )


def slot_key(
    seed: int, epoch: int, rows: Ints, lanes: Ints, draw: Ints | int
) -> NDArray[np.uint64]:
    """64 keyed random bits for draw number `draw` of each slot; of the broadcast shape."""
    bits: NDArray[np.uint64] = hash64(seed, epoch, Purpose.SLOT, rows, lanes, draw)
    return bits


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order of every epoch over one split.

    `seed=None` is the stored order, for evaluation; `window` must then be 0, because nothing moves.
    Each sample takes `augment_repeats` slots next to each other. `view` has the ids that a view of
    the split takes, None for all. Raises ConfigError for numbers that can't make an order.
    """

    shard_sizes: Sequence[int]
    seed: int | None
    global_batch_size: int
    num_lanes: int
    block_size: int
    window: int
    view: Selection | None = None
    last_batch: LastBatch = "pad"
    augment_repeats: int = 1
    _layouts: dict[int, BlockLayout] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layouts": {}}

    @cached_property
    def first_ids(self) -> Ints:
        """The id of each shard's first sample, and the end: [num_shards + 1]."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.shard_sizes, dtype=np.int64))])

    def slots_of(self, ids: Ints | int) -> tuple[Ints, Ints]:
        """Where samples are stored: their shards, and their positions there."""
        shards = np.searchsorted(self.first_ids, ids, side="right") - 1
        return shards, ids - self.first_ids[shards]

    @cached_property
    def selection(self) -> Selection:
        """The ids of an epoch."""
        return Selection(int(self.first_ids[-1])) if self.view is None else self.view

    @property
    def num_samples(self) -> int:
        """N: the samples of an epoch."""
        return self.selection.num_kept

    @property
    def rows_per_step(self) -> int:
        """k: the rows of a global batch, so its samples in one lane."""
        return self.global_batch_size // self.slots_per_row

    @property
    def slots_per_row(self) -> int:
        """The slots of one row: one in each lane for each repeat."""
        return self.num_lanes * self.augment_repeats

    @property
    def num_rows(self) -> int:
        """R: the rows of an epoch; the last may lack samples in some lanes."""
        return -(-self.num_samples // self.num_lanes)

    @property
    def num_batches(self) -> int:
        """The global batches of an epoch, all of the same size."""
        if self.last_batch == "drop":
            return self.num_samples // self.num_lanes // self.rows_per_step
        return -(-self.num_rows // self.rows_per_step)

    def lane_starts(self, lanes: Ints) -> Ints:
        """Where lanes begin in the sequence; lane `num_lanes` would begin at its end."""
        return self.num_samples * np.asarray(lanes, dtype=np.int64) // self.num_lanes

    def positions(
        self, epoch: int, lanes: Ints, start: int, stop: int
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Rows [start, stop) of some lanes: positions in the sequence, and whether a sample is
        there.

        Both are [len(lanes), stop - start]. Past the end of a lane the position is its last row's
        (for an empty lane, a neighbour's sample). Costs O(len(lanes) * (stop - start + 2 *
        window)).
        """
        lanes = np.asarray(lanes, dtype=np.int64)[:, None]
        begin = self.lane_starts(lanes)
        length = self.lane_starts(lanes + 1) - begin
        rows = np.arange(start, stop, dtype=np.int64)[None, :]
        offsets = np.clip(rows, 0, np.maximum(length - 1, 0))
        if self.window and rows.size and length.max() > 0:
            low = max(0, int(offsets.min()) - self.window)
            high = min(int(length.max()), int(offsets.max()) + 1 + self.window)
            near = np.arange(low, high, dtype=np.int64)[None, :]
            keys = np.where(near < length, self._shuffle_keys(epoch, lanes, near), _AFTER_ALL)
            offsets = low + np.take_along_axis(
                np.argsort(keys, axis=1, kind="stable"), offsets - low, axis=1
            )
        return np.minimum(begin + offsets, self.num_samples - 1), rows < length

    def ids(self, epoch: int, positions: Ints) -> Ints:
        """The ids at some positions of the sequence; of the same shape."""
        return self._layout(epoch).ids(positions)

    def find(self, epoch: int, ids: Ints) -> tuple[Ints, Ints]:
        """(rows, lanes) of some samples in an epoch: the inverse of `positions` and `ids`.

        Raises ConfigError for an id that is left out or outside the split. Costs O(len(ids) *
        window) and, once an epoch, the order of its blocks.
        """
        ids = np.asarray(ids, dtype=np.int64)
        is_taken = (ids >= 0) & (ids < self.first_ids[-1]) & self.selection.has(ids)
        if not is_taken.all():
            raise ConfigError(
                f"id {ids[~is_taken][0]} is not in the view or not 0 to"
                f" {self.first_ids[-1] - 1}, so it is in no epoch"
            )
        positions = self._layout(epoch).positions(ids)
        lanes = ((positions + 1) * self.num_lanes - 1) // self.num_samples
        begin = self.lane_starts(lanes)
        length, offsets = self.lane_starts(lanes + 1) - begin, positions - begin
        if self.window == 0:
            return offsets, lanes
        first = np.maximum(offsets - self.window, 0)
        near = first[:, None] + np.arange(2 * self.window + 1, dtype=np.int64)
        keys = self._shuffle_keys(epoch, lanes[:, None], near)
        its_keys = np.take_along_axis(keys, (offsets - first)[:, None], axis=1)
        below = (keys < its_keys) | ((keys == its_keys) & (near < offsets[:, None]))
        return first + np.count_nonzero(below & (near < length[:, None]), axis=1), lanes

    def reads_of(self, epoch: int, lanes: Ints, positions: Ints) -> RangeReads:
        """For each position the read in its lane that brings it; equal `first` means the same
        read.
        """
        begin, end = self.lane_starts(lanes), self.lane_starts(np.asarray(lanes) + 1)
        return self._layout(epoch).reads_of(positions, begin, end)

    def slots(self, epoch: int, steps: range, start: int, stop: int) -> Slots:
        """The slots [start, stop) of some global batches; all arrays but `lanes` and `repeats` are
        [len(steps), n].
        """
        size, part = self.rows_per_step, range(start, stop)
        numbers, repeats = np.divmod(np.arange(start, stop, dtype=np.int64), self.augment_repeats)
        lane_of, items = np.divmod(numbers, size)
        lanes = np.array(self.part_lanes(part), dtype=np.int64)
        first, last = steps[0] * size, (steps[-1] + 1) * size
        lane_positions, has_sample = self.positions(epoch, lanes, first, last)
        rows = size * np.array(steps)[:, None] + items
        at = lane_of - lanes[:1], rows - first
        positions, weights = lane_positions[at], has_sample[at].astype(np.float32)
        ids = self.ids(epoch, positions)
        return Slots(ids, weights, lane_of, rows, positions, repeats)

    def batch(self, epoch: int, step: int) -> Slots:
        """All slots of global batch number `step`, 0 <= step < num_batches."""
        return self.slots(epoch, range(step, step + 1), 0, self.global_batch_size)[0]

    def part_lanes(self, part: range) -> range:
        """The lanes that consecutive slots of a global batch come from; replicas may share the
        outer ones.
        """
        slots_per_lane = self.rows_per_step * self.augment_repeats
        return range(part.start // slots_per_lane, -(-part.stop // slots_per_lane))

    def state(self, epoch: int, step: int, manifest_digest: str) -> OrderState:
        """The state before step `step` of an epoch."""
        return OrderState(
            version=ORDER_VERSION,
            manifest=manifest_digest,
            view="" if self.view is None else self.view.digest,
            seed=self.seed,
            epoch=require_int("epoch", epoch),
            row=require_int("step", step) * self.rows_per_step,
            num_lanes=self.num_lanes,
            block_size=self.block_size,
            window=self.window,
        )

    def resume(self, state: OrderState, manifest_digest: str) -> tuple[int, int]:
        """(epoch, step) at which this order resumes from `state`; raises ConfigError naming what
        differs.
        """
        check_same_order(self.state(state.epoch, 0, manifest_digest), state)
        step, rest = divmod(state.row, self.rows_per_step)
        if rest:
            raise ConfigError(
                f"row {state.row} is inside a batch of {self.rows_per_step} rows; a global batch"
                f" size of {self.slots_per_row} times a divisor of {state.row} continues there"
            )
        return (state.epoch, step) if step < self.num_batches else (state.epoch + 1, 0)

    def _shuffle_keys(self, epoch: int, lanes: Ints, offsets: Ints) -> NDArray[np.uint64]:
        """The keys that sort the offsets of a lane into its rows: each moves by fewer than
        `window`.
        """
        hashes: NDArray[np.uint64] = hash64(self.seed, epoch, Purpose.SHUFFLE, lanes, offsets)
        return (offsets.astype(np.uint64) << _HIGH) + (hashes >> _HIGH) * np.uint64(self.window)

    def _layout(self, epoch: int) -> BlockLayout:
        # one look-up: another thread may drop this epoch meanwhile
        layout = self._layouts.get(epoch)
        if layout is None:
            layout = self._layouts[epoch] = BlockLayout(
                self.first_ids,
                self.selection,
                block_size=self.block_size,
                seed=self.seed,
                epoch=epoch,
            )
            # Two epochs stay: near its end, an epoch is read together with the start of the next.
            for other in sorted(self._layouts, key=lambda other: abs(other - epoch))[2:]:
                self._layouts.pop(other, None)
        return layout


def _check(order: Order) -> None:
    size, repeats, per_row = order.global_batch_size, order.augment_repeats, order.slots_per_row
    if not len(order.shard_sizes) or min(order.shard_sizes) < 1:
        raise ConfigError(
            "an order needs at least one shard, and no empty ones; check the manifest's split"
        )
    if size < 1 or size % per_row:
        times = f" times {repeats} repeats" if repeats > 1 else ""
        raise ConfigError(
            f"a global batch of {size} is not a multiple of {order.num_lanes} lanes{times}; use"
            f" {per_row * max(1, round(size / per_row))}, or"
            f" {default_lanes(max(1, size // repeats))} lanes"
        )
    if order.seed is None and order.window:
        raise ConfigError(
            f"the stored order (seed None) moves nothing, but w is {order.window}; use w = 0"
        )
    if order.num_samples < 1:
        raise ConfigError("no sample is in the view; nothing is left to read")
    if order.num_rows + order.window >= 1 << 32:  # see _HIGH
        raise ConfigError(
            f"lanes of {order.num_rows} samples and w = {order.window} are too long; use more lanes"
        )
