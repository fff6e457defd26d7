"""Sections of a large tar, which workers read at the same time.

A tar does not list its members, so the begin of a section is searched for: from a cut on, the first block that looks
like a header. Content may have such blocks too, as that of a tar inside the tar. So what the search finds is a guess,
until the section before is read to its end and ends there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tarfile import TarInfo
from typing import BinaryIO, Generic, TypeVar

import numpy as np

from pipelines.sources.base import Border
from pipelines.sources.formats.tar import BLOCK, walk
from shardset.errors import SourceError
from shardset.format.naming import split_member

M = TypeVar("M")

SECTION_BYTES = 1 << 30
"""A tar of less than twice this size is one section."""
SEARCH_BYTES = 256 << 20
"""The search ends after so many bytes: it is inside of a member that is larger."""

_CHUNK_BYTES = 1 << 20
_MAGIC_AT, _MAGIC = 257, np.frombuffer(b"ustar", np.uint8)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a tar is cut: at multiples of `section_bytes`. A section begins after the sample with the second member
    whose header is at or after its cut."""

    num_bytes: int
    section_bytes: int

    @property
    def num_sections(self) -> int:
        """The number of sections; the last one is up to twice as large."""
        return max(1, self.num_bytes // self.section_bytes)

    def section_of(self, header: int) -> int:
        """The number of the section whose cut is the last one before the header."""
        return min(self.num_sections - 1, header // self.section_bytes)


class Groups(Generic[M]):
    """The samples of a section of a tar: each its key and its members. Once they are read, `ends` is the next border.

    `read` turns each header into a member at once, while the window of the file still holds what follows. `ends` is
    None at the end of the tar. Raises SourceError if the tar is damaged.
    """

    def __init__(
        self, file: BinaryIO, where: str, begins: Border, cuts: Cuts, read: Callable[[BinaryIO, TarInfo], M]
    ) -> None:
        self.ends: Border | None = None
        self._file, self._where, self._begins, self._cuts, self._read = file, where, begins, cuts, read

    def __iter__(self) -> Iterator[tuple[str, list[M]]]:
        pax_headers = dict(self._begins.pax_headers)
        group: list[M] = []
        key, section, last = "", self._begins.section, 0
        for member in walk(self._file, self._where, self._begins.offset, pax_headers=pax_headers):
            its_key = split_member(member.name)[0]
            if group and its_key != key:
                yield key, group
                if section > self._begins.section:
                    self.ends = Border(section, member.offset, dict(pax_headers))
                    return
                group = []
            key = its_key
            group.append(self._read(self._file, member))
            section, last = max(section, self._cuts.section_of(last)), member.offset_data - BLOCK
        if group:
            yield key, group


def find_border(file: BinaryIO, where: str, section: int, cuts: Cuts) -> Border | None:
    """Where a section seems to begin; None if no sample seems to begin there."""
    cut = section * cuts.section_bytes
    for header in _headers(file, cut, cut + min(cuts.section_bytes, SEARCH_BYTES)):
        try:
            return _border_after(file, where, section, header)
        except SourceError:  # not a header, or one inside of a member
            continue
    return None


def _border_after(file: BinaryIO, where: str, section: int, header: int) -> Border | None:
    """The end of the sample that contains the second member from a header on."""
    pax_headers: dict[str, str] = {}
    members = walk(file, where, header, pax_headers=pax_headers)
    keys = ((split_member(member.name)[0], member.offset) for member in members)
    next(keys, None)  # its name may be in a header before the cut
    second, _ = next(keys, ("", 0))
    return next((Border(section, offset, pax_headers) for key, offset in keys if key != second), None)


def _headers(file: BinaryIO, start: int, stop: int) -> Iterator[int]:
    """The offsets of the blocks in [start, stop) that look like headers."""
    for at in range(start, stop, _CHUNK_BYTES):
        file.seek(at)
        chunk = file.read(min(_CHUNK_BYTES, stop - at))
        blocks = np.frombuffer(chunk[: len(chunk) // BLOCK * BLOCK], np.uint8).reshape(-1, BLOCK)
        is_header = (blocks[:, _MAGIC_AT : _MAGIC_AT + len(_MAGIC)] == _MAGIC).all(axis=1)
        yield from (at + BLOCK * np.flatnonzero(is_header)).tolist()
