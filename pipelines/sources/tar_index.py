"""The index of a tar that others made, from one pass over its bytes."""

import io
import re
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import BinaryIO

from pipelines.sources.base import Extent
from pipelines.sources.formats.range_file import Ranges
from pipelines.sources.formats.tar import header_window, reject_reason, walk
from pipelines.sources.webdataset import TarGroupMember, label_of, why_no_sample
from shardset.checksum import extend_crc32c
from shardset.errors import ChangedInput, SourceError
from shardset.format.images import is_image_field
from shardset.format.index import MAX_FIELDS
from shardset.format.naming import split_member
from shardset.format.tar import TarBuilder
from shardset.storage.base import Stat, Storage

_ODD_NAME = re.compile(r"[^ -~]|\\|^__[^/]*__(/|$)|.{1025}")
"""Not ASCII; a byte that is no UTF-8, as the walk spells it; a name that webdataset skips, or one that would make the
key column of the index wide."""
_PIECE = 1 << 20
"""What stays in the processor's caches while it is hashed; a bucket is read in larger windows."""
_NOWHERE = Extent("", "", 0, 0)


def index_tar(storage: Storage, tar: Stat) -> tuple[TarBuilder, list[tuple[str, str]]]:
    """The rows and checksums of a tar, read once, front to back; each sample is what webdataset makes of it.

    Also the names of members that are no such sample, and why. Raises SourceError if the tar is damaged.
    """
    where, builder = f"{storage.url}/{tar.name}", TarBuilder(())
    rejected: list[tuple[str, str]] = []
    rows: dict[str, tuple[str, tuple[int, int, int, int], dict[str, tuple[int, int]]] | None] = {}
    fields = set[str]()
    with ThreadPoolExecutor(1) as thread:
        file = io.BufferedReader(_ReadAhead(storage, tar, builder, thread), _PIECE)
        named = ((*split_member(info.name), info) for info in walk(file, where, 0, tar.num_bytes))
        for key, group in groupby(named, itemgetter(0)):
            members: list[TarGroupMember] = []
            ranges: dict[str, tuple[int, int]] = {}
            start, crc, image_crc = -1, 0, 0
            for _, name, info in group:
                field, reason, content = name.lower(), reject_reason(info), None
                if _ODD_NAME.search(info.name):
                    reason = "has a name that is not ASCII, has a backslash, is __metadata__ or over 1024 bytes"
                if not reason:
                    content, crc, own = _read(file, info.offset_data, info.size, crc)
                    if is_image_field(field) and not any(map(is_image_field, ranges)):
                        image_crc = own
                start, ranges[field] = info.offset if start < 0 else start, (info.offset_data, info.size)
                content = content if field in ("cls", "json") else None
                members.append(TarGroupMember(info.name, field, reason, _NOWHERE, _NOWHERE, content))
            label = why_no_sample(key, members, key in rows) or label_of({member.field: member for member in members})
            if isinstance(label, int):
                rows[key] = members[0].name, (start, crc, image_crc, label), ranges
                fields |= ranges.keys()
                if len(fields) > MAX_FIELDS:
                    raise SourceError(f"{where}: more than {MAX_FIELDS} fields, such as {min(ranges)}; expected few")
                continue
            rejected.append((members[0].name, label))
            if before := rows.get(key):  # each of the two may be half of a sample
                rejected.append((before[0], "its key comes again in this tar, and not right after"))
            rows[key] = None
    if tar.crc32c not in (None, builder.crc32c):
        raise ChangedInput(f"{where}: its crc32c is {builder.crc32c}, the bucket says {tar.crc32c}; run it again")
    builder.num_bytes, builder.fields = tar.num_bytes, sorted(fields)
    samples = ((key, row) for key, row in rows.items() if row)
    for source, (key, (_, numbers, ranges)) in enumerate(samples):
        builder.add_row((*numbers, source, 0), key, ranges)
    return builder, rejected


def _read(file: BinaryIO, start: int, num_bytes: int, crc: int) -> tuple[bytes | None, int, int]:
    """The content of a member if it is short; the CRC32C of what came before and of it, and of it alone."""
    file.seek(start)
    piece, own = b"", 0
    for at in range(0, num_bytes, _PIECE):
        piece = file.read(min(_PIECE, num_bytes - at))
        crc, own = extend_crc32c(crc, piece), extend_crc32c(own, piece)
    return piece if num_bytes <= _PIECE else None, crc, own


class _ReadAhead(Ranges):
    """Reads an object front to back by a thread, which also gives each byte once to `builder` to be counted."""

    def __init__(self, storage: Storage, stat: Stat, builder: TarBuilder, thread: Executor) -> None:
        super().__init__(storage, stat)
        self._window = max(_PIECE, header_window(storage))
        self._builder, self._thread = builder, thread
        self._held: list[tuple[int, bytes]] = []  # two, because a walk looks back at headers
        self._stop, self._following = 0, thread.submit(self._window_at, 0)

    def _window_at(self, start: int) -> bytes:
        stop = min(start + self._window, self.stat.num_bytes)
        return self._builder.count(self._read(start, stop)) if start < stop else b""

    def next_bytes(self, num_bytes: int) -> bytes:
        while self._stop <= self.position < self.stat.num_bytes:
            self._held = [*self._held[-1:], (self._stop, data := self._following.result())]
            self._stop += len(data)
            self._following = self._thread.submit(self._window_at, self._stop)
        for start, data in self._held:
            if start <= self.position < start + len(data):
                found = data[self.position - start : self.position - start + num_bytes]
                self.position += len(found)
                return found
        return super().next_bytes(num_bytes)
