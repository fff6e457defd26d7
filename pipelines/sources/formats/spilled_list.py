"""A list in a temporary file: a listing of many millions of files does not fit the memory."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from shardset.storage.base import os_errors_as_storage_errors

READ_BYTES = 1 << 20

Entry = Any
"""One entry, as JSON has it: a row as a list, a unit as a dict."""


class SpilledList:
    """Entries in the order in which they were added; may be iterated over more than once.

    Raises StorageError if the temporary folder can't hold them.
    """

    def __init__(self) -> None:
        self._where = f"the temporary folder {tempfile.gettempdir()}"
        with os_errors_as_storage_errors(self._where):
            # closed, and so removed, with the list
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._num_entries = 0

    def add(self, entry: Entry) -> None:
        """Appends an entry."""
        line = msgspec.json.encode(entry) + b"\n"
        with os_errors_as_storage_errors(self._where):
            self._file.write(line)
        self._num_entries += 1

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry]:
        with os_errors_as_storage_errors(self._where):
            self._file.flush()
        position, rest = 0, b""
        while data := os.pread(self._file.fileno(), READ_BYTES, position):
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            yield from map(msgspec.json.decode, lines)


def spilled_units(entries: Iterable[Entry], size: int) -> SpilledList:
    """Units of `size` entries, at least one unit."""
    units, remaining = SpilledList(), iter(entries)
    while (some := list(islice(remaining, size))) or not units:
        units.add({"entries": some})
    return units
