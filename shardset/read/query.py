"""The samples of a set or view as tables: where each is, and what the index of its shard says."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset.format.manifest import LoadedSet
from shardset.format.rows import numbers
from shardset.read.indexes import read_index
from shardset.storage.many import in_order


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
    wanted = range(len(stored)) if shards is None else shards
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


def repeated(values: pa.ChunkedArray) -> pa.Array:
    """The values that occur more than once."""
    times = values.value_counts()
    return times.filter(pc.greater(times.field("counts"), 1)).field("values")
