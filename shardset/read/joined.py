"""Samples and their values in columns, which lie at the same places of other sets, read together."""

from collections.abc import Iterator, Sequence

from shardset.errors import DamagedShard
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.indexes import ShardTable
from shardset.read.pending import Contents, PendingSamples, SampleReader


class JoinedReader:
    """A reader of samples whose contents are followed by those of the same samples in other tables; a SampleReader."""

    def __init__(self, first: SampleReader, others: Sequence[tuple[ShardTable, SampleReader]]) -> None:
        self._first, self._others = first, others
        self._all = [first, *(reader for _, reader in others)]

    @property
    def num_bytes_read(self) -> int:
        return sum(reader.num_bytes_read for reader in self._all)

    def prepare(self, epoch: int, slots: Slots) -> None:
        for reader in self._all:
            reader.prepare(epoch, slots)

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        first = self._first.read_step(epoch, slots, addresses)
        return JoinedSamples(
            first, [each.read_step(epoch, slots, _in(table, addresses)) for table, each in self._others]
        )

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        first = self._first.read_single(addresses)
        return JoinedSamples(first, [each.read_single(_in(table, addresses)) for table, each in self._others])

    def within_budget(self) -> bool:
        return all(reader.within_budget() for reader in self._all)

    def close(self) -> None:
        for reader in self._all:
            reader.close()


class JoinedSamples(PendingSamples):
    """Samples that several readers have requested."""

    def __init__(self, first: PendingSamples, others: Sequence[PendingSamples]) -> None:
        self.table, self.addresses, self._all = first.table, first.addresses, [first, *others]

    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        for number in range(start, stop):
            contents: list[bytes | None] = []
            damage = None
            for samples in self._all:  # takes all, so that each reader can free its block
                try:
                    contents += samples.take(number)
                except DamagedShard as error:
                    damage = damage or error
            if damage:
                raise damage
            yield contents


def _in(table: ShardTable, addresses: SampleAddresses) -> SampleAddresses:
    return table.addresses(addresses.shards, addresses.positions)
