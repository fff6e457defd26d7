"""The samples of a shard set as one table, from the indexes alone, and their images read by it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipelines.check.problems import Problem, problem_of
from pipelines.plan.range_reads import coalesce
from pipelines.report.alike import equal_images
from shardset.checksum import crc32c_of
from shardset.errors import REPAIR, DamagedShard, StorageError, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.rows import first_images, keys_of, numbers, ranges_of
from shardset.order.permutation import derive_key, hash64
from shardset.program import count
from shardset.read.addresses import columns_of
from shardset.read.indexes import read_index
from shardset.storage.base import Storage

T = TypeVar("T")

THREADS = 16
MAX_GAP = 64 * 1024
MAX_READ = 8 * 2**20

MAX_SAMPLES = 4_000_000
"""Limit of one catalog, to bound memory: of a larger set, only every second, third, ... shard is
read.
"""

_ROW = np.dtype(
    [
        ("shard", "i4"),
        ("position", "i4"),
        ("split", "i4"),
        ("label", "i8"),
        ("copy", "i4"),
        ("random", "u8"),
        ("image_start", "i8"),
        ("image_bytes", "i8"),
        ("image_crc32c", "u4"),
        ("json", [("offset", "i8"), ("num_bytes", "i8")]),
    ]
)
"""One sample.

`shard` and `split` are positions in the catalog's lists; `copy` is 0 for an original, else the
number of the repeat; `random` orders samples, always in the same way; the image is the first one of
the sample in its tar, and the JSON follows it in a set of COCO's categories.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The samples of all shards whose index could be read.

    `num_left_out` are of shards beyond MAX_SAMPLES.
    """

    splits: list[str]
    shards: list[Shard]
    keys: list[np.ndarray]
    rows: np.ndarray
    num_left_out: int

    def key(self, sample: int) -> str:
        """The key of a row."""
        row = self.rows[sample]
        key: bytes = self.keys[row["shard"]][row["position"]]
        return key.decode("ascii", "replace")

    def path(self, sample: int) -> str:
        """The path of the shard that holds a row."""
        return self.shards[int(self.rows["shard"][sample])].path

    def originals(self) -> np.ndarray:
        """The rows that have an image and are not repeats that the build made."""
        return np.flatnonzero((self.rows["image_bytes"] > 0) & (self.rows["copy"] == 0))


def open_catalog(
    loaded: LoadedSet, *, max_samples: int = MAX_SAMPLES
) -> tuple[Catalog, list[Problem]]:
    """The catalog of a set or view, and the indexes that are damaged or missing."""
    manifest = loaded.manifest
    num_samples = sum(split.num_samples for split in manifest.splits.values())
    step = max(1, -(-num_samples // max_samples))
    # By the number within the split, so that every split keeps some shards.
    wanted = [
        (number, name, shard)
        for number, (name, split) in enumerate(manifest.splits.items())
        for shard in split.shards[::step]
    ]
    with ThreadPoolExecutor(THREADS) as threads:
        outcomes = list(threads.map(lambda each: _rows_of(loaded, *each), wanted))
    found = [each for each in outcomes if not isinstance(each, Problem)]
    for number, (_, _, rows) in enumerate(found):
        rows["shard"] = number
    catalog = Catalog(
        splits=list(manifest.splits),
        shards=[shard for shard, _, _ in found],
        keys=[keys for _, keys, _ in found],
        rows=np.concatenate([np.zeros(0, _ROW), *(rows for _, _, rows in found)]),
        num_left_out=num_samples - sum(shard.num_samples for *_, shard in wanted),
    )
    return catalog, [each for each in outcomes if isinstance(each, Problem)]


def leaks(url: str) -> list[str]:
    """A sentence on the images that several splits of a set share; none if there are none."""
    catalog, _ = open_catalog(manifests.load(url))
    groups = equal_images(catalog.rows, catalog.originals())
    shared = [catalog.key(one.samples[0]) for one in groups if one.num_splits > 1]
    return [
        f"{count(len(shared), 'image')} stored in several splits, such as {name}, so evaluation"
        " meets what was trained on; a view with --drop-duplicates leaves out all but one of each"
        for name in shared[:1]
    ]


def _rows_of(
    loaded: LoadedSet, number: int, split: str, shard: Shard
) -> tuple[Shard, np.ndarray, np.ndarray] | Problem:
    """A shard of the split of that number, its keys, and the rows of those samples that the set or
    view has; the `shard` of the rows is still missing.
    """
    try:
        fields = columns_of(loaded.manifest.split(split))
        index = read_index(loaded.storage, shard, [*fields, "key", "copy", "image_crc32c"])
    except (DamagedShard, StorageError) as error:
        return problem_of(shard.index.path, error)
    part, ids = loaded.part(split), shard.first_id + np.arange(len(index))
    rows, is_taken = np.zeros(len(index), _ROW), part.selection.has(ids)
    rows["split"], rows["position"] = number, np.arange(len(index))
    for name in ("label", "copy", "image_crc32c"):
        rows[name] = numbers(index, name)
    rows["random"] = hash64(derive_key(0, "report"), rows["split"], ids)
    rows["image_start"], rows["image_bytes"] = first_images(index)
    if loaded.manifest.labels_by_category:
        starts, sizes = ranges_of(index, "json")
        is_after = starts > rows["image_start"]
        rows["json"]["offset"], rows["json"]["num_bytes"] = starts * is_after, sizes * is_after
    rows = rows[is_taken]
    rows["label"] = part.labels_of(ids[is_taken], rows["label"])
    return shard, keys_of(index), rows


def ranks(values: np.ndarray) -> np.ndarray:
    """The number of each of some sorted values among its equals."""
    _, firsts, counts = np.unique(values, return_index=True, return_counts=True)
    return np.arange(len(values)) - np.repeat(firsts, counts)


def read_images(
    storage: Storage, catalog: Catalog, samples: np.ndarray, use: Callable[[bytes, bytes], T]
) -> tuple[dict[int, T], list[Problem]]:
    """The results of `use` for the images of ascending rows with their JSON, and what is damaged or
    does not decode.

    Calls `use` in threads.

    Neighbours are read together, and an image that differs from the index a second time.
    """
    ends = np.flatnonzero(np.diff(catalog.rows["shard"][samples])) + 1
    by_shard = [group.tolist() for group in np.split(samples, ends) if len(group)]
    results: dict[int, T] = {}
    damage: list[Problem] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for used, damaged in threads.map(
            lambda group: _read_shard(storage, catalog, group, use), by_shard
        ):
            results |= used
            damage += damaged
    return results, damage


def _read_shard(
    storage: Storage, catalog: Catalog, samples: list[int], use: Callable[[bytes, bytes], T]
) -> tuple[dict[int, T], list[Problem]]:
    """See `read_images`, for rows of one shard."""
    rows, path = catalog.rows[samples], catalog.path(samples[0])
    starts, checksums = rows["image_start"].tolist(), rows["image_crc32c"].tolist()
    sizes, beside = rows["image_bytes"].tolist(), rows["json"].tolist()
    ranges = [
        (start, max(start + size, sum(json)))
        for start, size, json in zip(starts, sizes, beside, strict=True)
    ]
    results: dict[int, T] = {}
    problems: list[Problem] = []
    try:
        for together in coalesce(ranges, max_gap=MAX_GAP, max_bytes=MAX_READ):
            first = starts[together][0]
            data = storage.read(path, first, max(stop for _, stop in ranges[together]))
            for number in range(len(samples))[together]:
                start, (offset, num_bytes) = starts[number], beside[number]
                stop = start + sizes[number]
                image = data[start - first : stop - first]
                if crc32c_of(image) != checksums[number]:
                    image = storage.read(path, start, stop)
                where = f"{path}, sample {catalog.key(samples[number])}"
                if crc32c_of(image) != checksums[number]:
                    text = f"its CRC32C differs from the index; {REPAIR}"
                    problems.append(Problem(where, text))
                    continue
                try:
                    results[samples[number]] = use(
                        image, data[offset - first : offset - first + num_bytes]
                    )
                except UndecodableImage as error:
                    text = f"can't be decoded: {error}; build again with --verify decode"
                    problems.append(Problem(where, text))
    except StorageError as error:
        problems.append(problem_of(path, error))
    return results, problems
