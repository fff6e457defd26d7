"""The list of raw samples that a build rejected, `quarantine.jsonl`: a JSON object a line."""

import json
from collections.abc import Iterator
from typing import Any

from shardset.manifest import Manifest
from shardset.storage import Storage


def entry_of(line: bytes) -> dict[str, Any] | None:
    """One entry of the list; None if the line is no JSON object."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def find(storage: Storage, manifest: Manifest, name: str) -> Iterator[dict[str, Any]]:
    """The entries of that original name, or of a name that ends with `/` and it; raises StorageError."""
    lines = storage.read(manifest.quarantine.path).splitlines() if manifest.quarantine.count else []
    for line in lines:
        entry = entry_of(line)
        if entry and f"/{entry.get('name')}".endswith(f"/{name}"):
            yield entry
