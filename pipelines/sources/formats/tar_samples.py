"""Samples of a tar: adjacent members with the same key. Short texts come along; images stay where they are."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from tarfile import TarInfo
from typing import Any, BinaryIO, NamedTuple

from pipelines.sources.base import UNREAD, Extent, RawSample, Rejected, Unit
from pipelines.sources.formats.tar import BLOCK, is_passed, read_member, reject_reason, walk
from shardset.checksum import crc32c_of
from shardset.errors import SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.naming import is_field, split_member
from shardset.storage.base import Storage

INLINE_FIELDS = frozenset(("cls", "json", "txt"))
MAX_INLINE_BYTES = 4096
MAX_JSON_BYTES = 1 << 20
MAX_LABEL = 1_000_000

_LABEL = re.compile(rb"\s*(-1|\d{1,18})\s*")


class TarGroupMember(NamedTuple):
    """A member of a tar: its header, its content if that is short text, and the CRC32C of what was read of it.

    `header_crc32c` is that of an extension header, which has no checksum of its own. UNREAD stands for bytes that the
    walk does not read, and for a disk, which is trusted.
    """

    info: TarInfo
    content: bytes
    crc32c: int
    header_crc32c: int

    @property
    def field(self) -> str:
        return split_member(self.info.name)[1].lower()

    @property
    def is_text(self) -> bool:
        """Whether the content may become a field in memory."""
        return self.field in INLINE_FIELDS and self.info.size <= MAX_INLINE_BYTES


def samples_of(storage: Storage, unit: Unit, file: BinaryIO) -> Iterator[RawSample | Rejected]:
    """The samples of a tar of the storage, in its order; raises SourceError if it is damaged."""
    members, seen = (_read(storage, file, info) for info in walk(file, f"{storage.url}/{unit['tar']}")), set[str]()
    for key, group in groupby(members, lambda member: split_member(member.info.name)[0]):
        yield _sample(TarGroup(unit, key, [*group], key in seen), file)
        seen.add(key)


def _read(storage: Storage, file: BinaryIO, info: TarInfo) -> TarGroupMember:
    """The member of a header that the walk has just given: the window of the file still holds what follows."""
    member = TarGroupMember(info, b"", UNREAD, UNREAD)
    if reject_reason(info):
        return member
    if storage.is_remote and info.offset_data - info.offset > BLOCK:
        file.seek(info.offset)
        member = member._replace(header_crc32c=crc32c_of(file.read(info.offset_data - info.offset)))
    is_compared = is_passed(info, storage)
    content = read_member(file, info) if is_compared or member.is_text else b""
    return member._replace(
        content=content if member.is_text else b"", crc32c=crc32c_of(content) if is_compared else UNREAD
    )


@dataclass(frozen=True, slots=True)
class TarGroup:
    """Adjacent members of a tar with the same key."""

    unit: Unit
    key: str
    members: list[TarGroupMember]
    repeated: bool

    @property
    def name(self) -> str:
        return f"{self.unit['tar']}/{self.key}"

    def extent(self, member: TarGroupMember) -> Extent:
        return self._range(member.info.offset_data, member.info.size, member.crc32c)

    @property
    def seen(self) -> tuple[Extent, ...]:
        """The contents and extension headers that decide what the sample is."""
        headers = (
            self._range(member.info.offset, member.info.offset_data - member.info.offset, member.header_crc32c)
            for member in self.members
        )
        contents = (self.extent(member) for member in self.members if member.is_text or member.field == "json")
        return tuple(extent for extent in (*headers, *contents) if extent.crc32c != UNREAD)

    def _range(self, start: int, num_bytes: int, crc32c: int) -> Extent:
        return Extent(self.unit["tar"], self.unit["generation"], start, num_bytes, crc32c)

    def reason(self) -> str | None:
        """Why this can't be a sample, or None."""
        for member in self.members:
            if reason := reject_reason(member.info):
                return f"member {member.info.name!r} {reason}"
        if not self.key.rpartition("/")[2]:
            return "has no key before its first dot"
        if self.repeated:
            return "its key came before in this tar, and not right before"
        return _why_no_fields([member.field for member in self.members])

    def rejected(self, reason: str) -> Rejected:
        first = self.members[0]
        return Rejected(
            name=f"{self.unit['tar']}/{first.info.name}",
            split=self.unit["split"],
            reason=reason,
            extent=None if reject_reason(first.info) else self.extent(first),
            seen=self.seen,
        )


def _why_no_fields(fields: list[str]) -> str | None:
    if "" in fields:
        return "has no dot in its name, so no field"
    if odd := [field for field in fields if not is_field(field)]:
        return f"{odd[0]!r} can't be a field name (lower-case ASCII, at most 16 bytes)"
    if len(set(fields)) != len(fields):
        return f"has the field {max(fields, key=fields.count)!r} twice"
    return None


def _sample(group: TarGroup, file: BinaryIO) -> RawSample | Rejected:
    if reason := group.reason():
        return group.rejected(reason)
    members = {member.field: member for member in group.members}
    try:
        label = _label(members, file)
    except ValueError as error:
        return group.rejected(str(error))
    fields: dict[str, Extent | bytes] = {
        field: member.content if member.is_text else group.extent(member) for field, member in members.items()
    }
    if "cls" in fields and label < 0:
        del fields["cls"]
    elif "cls" in fields:
        fields["cls"] = b"%d" % label  # others write it with white space or leading zeros
    if not fields:
        return group.rejected("has only a cls of -1, which says that there is no label")
    return RawSample(
        name=group.name,
        key=group.key,
        split=group.unit["split"],
        label=label,
        image=next((field for field in members if field in FIELD_OF_EXTENSION), ""),
        fields=fields,
        seen=group.seen,
    )


def _label(members: dict[str, TarGroupMember], file: BinaryIO) -> int:
    if cls := members.get("cls"):
        return _label_in_cls(cls.content if cls.is_text else b"...")
    if (metadata := members.get("json")) and metadata.info.size <= MAX_JSON_BYTES:
        return _label_in_json(metadata.content if metadata.is_text else _read_same(file, metadata))
    return -1


def _read_same(file: BinaryIO, member: TarGroupMember) -> bytes:
    """The content of a longer member; raises SourceError if it is not what the walk has passed."""
    content = read_member(file, member.info)
    if member.crc32c not in (UNREAD, crc32c_of(content)):
        raise SourceError(f"{member.info.name}: two reads gave different bytes; check the network and try again")
    return content


def _label_in_cls(content: bytes) -> int:
    number = _LABEL.fullmatch(content)
    if not number or int(number[1]) > MAX_LABEL:
        raise ValueError(f"cls is {content[:40]!r}, expected a label from 0 to {MAX_LABEL} in ASCII digits")
    return int(number[1])


def _label_in_json(content: bytes) -> int:
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json can't be parsed ({error})") from error
    label = value.get("label") if isinstance(value, dict) else None
    return label if type(label) is int and 0 <= label <= MAX_LABEL else -1
