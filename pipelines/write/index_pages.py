"""Writes the checksums of the pages of large indexes, from the records of their shards."""

from collections.abc import Iterable, Iterator

from pipelines.plan.files import PlanFiles
from pipelines.plan.records import ShardRecord
from shardset.format import naming
from shardset.format.index_pages import LARGE_BYTES, file_bytes
from shardset.format.shards import SHARDS_PER_PAGE


def writing_index_pages(
    files: PlanFiles, records: Iterable[ShardRecord], shards_per_file: int = SHARDS_PER_PAGE
) -> Iterator[ShardRecord]:
    """The records of consecutive shards of a split; writes a file of checksums after each `shards_per_file` of them."""
    together: list[ShardRecord] = []
    for record in records:
        together.append(record)
        yield record
        if len(together) == shards_per_file:
            _write(files, together, shards_per_file)
            together.clear()
    if together:
        _write(files, together, shards_per_file)


def _write(files: PlanFiles, records: list[ShardRecord], shards_per_file: int) -> None:
    large = [record for record in records if record.shard.index.num_bytes > LARGE_BYTES]
    # An earlier version, whose build this one finishes, kept no checksums: without them indexes are read whole.
    if not large or not all(record.index_pages for record in large):
        return
    path = naming.index_pages_path(records[0].shard.path, records[0].number // shards_per_file)
    with files.writer(path) as out:
        out.write(file_bytes([record.index_pages for record in large]))
