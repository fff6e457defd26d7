"""The problems of a file of a shard set, and the list of raw samples that a build rejected,
`quarantine.jsonl`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardset.errors import REPAIR, NotFound, StorageError, printable
from shardset.format.manifest import Quarantine
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `where` is a path relative to the manifest, with the sample's key
    where there is one.
    """

    where: str
    sentence: str


def lines_of(problems: Sequence[Problem], most: int, advice: str = "") -> list[str]:
    """A line for each of the first `most` problems, then one on the others, with `advice`."""
    lines = [printable(f"{problem.where}: {problem.sentence}") for problem in problems[:most]]
    more = len(problems) - len(lines)
    return [*lines, f"... and {more:,} more{advice}"] if more else lines


def problem_of(path: str, error: Exception) -> Problem:
    """The problem of a file that is missing, unreadable or damaged; the sentence leaves out the
    file's name.
    """
    if isinstance(error, NotFound):
        return Problem(path, f"is missing; {REPAIR}")
    sentence = str(error).partition(f"{path}: ")[2] or str(error)
    return Problem(
        path, f"can't be read: {sentence}" if isinstance(error, StorageError) else sentence
    )


def read_quarantine(storage: Storage, listed: Quarantine) -> list[dict[str, Any] | None]:
    """All entries of the list, None for a line that is not a JSON object; raises StorageError.

    Reads the list a second time if it has such a line, or is not as long as the manifest says.
    """
    return read_twice(
        lambda: [quarantine_entry(line) for line in storage.read(listed.path).splitlines()],
        lambda entries: len(entries) == listed.count and None not in entries,
    )


def quarantine_entry(line: bytes) -> dict[str, Any] | None:
    """One entry of the list; None if the line is not a JSON object."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def check_quarantine(
    storage: Storage, listed: Quarantine
) -> tuple[list[dict[str, Any]], list[Problem]]:
    """The sound entries of the list, and what is wrong with it."""
    try:
        lines = read_quarantine(storage, listed)
    except StorageError as error:
        return [], [problem_of(listed.path, error)]
    sentences = [
        f"line {number} is not a JSON object"
        for number, entry in enumerate(lines, 1)
        if entry is None
    ]
    if len(lines) != listed.count:
        sentences.insert(0, f"lists {len(lines)} samples, the manifest says {listed.count}")
    problems = [
        Problem(listed.path, f"{sentence}; restore or rebuild it") for sentence in sentences
    ]
    return [entry for entry in lines if entry is not None], problems
