"""The list of raw samples that a build rejected, `quarantine.jsonl`: one JSON object per line."""

import json
from typing import Any

from pipelines.check.problems import Problem, problem_of
from shardset.errors import StorageError
from shardset.format.manifest import Quarantine
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


def check(storage: Storage, listed: Quarantine) -> tuple[list[dict[str, Any]], list[Problem]]:
    """The sound entries of the list, and what is wrong with it."""
    try:
        lines = read(storage, listed)
    except StorageError as error:
        return [], [problem_of(listed.path, error)]
    sentences = [f"line {number} is not a JSON object" for number, entry in enumerate(lines, 1) if entry is None]
    if len(lines) != listed.count:
        sentences.insert(0, f"lists {len(lines)} samples, the manifest says {listed.count}")
    problems = [Problem(listed.path, f"{sentence}; restore or rebuild it") for sentence in sentences]
    return [entry for entry in lines if entry is not None], problems
