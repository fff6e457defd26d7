"""The samples of a shard set as arrays, from the indexes alone; chooses which ones a report decodes and shows."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.check.problems import Problem, problem_of
from shardset.errors import DamagedShard, StorageError
from shardset.format.images import is_image_field
from shardset.format.index import index_fields
from shardset.format.manifest import Manifest, Shard
from shardset.order.permutation import derive_key, hash64
from shardset.read.indexes import read_index
from shardset.storage.base import Storage

THREADS = 16

MAX_SAMPLES = 4_000_000
"""Limit of one catalog, to bound memory: of a larger set, only every second, third, ... shard is read."""


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """A shard and its index."""

    split: str
    number: int
    shard: Shard
    index: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The samples of all shards whose index could be read, numbered consecutively; arrays have one entry per sample.

    `num_left_out` counts the samples of the shards that were skipped because the set exceeds MAX_SAMPLES.
    """

    splits: list[str]
    shards: list[IndexedShard]
    num_left_out: int

    @cached_property
    def first_samples(self) -> np.ndarray:
        """The number of each shard's first sample, and the number of all samples."""
        return np.cumsum([0, *(len(shard.index) for shard in self.shards)])

    @cached_property
    def split(self) -> np.ndarray:
        """The position of the sample's split in `splits`."""
        numbers = [np.full(len(shard.index), self.splits.index(shard.split)) for shard in self.shards]
        return _joined(numbers, np.int32)

    @cached_property
    def label(self) -> np.ndarray:
        """The label; -1 where there is none."""
        return _joined([shard.index["label"] for shard in self.shards], np.int64)

    @cached_property
    def copy(self) -> np.ndarray:
        """0 for an original; the number of the repeat for a copy that the build made."""
        return _joined([shard.index["copy"] for shard in self.shards], np.int64)

    @cached_property
    def random(self) -> np.ndarray:
        """A random number for each sample; always the same for the same set."""
        ids = _joined([shard.shard.first_id + np.arange(len(shard.index)) for shard in self.shards], np.int64)
        keys: np.ndarray = hash64(derive_key(0, "report"), self.split, ids)
        return keys

    @cached_property
    def image_bytes(self) -> np.ndarray:
        """Bytes of the sample's image; 0 where there is none."""
        return _joined([_image_bytes(shard.index) for shard in self.shards], np.int64)

    @cached_property
    def image_crc32c(self) -> np.ndarray:
        """The CRC32C of the sample's image; 0 where there is none."""
        return _joined([shard.index["image_crc32c"] for shard in self.shards], np.uint32)

    def __len__(self) -> int:
        return int(self.first_samples[-1])

    def locate(self, sample: int) -> tuple[IndexedShard, int]:
        """The shard that holds a sample, and its position there."""
        number = int(np.searchsorted(self.first_samples, sample, side="right")) - 1
        return self.shards[number], sample - int(self.first_samples[number])

    def key(self, sample: int) -> str:
        """The sample's key."""
        shard, position = self.locate(sample)
        return key_at(shard.index, position)


def key_at(index: np.ndarray, position: int) -> str:
    """The key of one row of an index."""
    key: bytes = index["key"][position]
    return key.decode("ascii", "replace")


def open_catalog(
    storage: Storage, manifest: Manifest, *, max_samples: int = MAX_SAMPLES
) -> tuple[Catalog, list[Problem]]:
    """The catalog of a set, and the indexes that are damaged or missing."""
    shards = [(name, *numbered) for name, split in manifest.splits.items() for numbered in enumerate(split.shards)]
    num_samples = sum(split.num_samples for split in manifest.splits.values())
    step = max(1, -(-num_samples // max_samples))

    def read(split: str, number: int, shard: Shard) -> IndexedShard | Problem:
        try:
            return IndexedShard(split, number, shard, read_index(storage, shard))
        except (DamagedShard, StorageError) as error:
            return problem_of(shard.index.path, error)

    # By the number within the split, so that every split keeps some shards.
    wanted = [each for each in shards if each[1] % step == 0]
    with ThreadPoolExecutor(THREADS) as threads:
        outcomes = list(threads.map(lambda each: read(*each), wanted))
    catalog = Catalog(
        splits=list(manifest.splits),
        shards=[each for each in outcomes if isinstance(each, IndexedShard)],
        num_left_out=num_samples - sum(shard.num_samples for _, _, shard in wanted),
    )
    return catalog, [each for each in outcomes if isinstance(each, Problem)]


def choose_images(catalog: Catalog, max_images: int) -> np.ndarray:
    """At most `max_images` samples with images, ascending: an equal share of each split, or all that it has."""
    candidates = np.flatnonzero((catalog.image_bytes > 0) & (catalog.copy == 0))
    groups = [candidates[catalog.split[candidates] == number] for number in range(len(catalog.splits))]
    chosen, left = [], max_images
    # Small splits first: what they do not use of their share goes to the larger ones.
    for done, group in enumerate(sorted(groups, key=len)):
        share = min(len(group), left // (len(groups) - done))
        chosen.append(group[np.argsort(catalog.random[group], kind="stable")[:share]])
        left -= share
    return np.sort(_joined(chosen, np.int64))


def choose_of_each(catalog: Catalog, values: np.ndarray, max_each: int) -> dict[int, list[int]]:
    """Up to `max_each` samples with images for each distinct value, in random order; `values` has one per sample."""
    candidates = np.flatnonzero(catalog.image_bytes > 0)
    order = candidates[np.lexsort((catalog.random[candidates], values[candidates]))]
    distinct, firsts = np.unique(values[order], return_index=True)
    groups = np.split(order, firsts[1:]) if len(firsts) else []
    return {value: group[:max_each].tolist() for value, group in zip(distinct.tolist(), groups, strict=True)}


def _joined(columns: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *columns]).astype(dtype)


def _image_bytes(index: np.ndarray) -> np.ndarray:
    """Bytes of the image of each sample, which is its first one in the tar."""
    num_bytes, first = np.zeros(len(index), np.int64), np.full(len(index), np.iinfo(np.uint64).max)
    for name in filter(is_image_field, index_fields(index)):
        offset = index[f".{name}"]["offset"]
        is_first = (offset > 0) & (offset < first)
        num_bytes = np.where(is_first, index[f".{name}"]["num_bytes"].astype(np.int64), num_bytes)
        first = np.where(is_first, offset, first)
    return num_bytes
