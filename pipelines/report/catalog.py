"""The samples of a shard set as one table, from the indexes alone, and their images read by it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.check.problems import Problem, problem_of
from pipelines.report.alike import equal_images
from shardset.checksum import crc32c_of
from shardset.errors import REPAIR, DamagedShard, StorageError, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet
from shardset.format.rows import first_images, numbers, ranges_of
from shardset.order.permutation import derive_key, hash64
from shardset.program import count
from shardset.read.addresses import columns_of
from shardset.read.query import samples_of_shard
from shardset.storage.base import Storage
from shardset.storage.many import MAX_READ, OBJECTS_AT_ONCE, coalesce, in_order

T = TypeVar("T")

MAX_GAP = 64 * 1024

MAX_SAMPLES = 4_000_000
"""Limit of one catalog, to bound memory: of a larger set, only every second, third, ... shard is
read.
"""

_FACTS = {
    "split": pa.string(),
    "shard": pa.dictionary(pa.int32(), pa.string()),
    "id": pa.int64(),
    "key": pa.string(),
    "label": pa.int64(),
    "copy": pa.int32(),
    "image_crc32c": pa.uint32(),
}
_RANGES = dict.fromkeys(("image.offset", "image.bytes", "json.offset", "json.bytes"), pa.int64())
_SCHEMA = pa.schema(_FACTS | _RANGES | {"random": pa.uint64()})


class Catalog(NamedTuple):
    """The samples of all shards whose index could be read, and the problems of the other indexes.

    `row` is the number of a sample in the table, `random` orders the samples, always in the same
    way. `image` is the first image of a sample, `json` its annotations in a set of COCO's
    categories; their ranges of bytes are 0 where it has none. `num_left_out` are of shards beyond
    MAX_SAMPLES.
    """

    samples: pa.Table
    num_left_out: int
    problems: list[Problem]


def open_catalog(loaded: LoadedSet, *, max_samples: int = MAX_SAMPLES) -> Catalog:
    """The catalog of a set or view."""
    splits = loaded.manifest.splits
    num_samples = sum(split.num_samples for split in splits.values())
    step = max(1, -(-num_samples // max_samples))
    # By the number within the split, so that every split keeps some shards.
    wanted = [
        (name, number)
        for name, split in splits.items()
        for number in range(split.num_shards)[::step]
    ]
    num_listed = sum(splits[name].shards[number].num_samples for name, number in wanted)
    at_once = loaded.storage.reads_at_once
    outcomes = list(in_order(at_once, wanted, lambda each: _samples_of(loaded, *each)))
    tables = [each for each in outcomes if isinstance(each, pa.Table)]
    samples = pa.concat_tables([_SCHEMA.empty_table(), *tables]).unify_dictionaries()
    return Catalog(
        samples.combine_chunks().append_column("row", pa.array(np.arange(len(samples)))),
        num_samples - num_listed,
        [each for each in outcomes if isinstance(each, Problem)],
    )


def leaks(url: str) -> list[str]:
    """A sentence on the images that several splits of a set share; none if there are none."""
    samples = open_catalog(manifests.load(url)).samples
    shared = [group.samples[0] for group in equal_images(samples) if group.num_splits > 1]
    return [
        f"{count(len(shared), 'image')} stored in several splits, such as {samples['key'][first]},"
        " so evaluation meets what was trained on; a view with --drop-duplicates leaves out all but"
        " one of each"
        for first in shared[:1]
    ]


def _samples_of(loaded: LoadedSet, split: str, number: int) -> pa.Table | Problem:
    """The samples that the set or view has of a shard."""
    stored = loaded.manifest.split(split)
    columns = [*columns_of(stored), "key", "copy", "image_crc32c"]
    try:
        samples = samples_of_shard(loaded, split, columns, number)
    except (DamagedShard, StorageError) as error:
        return problem_of(stored.shards[number].index.path, error)
    ranges = [*first_images(samples), *np.zeros((2, len(samples)), np.int64)]
    if loaded.manifest.labels_by_category:
        ranges[2:] = ranges_of(samples, "json")
    number_of_split = [*loaded.manifest.splits].index(split)
    random = hash64(derive_key(0, "report"), number_of_split, numbers(samples, "id"))
    return pa.table([*(samples[name] for name in _FACTS), *ranges, random], _SCHEMA)


def rows_by(column: str, samples: pa.Table) -> dict[Any, list[int]]:
    """The `row` of samples for each value of a column, in the order of their `random`."""
    shuffled = samples.select([column, "row", "random"]).sort_by("random")
    groups = shuffled.group_by(column, use_threads=False).aggregate([("row", "list")])
    return dict(zip(*groups.sort_by(column).to_pydict().values(), strict=True))


def read_images(
    storage: Storage, samples: pa.Table, rows: Sequence[int], use: Callable[[bytes, bytes], T]
) -> tuple[dict[int, T], list[Problem]]:
    """The results of `use` for the images of ascending rows with their JSON, and what is damaged or
    does not decode.

    Calls `use` in threads.

    Neighbours are read together, and an image that differs from the index a second time.
    """
    chosen = samples.take(pa.array(rows, pa.int64())).to_pylist()
    groups = [list(group) for _, group in groupby(chosen, itemgetter("shard"))]
    results: dict[int, T] = {}
    damage: list[Problem] = []
    for used, damaged in in_order(OBJECTS_AT_ONCE, groups, partial(_read_shard, storage, use)):
        results |= used
        damage += damaged
    return results, damage


def _read_shard(
    storage: Storage, use: Callable[[bytes, bytes], T], rows: list[dict[str, Any]]
) -> tuple[dict[int, T], list[Problem]]:
    """See `read_images`, for samples of one shard."""
    results, problems = dict[int, T](), list[Problem]()
    images = [_range_of(row, "image") for row in rows]
    jsons = [_range_of(row, "json") for row in rows]
    ranges = [
        (start, max(stop, json_stop))
        for (start, stop), (_, json_stop) in zip(images, jsons, strict=True)
    ]
    for run in coalesce(ranges, max_gap=MAX_GAP, max_bytes=MAX_READ):
        path, first = rows[0]["shard"], ranges[run][0][0]
        try:
            data = storage.read(path, first, max(stop for _, stop in ranges[run]))
            for row, (start, stop), json in zip(rows[run], images[run], jsons[run], strict=True):
                image, where = data[start - first : stop - first], f"{path}, sample {row['key']}"
                if crc32c_of(image) != row["image_crc32c"]:
                    image = storage.read(path, start, stop)
                if crc32c_of(image) != row["image_crc32c"]:
                    text = f"its CRC32C differs from the index; {REPAIR}"
                    problems.append(Problem(where, text))
                    continue
                try:
                    annotations = data[max(0, json[0] - first) : max(0, json[1] - first)]
                    results[row["row"]] = use(image, annotations)
                except UndecodableImage as error:
                    text = f"can't be decoded: {error}; build again with --verify decode"
                    problems.append(Problem(where, text))
        except StorageError as error:
            return results, [*problems, problem_of(path, error)]
    return results, problems


def _range_of(row: dict[str, Any], field: str) -> tuple[int, int]:
    start = row[f"{field}.offset"]
    return start, start + row[f"{field}.bytes"]
