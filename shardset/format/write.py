"""Writes a shard, and the table and the totals of a split; whoever builds a set calls these and
publishes the manifest.

Nothing here knows a plan or a pipeline: samples arrive in the order in which they are stored.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardset.checksum import crc32c_of, crc32c_text, extend_crc32c
from shardset.format import naming, table
from shardset.format.index import index_to_bytes
from shardset.format.manifest import Split
from shardset.format.shards import SHARD_DTYPE, Group, IndexFile, Promise, Shard, shard_row
from shardset.format.tar import StoredSample, TarBuilder
from shardset.storage.base import ObjectWriter

OpenWriter = Callable[[str], AbstractContextManager[ObjectWriter]]
"""Opens a new object of that name to be written."""

_ROWS_AT_ONCE = 4096


class WrittenShard(NamedTuple):
    """A shard with what its split adds up: `fields` in the order of the index, and the bytes of
    their contents.
    """

    shard: Shard
    fields: Sequence[str]
    num_content_bytes: int


def write_shard(
    path: str, samples: Iterable[StoredSample], fields: Sequence[str], writer: OpenWriter
) -> tuple[WrittenShard, NDArray[np.int64]]:
    """Writes the tar of some samples and its index, and returns what they are and the label of each
    sample.

    `fields` are those of the split. `first_id` of the shard is 0, because it follows from the
    shards before.
    """
    builder = TarBuilder(fields)
    with writer(path) as out:
        for sample in samples:
            out.write(builder.add(sample))
        out.write(builder.finish())
    rows = builder.take_index()
    return write_index(path, builder, rows, writer), rows["label"]


def write_index(
    path: str, builder: TarBuilder, rows: NDArray[np.void], writer: OpenWriter
) -> WrittenShard:
    """Writes the index of the tar that a builder has finished, and returns what both are."""
    index, index_path = index_to_bytes(rows), naming.index_path(path)
    with writer(index_path) as out:
        out.write(index)
    shard = Shard(
        path=path,
        num_samples=len(rows),
        num_bytes=builder.num_bytes,
        crc32c=builder.crc32c,
        sha256=builder.sha256,
        first_id=0,
        index=IndexFile(
            path=index_path, num_bytes=len(index), crc32c=crc32c_text(crc32c_of(index))
        ),
    )
    return WrittenShard(shard, builder.fields, builder.num_content_bytes)


def class_counts(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """The samples of each class; those without a label, -1, are in none."""
    return np.bincount(labels[labels >= 0], minlength=num_classes)


def write_split(
    writer: OpenWriter,
    shards: Iterable[WrittenShard],
    *,
    pattern: str,
    table_path: str,
    num_shards: int,
    class_totals: Sequence[int] = (),
    seed: int = 0,
    plan_digest: str,
    promises: Sequence[Promise],
    num_dropped: int = 0,
    num_repeats: int = 0,
) -> Split:
    """Writes the table of the shards of a split, and returns what the manifest says about them, in
    constant memory.

    `pattern` and `table_path` are the names of the tars and of the table.
    """
    num_content_bytes = num_tar_bytes = max_tar_bytes = max_index_bytes = 0
    fields: dict[str, None] = {}

    def counted() -> Iterator[Shard]:
        nonlocal num_content_bytes, num_tar_bytes, max_tar_bytes, max_index_bytes
        for shard, own_fields, num_bytes in shards:
            num_content_bytes += num_bytes
            num_tar_bytes += shard.num_bytes
            max_tar_bytes = max(max_tar_bytes, shard.num_bytes)
            max_index_bytes = max(max_index_bytes, shard.index.num_bytes)
            fields.update(dict.fromkeys(own_fields))
            yield shard

    facts = write_table(writer, counted(), table_path, num_shards, promises)
    groups: Any = [Group(shards=pattern, seed=seed, plan_digest=plan_digest, **facts)]
    num_samples = facts["num_samples"]
    return Split(
        num_samples=num_samples,
        num_source_samples=num_samples + num_dropped - num_repeats,
        num_dropped=num_dropped,
        num_repeats=num_repeats,
        num_content_bytes=num_content_bytes,
        num_tar_bytes=num_tar_bytes,
        max_tar_bytes=max_tar_bytes,
        max_index_bytes=max_index_bytes,
        fields=list(fields),
        class_totals=list(class_totals),
        shards=groups,
    )


def write_table(
    writer: OpenWriter,
    shards: Iterable[Shard],
    path: str,
    num_shards: int,
    promises: Sequence[Promise],
) -> dict[str, Any]:
    """Writes the table of the shards of a group, and returns what the group says about it, in
    constant memory.

    The promise `equal` is given where the sizes keep it.
    """
    num_done = num_samples = crc = 0
    ends: list[int] = []  # the sizes of the first and of the last shard so far
    is_equal, sha256 = True, hashlib.sha256()

    def put(data: bytes) -> None:
        nonlocal crc
        crc = extend_crc32c(crc, data)
        sha256.update(data)
        out.write(data)

    with writer(path) as out:
        put(table.header(SHARD_DTYPE, num_shards))
        waiting = iter(shards)
        while some := [*islice(waiting, _ROWS_AT_ONCE)]:
            rows = np.array(list(map(shard_row, some)), SHARD_DTYPE)
            put(table.sealed(rows, num_done).tobytes())
            sizes = [*ends, *rows["num_samples"].tolist()]
            ends = [sizes[0], sizes[-1]]
            is_equal &= sizes[0] - sizes[-1] <= 1 and sizes == sorted(sizes, reverse=True)
            num_done += len(rows)
            num_samples += int(rows["num_samples"].sum())
        assert num_done == num_shards, "each shard is in the table once"
    return {
        "table": path,
        "table_crc32c": crc32c_text(crc),
        "table_sha256": sha256.hexdigest(),
        "num_shards": num_shards,
        "num_samples": num_samples,
        "promises": ["equal"] * is_equal + [name for name in promises if name != "equal"],
    }
