"""Checks the pages of a manifest of version 2. Opening the manifest has checked those that describe its shards."""

import hashlib
from collections.abc import Iterator

import numpy as np

from pipelines.check.problems import Problem, problem_of
from shardset.errors import ManifestError, StorageError
from shardset.format.manifest import Manifest
from shardset.format.shards import PagedShards
from shardset.storage.checked import read_object

_RESTORE = "restore or rebuild the shard set"


def check(manifest: Manifest) -> dict[str, list[Problem]]:
    """The problems of the pages of each split; nothing for splits without any."""
    shards = {name: split.shards for name, split in manifest.splits.items()}
    found = {name: [*_problems(name, each)] for name, each in shards.items() if isinstance(each, PagedShards)}
    return {name: problems for name, problems in found.items() if problems}


def _problems(split: str, shards: PagedShards) -> Iterator[Problem]:
    storage, pages = shards.storage, shards.pages
    for page in pages.pages:
        data = read_object(storage, page.path, page.num_bytes, page.crc32c, _RESTORE)
        if hashlib.sha256(data).hexdigest() != page.sha256:
            yield Problem(page.path, f"its SHA-256 is not that of the manifest; {_RESTORE}")
    totals, is_whole = np.zeros(shards.num_classes, np.int64), True
    for number, page in enumerate(pages.count_pages):
        try:
            totals += shards.count_page(number).sum(axis=0, dtype=np.int64)
        except (ManifestError, StorageError) as error:
            yield problem_of(page.path, error)
            is_whole = False
    if is_whole and totals.tolist() != pages.class_counts:
        yield Problem(f"split {split}", f"the class counts of its shards do not add up to its own; {_RESTORE}")
