"""Writes a shard, and the table and the totals of a split; whoever builds a set calls these and
publishes the manifest.

Nothing here knows a plan or a pipeline: samples arrive in the order in which they are stored.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardset.checksum import crc32c_of, crc32c_text
from shardset.format import naming, rows, table
from shardset.format.manifest import Split
from shardset.format.shards import (
    SHARD_DTYPE,
    TAR_FACTS,
    Group,
    IndexFile,
    Promise,
    Shard,
    StoredShards,
    shard_row,
)
from shardset.format.tar import StoredSample, TarBuilder
from shardset.storage.base import ObjectWriter

OpenWriter = Callable[[str], AbstractContextManager[ObjectWriter]]
"""Opens a new object of that name to be written."""


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

    `fields` are the split's. `first_id` of the shard is 0, because it follows from the
    shards before.
    """
    with open_tar(path, fields, writer) as (builder, add):
        for sample in samples:
            add(sample)
    index = builder.take_index()
    return write_index(path, builder, index, writer), rows.numbers(index, "label")


@contextmanager
def open_tar(
    path: str, fields: Sequence[str], writer: OpenWriter
) -> Iterator[tuple[TarBuilder, Callable[[StoredSample], None]]]:
    """A new tar: its builder, which has the rows for `write_index` at the end, and what adds a
    sample to both.
    """
    builder = TarBuilder(fields)
    with writer(path) as out:
        yield builder, lambda sample: out.write(builder.add(sample))
        out.write(builder.finish())


def write_index(
    path: str, builder: TarBuilder, index: pa.Table, writer: OpenWriter
) -> WrittenShard:
    """Writes the index of the tar that a builder has finished, and returns what both are."""
    data, index_path = rows.to_bytes(index), naming.index_path(path)
    footer = rows.footer_of(data)
    with writer(index_path) as out:
        out.write(data)
    shard = Shard(
        path=path,
        num_samples=len(index),
        num_bytes=builder.num_bytes,
        crc32c=builder.crc32c,
        sha256=builder.sha256,
        first_id=0,
        index=IndexFile(
            path=index_path,
            num_bytes=len(data),
            crc32c=crc32c_text(crc32c_of(data)),
            footer_bytes=len(footer),
            footer_crc32c=crc32c_text(crc32c_of(footer)),
        ),
    )
    return WrittenShard(shard, builder.fields, builder.num_content_bytes)


def digest_of_tars(listed: NDArray[np.void]) -> str:
    """The SHA-256 of what the rows of some shards say of their tars."""
    facts = b"".join(listed[name].tobytes() for name in TAR_FACTS)
    return hashlib.sha256(facts).hexdigest()


def class_counts(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """The samples of each class; those without a label, -1, are in none."""
    return np.bincount(labels[labels >= 0], minlength=num_classes)


def write_table(
    writer: OpenWriter,
    path: str,
    shards: Iterable[Shard],
    *,
    pattern: str,
    plan_digest: str,
    promises: Sequence[Promise],
    seed: int = 0,
) -> tuple[Group, NDArray[np.void]]:
    """Writes the table of some shards, and returns their group and the rows of the table.

    `pattern` names the tars, `path` the table. The promise `equal` is given if the sizes keep it.
    """
    listed = np.fromiter(map(shard_row, shards), SHARD_DTYPE)
    data, sizes = table.to_bytes(listed), listed["num_samples"].astype(np.int64)
    with writer(path) as out:
        out.write(data)
    is_equal = sizes[0] - sizes[-1] <= 1 and (np.diff(sizes) <= 0).all()
    kept: list[Promise] = ["equal"] if is_equal else []
    group = Group(
        shards=pattern,
        table=path,
        table_crc32c=crc32c_text(crc32c_of(data)),
        tars_sha256=digest_of_tars(listed),
        num_shards=len(listed),
        num_samples=int(sizes.sum()),
        seed=seed,
        plan_digest=plan_digest,
        promises=[*kept, *(promise for promise in promises if promise != "equal")],
    )
    return group, listed


def write_split(
    writer: OpenWriter,
    shards: Iterable[WrittenShard],
    *,
    pattern: str,
    table_path: str,
    plan_digest: str,
    promises: Sequence[Promise],
    seed: int = 0,
    class_totals: Sequence[int] = (),
    num_dropped: int = 0,
    num_repeats: int = 0,
) -> Split:
    """Writes the table of the shards of a split, and returns what the manifest says about them."""
    fields: dict[str, None] = {}
    content_bytes: list[int] = []

    def counted() -> Iterator[Shard]:
        for written in shards:
            fields.update(dict.fromkeys(written.fields))
            content_bytes.append(written.num_content_bytes)
            yield written.shard

    group, listed = write_table(
        writer,
        table_path,
        counted(),
        pattern=pattern,
        plan_digest=plan_digest,
        promises=promises,
        seed=seed,
    )
    return Split(
        num_samples=group.num_samples,
        num_source_samples=group.num_samples + num_dropped - num_repeats,
        num_dropped=num_dropped,
        num_repeats=num_repeats,
        num_content_bytes=sum(content_bytes),
        num_tar_bytes=int(listed["num_bytes"].sum()),
        max_tar_bytes=int(listed["num_bytes"].max()),
        fields=list(fields),
        class_totals=list(class_totals),
        shards=StoredShards([group]),
    )
