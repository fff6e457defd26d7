"""Checks the files with the checksums of index pages. A set may have all of them, or none."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipelines.check.problems import Problem
from shardset.errors import NotFound, StorageError
from shardset.format.index_pages import (
    ENTRY,
    FILE_HEADER_BYTES,
    IndexPages,
    file_bytes,
    file_names,
    first_entries,
    shards_per_file,
)
from shardset.format.manifest import Manifest, Split
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice

_RESTORE = "restore it, or remove all files of this kind: readers then read whole indexes"


def check(storage: Storage, manifest: Manifest) -> tuple[dict[str, bytes], list[Problem]]:
    """The checksums of each large index, by its path, if they make its CRC32C in the manifest; and all problems."""
    entries: dict[str, bytes] = {}
    problems: list[Problem] = []
    for name, split in manifest.splits.items():
        missing, found = [], 0
        for path, numbers, starts in _files(name, split):
            try:
                data = _read(storage, path, ENTRY.itemsize * starts.item(-1))
            except NotFound:
                missing.append(path)
                continue
            except StorageError as error:
                problems.append(Problem(path, f"can't be read: {error}"))
            else:
                problems += _add_entries(path, data, split, numbers, starts, entries)
            found += 1
        problems += [Problem(path, f"is missing, while others are there; {_RESTORE}") for path in missing if found]
    return entries, problems


def _files(name: str, split: Split) -> Iterator[tuple[str, range, NDArray[np.int64]]]:
    """The files of a split: path, shards, and where the entries of each shard begin in it, and the end."""
    firsts, size = first_entries(split), shards_per_file(split)
    for number, path in enumerate(file_names(name, split)):
        numbers = range(number * size, min((number + 1) * size, split.num_shards))
        starts = firsts[numbers.start : numbers.stop + 1] - firsts[numbers.start]
        if starts[-1]:
            yield path, numbers, starts


def _read(storage: Storage, path: str, num_bytes: int) -> bytes | None:
    """The entries of a file; None if two reads find something else."""

    def fits(data: bytes) -> bool:
        entries = data[FILE_HEADER_BYTES:]
        return len(entries) == num_bytes and data == file_bytes([entries])

    data = read_twice(lambda: storage.read(path), fits)
    return data[FILE_HEADER_BYTES:] if fits(data) else None


def _add_entries(
    path: str, data: bytes | None, split: Split, numbers: range, starts: NDArray[np.int64], entries: dict[str, bytes]
) -> Iterator[Problem]:
    if data is None:
        yield Problem(path, f"is not an array of {starts[-1]} checksums; {_RESTORE}")
        return
    for number, start, stop in zip(numbers, starts.tolist(), starts[1:].tolist(), strict=False):
        shard, own = split.shards[number], data[ENTRY.itemsize * start : ENTRY.itemsize * stop]
        if start == stop:
            continue
        if IndexPages.from_entries(own, shard.index, shard.num_samples, split.fields) is None:
            yield Problem(path, f"the checksums of {shard.index.path} do not make that of the manifest; {_RESTORE}")
        else:
            entries[shard.index.path] = own
