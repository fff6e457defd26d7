"""The blocks of one epoch in their keyed order: the ids at each position, and the reads that bring
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardset.order.permutation import Purpose, hash64
from shardset.order.selection import Selection

GAP_SHARE = 0.3
"""Most unwanted samples that a read may bring for each wanted one."""

_BLOCKS_AT_ONCE = 1 << 16  # bounds the memory of hashing all blocks of an epoch
_BLOCKS_PER_BUCKET_BITS = 8
_MAX_BUCKET_BITS = 16  # a bucket's number is stored as uint16

Ints = NDArray[np.int64]


class RangeReads(NamedTuple):
    """Ranged reads: each covers the positions [start, stop) of a shard. All columns are int64 [n].

    `first` is the position in the sequence at which a read begins; `num_samples` is `stop - start`
    without samples that are quarantined or not in the view.
    """

    shard: Ints
    start: Ints
    stop: Ints
    first: Ints
    num_samples: Ints


@dataclass(frozen=True, slots=True)
class _SortedBuckets:
    """Some sorted buckets: their blocks in the order of the sequence, and where each block begins
    there.
    """

    has_bucket: NDArray[np.bool_]
    blocks: Ints
    starts: Ints


class BlockLayout:
    """The sequence of an epoch, block by block, without sorting all blocks.

    The top bits of its hash put each block into a bucket; only the bucket is kept, in two bytes a
    block. A request for positions collects the blocks of their buckets, hashes them again, sorts
    them and keeps them until it needs another bucket. It sorts the next buckets along with them, so
    that a reader that goes through an epoch seldom waits.
    """

    def __init__(
        self,
        first_ids: Ints,
        selection: Selection,
        *,
        block_size: int,
        seed: int | None,
        epoch: int,
    ) -> None:
        self.first_ids, self.selection = first_ids, selection
        self.block_size, self.seed, self.epoch = block_size, seed, epoch
        shards = np.arange(len(first_ids) - 1, dtype=np.int64)
        # Where the first block of each shard would begin, before the shard: another place in each
        # epoch.
        self.phases = np.zeros_like(shards)
        if seed is not None:
            self.phases = (
                hash64(seed, epoch, Purpose.PHASE, shards) % np.uint64(block_size)
            ).astype(np.int64)
        self.first_blocks = np.concatenate(
            [[0], np.cumsum(-(-(np.diff(first_ids) + self.phases) // block_size))]
        )
        self.num_blocks = int(self.first_blocks[-1])
        bits = min(_MAX_BUCKET_BITS, max(1, self.num_blocks.bit_length() - _BLOCKS_PER_BUCKET_BITS))
        # The stored order uses the block's own number as its hash, which has fewer bits.
        hash_bits = self.num_blocks.bit_length() if seed is None else 64
        self.shift = np.uint64(hash_bits - bits)
        self.bucket_of_block = np.empty(self.num_blocks, dtype=np.uint16)
        self.bucket_starts = self._fill_buckets(1 << bits)
        nothing = np.zeros(0, dtype=np.int64)
        self._sorted = _SortedBuckets(np.zeros(1 << bits, dtype=bool), nothing, nothing)

    def ids(self, positions: Ints) -> Ints:
        """The ids at some positions of the sequence; of the same shape."""
        blocks, starts = self._blocks_at(positions)
        return self.selection.id_of(positions - starts + self._num_before(blocks))

    def positions(self, ids: Ints) -> Ints:
        """The inverse of `ids`."""
        blocks = self._blocks_of(ids)
        buckets = self._sorted_buckets(self.bucket_of_block[blocks])
        by_number = np.argsort(buckets.blocks)
        at = by_number[np.searchsorted(buckets.blocks, blocks, sorter=by_number)]
        starts: Ints = buckets.starts[at]
        return starts + self.selection.num_before(ids) - self._num_before(blocks)

    def reads_of(self, positions: Ints, begin: Ints, end: Ints) -> RangeReads:
        """For each position the read of the part of its block inside [begin, end)."""
        blocks, starts = self._blocks_at(positions)
        first = np.maximum(starts, begin)
        last = np.minimum(starts + self._sizes(blocks), end) - 1
        numbers = self._num_before(blocks) - starts
        start = self.selection.id_of(numbers + first)
        stop = self.selection.id_of(numbers + last) + 1
        num_samples = last + 1 - first
        # quarantine makes no gaps
        if self.selection.digest and (stop - start > (1 + GAP_SHARE) * num_samples).any():
            start, stop, first, num_samples = self._cut_at_gaps(
                positions, first, num_samples, numbers
            )
        shard = self._in_shards(blocks)[0]
        low = self.first_ids[shard]
        return RangeReads(shard, start - low, stop - low, first, num_samples)

    def _cut_at_gaps(
        self, positions: Ints, first: Ints, num_samples: Ints, numbers: Ints
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """(start, stop, first, num_samples) of the read that brings each position.

        Reads go on over the smallest gaps of their block first, as many as GAP_SHARE allows.
        `first` and `num_samples` describe the complete block, `numbers` what turns its positions
        into numbers of taken ids.
        """
        _, once, owners = np.unique(first, return_index=True, return_inverse=True)
        sizes = num_samples[once]
        begins = np.cumsum(sizes) - sizes
        block = np.repeat(np.arange(len(once)), sizes)
        in_line = np.arange(len(block)) - begins[block] + first[once][block]
        ids = self.selection.id_of(in_line + numbers[once][block])
        gaps = np.diff(ids, prepend=0) - 1
        gaps[begins] = 0
        by_size = np.lexsort((gaps, block))
        skipped = np.cumsum(gaps[by_size])
        skipped -= skipped[begins][block]  # the gap before a block is 0, so the first of its gaps
        is_cut = np.zeros(len(block), bool)
        is_cut[by_size] = skipped > (GAP_SHARE * sizes)[block]
        is_cut[begins] = True
        cuts = np.append(np.flatnonzero(is_cut), len(block))
        read = np.cumsum(is_cut)[begins[owners] + positions - first] - 1
        begin, end = cuts[read], cuts[read + 1]
        return ids[begin], ids[end - 1] + 1, in_line[begin], end - begin

    def _fill_buckets(self, num_buckets: int) -> Ints:
        """Where each bucket begins in the sequence, and the end."""
        sizes = np.zeros(num_buckets)
        for start, stop in self._chunks():
            blocks = np.arange(start, stop)
            buckets = self._hashes(blocks) >> self.shift
            self.bucket_of_block[start:stop] = buckets
            sizes += np.bincount(self.bucket_of_block[start:stop], self._sizes(blocks), num_buckets)
        return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def _chunks(self) -> Iterator[tuple[int, int]]:
        last = self.num_blocks
        return (
            (start, min(last, start + _BLOCKS_AT_ONCE)) for start in range(0, last, _BLOCKS_AT_ONCE)
        )

    def _hashes(self, blocks: Ints) -> NDArray[np.uint64]:
        if self.seed is None:
            return blocks.astype(np.uint64)
        hashes: NDArray[np.uint64] = hash64(
            self.seed, self.epoch, Purpose.BLOCK, *self._in_shards(blocks)
        )
        return hashes

    def _blocks_at(self, positions: Ints) -> tuple[Ints, Ints]:
        """The block at each position of the sequence, and where it begins there."""
        buckets = self._sorted_buckets(_owner(self.bucket_starts, positions))
        owners = _owner(buckets.starts, positions)
        return buckets.blocks[owners], buckets.starts[owners]

    def _blocks_of(self, ids: Ints) -> Ints:
        """The block of each id."""
        shards = _owner(self.first_ids, ids)
        within = ids - self.first_ids[shards] + self.phases[shards]
        blocks: Ints = self.first_blocks[shards] + within // self.block_size
        return blocks

    def _in_shards(self, blocks: Ints) -> tuple[Ints, Ints]:
        """The shard of each block, and its number there."""
        shards = _owner(self.first_blocks, blocks)
        return shards, blocks - self.first_blocks[shards]

    def _id_ranges(self, blocks: Ints) -> tuple[Ints, Ints]:
        """First and last + 1 id of each block, those that are left out included."""
        shards, numbers = self._in_shards(blocks)
        low, high = self.first_ids[shards], self.first_ids[shards + 1]
        start = low + numbers * self.block_size - self.phases[shards]
        return np.maximum(start, low), np.minimum(start + self.block_size, high)

    def _num_before(self, blocks: Ints) -> Ints:
        """The number of taken ids before each block."""
        return self.selection.num_before(self._id_ranges(blocks)[0])

    def _sizes(self, blocks: Ints) -> Ints:
        start, stop = self._id_ranges(blocks)
        return self.selection.num_before(stop) - self.selection.num_before(start)

    def _sorted_buckets(self, buckets: NDArray[Any]) -> _SortedBuckets:
        """At least these buckets, sorted."""
        # read once: another thread may ask for other buckets meanwhile
        sorted_buckets = self._sorted
        present = sorted_buckets.has_bucket[buckets]
        if not present.all():
            wanted = np.zeros(len(sorted_buckets.has_bucket), dtype=bool)
            wanted[buckets] = True
            if present.any():  # a reader moves on: sort the next buckets too
                wanted[1:] |= wanted[:-1]
            self._sorted = sorted_buckets = self._sort(wanted)
        return sorted_buckets

    def _sort(self, wanted: NDArray[np.bool_]) -> _SortedBuckets:
        blocks = np.concatenate(
            [
                start + np.flatnonzero(wanted.take(self.bucket_of_block[start:stop]))
                for start, stop in self._chunks()
            ]
        )
        hashes, sizes = self._hashes(blocks), self._sizes(blocks)
        order = np.argsort(hashes, kind="stable")
        sizes = sizes[order]
        # Samples of the buckets that are not sorted here shift the blocks behind them.
        left_out = np.cumsum(np.where(wanted, 0, np.diff(self.bucket_starts)))
        starts = np.cumsum(sizes) - sizes + left_out[hashes[order] >> self.shift]
        return _SortedBuckets(wanted, blocks[order], starts)


def _owner(starts: Ints, values: Ints) -> Ints:
    """The last of the ascending `starts` that is not above each value."""
    return np.searchsorted(starts, values, side="right") - 1
