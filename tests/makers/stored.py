"""Reads back what a build stored, through the tar alone."""

from pathlib import Path

from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.format.tar import members, sample_members
from shardset.storage.open import open_storage


def files_of(folder: Path | str) -> dict[str, bytes]:
    """Everything of a shard set; the plan and the page about it are no part of it."""
    storage = open_storage(str(folder))
    names = [
        found.name for found in storage.list() if not found.name.startswith(naming.PLAN_FOLDER)
    ]
    return {name: storage.read(name) for name in names if name != naming.REPORT}


def samples_of(folder: Path | str, manifest: Manifest, split: str) -> dict[str, dict[str, bytes]]:
    """key -> field -> content."""
    storage = open_storage(str(folder))
    found = {}
    for shard in manifest.split(split).shards:
        data = storage.read(shard.path)
        for group in sample_members(members(data, shard.path)):
            found[group[0].key] = {m.field: data[m.offset : m.offset + m.num_bytes] for m in group}
    return found
