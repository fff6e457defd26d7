"""The index of a tar that others made, from one pass over its bytes."""

import hashlib
import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from tarfile import TarInfo
from typing import Any, BinaryIO

from pipelines.sources.base import Extent
from pipelines.sources.formats.range_file import Ranges
from pipelines.sources.formats.tar import BLOCK, header_window, reject_reason, walk
from pipelines.sources.webdataset import INLINE_FIELDS, MAX_JSON_BYTES, TarGroupMember, label_of, why_no_sample
from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import SourceError
from shardset.format.images import is_image_field
from shardset.format.naming import split_member
from shardset.storage.base import Stat, Storage

MAX_NAME_BYTES = 1024
"""The key column of an index is as wide as its longest key."""

_ODD_NAME = re.compile(r"[^ -~]|\\|^__[^/]*__(/|$)")
"""Not ASCII; a byte that is no UTF-8, as the walk spells it; or a name that webdataset skips."""
_PIECE = 1 << 20
"""What stays in the processor's caches while it is hashed; a bucket is read in larger windows."""


@dataclass(slots=True)
class IndexedTar:
    """What a pass over a tar found; a `FinishedTar` of `shardset.format.write`.

    `rows` are those of an index, whose `source` counts the samples of this tar. `rejected` are members that are no
    sample, by name and reason.
    """

    num_bytes: int
    fields: list[str] = field(default_factory=list)
    num_content_bytes: int = 0
    crc32c: str = ""
    sha256: str = ""
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)


def index_stored(storage: Storage, tar: Stat) -> IndexedTar:
    """Reads a stored tar once, front to back; SourceError if it is damaged or its bytes are not those of `tar`."""
    where = f"{storage.url}/{tar.name}"
    with ThreadPoolExecutor(1) as thread:
        ranges = _HashedRanges(storage, tar, thread)
        indexed = index_tar(io.BufferedReader(ranges, max(_PIECE, header_window(storage))), tar.num_bytes, where)
    indexed.crc32c, indexed.sha256 = crc32c_text(ranges.crc), ranges.sha.hexdigest()
    if tar.crc32c not in (None, indexed.crc32c):
        raise SourceError(f"{where}: its crc32c is {indexed.crc32c}, the bucket says {tar.crc32c}; check the network")
    return indexed


def index_tar(file: BinaryIO, num_bytes: int, where: str) -> IndexedTar:
    """The index of a tar of `num_bytes`; each sample is what webdataset makes of it, or rejected."""
    indexed, seen = IndexedTar(num_bytes), set[str]()
    named = ((*split_member(info.name), info) for info in walk(file, where, 0, num_bytes))
    for key, group in groupby(named, itemgetter(0)):
        members, crc, image_crc = [], 0, None
        for _, name, info in group:
            before, member = crc, _member(info, name.lower())
            if member.reason is None:
                crc, content = _read(file, info, crc, keeps=member.field in INLINE_FIELDS)
                member = member._replace(content=content)
                if image_crc is None and is_image_field(member.field):
                    image_crc = _read(file, info, 0)[0] if before else crc
            members.append(member)
        label = why_no_sample(key, members, key in seen) or label_of({member.field: member for member in members})
        seen.add(key)
        if isinstance(label, str):
            indexed.rejected.append((members[0].name, label))
            continue
        ranges = dict.fromkeys(indexed.fields, (0, 0))
        ranges |= {member.field: (member.extent.offset, member.extent.num_bytes) for member in members}
        indexed.fields = list(ranges)
        numbers = members[0].header.offset, crc, image_crc or 0, label, len(indexed.rows), 0
        indexed.rows.append((*numbers, key.encode(), *ranges.values()))
        indexed.num_content_bytes += sum(member.extent.num_bytes for member in members)
    return indexed


def _member(info: TarInfo, field: str) -> TarGroupMember:
    reason = reject_reason(info)
    if _ODD_NAME.search(info.name) or len(info.name) > MAX_NAME_BYTES:
        reason = f"has a name that is not ASCII, holds a backslash, is __metadata__, or longer than {MAX_NAME_BYTES}"
    header = Extent("", "", info.offset, BLOCK)
    content = Extent("", "", info.offset_data, info.size)
    return TarGroupMember(info.name, field, reason, header, content, None)


def _read(file: BinaryIO, info: TarInfo, crc: int, *, keeps: bool = False) -> tuple[int, bytes | None]:
    """The CRC32C of what came before and of the content of a member; the content too, if it is short."""
    file.seek(info.offset_data)
    if keeps and info.size <= MAX_JSON_BYTES:
        content = file.read(info.size)
        return extend_crc32c(crc, content), content
    for start in range(0, info.size, _PIECE):
        crc = extend_crc32c(crc, file.read(min(_PIECE, info.size - start)))
    file.read(-info.size % BLOCK)  # the padding too, so that ranges follow each other
    return crc, None


class _HashedRanges(Ranges):
    """Reads a range while the one before is used, and knows the checksums of all bytes up to the last one it gave."""

    def __init__(self, storage: Storage, stat: Stat, thread: ThreadPoolExecutor) -> None:
        super().__init__(storage, stat)
        self.crc, self.sha = 0, hashlib.sha256()
        self._passed, self._thread = 0, thread
        self._next_range, self._following = (0, 0), thread.submit(bytes)

    def _read(self, start: int, stop: int) -> bytes:
        read = super()._read
        data = self._following.result() if (start, stop) == self._next_range else read(start, stop)
        self._next_range = stop, min(2 * stop - start, self.stat.num_bytes)
        if stop < self.stat.num_bytes:
            self._following = self._thread.submit(read, *self._next_range)
        return data

    def _next(self, num_bytes: int) -> bytes:
        start = self.position
        data = super()._next(num_bytes)
        if start > self._passed:  # what nobody has asked for
            self._pass(super()._read(self._passed, start))
        self._pass(data[self._passed - start :])
        return data

    def _pass(self, data: bytes) -> None:
        self.crc = extend_crc32c(self.crc, data)
        self.sha.update(data)
        self._passed += len(data)
