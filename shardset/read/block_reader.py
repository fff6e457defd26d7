"""Samples from a bucket, read by blocks: one ranged read fetches neighbours, which the order uses
soon after.
"""

import heapq
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard, ShardsetError
from shardset.order.blocks import RangeReads
from shardset.order.epoch import Order, Slots
from shardset.read.addresses import SampleAddress, SampleAddresses
from shardset.read.disk_cache import CachedReader
from shardset.read.indexes import ShardTable
from shardset.read.pending import Contents, PendingSamples, SampleReader
from shardset.read.remote import RemoteReader

_log = logging.getLogger(__name__)

_NO_BYTES: Future[bytes] = Future()


class BlockSampleReader(SampleReader):
    """Reads the blocks of an order ahead of its steps; taking a sample cuts it out of its block.

    The first step reads its samples one by one; blocks follow once all of them have been taken. So
    the first batch waits for its own bytes only. A block is freed with its last sample.
    `held_bytes` counts blocks read or requested.
    """

    def __init__(
        self,
        order: Order,
        table: ShardTable,
        reader: RemoteReader | CachedReader,
        budget_bytes: int,
    ) -> None:
        self.order = order
        self.table = table
        self.reader = reader
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self._open: dict[tuple[int, int], _Block] = {}
        self._closing: list[tuple[int, int, tuple[int, int]]] = []
        """A heap of (epoch, row, key in `_open`): no slot from that row on needs the block."""
        self._last_begin = (-1, -1)
        self._num_first_left = 0
        self._first_taken = threading.Event()
        self._begun = False
        self._lock = threading.Lock()

    def prepare(self, epoch: int, slots: Slots) -> None:
        """See SampleReader.

        The rows of a block are one request; before the first batch, the rows of each sample are.
        """
        if not self.table.reads_rows or not self._begun:
            return
        self._first_taken.wait()
        is_real = slots.weights > 0
        lanes = np.broadcast_to(slots.lanes, slots.positions.shape)[is_real]
        self.table.load(self.order.reads_of(epoch, lanes, slots.positions[is_real]))

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        if not self._begun:
            self._begun = True
            self._num_first_left = len(addresses)
            return self.read_single(addresses)
        self._first_taken.wait()
        if (begin := (epoch, slots.rows.item(0))) <= self._last_begin:
            # The caller went back: open blocks may have given away samples that are requested once
            # more.
            self._close_passed(sys.maxsize, 0)
        self._last_begin = begin
        is_real = slots.weights > 0
        lanes = slots.lanes[is_real]
        in_order = iter(
            self._blocks_of(
                epoch, lanes, self.order.reads_of(epoch, lanes, slots.positions[is_real])
            )
        )
        # Slots that fill up the last step are no part of the order: their samples get reads of
        # their own.
        blocks = [
            next(in_order) if real else self._single(addresses[slot])
            for slot, real in enumerate(is_real.tolist())
        ]
        self._close_passed(epoch, int(slots.rows.max()) + 1)
        return BlockPendingSamples(self, addresses, blocks)

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        """Requests samples outside the order of the steps, each with a separate read."""
        return BlockPendingSamples(
            self, addresses, [self._single(address) for address in addresses]
        )

    def within_budget(self) -> bool:
        return self.held_bytes < self.budget_bytes

    def close(self) -> None:
        self._first_taken.set()
        self.reader.close()

    def note_taken(self, blocks: "Sequence[_Block]") -> None:
        """Counts a taken sample for each of the blocks, which may repeat; frees a block after its
        last sample.
        """
        with self._lock:
            self._num_first_left -= len(blocks)
            for block, number in Counter(blocks).items():
                block.num_taken += number
                self._free_if_done(block)
        if self._num_first_left <= 0:
            self._first_taken.set()

    def _blocks_of(self, epoch: int, lanes: NDArray[np.int64], reads: RangeReads) -> "list[_Block]":
        """The block of each read; equal reads share one."""
        _, numbers, owners, counts = np.unique(
            reads.first, return_index=True, return_inverse=True, return_counts=True
        )
        blocks = [
            self._block_of(epoch, lanes.item(number), reads, number) for number in numbers.tolist()
        ]
        for block, count in zip(blocks, counts.tolist(), strict=True):
            block.num_requested += count
        return [blocks[owner] for owner in owners.tolist()]

    def _block_of(self, epoch: int, lane: int, reads: RangeReads, number: int) -> "_Block":
        first = reads.first.item(number)
        block = self._open.get((epoch, first))
        if block is None:
            shard, num_samples = reads.shard.item(number), reads.num_samples.item(number)
            start, stop = self.table.byte_range(
                shard, reads.start.item(number), reads.stop.item(number)
            )
            num_taken = num_samples * self.order.augment_repeats
            block = self._open[epoch, first] = self._submit(
                shard, start, stop, num_samples=num_taken
            )
            last_row = first + num_samples - 1 - int(self.order.lane_starts(np.array(lane)))
            heapq.heappush(
                self._closing, (epoch, last_row + max(1, self.order.window), (epoch, first))
            )
        return block

    def _single(self, address: SampleAddress) -> "_Block":
        return self._submit(address.shard, address.start, address.stop, num_samples=1)

    def _submit(self, shard: int, start: int, stop: int, *, num_samples: int) -> "_Block":
        with self._lock:
            self.held_bytes += stop - start
        return _Block(start, stop - start, num_samples, self.reader.submit(shard, start, stop))

    def _close_passed(self, epoch: int, row: int) -> None:
        """Closes the blocks that no slot from that row on needs.

        Their samples that have not been requested never will be: an earlier run took them, or
        another rank does.
        """
        while self._closing and self._closing[0][:2] <= (epoch, row):
            block = self._open.pop(heapq.heappop(self._closing)[2])
            with self._lock:
                block.num_samples = block.num_requested
                self._free_if_done(block)

    def _free_if_done(self, block: "_Block") -> None:
        if block.num_taken == block.num_samples and block.num_bytes:
            self.held_bytes -= block.num_bytes
            block.num_bytes = 0
            block.data = _NO_BYTES


@dataclass(eq=False, slots=True)
class _Block:
    """One read of several samples.

    `num_samples` will be taken from it; `num_requested` are known to be wanted.

    A sample that takes several slots counts as often.
    """

    start: int
    num_bytes: int
    num_samples: int
    data: Future[bytes]
    num_requested: int = 0
    num_taken: int = 0


class BlockPendingSamples(PendingSamples):
    """Samples in blocks that are being read."""

    def __init__(
        self, reader: BlockSampleReader, addresses: SampleAddresses, blocks: "list[_Block]"
    ) -> None:
        super().__init__(reader.table, addresses)
        self.reader, self._blocks = reader, blocks

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        number = start - 1
        try:
            for number in range(start, stop):
                yield self._contents_of(number)
        finally:
            self.reader.note_taken(self._blocks[start : number + 1])

    def _contents_of(self, number: int) -> Contents:
        block = self._blocks[number]
        data = self._bytes_of(number, block.data)
        try:
            return self._cut(number, data, self.starts[number] - block.start)
        except DamagedShard as error:
            _log.warning(
                "%s; reading it once more, in case the transfer or the cache damaged it", error
            )
        address = self.addresses[number]
        again = self.reader.reader.submit(address.shard, address.start, address.stop, fresh=True)
        return self._cut(number, self._bytes_of(number, again), 0)

    def _bytes_of(self, number: int, data: Future[bytes]) -> bytes:
        try:
            return data.result()
        except ShardsetError as error:
            raise self.located(number, error) from error

    def _cut(self, number: int, data: bytes, start: int) -> Contents:
        contents = [
            data[start + starts[number] : start + stops[number]] for starts, stops in self._fields
        ]
        return self._verified(number, contents)
