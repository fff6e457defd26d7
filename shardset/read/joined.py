"""Samples and their values in columns, which lie at the same places of other sets, read together."""

from collections.abc import Iterator, Sequence

from shardset.errors import DamagedShard
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.indexes import ShardTable
from shardset.read.pending import Contents, PendingSamples, SampleReader


class JoinedReader:
    """A reader of samples whose contents are followed by those of the same samples in other tables; a SampleReader."""

    def __init__(self, first: SampleReader, tables: Sequence[ShardTable], others: Sequence[SampleReader]) -> None:
        self._first, self._tables, self._others = first, tables, others
        self._all = [first, *others]

    @property
    def num_bytes_read(self) -> int:
        return sum(reader.num_bytes_read for reader in self._all)

    def prepare(self, epoch: int, slots: Slots) -> None:
        for reader in self._all:
            reader.prepare(epoch, slots)

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        return _Joined(
            [
                reader.read_step(epoch, slots, own)
                for reader, own in zip(self._all, self._addresses(addresses), strict=True)
            ]
        )

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        return _Joined(
            [reader.read_single(own) for reader, own in zip(self._all, self._addresses(addresses), strict=True)]
        )

    def within_budget(self) -> bool:
        return all(reader.within_budget() for reader in self._all)

    def close(self) -> None:
        for reader in self._all:
            reader.close()

    def _addresses(self, first: SampleAddresses) -> list[SampleAddresses]:
        return [first, *(table.addresses(first.shards, first.positions) for table in self._tables)]


class _Joined(PendingSamples):
    def __init__(self, parts: Sequence[PendingSamples]) -> None:
        self.table, self.addresses, self._parts = parts[0].table, parts[0].addresses, parts

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        for number in range(start, stop):
            contents: list[bytes | None] = []
            damage = None
            for part in self._parts:  # takes all, so that each reader can free its block
                try:
                    contents += part.take(number)
                except DamagedShard as error:
                    damage = damage or error
            if damage:
                raise damage
            yield contents
