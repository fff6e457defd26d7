"""Reproducible tar bytes and an index from samples, and the byte range of every field from a tar.

The tar is POSIX USTAR (IEEE 1003.1-1988): mode 0644, mtime 0, no owner, names of at most 100 bytes,
the members of a sample adjacent, two zero blocks at the end. The bytes depend on the samples alone.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import pyarrow as pa

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import ConfigError, DamagedShard
from shardset.format.images import is_image_field
from shardset.format.images.size import Size, size_of
from shardset.format.naming import is_member, split_member
from shardset.format.rows import ORIGIN, UNKNOWN, Origin, schema_of

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_MEMBER_BYTES = 8**11 - 1
"""A USTAR header has eleven octal digits for a size."""

_SIZE = re.compile(rb"[0-7]{11}")
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" + b"0000000\0"
_BEFORE_CHECKSUM = b"00000000000\0"
_AFTER_CHECKSUM = (
    b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" + b"0000000\0" + bytes(167)
)
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_BEFORE_CHECKSUM) + sum(_AFTER_CHECKSUM) + 8 * ord(" ")


class StoredSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a tar.

    `fields` are (extension, content) in member order. `label` is -1 if there is none. `serial` is
    the number of the raw sample in its split, `copy` is 0 or the number of this repeat of it.
    """

    key: str
    fields: Sequence[tuple[str, bytes | memoryview]]
    label: int
    serial: int
    copy: int = 0
    origin: Origin = UNKNOWN


def header(name: bytes, num_bytes: int) -> bytes:
    """The 512-byte USTAR header of a regular file."""
    size = b"%011o\0" % num_bytes
    if len(name) > 100 or num_bytes > MAX_MEMBER_BYTES:
        raise ConfigError(
            f"member {name!r} of {num_bytes} bytes does not fit a USTAR header (100 bytes, 8 GiB)"
        )
    checksum = b"%06o\0 " % (_FIXED_SUM + sum(name) + sum(size))
    return (
        name.ljust(100, b"\0") + _BEFORE_SIZE + size + _BEFORE_CHECKSUM + checksum + _AFTER_CHECKSUM
    )


class TarBuilder:
    """Turns samples into tar bytes one by one, and collects the facts for the index and the
    manifest.

    `fields` are the expected ones, in the order of the index's columns; others are appended as they
    occur.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = list(fields)
        self.num_bytes = 0
        self.num_content_bytes = 0
        self._crc = 0
        self._sha = hashlib.sha256()
        self._rows: list[dict[str, Any]] = []

    def add(self, sample: StoredSample) -> bytes:
        """The tar bytes of one sample: for each field header, content, padding."""
        pieces: list[bytes | memoryview] = []
        ranges: dict[str, tuple[int, int]] = {}
        crc, image_crc, image = 0, None, b""
        for field, content in sample.fields:
            size, before = len(content), crc
            pieces += (
                header(f"{sample.key}.{field}".encode("ascii"), size),
                content,
                bytes(-size % BLOCK),
            )
            ranges[field] = (self.num_bytes + BLOCK, size)
            crc = extend_crc32c(crc, content)
            if image_crc is None and is_image_field(field):
                image_crc, image = extend_crc32c(0, content) if before else crc, bytes(content)
            self.num_bytes += BLOCK + size + -size % BLOCK
        self.add_row(sample, crc, image_crc or 0, size_of(image), ranges)
        return self.count(b"".join(pieces))

    def add_row(
        self,
        sample: StoredSample,
        crc32c: int,
        image_crc32c: int,
        size: Size,
        ranges: dict[str, tuple[int, int]],
    ) -> None:
        """Adds the row of a sample, whose contents have that CRC32C.

        Its image has another one and the (width, height) `size`; `ranges` has (offset, size) of
        each field.
        """
        self.fields = list(dict.fromkeys([*self.fields, *ranges]))
        self.num_content_bytes += sum(size for _, size in ranges.values())
        row = {
            "crc32c": crc32c,
            "label": sample.label,
            "key": sample.key,
            "image_crc32c": image_crc32c,
            "width": size[0],
            "height": size[1],
            "serial": sample.serial,
            "copy": sample.copy,
            **dict(zip(ORIGIN, sample.origin, strict=True)),
        }
        for field, (offset, num_bytes) in ranges.items():
            row[f"{field}.offset"], row[f"{field}.bytes"] = offset, num_bytes
        self._rows.append(row)

    def finish(self) -> bytes:
        """The two zero blocks that end the tar."""
        self.num_bytes += len(END)
        return self.count(END)

    def take_index(self) -> pa.Table:
        """A row per sample, of which no other copy is kept; see `shardset.format.rows`."""
        rows, self._rows = self._rows, []
        return pa.Table.from_pylist(rows, schema_of(self.fields))

    @property
    def crc32c(self) -> str:
        """CRC32C of all bytes so far, base64."""
        return crc32c_text(self._crc)

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far, hexadecimal."""
        return self._sha.hexdigest()

    def count(self, data: bytes) -> bytes:
        """Takes the next bytes of the tar into its checksums, and returns them."""
        self._crc = extend_crc32c(self._crc, data)
        self._sha.update(data)
        return data


@dataclass(frozen=True, slots=True)
class TarMember:
    """One regular file in a tar: where its header and its content start, and the content's size in
    bytes.
    """

    key: str
    field: str
    header_offset: int
    offset: int
    num_bytes: int


def members(data: bytes | memoryview, where: str) -> Iterator[TarMember]:
    """The members of a shard in order; raises DamagedShard at the first byte that TarBuilder can't
    have written.

    Strict on purpose: anything but plain files with correct checksums, zero padding and two zero
    blocks at the end is damage, because a lenient reader turns a flipped bit into a shorter shard.
    """
    view = memoryview(data)
    offset = 0
    while bytes(view[offset : offset + BLOCK]) != END[:BLOCK]:
        member = _member(view, offset, where)
        yield member
        offset = member.offset + member.num_bytes
        padding = -member.num_bytes % BLOCK
        if view[offset : offset + padding] != bytes(padding):
            raise DamagedShard(f"{where}: padding at byte {offset} is not zero")
        offset += padding
    if bytes(view[offset:]) != END:
        raise DamagedShard(
            f"{where}: the end at byte {offset} is {len(view) - offset} bytes, expected 1024 zero"
            " bytes"
        )


def sample_members(tar_members: Iterable[TarMember]) -> Iterator[list[TarMember]]:
    """Members grouped into samples: neighbours with the same key."""
    return (list(group) for _, group in itertools.groupby(tar_members, key=attrgetter("key")))


def _member(view: memoryview, offset: int, where: str) -> TarMember:
    block = bytes(view[offset : offset + BLOCK])
    if len(block) < BLOCK:
        raise DamagedShard(f"{where}: cut at byte {len(view)}: no end mark; fetch or rebuild it")
    name, digits = block[:100].rstrip(b"\0"), block[124:135]
    # Digits alone: Python also reads a sign, and a negative size would lead back to members that
    # were seen before.
    if not _SIZE.fullmatch(digits):
        raise DamagedShard(
            f"{where}: header at byte {offset} has no valid size ({digits!r}); fetch or rebuild it"
        )
    size = int(digits, 8)
    if block != header(name, size) or not is_member(name.decode("ascii", "replace")):
        raise DamagedShard(f"{where}: header at byte {offset} is not what was written for {name!r}")
    if offset + BLOCK + size > len(view):
        raise DamagedShard(
            f"{where}: cut at byte {len(view)} inside {name!r}, which ends at"
            f" {offset + BLOCK + size}"
        )
    key, field = split_member(name.decode("ascii"))
    return TarMember(key, field, offset, offset + BLOCK, size)
