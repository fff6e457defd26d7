"""The samples of a set or view as tables: where each is, and what the index of its shard says."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shardset.checksum import crc32c_of
from shardset.errors import REPAIR
from shardset.format.columns import StoredColumn
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.rows import members_of, numbers
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.checked import read_range
from shardset.storage.many import MAX_READ, SHARDS_AT_ONCE, coalesce, in_order

MAX_GAP = 1 << 19
"""Bytes between neighbours that are read with them: fewer take a bucket less than a request."""


def samples_of(
    loaded: LoadedSet,
    split: str,
    columns: Sequence[str] | None = None,
    shards: Sequence[int] | None = None,
) -> Iterator[pa.Table]:
    """The samples of each shard of a split, or of these shards; reads ahead from a bucket.

    A table has the columns of the index, or these of them, and before them `split`, `shard` (the
    path of its tar), `number` (of the shard), `position` and `id`. Of a view it has only the
    samples in it, with its labels. Raises DamagedShard or StorageError.
    """
    stored = loaded.manifest.split(split).shards
    wanted = shards_of(loaded, split) if shards is None else shards
    stored.load(np.array(wanted))  # at once, before the threads
    read = partial(samples_of_shard, loaded, split, columns)
    return in_order(loaded.storage.reads_at_once, wanted, read)


def samples_of_shard(
    loaded: LoadedSet, split: str, columns: Sequence[str] | None, number: int
) -> pa.Table:
    """The table of one shard; see `samples_of`."""
    shard, part = loaded.manifest.split(split).shards[number], loaded.part(split)
    index = read_index(loaded.storage, shard, columns)
    positions = np.arange(len(index))
    ids = shard.first_id + positions
    places = {
        "split": pa.repeat(split, len(index)),
        "shard": pa.repeat(shard.path, len(index)).dictionary_encode(),
        "number": np.full(len(index), number),
        "position": positions,
        "id": ids,
    }
    is_taken = part.selection.has(ids)
    samples = pa.table(places | dict(zip(index.column_names, index.columns, strict=True)))
    samples = samples.filter(pa.array(is_taken))
    if part.labels is None or "label" not in index.column_names:
        return samples
    labels = part.labels_of(ids[is_taken], numbers(samples, "label"))
    return samples.set_column(samples.column_names.index("label"), "label", pa.array(labels))


def shards_of(loaded: LoadedSet, split: str) -> list[int]:
    """The numbers of the shards that hold samples of a split of a set or view."""
    ends = np.cumsum([0, *loaded.manifest.split(split).shard_sizes])
    in_shards = np.diff(loaded.part(split).selection.num_before(ends))
    numbers: list[int] = np.flatnonzero(in_shards).tolist()
    return numbers


def contents_of(
    storage: Storage, shard: Shard, rows: pa.Table, advice: str = REPAIR
) -> Iterator[list[tuple[str, bytes]]]:
    """The fields of some samples of a shard, in the order of the tar; `rows` are ascending ones of
    its index.

    Reads neighbours together, and holds a few requests. Compares each sample with its CRC32C, and
    reads it a second time if they differ. Raises StorageError, or DamagedShard with `advice`.
    """
    samples, crcs = [*members_of(rows)], numbers(rows, "crc32c").tolist()
    ranges = [(members[0].start, members[-1].stop) for members in samples]

    def cut(run: slice, data: bytes) -> Iterator[list[tuple[str, bytes]]]:
        first = ranges[run.start][0]
        for members in samples[run]:
            yield [(field, data[start - first : stop - first]) for start, stop, field in members]

    def problem_of(run: slice, data: bytes) -> str:
        for number, fields in enumerate(cut(run, data), run.start):
            if crc32c_of(*(content for _, content in fields)) != crcs[number]:
                key, start = rows["key"][number], ranges[number][0]
                return f"sample {str(key)!r} at byte {start}: its crc32c differs from the index"
        return ""

    def read(run: slice) -> list[list[tuple[str, bytes]]]:
        data = read_range(
            storage, shard.path, ranges[run.start][0], max(stop for _, stop in ranges[run]),
            num_bytes=shard.num_bytes, crc32c=shard.crc32c, advice=advice,
            problem_of=partial(problem_of, run),
        )  # fmt: skip
        return [*cut(run, data)]

    at_once = min(storage.reads_at_once, SHARDS_AT_ONCE)
    runs = coalesce(ranges, max_gap=MAX_GAP, max_bytes=MAX_READ)
    return chain.from_iterable(in_order(at_once, runs, read))


def values_of(column: StoredColumn, number: int, positions: NDArray[np.int64]) -> Iterator[bytes]:
    """The contents of a column for samples at ascending positions of a shard; b"" for those without
    a value.

    Reads as `contents_of` does.
    """
    if number >= column.split.num_shards:
        return repeat(b"", len(positions))
    shard = column.split.shards[number]
    rows = read_index(column.storage, shard).take(positions)
    values = contents_of(column.storage, shard, rows, "write the column again")
    return (content for [(_, content)] in values)


def repeated(values: pa.ChunkedArray) -> pa.Array:
    """The values that occur more than once."""
    times = values.value_counts()
    return times.filter(pc.greater(times.field("counts"), 1)).field("values")
