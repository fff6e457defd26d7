"""Turns a tiny shard set into one of version 2, whose shards are described in pages of very few."""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Shard, Split
from shardset.format.shards import PageFile, ShardPages, count_page_bytes, page_bytes
from shardset.storage.base import Storage
from shardset.storage.checked import facts_of
from tests.makers.shardset import put


def to_pages(storage: Storage, *, shards_per_page: int = 2, shards_per_count_page: int = 1) -> Manifest:
    """Replaces the manifest of version 1 by one of version 2 with the same shards, and returns it as written."""
    listed = manifests.read(storage)
    sizes = shards_per_page, shards_per_count_page
    splits = {
        name: msgspec.structs.replace(split, shards=_paged(storage, name, split, *sizes))
        for name, split in listed.splits.items()
    }
    paged = manifests.seal(msgspec.structs.replace(listed, version=2, splits=splits))
    put(storage, naming.MANIFEST, manifests.to_json(paged))
    return paged


def put_page(storage: Storage, path: str, data: bytes) -> PageFile:
    """Writes a page, and returns what the manifest says about it."""
    put(storage, path, data)
    num_bytes, crc32c = facts_of(data)
    return PageFile(path=path, num_bytes=num_bytes, crc32c=crc32c, sha256=hashlib.sha256(data).hexdigest())


def _paged(storage: Storage, name: str, split: Split, per_page: int, per_count_page: int) -> ShardPages:
    pages = enumerate(map(page_bytes, _cut(split.shards, per_page)))
    counts = [[shard.class_counts for shard in some] for some in _cut(split.shards, per_count_page)]
    return ShardPages(
        folder=split.shards[0].path.rpartition("/")[0],
        shards_per_page=per_page,
        pages=[put_page(storage, naming.page_path("", name, number), data) for number, data in pages],
        class_counts=split.class_totals,
        shards_per_count_page=per_count_page,
        count_pages=[
            put_page(storage, naming.count_page_path("", name, number), count_page_bytes(np.array(some)))
            for number, some in enumerate(counts)
            if split.class_totals
        ],
    )


def _cut(shards: Sequence[Shard], size: int) -> Iterator[Sequence[Shard]]:
    return (shards[start : start + size] for start in range(0, len(shards), size))
