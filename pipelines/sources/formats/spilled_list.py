"""A list in a temporary file: a listing of many millions of files does not fit the memory."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import msgspec

from shardset.storage.base import os_errors_as_storage_errors

ENTRIES_PER_WRITE = 1_000

Entry = Any
"""One entry, as JSON has it: a row as a list, a unit as a dict."""


class SpilledList:
    """Entries in the order in which they were added; may be iterated over more than once.

    Raises StorageError if the temporary folder can't hold them.
    """

    def __init__(self, entries_per_write: int = ENTRIES_PER_WRITE) -> None:
        self._entries_per_write = entries_per_write
        self._where = f"the temporary folder {tempfile.gettempdir()}"
        with os_errors_as_storage_errors(self._where):
            # closed, and so removed, with the list
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._stops = [0]
        self._last: list[Entry] = []
        self._num_entries = 0

    def add(self, entry: Entry) -> None:
        """Appends an entry."""
        self._last.append(entry)
        self._num_entries += 1
        if len(self._last) < self._entries_per_write:
            return
        data = msgspec.msgpack.encode(self._last)
        self._last.clear()
        self._stops.append(self._stops[-1] + len(data))
        with os_errors_as_storage_errors(self._where):
            while data:
                data = data[self._file.write(data) :]

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry]:
        for start, stop in pairwise(self._stops):
            with os_errors_as_storage_errors(self._where):
                data = os.pread(self._file.fileno(), stop - start, start)
            yield from msgspec.msgpack.decode(data)
        yield from self._last


def spilled_units(entries: Iterable[Entry], size: int) -> SpilledList:
    """Units of `size` entries, at least one unit."""
    units, remaining = SpilledList(1), iter(entries)
    while (some := list(islice(remaining, size))) or not units:
        units.add({"entries": some})
    return units
