"""Samples that a reader has requested; every reader returns them through here, verified.

No byte reaches a caller before its length and CRC32C have been compared with the index.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np

from shardset.errors import DamagedShard, ShardsetError
from shardset.order.epoch import Slots
from shardset.read.addresses import SampleAddresses, stops_of
from shardset.read.indexes import ShardTable

Contents = Sequence[bytes | None]
"""A sample's fields, in the split's order; None for a field that the sample does not have."""


class PendingSamples(ABC):
    """Samples that a reader has requested. Any thread may take them."""

    def __init__(self, table: ShardTable, addresses: SampleAddresses) -> None:
        self.table, self.addresses = table, addresses
        rows = addresses.rows
        offsets, sizes = rows["offset"], rows["num_bytes"]
        # Lists, because the loops below index them once per sample and field: several times faster
        # than arrays.
        self.starts = rows["start"].tolist()
        self.sizes = (stops_of(rows) - rows["start"]).tolist()
        self._fields: list[tuple[list[int], list[int]]] = list(
            zip(offsets.T.tolist(), (offsets + sizes).T.tolist(), strict=True)
        )
        self._crcs: list[int] = rows["crc32c"].tolist()
        self._absent: list[list[bool]] | None = (
            (offsets < 0).tolist() if (offsets < 0).any() else None
        )
        # The CRC32C covers the members in the order of the tar, which may differ from the split's
        # order of fields.
        in_order = (np.diff(offsets, axis=1) >= 0).all()
        self._member_orders = (
            None if in_order else np.argsort(offsets, axis=1, kind="stable").tolist()
        )

    @abstractmethod
    def contents(self, start: int, stop: int) -> Iterator[Contents]:
        """The verified fields of the samples [start, stop); take each sample once.

        The first bad sample raises DamagedShard or StorageError, which names shard, key and offset.
        """

    def take(self, number: int) -> Contents:
        """The verified fields of one sample; take each sample once."""
        return next(self.contents(number, number + 1))

    def describe(self, number: int) -> str:
        """The sample's shard, key and offset, for messages."""
        return self.table.describe(self.addresses[number])

    def _verified(self, number: int, contents: list[bytes]) -> Contents:
        """`contents`, with None for absent fields;
        raises DamagedShard unless the CRC32C matches.
        """
        crc = 0
        orders = self._member_orders
        for content in (
            contents if orders is None else [contents[column] for column in orders[number]]
        ):
            crc = google_crc32c.extend(crc, content)
        if crc != self._crcs[number]:
            raise self._damage(number, sum(map(len, contents)), crc)
        if self._absent is None:
            return contents
        return [
            None if absent else content
            for absent, content in zip(self._absent[number], contents, strict=True)
        ]

    def _damage(self, number: int, num_bytes: int, crc: int) -> DamagedShard:
        expected = sum(stops[number] - starts[number] for starts, stops in self._fields)
        if num_bytes != expected:
            what = f"{num_bytes} bytes, expected {expected}; the shard is cut"
        else:
            what = f"crc32c is {crc:08x}, expected {self._crcs[number]:08x}; the shard is damaged"
        return DamagedShard(f"{self.describe(number)}: {what}, fetch or rebuild it")

    def located(self, number: int, error: ShardsetError) -> ShardsetError:
        """The error, prefixed with shard, key and offset."""
        return type(error)(f"{self.describe(number)}: {error}")


class SampleReader(ABC):
    """Reads samples.

    One thread requests them, in the order of the steps; any thread may take them.
    """

    def prepare(self, epoch: int, slots: Slots) -> None:  # noqa: B027
        """Reads what the addresses of several steps need, before anything asks for these; arrays
        [steps, n].
        """

    @abstractmethod
    def read_step(self, epoch: int, slots: Slots, addresses: SampleAddresses) -> PendingSamples:
        """Requests the samples of a step's slots."""

    def within_budget(self) -> bool:
        """Whether memory is left for another step."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Stops all threads and cancels pending reads."""
