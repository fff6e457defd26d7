"""Where samples are stored: what a reader keeps of a shard's index, one row of numbers per sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardset.errors import DamagedShard
from shardset.format.manifest import Shard

_START, _CRC, _LABEL, _FIELDS = range(4)
"""The columns of a row. From `_FIELDS` on: each field's offset from the start of the sample, then each field's size."""
_ABSENT = -1
"""The offset of a field that a sample does not have; its size is 0."""


class SampleAddress(NamedTuple):
    """Where one sample is stored: the bytes [start, stop) of a shard hold all its fields."""

    shard: int
    position: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The rows of a shard's samples in memory: 4-byte numbers where they suffice, keys only for who wants them.

    The CRC32C is kept as a signed number, so that it fits 4 bytes too.
    """

    rows: NDArray[np.signedinteger]
    keys: NDArray[np.bytes_] | None

    @classmethod
    def from_records(
        cls, records: NDArray[np.void], shard: Shard, fields: Sequence[str], url: str, *, with_keys: bool
    ) -> Self:
        """The rows of the stored index `url`; raises DamagedShard if it points outside its shard."""
        offsets = np.stack([records[f".{name}"]["offset"] for name in fields], axis=1).astype(np.int64)
        sizes = np.stack([records[f".{name}"]["num_bytes"] for name in fields], axis=1).astype(np.int64)
        starts = np.where(offsets > 0, offsets, shard.num_bytes).min(axis=1)
        stops = (offsets + sizes).max(axis=1)
        if (offsets < 0).any() or (sizes < 0).any() or (starts > stops).any() or stops.max() > shard.num_bytes:
            raise DamagedShard(f"{url}: it points outside shard {shard.path} of {shard.num_bytes} bytes; rebuild it")
        labels = records["label"]
        fits_int32 = shard.num_bytes < 1 << 31 and labels.min() >= -(1 << 31) and labels.max() < 1 << 31
        rows = np.empty((len(records), num_columns(len(fields))), dtype=np.int32 if fits_int32 else np.int64)
        rows[:, _START], rows[:, _CRC], rows[:, _LABEL] = starts, records["crc32c"].view(np.int32), labels
        rows[:, _FIELDS : _FIELDS + len(fields)] = np.where(offsets > 0, offsets - starts[:, None], _ABSENT)
        rows[:, _FIELDS + len(fields) :] = sizes
        return cls(rows, records["key"].copy() if with_keys else None)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return self.rows.nbytes + (0 if self.keys is None else self.keys.nbytes)

    @property
    def starts(self) -> NDArray[np.signedinteger]:
        """First byte of each sample."""
        return self.rows[:, _START]

    def start(self, position: int) -> int:
        """First byte of a sample."""
        return int(self.rows.item(position, _START))

    def stop(self, position: int) -> int:
        """End of a sample's last field."""
        return int(_stops(self.rows[position : position + 1])[0])


class SampleAddresses:
    """Where several samples are stored, their labels and, if asked for, their keys: a column each."""

    def __init__(
        self,
        shards: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: NDArray[np.signedinteger],
        keys: list[str] | None,
    ) -> None:
        self.shards, self.positions, self.rows, self.keys = shards, positions, rows, keys

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
        return SampleAddresses(self.shards[start:stop], self.positions[start:stop], self.rows[start:stop], keys)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels; -1 where a sample has none."""
        return self.rows[:, _LABEL].astype(np.int64)

    def label(self, number: int) -> int:
        """The label of one sample."""
        return int(self.rows.item(number, _LABEL))

    @property
    def starts(self) -> NDArray[np.signedinteger]:
        """First byte of each sample in its shard."""
        return self.rows[:, _START]

    @property
    def stops(self) -> NDArray[np.int64]:
        """End of each sample's last field in its shard."""
        return _stops(self.rows)

    @property
    def crcs(self) -> NDArray[np.int64]:
        """CRC32C of each sample, as an unsigned number."""
        return self.rows[:, _CRC].astype(np.int64) & 0xFFFFFFFF

    @property
    def field_offsets(self) -> NDArray[np.int64]:
        """[sample, field]: offset from the start of the sample, negative where it does not have the field."""
        return _fields(self.rows)[0]

    @property
    def field_sizes(self) -> NDArray[np.int64]:
        """[sample, field]: bytes."""
        return _fields(self.rows)[1]


def num_columns(num_fields: int) -> int:
    """Columns of the rows of a split."""
    return _FIELDS + 2 * num_fields


def _fields(rows: NDArray[np.signedinteger]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets, sizes = np.split(rows[:, _FIELDS:].astype(np.int64, copy=False), 2, axis=1)
    return offsets, sizes


def _stops(rows: NDArray[np.signedinteger]) -> NDArray[np.int64]:
    offsets, sizes = _fields(rows)
    ends: NDArray[np.int64] = rows[:, _START] + (offsets + sizes).max(axis=1)
    return ends
