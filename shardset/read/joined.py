"""Samples and their values in columns, which lie at the same places of other sets,
read together.
"""

from collections.abc import Callable, Iterator, Sequence

from shardset.errors import DamagedShard
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.indexes import ShardTable
from shardset.read.pending import Contents, PendingSamples, SampleReader


class JoinedReader(SampleReader):
    """A reader of samples, each followed by the contents of the same sample in other tables;
    a SampleReader.
    """

    def __init__(self, tables: Sequence[ShardTable], readers: Sequence[SampleReader]) -> None:
        self._tables, self._readers = tables, readers

    def prepare(self, epoch: int, slots: Slots) -> None:
        for reader in self._readers:
            reader.prepare(epoch, slots)

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        return self._joined(lambda reader, own: reader.read_step(epoch, slots, own), addresses)

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        return self._joined(lambda reader, own: reader.read_single(own), addresses)

    def within_budget(self) -> bool:
        return all(reader.within_budget() for reader in self._readers)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _joined(
        self,
        read: Callable[[SampleReader, SampleAddresses], PendingSamples],
        first: SampleAddresses,
    ) -> PendingSamples:
        own = [
            first,
            *(table.addresses(first.shards, first.positions) for table in self._tables[1:]),
        ]
        return _Joined(list(map(read, self._readers, own)))


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
