"""Reads back what a build stored, through the tar alone."""

import io
import json
from pathlib import Path
from typing import Any

from pyarrow import parquet

from shardset.format import manifest as manifests
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


def contents_of(folder: Path | str) -> dict[str, Any]:
    """A shard set without what depends on the place of its input: the generations of raw objects,
    and what follows from the bytes of indexes.
    """
    found: dict[str, Any] = files_of(folder)
    for name in [*found]:
        if name.endswith(".parquet"):
            rows = parquet.read_table(io.BytesIO(found[name]))
            found[name] = rows.drop_columns(["generation"]).to_pylist()
        elif name == naming.MANIFEST:
            found[name] = manifests.parse(found[name]).digest
        elif name.endswith("shards.npy"):
            del found[name]
    return found


def samples_of(folder: Path | str, manifest: Manifest, split: str) -> dict[str, dict[str, bytes]]:
    """key -> field -> content."""
    storage = open_storage(str(folder))
    found = {}
    for shard in manifest.split(split).shards:
        data = storage.read(shard.path)
        for group in sample_members(members(data, shard.path)):
            found[group[0].key] = {m.field: data[m.offset : m.offset + m.num_bytes] for m in group}
    return found


def quarantined(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of the quarantine list."""
    lines = open_storage(str(folder)).read(naming.quarantine_path()).splitlines()
    return [json.loads(line) for line in lines]
