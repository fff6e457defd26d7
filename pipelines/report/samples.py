"""Reads chosen samples of a shard set, neighbours together, and checks each against its index.

Names what can't be read and continues: the report of a damaged set says where the damage is.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from pipelines.check.problems import Problem, problem_of
from pipelines.plan.range_reads import coalesce
from pipelines.report.catalog import THREADS, Catalog, IndexedShard, key_at
from shardset.checksum import crc32c_of
from shardset.errors import StorageError, UndecodableImage
from shardset.format.images import is_image_field
from shardset.format.index import index_fields
from shardset.storage.base import Storage

T = TypeVar("T")

NO_PICTURE = ("no image", "no 8-bit form")
"""Reasons that are not damage: a sample without an image, pixels of 32 bits."""

MAX_GAP = 64 * 1024
MAX_READ = 8 * 2**20

Fields = dict[str, bytes]
"""The fields of one sample by name, in member order."""

_Ranges = list[tuple[int, int, str]]
"""(offset, bytes, field) of a sample's fields, in member order."""


def read_samples(
    storage: Storage, catalog: Catalog, samples: np.ndarray, use: Callable[[Fields], T], *, max_read: int = MAX_READ
) -> tuple[dict[int, T], list[Problem]]:
    """The results of `use` for the fields of each sample, and the samples that are damaged or do not decode.

    A sample that `use` rejects for one of NO_PICTURE is in neither. Calls `use` in threads.
    """
    samples, firsts = np.unique(samples), catalog.first_samples
    chosen = np.split(samples, np.searchsorted(samples, firsts[1:]))
    by_shard = zip(catalog.shards, firsts.tolist(), chosen, strict=False)
    tasks = [(shard, first, (ids - first).tolist()) for shard, first, ids in by_shard if len(ids)]
    results: dict[int, T] = {}
    damage: list[Problem] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for used, damaged in threads.map(lambda task: _read_rows(storage, use, max_read, *task), tasks):
            results |= used
            damage += damaged
    return results, damage


def image_of(fields: Fields) -> bytes:
    """The image among a sample's fields; raises UndecodableImage if there is none."""
    for name, content in fields.items():
        if is_image_field(name):
            return content
    raise UndecodableImage("no image")


def _read_rows(
    storage: Storage, use: Callable[[Fields], T], max_read: int, shard: IndexedShard, first: int, rows: list[int]
) -> tuple[dict[int, T], list[Problem]]:
    """See `read_samples`, for some rows of one shard; `first` is the number of its first sample."""
    path = shard.shard.path
    used: dict[int, T] = {}
    damage: list[Problem] = []
    try:
        for row, fields in _checked_fields(storage, shard, rows, max_read):
            where = f"{path}, sample {key_at(shard.index, row)}"
            if fields is None:
                sentence = "its CRC32C is not that of the index; rebuild the shard with --only-shards"
                damage.append(Problem(where, sentence))
                continue
            try:
                used[first + row] = use(fields)
            except UndecodableImage as error:
                if error.reason not in NO_PICTURE:
                    damage.append(Problem(where, f"can't be decoded: {error}; build again with --verify decode"))
    except StorageError as error:
        damage.append(problem_of(path, error))
    return used, damage


def _checked_fields(
    storage: Storage, shard: IndexedShard, rows: list[int], max_read: int
) -> Iterator[tuple[int, Fields | None]]:
    """(row, fields) of each sample; fields are None if two reads do not match their CRC32C."""
    ranges = {row: _ranges_of(shard.index, row) for row in rows}
    for row, fields in _read_fields(storage, shard.shard.path, ranges, max_read):
        if not _is_sound(fields, shard.index, row):
            [(_, fields)] = _read_fields(storage, shard.shard.path, {row: ranges[row]}, max_read)
        yield row, fields if _is_sound(fields, shard.index, row) else None


def _read_fields(
    storage: Storage, path: str, ranges: dict[int, _Ranges], max_read: int
) -> Iterator[tuple[int, Fields]]:
    rows = sorted(ranges, key=lambda row: ranges[row][0][0])
    spans = [(ranges[row][0][0], max(start + size for start, size, _ in ranges[row])) for row in rows]
    for together in coalesce(spans, max_gap=MAX_GAP, max_bytes=max_read):
        first = spans[together][0][0]
        data = storage.read(path, first, max(stop for _, stop in spans[together]))
        for row in rows[together]:
            yield row, {name: data[start - first : start - first + size] for start, size, name in ranges[row]}


def _ranges_of(index: np.ndarray, row: int) -> _Ranges:
    record = index[row]
    ranges = [(int(record[f".{name}"][0]), int(record[f".{name}"][1]), name) for name in index_fields(index)]
    return sorted(each for each in ranges if each[0])  # a field that the sample lacks starts at 0


def _is_sound(fields: Fields, index: np.ndarray, row: int) -> bool:
    return crc32c_of(*fields.values()) == int(index["crc32c"][row])
