"""The list of raw samples that a build rejected, `quarantine.jsonl`: one JSON object per line."""

import json
from collections.abc import Iterator
from typing import Any

from shardset.format.manifest import Manifest, Quarantine
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice


def entry_of(line: bytes) -> dict[str, Any] | None:
    """One entry of the list; None if the line is not a JSON object."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def read(storage: Storage, listed: Quarantine) -> list[dict[str, Any] | None]:
    """All entries, None for a line that is not a JSON object; raises StorageError.

    Reads the list a second time if it has such a line, or is not as long as the manifest says.
    """
    return read_twice(
        lambda: [entry_of(line) for line in storage.read(listed.path).splitlines()],
        lambda entries: len(entries) == listed.count and None not in entries,
    )


def find(storage: Storage, manifest: Manifest, name: str) -> Iterator[dict[str, Any]]:
    """The entries with that original name, or with a name that ends with `/` and it; raises StorageError."""
    entries = read(storage, manifest.quarantine) if manifest.quarantine.count else []
    for entry in entries:
        if entry and f"/{entry.get('name')}".endswith(f"/{name}"):
            yield entry
