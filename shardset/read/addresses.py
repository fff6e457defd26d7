"""Where samples are stored: what a reader keeps of a shard's index, one row for each sample."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardset.errors import DamagedShard
from shardset.format.manifest import Shard, Split
from shardset.format.rows import STREAMED, numbers, ranges_of

Rows = NDArray[np.void]

Positions = NDArray[np.int64]

_ABSENT = -1
"""Offset of a field that a sample does not have; its size is 0."""


class SampleAddress(NamedTuple):
    """Where one sample is stored: the bytes [start, stop) of a shard hold all of its fields."""

    shard: int
    position: int
    start: int
    stop: int


def row_dtype(split: Split) -> np.dtype[np.void]:
    """The columns of a row: `start` of the sample in its shard, its `crc32c` and `label`, and for
    each field of the split its `offset` from that start and its `num_bytes`.
    """
    number = np.int32 if split.max_tar_bytes < 1 << 31 else np.int64
    per_field = (len(split.fields),)
    return np.dtype(
        [
            ("start", number),
            ("crc32c", np.uint32),
            ("label", np.int32),
            ("offset", number, per_field),
            ("num_bytes", number, per_field),
        ]
    )


def columns_of(split: Split) -> list[str]:
    """The columns of an index from which `rows_of_index` makes rows."""
    ranges = [f"{field}.{part}" for field in split.fields for part in ("offset", "bytes")]
    return [*STREAMED, *ranges]


def rows_of_index(index: pa.Table, shard: Shard, split: Split, folder: str) -> Rows:
    """The rows of the index of a shard; raises DamagedShard if it points outside its shard.

    `folder` is for the message. A shard from before a field came to the split lacks its columns.
    """
    # The header of a tar member comes before its content, so no field starts at 0: that marks an
    # absent one.
    offsets, sizes = np.zeros((2, len(index), len(split.fields)), np.int64)
    for at, name in enumerate(split.fields):
        offsets[:, at], sizes[:, at] = ranges_of(index, name)
    starts = np.where(offsets > 0, offsets, shard.num_bytes).min(axis=1)
    stops = (offsets + sizes).max(axis=1)
    is_negative = (offsets < 0).any() or (sizes < 0).any()
    end = min(shard.num_bytes, split.max_tar_bytes)
    if is_negative or (starts > stops).any() or stops.max() > end:
        raise DamagedShard(
            f"{folder}/{shard.index.path}: points outside shard {shard.path} of"
            f" {shard.num_bytes} bytes; rebuild it"
        )
    rows = np.empty(len(index), row_dtype(split))
    rows["start"] = starts
    rows["crc32c"], rows["label"] = numbers(index, "crc32c"), numbers(index, "label")
    rows["offset"] = np.where(offsets > 0, offsets - starts[:, None], _ABSENT)
    rows["num_bytes"] = sizes
    return rows


def stops_of(rows: Rows) -> NDArray[np.int64]:
    """The end of each sample's last field in its shard."""
    ends: NDArray[np.int64] = rows["start"] + (rows["offset"] + rows["num_bytes"]).max(axis=1)
    return ends


@dataclass(frozen=True, slots=True, eq=False)
class SampleAddresses:
    """Where several samples are stored, and on request their keys."""

    rows: Rows
    shards: NDArray[np.int64]
    positions: Positions
    keys: list[str] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> SampleAddress:
        return next(iter(self.part(number, number + 1)))

    def __iter__(self) -> Iterator[SampleAddress]:
        columns = self.shards, self.positions, self.rows["start"], stops_of(self.rows)
        return map(SampleAddress, *(column.tolist() for column in columns))

    def part(self, start: int, stop: int) -> "SampleAddresses":
        """The samples [start, stop) of these."""
        part = slice(start, stop)
        keys = None if self.keys is None else self.keys[part]
        return SampleAddresses(self.rows[part], self.shards[part], self.positions[part], keys)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels; -1 where a sample has none."""
        return self.rows["label"].astype(np.int64)
