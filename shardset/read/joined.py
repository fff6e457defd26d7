"""Samples and their values in columns, which lie at the same places of other sets,
read together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.indexes import ShardTable
from shardset.read.pending import Contents, PendingSamples, SampleReader

Part = tuple[PendingSamples | None, dict[int, int]]
"""What is read of a column for a step, and the number there of each slot that has a value."""


class JoinedReader(SampleReader):
    """A reader of samples, each followed by its value in each column: b"" for those after the last
    shard of that column.
    """

    def __init__(self, tables: Sequence[ShardTable], readers: Sequence[SampleReader]) -> None:
        self._joined = [*zip(tables, readers, strict=True)]

    def prepare(self, epoch: int, slots: Slots) -> None:
        for table, reader in self._joined:
            weights = np.where(_is_stored(table, slots), slots.weights, 0)
            reader.prepare(epoch, replace(slots, weights=weights))

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        def read(table: ShardTable, reader: SampleReader) -> Part:
            stored = np.flatnonzero(_is_stored(table, slots))
            if not len(stored):
                return None, {}
            places = table.addresses(addresses.shards[stored], addresses.positions[stored])
            some = Slots(*(getattr(slots, field.name)[stored] for field in fields(slots)))
            return reader.read_step(epoch, some, places), dict(zip(stored.tolist(), count()))

        _, samples = self._joined[0]
        first = samples.read_step(epoch, slots, addresses)
        return _Joined(first, [read(table, reader) for table, reader in self._joined[1:]])

    def within_budget(self) -> bool:
        return all(reader.within_budget() for _, reader in self._joined)

    def close(self) -> None:
        for _, reader in self._joined:
            reader.close()


class _Joined(PendingSamples):
    def __init__(self, samples: PendingSamples, columns: Sequence[Part]) -> None:
        self.table, self.addresses = samples.table, samples.addresses
        self._samples, self._columns = samples, columns

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        for slot in range(start, stop):
            parts: list[tuple[PendingSamples | None, int | None]] = [(self._samples, slot)]
            parts += [(pending, numbers.get(slot)) for pending, numbers in self._columns]
            contents: list[bytes | None] = []
            damage = None
            for pending, number in parts:  # takes all, so that each reader can free its block
                try:
                    contents += [b""] if pending is None or number is None else pending.take(number)
                except DamagedShard as error:
                    damage = damage or error
            if damage:
                raise damage
            yield contents


def _is_stored(table: ShardTable, slots: Slots) -> NDArray[np.bool_]:
    is_stored: NDArray[np.bool_] = slots.ids < table.split.num_samples
    return is_stored
