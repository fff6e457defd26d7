"""Samples whose bytes have been asked for, and the door through which every reader hands them out, checked.

No byte reaches a caller before its length and CRC32C have been compared with the index.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import google_crc32c
import numpy as np

from shardset.errors import DamagedShard, ShardsetError
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses
from shardset.read.indexes import ShardTable

Contents = Sequence[bytes | None]
"""The contents of a sample's fields, a column each; None where the sample does not have the field."""


class PendingSamples(ABC):
    """Samples that a reader has been asked for. Any thread may take them."""

    def __init__(self, table: ShardTable, addresses: SampleAddresses) -> None:
        self.table, self.addresses = table, addresses
        offsets, sizes = addresses.field_offsets, addresses.field_sizes
        self.starts = addresses.starts.tolist()
        self.sizes = (addresses.stops - addresses.starts).tolist()
        self._fields: list[tuple[list[int], list[int]]] = list(
            zip(offsets.T.tolist(), (offsets + sizes).T.tolist(), strict=True)
        )
        self._crcs: list[int] = addresses.crcs.tolist()
        self._absent: list[list[bool]] | None = (offsets < 0).tolist() if (offsets < 0).any() else None
        # The CRC32C covers the members as the tar stores them, which may differ from the split's order of fields.
        in_order = (np.diff(offsets, axis=1) >= 0).all()
        self._member_orders = None if in_order else np.argsort(offsets, axis=1, kind="stable").tolist()

    @abstractmethod
    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        """The checked fields of the samples [start, stop); take each sample once.

        Raises DamagedShard or StorageError naming shard, key and offset, and ends there.
        """

    def take(self, number: int) -> Contents:
        """The checked fields of one sample; take each sample once."""
        return next(self.contents(number, number + 1))

    def describe(self, number: int) -> str:
        """A sample by shard, key and offset."""
        return self.table.describe(self.addresses[number])

    def _verified(self, number: int, contents: list[bytes]) -> Contents:
        """`contents` if they are those of the sample; raises DamagedShard."""
        crc = 0
        orders = self._member_orders
        for content in contents if orders is None else [contents[column] for column in orders[number]]:
            crc = google_crc32c.extend(crc, content)
        if crc != self._crcs[number]:
            raise self._damage(number, sum(map(len, contents)), crc)
        if self._absent is None:
            return contents
        return [None if absent else content for absent, content in zip(self._absent[number], contents, strict=True)]

    def _damage(self, number: int, num_bytes: int, crc: int) -> DamagedShard:
        expected = sum(stops[number] - starts[number] for starts, stops in self._fields)
        if num_bytes != expected:
            what = f"{num_bytes} bytes, expected {expected}; the shard is cut"
        else:
            what = f"crc32c is {crc:08x}, expected {self._crcs[number]:08x}; the shard is damaged"
        return DamagedShard(f"{self.describe(number)}: {what}, fetch or rebuild it")

    def _located(self, number: int, error: ShardsetError) -> ShardsetError:
        """The same error with shard, key and offset in front."""
        return type(error)(f"{self.describe(number)}: {error}")


class SampleReader(Protocol):
    """Reads samples. One thread asks, in the order of the steps; any thread takes what it asked for."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes that storage has sent so far, without indexes."""
        ...

    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        """The samples of the slots of a step."""
        ...

    def read_single(self, addresses: SampleAddresses) -> PendingSamples:
        """Samples outside the order of the steps, each read by itself."""
        ...

    def within_budget(self) -> bool:
        """Whether there is memory for another step before one is taken."""
        ...

    def close(self) -> None:
        """Ends all threads and fails what has not been read."""
        ...
