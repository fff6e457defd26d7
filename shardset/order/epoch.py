"""The epoch order: (epoch, step, replica) -> sample ids, weights and the reads that bring them.

Pure integers, one function of (shard sizes, quarantined ids, seed, epoch, L, q, w); how many replicas, hosts or
threads read is no part of it. `docs/order.md` explains it with a picture. The numbers are fixed by the vectors in
`tests/shardset/order/test_epoch.py`; changing any of them raises `permutation.ORDER_VERSION`.
"""

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from shardset.errors import ConfigError
from shardset.order.permutation import ORDER_VERSION, hash64, hash64_on

MAX_DEFAULT_LANES = 256
DEFAULT_WINDOW = 256
READ_BYTES = 4 << 20
MAX_STATE_BYTES = 4096

_PHASE, _BLOCK, _SHUFFLE = 1, 2, 3
"""The `purpose` word of the hash. 4 belongs to the choices made per slot (crop, flip), see `slot_key`."""
_SLOT = 4

_BLOCKS_AT_ONCE = 1 << 16
_BLOCKS_PER_BUCKET_BITS = 8
_MAX_BUCKET_BITS = 16
_LAST = np.uint64((1 << 64) - 1)
_HIGH = np.uint64(32)

LastBatch = Literal["pad", "drop"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Consecutive slots of a global batch, lane-major; of several batches, one after the other, in 2-D arrays.

    `ids` int64 [n]; `weights` float32 [n], 0 where the slot repeats a sample only to keep the shape; `lanes` and
    `rows` int64 [n]: where the slot stands in the epoch, whatever the world size; `positions` int64 [n] in the line.
    """

    ids: np.ndarray
    weights: np.ndarray
    lanes: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    def __getitem__(self, batch: int) -> "Slots":
        """The slots of one batch of several."""
        return Slots(self.ids[batch], self.weights[batch], self.lanes, self.rows[batch], self.positions[batch])


@dataclass(frozen=True, slots=True)
class RangeReads:
    """What a range of the line reads, one ranged read per row: positions [start, stop) of a shard, int64 [n] each.

    `first` is where each piece begins in the line; `num_samples` is `stop - start` without quarantined samples.
    """

    shard: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray
    num_samples: np.ndarray


def default_block_size(mean_bytes: float) -> int:
    """q: as many samples as make a read of about 4 MiB, from 8 to 512."""
    return int(min(512, max(8, READ_BYTES // max(1.0, mean_bytes))))


def default_lanes(global_batch_size: int) -> int:
    """L: the largest divisor of the global batch size that is at most 256."""
    divisors = (lanes for lanes in range(min(global_batch_size, MAX_DEFAULT_LANES), 0, -1))
    return next(lanes for lanes in divisors if global_batch_size % lanes == 0)


def fit_lanes(mean_bytes: float, *, global_batch_size: int, block_size: int, budget_bytes: int) -> int:
    """L: the default, or the largest smaller divisor whose blocks alone fit the budget; at least 1."""
    most = max(1, int(budget_bytes / (block_size * max(1.0, mean_bytes))))
    divisors = (lanes for lanes in range(min(most, default_lanes(global_batch_size)), 0, -1))
    return next(lanes for lanes in divisors if global_batch_size % lanes == 0)


def fit_window(mean_bytes: float, *, num_lanes: int, block_size: int, budget_bytes: int) -> int:
    """w: 256, or what remains of `budget_bytes` when one reader holds `num_lanes * (w + q)` samples; at least 0."""
    rows = int(budget_bytes / max(1.0, mean_bytes)) // num_lanes
    return max(0, min(DEFAULT_WINDOW, rows - block_size))


def held_bytes(mean_bytes: float, *, num_lanes: int, block_size: int, window: int) -> int:
    """About how many raw bytes the readers of `num_lanes` lanes hold at a time."""
    return int(num_lanes * (block_size + window) * mean_bytes)


def quarantine_digest(ids: Iterable[int]) -> str:
    """SHA-256 over the sorted ids, eight little-endian bytes each."""
    return hashlib.sha256(np.array(sorted(set(ids)), dtype="<i8").tobytes()).hexdigest()


def slot_key(seed: int, epoch: int, rows: np.ndarray, lanes: np.ndarray, draw: np.ndarray | int) -> np.ndarray:
    """64 keyed random bits for draw number `draw` of each slot; uint64, of the broadcast shape."""
    return hash64(seed, epoch, _SLOT, rows, lanes, draw)


class OrderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a run needs to go on at a row: the same on every replica, about 300 bytes of JSON."""

    version: int
    manifest: str
    quarantine: str
    seed: int | None
    epoch: int
    row: int
    num_lanes: int = msgspec.field(name="L")
    block_size: int = msgspec.field(name="q")
    window: int = msgspec.field(name="w")

    def to_json(self) -> str:
        """One line of JSON; `state_from_json` gives the same state back."""
        return msgspec.json.encode(self, enc_hook=operator.index).decode("ascii")


def state_from_json(text: str | bytes) -> OrderState:
    """A state from `OrderState.to_json`; raises ConfigError if it is anything else."""
    if len(text) > MAX_STATE_BYTES:
        raise ConfigError(
            f"the order state is {len(text)} bytes, expected at most {MAX_STATE_BYTES}; it is not a state"
        )
    try:
        return msgspec.json.decode(text, type=OrderState)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"the order state can't be read ({error}); resume from another checkpoint") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order of every epoch over one split.

    `seed=None` is the stored order, for evaluation; `window` must be 0 then, because nothing moves. Raises
    ConfigError where the numbers can't make an order.
    """

    shard_sizes: Sequence[int]
    seed: int | None
    global_batch_size: int
    num_lanes: int
    block_size: int
    window: int
    quarantined: Sequence[int] = ()
    last_batch: LastBatch = "pad"
    _lines: dict[int, "_Line"] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_lines": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)

    @cached_property
    def first_ids(self) -> np.ndarray:
        """int64 [num_shards + 1]: the id of each shard's first sample, and the end."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.shard_sizes, dtype=np.int64))])

    @cached_property
    def bad_ids(self) -> np.ndarray:
        """int64, sorted: the quarantined ids."""
        return np.unique(np.asarray(self.quarantined, dtype=np.int64))

    @property
    def num_samples(self) -> int:
        """N: the samples of an epoch."""
        return int(self.first_ids[-1]) - len(self.bad_ids)

    @property
    def items(self) -> int:
        """k: the slots of one lane in one global batch."""
        return self.global_batch_size // self.num_lanes

    @property
    def num_rows(self) -> int:
        """R: the rows of an epoch; the last may miss samples in some lanes."""
        return -(-self.num_samples // self.num_lanes)

    @property
    def num_batches(self) -> int:
        """The global batches of an epoch, all of the same size."""
        if self.last_batch == "drop":
            return self.num_samples // self.num_lanes // self.items
        return -(-self.num_rows // self.items)

    def lane_starts(self, lanes: np.ndarray) -> np.ndarray:
        """Where lanes begin in the line; lane `num_lanes` begins at its end."""
        return self.num_samples * np.asarray(lanes, dtype=np.int64) // self.num_lanes

    def positions(self, epoch: int, lanes: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [start, stop) of some lanes: positions in the line, and whether a sample is there.

        int64 and bool, [len(lanes), stop - start]. Where none is there the position is the lane's last output (of an
        empty lane a neighbour's sample). Costs O(len(lanes) * (stop - start + 2 * window)).
        """
        lanes = np.asarray(lanes, dtype=np.int64)[:, None]
        begin = self.lane_starts(lanes)
        length = self.lane_starts(lanes + 1) - begin
        rows = np.arange(start, stop, dtype=np.int64)[None, :]
        wanted = np.clip(rows, 0, length - 1)
        return np.minimum(begin + self._moved(epoch, lanes, length, wanted), self.num_samples - 1), rows < length

    def _moved(self, epoch: int, lanes: np.ndarray, length: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        if self.window == 0 or wanted.size == 0 or wanted.max() < 0:
            return np.maximum(wanted, 0)
        low = max(0, int(wanted.min()) - self.window)
        high = min(int(length.max()), int(wanted.max()) + 1 + self.window)
        places = np.arange(low, high, dtype=np.int64)[None, :]
        keys = _shuffle_keys(hash64(self.seed, epoch, _SHUFFLE, lanes, places), places, self.window)
        order = np.argsort(np.where(places < length, keys, _LAST), axis=1, kind="stable")
        return low + np.take_along_axis(order, np.maximum(wanted, low) - low, axis=1)

    def ids(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The ids at some positions of the line; int64, of the same shape."""
        return self._line(epoch).ids(positions)

    def find(self, epoch: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, lanes) at which an epoch gives some samples: the inverse of `positions` and `ids`; int64 [n] each.

        Raises ConfigError for an id that is quarantined or outside the split. Costs O(len(ids) * window) and, once
        an epoch, the order of its blocks.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size == 0:
            return ids, ids
        _check_ids(self, ids)
        positions = self._line(epoch).positions(ids)
        lanes = ((positions + 1) * self.num_lanes - 1) // self.num_samples
        begin = self.lane_starts(lanes)
        return self._rank(epoch, lanes, self.lane_starts(lanes + 1) - begin, positions - begin), lanes

    def _rank(self, epoch: int, lanes: np.ndarray, length: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The rows to which the in-lane shuffle sends some places of lanes: how many keys are below theirs."""
        if self.window == 0:
            return places
        first = np.maximum(places - self.window, 0)
        near = first[:, None] + np.arange(2 * self.window + 1, dtype=np.int64)
        keys = _shuffle_keys(hash64(self.seed, epoch, _SHUFFLE, lanes[:, None], near), near, self.window)
        own = np.take_along_axis(keys, (places - first)[:, None], axis=1)
        below = (keys < own) | ((keys == own) & (near < places[:, None]))
        return first + np.count_nonzero(below & (near < length[:, None]), axis=1)

    def pieces(self, epoch: int, start: int, stop: int) -> RangeReads:
        """The ranged reads behind the positions [start, stop) of the line, in line order."""
        return self._line(epoch).pieces(start, stop)

    def num_reads(self, epoch: int) -> int:
        """How many ranged reads an epoch takes if no lane is shared: the rows of `pieces` over every lane."""
        begins = self.lane_starts(np.arange(1, self.num_lanes))
        begins = np.unique(begins[(begins > 0) & (begins < self.num_samples)])
        at = self._line(epoch).reads(begins, np.zeros(1, np.int64), np.array([self.num_samples]))
        return self._line(epoch).num_filled_blocks() + int((at.first < begins).sum())

    def reads(self, epoch: int, lanes: np.ndarray, positions: np.ndarray) -> RangeReads:
        """For each position the piece of its own lane that brings it; equal `first` means the same read."""
        begin, end = self.lane_starts(lanes), self.lane_starts(np.asarray(lanes) + 1)
        return self._line(epoch).reads(positions, begin, end)

    def slots(self, epoch: int, steps: range, start: int, stop: int) -> Slots:
        """The slots [start, stop) of several consecutive global batches, all arrays but `lanes` [len(steps), n]."""
        numbers = np.arange(start, stop, dtype=np.int64)
        lanes = np.arange(start // self.items, -(-stop // self.items), dtype=np.int64)
        rows = range(steps.start * self.items, steps.stop * self.items)
        positions, there = self.positions(epoch, lanes, rows.start, rows.stop)

        def by_batch(values: np.ndarray) -> np.ndarray:
            cut = values.reshape(len(lanes), len(steps), self.items).transpose(1, 0, 2).reshape(len(steps), -1)
            return cut[:, numbers - start // self.items * self.items]

        chosen = by_batch(positions)
        row_of = np.arange(steps.start, steps.stop)[:, None] * self.items + numbers % self.items
        weights = by_batch(there).astype(np.float32)
        return Slots(self.ids(epoch, chosen), weights, numbers // self.items, row_of, chosen)

    def batch(self, epoch: int, step: int) -> Slots:
        """All slots of global batch number `step`, 0 <= step < num_batches."""
        return self.slots(epoch, range(step, step + 1), 0, self.global_batch_size)[0]

    def rank_slots(self, epoch: int, step: int, rank: int, world_size: int) -> Slots:
        """The slots of one replica or host; `check_world` says which world sizes there are."""
        return self.rank_steps(epoch, range(step, step + 1), rank, world_size)[0]

    def rank_steps(self, epoch: int, steps: range, rank: int, world_size: int) -> Slots:
        """The slots of one replica or host in several consecutive batches."""
        part = rank_part(self.global_batch_size, rank, world_size)
        return self.slots(epoch, steps, part.start, part.stop)

    def rank_lanes(self, rank: int, world_size: int) -> range:
        """The lanes from which a replica has slots; it shares the outer ones if world_size does not divide L."""
        return self.part_lanes(rank_part(self.global_batch_size, rank, world_size))

    def part_lanes(self, part: range) -> range:
        """The lanes from which consecutive slots of a global batch come."""
        return range(part.start // self.items, -(-part.stop // self.items))

    def state(self, epoch: int, step: int, manifest_digest: str) -> OrderState:
        """The state before step `step` of an epoch, from the trainer's own step."""
        return OrderState(
            version=ORDER_VERSION,
            manifest=manifest_digest,
            quarantine=quarantine_digest(self.quarantined),
            seed=self.seed,
            epoch=require_int("epoch", epoch),
            row=require_int("step", step) * self.items,
            num_lanes=self.num_lanes,
            block_size=self.block_size,
            window=self.window,
        )

    def resume(self, state: OrderState, manifest_digest: str) -> tuple[int, int]:
        """(epoch, step) at which this order goes on from `state`; raises ConfigError naming what differs."""
        _refuse_difference(self.state(state.epoch, 0, manifest_digest), state)
        if state.epoch < 0 or state.row < 0:
            raise ConfigError(f"the state stands at epoch {state.epoch}, row {state.row}; no run does, it is damaged")
        step, rest = divmod(state.row, self.items)
        if rest:
            raise ConfigError(
                f"row {state.row} is inside a batch of {self.items} rows; a global batch size of {self.num_lanes} "
                f"times a divisor of {state.row} goes on there"
            )
        return (state.epoch, step) if step < self.num_batches else (state.epoch + 1, 0)

    def _line(self, epoch: int) -> "_Line":
        line = self._lines.get(epoch)  # one look: another thread may ask for another epoch, and this one go
        if line is None:
            line = self._lines[epoch] = _Line(self, epoch)
            for other in sorted(self._lines, key=lambda known: abs(known - epoch))[2:]:
                self._lines.pop(other, None)
        return line


def require_int(name: str, value: int) -> int:
    """`value` as an int of Python, of whatever library it is; raises ConfigError for a text, a fraction and None."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}, expected a whole number") from None


def check_world(global_batch_size: int, rank: int, world_size: int) -> None:
    """Raises ConfigError unless `world_size` divides the global batch size and `rank` is in [0, world_size)."""
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size is {global_batch_size}, expected at least 1")
    if world_size < 1 or global_batch_size % world_size:
        fits = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
        near = sorted(sorted(fits, key=lambda size: abs(size - world_size))[:4])
        raise ConfigError(
            f"a global batch of {global_batch_size} does not divide over {world_size} replicas; "
            f"use {', '.join(map(str, near))} replicas, or a global batch size that is a multiple of {world_size}"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}; give each replica its own")


def rank_part(global_batch_size: int, rank: int, world_size: int) -> range:
    """The slots of one replica or host in a global batch."""
    size = global_batch_size // world_size
    return range(rank * size, (rank + 1) * size)


@dataclass(frozen=True, slots=True)
class _Held:
    """Some buckets, sorted: which, their blocks in line order, and where each block begins in the line."""

    buckets: np.ndarray
    blocks: np.ndarray
    starts: np.ndarray


class _Line:
    """The blocks of one epoch in their order, found without sorting all of them.

    Blocks are put into buckets by the top bits of their hash, and two bytes a block are kept: its bucket. When
    positions are asked for, the blocks of their buckets are picked out, hashed again and sorted, and held until another
    bucket is asked for. Whoever goes through an epoch gets the next buckets with them, and seldom has to wait.
    """

    def __init__(self, order: Order, epoch: int) -> None:
        self.order, self.epoch = order, epoch
        self.shuffled = order.seed is not None
        shards = np.arange(len(order.shard_sizes), dtype=np.int64)
        self.phases = self._phases(shards)
        sizes = np.diff(order.first_ids)
        self.first_blocks = np.concatenate([[0], np.cumsum(-(-(sizes + self.phases) // order.block_size))])
        self.num_blocks = int(self.first_blocks[-1])
        bits = min(_MAX_BUCKET_BITS, max(0, self.num_blocks.bit_length() - _BLOCKS_PER_BUCKET_BITS))
        span = 64 if self.shuffled else max(1, self.num_blocks.bit_length())
        self.shift = np.uint64(max(0, span - bits))
        self.buckets = np.empty(self.num_blocks, dtype=np.uint16)
        self.bucket_samples = self._fill_buckets(1 << bits)
        nothing = np.zeros(0, dtype=np.int64)
        self._held = _Held(np.zeros(1 << bits, dtype=bool), nothing, nothing)

    def _phases(self, shards: np.ndarray) -> np.ndarray:
        if not self.shuffled:
            return np.zeros(len(shards), dtype=np.int64)
        size = np.uint64(self.order.block_size)
        return (hash64(self.order.seed, self.epoch, _PHASE, shards) % size).astype(np.int64)

    def _fill_buckets(self, num_buckets: int) -> np.ndarray:
        """Where in the line each bucket begins, and the end."""
        counts = np.zeros(num_buckets, dtype=np.int64)
        for start, stop in self._chunks():
            self.buckets[start:stop] = self._bucket_of(self._hashes_between(start, stop))
            counts += np.bincount(self.buckets[start:stop], minlength=num_buckets)
        short = self._not_full()
        missing = np.bincount(
            self.buckets[short], weights=self.order.block_size - self._sizes(short), minlength=num_buckets
        ).astype(np.int64)
        return np.concatenate([[0], np.cumsum(counts * self.order.block_size - missing)])

    def _hashes(self, blocks: np.ndarray) -> np.ndarray:
        if not self.shuffled:
            return blocks.astype(np.uint64)
        return hash64(self.order.seed, self.epoch, _BLOCK, *self._place(blocks))

    def _hashes_between(self, start: int, stop: int) -> np.ndarray:
        """The hashes of consecutive blocks; what the blocks of a shard share is hashed once."""
        numbers = np.arange(start, stop, dtype=np.int64)
        if not self.shuffled:
            return numbers.astype(np.uint64)
        shards, counts = self._shards_of(start, stop)
        states = hash64(self.order.seed, self.epoch, _BLOCK, shards)
        return hash64_on(np.repeat(states, counts), numbers - np.repeat(self.first_blocks[shards], counts))

    def _not_full(self) -> np.ndarray:
        """All blocks that may hold fewer than q samples: at the ends of shards, and with quarantined samples."""
        bad = self.order.bad_ids
        shard = _owner(self.order.first_ids, bad)
        block = (
            self.first_blocks[shard] + (bad - self.order.first_ids[shard] + self.phases[shard]) // self.order.block_size
        )
        found = np.sort(np.concatenate([self.first_blocks[:-1], self.first_blocks[1:] - 1, block]))
        return found[np.diff(found, prepend=-1) > 0]

    def _chunks(self) -> Iterable[tuple[int, int]]:
        last = self.num_blocks
        return ((start, min(last, start + _BLOCKS_AT_ONCE)) for start in range(0, last, _BLOCKS_AT_ONCE))

    def _bucket_of(self, hashes: np.ndarray) -> np.ndarray:
        return hashes >> self.shift if self.shift < 64 else np.zeros_like(hashes)

    def _place(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shard = _owner(self.first_blocks, blocks)
        return shard, blocks - self.first_blocks[shard]

    def _shards_of(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of consecutive blocks and how many of these blocks each has, without a search for every block."""
        first, last = _owner(self.first_blocks, np.array([start, stop - 1])).tolist()
        cuts = np.clip(self.first_blocks[first : last + 2], start, stop)
        return np.arange(first, last + 1, dtype=np.int64), np.diff(cuts)

    def _ranges(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last + 1 id of some blocks, quarantined ones included."""
        shard, block = self._place(blocks)
        low, high = self.order.first_ids[shard], self.order.first_ids[shard + 1]
        start = low + block * self.order.block_size - self.phases[shard]
        return np.maximum(start, low), np.minimum(start + self.order.block_size, high)

    def _sizes(self, blocks: np.ndarray) -> np.ndarray:
        start, stop = self._ranges(blocks)
        return self._line_number(stop) - self._line_number(start)

    def _line_number(self, ids: np.ndarray) -> np.ndarray:
        """How many samples that are not quarantined stand before an id."""
        bad = self.order.bad_ids
        return ids - np.searchsorted(bad, ids) if len(bad) else ids

    def _id_of(self, numbers: np.ndarray) -> np.ndarray:
        """The inverse of `_line_number`."""
        bad = self.order.bad_ids
        return numbers + np.searchsorted(bad - np.arange(len(bad)), numbers, side="right") if len(bad) else numbers

    def _hold(self, buckets: np.ndarray) -> _Held:
        """At least these buckets."""
        held = self._held  # one look: another thread may ask for other buckets meanwhile
        there = held.buckets[buckets]
        if not there.all():
            wanted = np.zeros(len(held.buckets), dtype=bool)
            wanted[buckets] = True
            if there.any():
                wanted[1:] |= wanted[:-1]
            self._held = held = self._sorted(wanted)
        return held

    def _sorted(self, wanted: np.ndarray) -> _Held:
        found = [start + np.flatnonzero(wanted.take(self.buckets[start:stop])) for start, stop in self._chunks()]
        blocks = np.concatenate(found)
        hashes, sizes = self._hashes(blocks), self._sizes(blocks)
        order = np.argsort(hashes, kind="stable")
        sizes = sizes[order]
        left_out = np.cumsum(np.where(wanted, 0, np.diff(self.bucket_samples)))
        starts = np.cumsum(sizes) - sizes + left_out[self._bucket_of(hashes[order])]
        return _Held(wanted, blocks[order], starts)

    def num_filled_blocks(self) -> int:
        """The blocks that hold a sample which is not quarantined."""
        return self.num_blocks - int(np.count_nonzero(self._sizes(self._not_full()) == 0))

    def ids(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size == 0:
            return positions
        held = self._hold(_owner(self.bucket_samples, positions))
        found = _owner(held.starts, positions)
        first = self._line_number(self._ranges(held.blocks[found])[0])
        return self._id_of(first + positions - held.starts[found])

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """The inverse of `ids`."""
        shard = _owner(self.order.first_ids, ids)
        within = ids - self.order.first_ids[shard] + self.phases[shard]
        wanted = self.first_blocks[shard] + within // self.order.block_size
        held = self._hold(self.buckets[wanted])
        places = np.flatnonzero(np.isin(held.blocks, wanted))
        places = places[np.argsort(held.blocks[places])]
        found = places[np.searchsorted(held.blocks[places], wanted)]
        return held.starts[found] + self._line_number(ids) - self._line_number(self._ranges(wanted)[0])

    def pieces(self, start: int, stop: int) -> RangeReads:
        """Each read of a range once, in line order."""
        reads = self.reads(np.arange(start, stop), np.array([start]), np.array([stop]))
        once = np.unique(reads.first, return_index=True)[1]
        return RangeReads(
            reads.shard[once], reads.start[once], reads.stop[once], reads.first[once], reads.num_samples[once]
        )

    def reads(self, positions: np.ndarray, begin: np.ndarray, end: np.ndarray) -> RangeReads:
        """For each position its block's part inside [begin, end)."""
        if positions.size == 0:
            return RangeReads(*(np.zeros(0, dtype=np.int64) for _ in range(5)))
        held = self._hold(_owner(self.bucket_samples, positions))
        found = _owner(held.starts, positions)
        blocks, starts = held.blocks[found], held.starts[found]
        first = np.maximum(starts, begin)
        last = np.minimum(starts + self._sizes(blocks), end) - 1
        numbers = self._line_number(self._ranges(blocks)[0]) - starts
        shard = self._place(blocks)[0]
        low = self.order.first_ids[shard]
        return RangeReads(
            shard, self._id_of(numbers + first) - low, self._id_of(numbers + last) + 1 - low, first, last + 1 - first
        )


def _owner(starts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The last of the ascending `starts` that is not above each value."""
    return np.searchsorted(starts, values, side="right") - 1


def _shuffle_keys(hashes: np.ndarray, places: np.ndarray, window: int) -> np.ndarray:
    return (places.astype(np.uint64) << _HIGH) + (hashes >> _HIGH) * np.uint64(window)


def _check(order: Order) -> None:
    if not len(order.shard_sizes) or min(order.shard_sizes) < 1:
        raise ConfigError("an order needs at least one shard, and no empty ones; check the manifest's split")
    if order.num_lanes < 1 or order.global_batch_size < 1 or order.global_batch_size % order.num_lanes:
        raise ConfigError(
            f"a global batch of {order.global_batch_size} is not a multiple of {order.num_lanes} lanes; "
            f"use {order.num_lanes * max(1, round(order.global_batch_size / max(1, order.num_lanes)))}, "
            f"or {default_lanes(max(1, order.global_batch_size))} lanes"
        )
    if order.block_size < 1 or order.window < 0:
        raise ConfigError(f"q is {order.block_size} and w is {order.window}, expected q >= 1 and w >= 0")
    if order.seed is not None and (isinstance(order.seed, bool) or not isinstance(order.seed, int | np.integer)):
        raise ConfigError(f"seed is {order.seed!r}, expected a whole number, or None for the stored order")
    if order.seed is None and order.window:
        raise ConfigError(f"the stored order (seed None) moves nothing, but w is {order.window}; use w = 0")
    _check_samples(order)


def _check_samples(order: Order) -> None:
    bad = order.bad_ids
    if len(bad) and (bad[0] < 0 or bad[-1] >= order.first_ids[-1]):
        raise ConfigError(f"quarantined ids reach {bad[0]} to {bad[-1]}, expected 0 to {order.first_ids[-1] - 1}")
    if order.num_samples < 1:
        raise ConfigError("every sample is quarantined; nothing is left to read")
    if order.num_rows + order.window >= 1 << 32:
        raise ConfigError(f"lanes of {order.num_rows} samples and w = {order.window} are too long; use more lanes")


def _check_ids(order: Order, ids: np.ndarray) -> None:
    if ids.min() < 0 or ids.max() >= order.first_ids[-1]:
        raise ConfigError(f"ids reach {ids.min()} to {ids.max()}, expected 0 to {order.first_ids[-1] - 1}")
    if (bad := np.intersect1d(ids, order.bad_ids)).size:
        raise ConfigError(f"id {bad[0]} is quarantined, so it is in no epoch")


def _refuse_difference(expected: OrderState, found: OrderState) -> None:
    for name in ("version", "manifest", "quarantine", "seed", "num_lanes", "block_size", "window"):
        here, there = getattr(expected, name), getattr(found, name)
        if here != there:
            cause = " (it follows from budget_bytes)" if name in ("num_lanes", "block_size", "window") else ""
            raise ConfigError(
                f"this run can't go on from that state: {name} is {here!r} here and was {there!r} there{cause}; "
                f"use the same, or start a new run"
            )
