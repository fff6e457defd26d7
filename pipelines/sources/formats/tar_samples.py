"""Samples of a tar: adjacent members with the same key. Short texts come along; images stay where they are."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from tarfile import TarInfo
from typing import Any, BinaryIO, NamedTuple

from pipelines.sources.base import UNREAD, Extent, RawSample, Rejected
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.tar import BLOCK, header_window, is_passed, read_member, reject_reason, walk
from shardset.checksum import crc32c_of
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.naming import is_field, split_member
from shardset.storage.base import Stat, Storage

INLINE_FIELDS = frozenset(("cls", "json", "txt"))
MAX_INLINE_BYTES = 4096
MAX_JSON_BYTES = 1 << 20
MAX_LABEL = 1_000_000

_LABEL = re.compile(rb"\s*(-1|\d{1,18})\s*")


class TarGroupMember(NamedTuple):
    """A member of a tar: where its content and its extension header are, and the content if it decides on the sample.

    A CRC32C is UNREAD where the walk does not read the bytes, and on a disk, which is trusted. An extension header has
    no checksum of its own.
    """

    name: str
    field: str
    reason: str | None
    header: Extent
    extent: Extent
    content: bytes | None

    @property
    def is_inline(self) -> bool:
        """Whether the content becomes a field in memory."""
        return self.content is not None and self.field in INLINE_FIELDS and len(self.content) <= MAX_INLINE_BYTES


def samples_of(storage: Storage, tar: Stat, split: str) -> Iterator[RawSample | Rejected]:
    """The samples of a tar of the storage, in its order; raises SourceError if it is damaged."""
    seen: set[str] = set()
    with RangeFile(storage, tar, header_window(storage)) as file:
        members = (_read(storage, tar, file, info) for info in walk(file, f"{storage.url}/{tar.name}"))
        for key, group in groupby(members, lambda member: split_member(member.name)[0]):
            yield _sample(tar.name, split, key, [*group], repeated=key in seen)
            seen.add(key)


def _read(storage: Storage, tar: Stat, file: BinaryIO, info: TarInfo) -> TarGroupMember:
    """The member of a header that the walk has just given: the window of the file still holds what follows."""
    reason, field, num_header_bytes = reject_reason(info), split_member(info.name)[1].lower(), BLOCK
    header_crc32c = crc32c = UNREAD
    if storage.is_remote and not reason and info.offset_data - info.offset > BLOCK:
        num_header_bytes = info.offset_data - info.offset
        file.seek(info.offset)
        header_crc32c = crc32c_of(file.read(num_header_bytes))
    max_bytes = MAX_JSON_BYTES if field == "json" else MAX_INLINE_BYTES if field in INLINE_FIELDS else -1
    is_kept, content = not reason and info.size <= max_bytes, None
    if is_kept or is_passed(info, storage):
        content = read_member(file, info)
        crc32c = crc32c_of(content) if is_passed(info, storage) else UNREAD
    return TarGroupMember(
        name=info.name,
        field=field,
        reason=reason,
        header=Extent(tar.name, tar.generation, info.offset, num_header_bytes, header_crc32c),
        extent=Extent(tar.name, tar.generation, info.offset_data, info.size, crc32c),
        content=content if is_kept else None,
    )


def _sample(
    tar: str, split: str, key: str, members: Sequence[TarGroupMember], *, repeated: bool
) -> RawSample | Rejected:
    decisive = [member.extent for member in members if member.content is not None or member.field == "json"]
    read = [*(member.header for member in members), *decisive]
    seen = tuple(extent for extent in read if extent.crc32c != UNREAD)
    label = _why_no_sample(key, members, repeated) or _label({member.field: member for member in members})
    fields: dict[str, Extent | bytes] = {
        member.field: member.content if member.content is not None and member.is_inline else member.extent
        for member in members
    }
    if isinstance(label, int):
        if "cls" in fields and label < 0:
            del fields["cls"]
        elif "cls" in fields:
            fields["cls"] = b"%d" % label  # others write it with white space or leading zeros
        label = label if fields else "has only a cls of -1, which says that there is no label"
    if isinstance(label, str):
        first = members[0]
        return Rejected(
            name=f"{tar}/{first.name}",
            split=split,
            reason=label,
            extent=None if first.reason else first.extent,
            seen=seen,
        )
    return RawSample(
        name=f"{tar}/{key}",
        key=key,
        split=split,
        label=label,
        image=next((member.field for member in members if member.field in FIELD_OF_EXTENSION), ""),
        fields=fields,
        seen=seen,
    )


def _why_no_sample(key: str, members: Sequence[TarGroupMember], repeated: bool) -> str | None:
    """Why these members can't be a sample, or None."""
    for member in members:
        if member.reason:
            return f"member {member.name!r} {member.reason}"
    fields = [member.field for member in members]
    if not key.rpartition("/")[2]:
        return "has no key before its first dot"
    if repeated:
        return "its key came before in this tar, and not right before"
    if "" in fields:
        return "has no dot in its name, so no field"
    if odd := [field for field in fields if not is_field(field)]:
        return f"{odd[0]!r} can't be a field name (lower-case ASCII, at most 16 bytes)"
    if len(set(fields)) != len(fields):
        return f"has the field {max(fields, key=fields.count)!r} twice"
    return None


def _label(members: Mapping[str, TarGroupMember]) -> int | str:
    """The label in `cls`, or else in `json`, -1 if there is none; or why it can't be read."""
    if cls := members.get("cls"):
        content = b"..." if cls.content is None else cls.content
        number = _LABEL.fullmatch(content)
        if number and int(number[1]) <= MAX_LABEL:
            return int(number[1])
        return f"cls is {content[:40]!r}, expected a label from 0 to {MAX_LABEL} in ASCII digits"
    metadata = members.get("json")
    if metadata is None or metadata.content is None:
        return -1
    try:
        value: Any = json.loads(metadata.content)
    except (ValueError, RecursionError) as error:
        return f"json can't be parsed ({error})"
    label = value.get("label") if isinstance(value, dict) else None
    return label if type(label) is int and 0 <= label <= MAX_LABEL else -1
