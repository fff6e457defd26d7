"""Where samples are stored: what a reader keeps of a shard's index,
one row of numbers per sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard
from shardset.format.manifest import Shard

_START, _CRC, _LABEL, _FIELDS = range(4)
"""Columns of a row.

From `_FIELDS` on: the offset of each field from the start of the sample, then its size.
"""
_ABSENT = -1
"""Offset of a field that a sample does not have; its size is 0."""


class SampleAddress(NamedTuple):
    """Where one sample is stored: the bytes [start, stop) of a shard hold all of its fields."""

    shard: int
    position: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class _SampleRows:
    """Some rows: 4-byte numbers where they suffice. CRC32Cs are signed, so that they fit too."""

    rows: NDArray[np.signedinteger]

    @property
    def starts(self) -> NDArray[np.signedinteger]:
        """The first byte of each sample in its shard."""
        return self.rows[:, _START]

    @property
    def stops(self) -> NDArray[np.int64]:
        """The end of each sample's last field in its shard."""
        offsets, sizes = self.fields
        ends: NDArray[np.int64] = self.starts + (offsets + sizes).max(axis=1)
        return ends

    @property
    def fields(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets from the start of the sample, negative for absent fields, and sizes: each
        [sample, field].
        """
        numbers = self.rows[:, _FIELDS:].astype(np.int64, copy=False)
        num_fields = numbers.shape[1] // 2
        return numbers[:, :num_fields], numbers[:, num_fields:]


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex(_SampleRows):
    """The rows of all samples of a shard, and their keys on request."""

    keys: NDArray[np.bytes_] | None

    @classmethod
    def from_records(
        cls,
        records: NDArray[np.void],
        shard: Shard,
        fields: Sequence[str],
        folder: str,
        *,
        with_keys: bool,
    ) -> Self:
        """The rows of an index; raises DamagedShard if it points outside its shard.

        `folder` is for the message.
        """
        # The header of a tar member comes before its content, so no field starts at 0: that marks
        # an absent one.
        offsets = np.stack([records[f".{name}"]["offset"] for name in fields], axis=1).astype(
            np.int64
        )
        sizes = np.stack([records[f".{name}"]["num_bytes"] for name in fields], axis=1).astype(
            np.int64
        )
        starts = np.where(offsets > 0, offsets, shard.num_bytes).min(axis=1)
        stops = (offsets + sizes).max(axis=1)
        if (
            (offsets < 0).any()
            or (sizes < 0).any()
            or (starts > stops).any()
            or stops.max() > shard.num_bytes
        ):
            raise DamagedShard(
                f"{folder}/{shard.index.path}: points outside shard {shard.path} of"
                f" {shard.num_bytes} bytes; rebuild it"
            )
        labels = records["label"]
        fits_int32 = (
            shard.num_bytes < 1 << 31 and labels.min() >= -(1 << 31) and labels.max() < 1 << 31
        )
        rows = np.empty(
            (len(records), num_columns(len(fields))), dtype=np.int32 if fits_int32 else np.int64
        )
        rows[:, _START], rows[:, _CRC], rows[:, _LABEL] = (
            starts,
            records["crc32c"].view(np.int32),
            labels,
        )
        rows[:, _FIELDS : _FIELDS + len(fields)] = np.where(
            offsets > 0, offsets - starts[:, None], _ABSENT
        )
        rows[:, _FIELDS + len(fields) :] = sizes
        return cls(rows, records["key"].copy() if with_keys else None)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return self.rows.nbytes + (0 if self.keys is None else self.keys.nbytes)

    def extended(self, other: Self) -> Self:
        """These rows, then those of another part of the same shard."""
        keys = (
            None
            if self.keys is None or other.keys is None
            else np.concatenate([self.keys, other.keys])
        )
        return type(self)(np.concatenate([self.rows, other.rows]), keys)

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) that hold the samples [first, last)."""
        return self.rows.item(first, _START), _SampleRows(self.rows[last - 1 : last]).stops.item()


@dataclass(frozen=True, slots=True, eq=False)
class SampleAddresses(_SampleRows):
    """Where several samples are stored, their labels and, on request, their keys: a column each."""

    shards: NDArray[np.int64]
    positions: NDArray[np.int64]
    keys: list[str] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> SampleAddress:
        return next(iter(self.part(number, number + 1)))

    def __iter__(self) -> Iterator[SampleAddress]:
        columns = self.shards, self.positions, self.starts, self.stops
        return map(SampleAddress, *(column.tolist() for column in columns))

    def part(self, start: int, stop: int) -> "SampleAddresses":
        """The samples [start, stop) of these."""
        keys = None if self.keys is None else self.keys[start:stop]
        return SampleAddresses(
            self.rows[start:stop], self.shards[start:stop], self.positions[start:stop], keys
        )

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels; -1 where a sample has none."""
        return self.rows[:, _LABEL].astype(np.int64)

    def label(self, number: int) -> int:
        """The label of one sample."""
        return int(self.rows.item(number, _LABEL))

    @property
    def crcs(self) -> NDArray[np.int64]:
        """The CRC32C of each sample, unsigned."""
        return self.rows[:, _CRC].astype(np.int64) & 0xFFFFFFFF


def num_columns(num_fields: int) -> int:
    """The width of the rows of a split."""
    return _FIELDS + 2 * num_fields
