"""The index of a tar that others made, from one pass over its bytes."""

import io
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from tarfile import TarInfo
from typing import BinaryIO, NamedTuple

from pipelines.sources.base import APART
from pipelines.sources.formats.range_file import Ranges
from pipelines.sources.formats.tar import header_window, reject_reason, walk
from pipelines.sources.tar_fields import count_fields
from pipelines.sources.webdataset import LABEL_FIELDS, TarGroupMember, grouped, label_of
from shardset.checksum import extend_crc32c
from shardset.errors import ChangedInput, SourceError
from shardset.format.images import is_image_field
from shardset.format.images.size import Size, size_of
from shardset.format.naming import DOTS, split_member
from shardset.format.rows import MAX_FIELDS
from shardset.format.tar import StoredSample, TarBuilder
from shardset.storage.base import Stat, Storage

_ODD_NAME = re.compile(r"[^ -~]|\\|^__[^/]*__(/|$)|.{1025}")
"""Not ASCII; a byte that is no UTF-8, as the walk spells it; a name that webdataset skips, or one
that would make the key column of the index wide.
"""
_PIECE = 1 << 20
"""It stays in the processor's caches while it is hashed; a bucket is read in larger windows."""


def index_tar(
    storage: Storage, tar: Stat
) -> tuple[TarBuilder, dict[str, int], list[tuple[str, str]]]:
    """The rows and checksums of a tar, read once, front to back; each sample is what webdataset
    makes of it.

    Also its fields, as `count_fields` says, and the names of members that are no such sample, and
    why. Raises SourceError if the tar is damaged.
    """
    where, builder = f"{storage.url}/{tar.name}", TarBuilder(())
    rejected: list[tuple[str, str]] = []
    samples: list[_Sample] = []
    fields = set[str]()
    with ThreadPoolExecutor(1) as thread:
        file = io.BufferedReader(_ReadAhead(storage, tar, builder, thread), _PIECE)
        infos = walk(file, where, 0, tar.num_bytes)
        for key, group in grouped(infos, lambda info, why: rejected.append((info.name, why))):
            sample = _read_sample(file, key, group)
            samples.append(sample)
            if isinstance(sample.label, int):
                fields |= sample.ranges.keys()
            if len(fields) > MAX_FIELDS:
                raise SourceError(
                    f"{where}: more than {MAX_FIELDS} fields, such as {min(fields)}; {DOTS}"
                )
    if tar.crc32c not in (None, builder.crc32c):
        raise ChangedInput(
            f"{where}: its crc32c is {builder.crc32c}, the bucket says {tar.crc32c}; run it again"
        )
    builder.num_bytes, builder.fields = tar.num_bytes, sorted(fields)
    times = Counter(sample.key for sample in samples)
    stored_fields: list[Iterable[str]] = []
    for sample in samples:
        label = sample.label if times[sample.key] == 1 else APART
        if isinstance(label, int):
            stored = StoredSample(key=sample.key, fields=(), label=label, serial=len(stored_fields))
            checks = sample.crc32c, sample.image_crc32c
            builder.add_row(stored, *checks, sample.size, sample.ranges)
            stored_fields.append(sample.ranges)
        else:
            rejected.append((sample.first, label))
    return builder, count_fields(stored_fields), rejected


class _Sample(NamedTuple):
    """A sample: its first member, the checksums of all its bytes and of its image, the size of
    that, its label or why it can't be a sample, and the (start, size) of each field.
    """

    key: str
    first: str
    crc32c: int
    image_crc32c: int
    size: Size
    label: int | str
    ranges: dict[str, tuple[int, int]]


def _read_sample(file: BinaryIO, key: str, group: Iterable[TarInfo]) -> _Sample:
    members: list[TarGroupMember] = []
    ranges: dict[str, tuple[int, int]] = {}
    crc = image_crc = 0
    size: Size = (None, None)
    for info in group:
        field, reason, content = split_member(info.name)[1].lower(), reject_reason(info), b""
        if _ODD_NAME.search(info.name):
            reason = (
                "has a name that is not ASCII, has a backslash, is __metadata__ or over 1024 bytes"
            )
        if not reason:
            file.seek(info.offset_data)
            content = file.read(info.size)
            crc = extend_crc32c(crc, content)
            if is_image_field(field) and not any(map(is_image_field, ranges)):
                image_crc, size = extend_crc32c(0, content), size_of(content)
        ranges[field] = (info.offset_data, info.size)
        is_read = field in LABEL_FIELDS and info.size <= _PIECE
        members.append(TarGroupMember(info.name, field, reason, content if is_read else None))
    return _Sample(key, members[0].name, crc, image_crc, size, label_of(members), ranges)


class _ReadAhead(Ranges):
    """Reads an object front to back by a thread, which also gives each byte once to `builder` to be
    counted.
    """

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
                taken = data[self.position - start : self.position - start + num_bytes]
                self.position += len(taken)
                return taken
        return super().next_bytes(num_bytes)
