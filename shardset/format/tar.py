"""Samples to reproducible tar bytes and an index; a tar back to the byte range of every field.

The tar is POSIX USTAR (IEEE 1003.1-1988): mode 0644, mtime 0, no owner, names of at most 100 bytes, the members
of a sample adjacent, two zero blocks at the end. The bytes depend on the samples alone.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import DamagedShard
from shardset.format.naming import is_member, split_member

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_MEMBER_BYTES = 8**11 - 1
"""A USTAR header has eleven octal digits for the size of a content."""

_PLACE = [("offset", "<u8"), ("num_bytes", "<u8")]
_HEAD = [("offset", "<u8"), ("crc32c", "<u4"), ("label", "<i8"), ("source", "<u8"), ("copy", "<u4")]
_NPY_1_0 = b"\x93NUMPY\x01\x00"
_KEY_COLUMN = re.compile(rb"\('key', '\|S([1-9][0-9]{0,3})'\)")
_FIELD_COLUMN = re.compile(rb"\('\.([a-z0-9_.-]+)', \[")
_SIZE = re.compile(rb"[0-7]{11}")
_SHAPE = re.compile(rb"'shape': \(([0-9]{1,12}),\)")
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" + b"0000000\0"
_BEFORE_CHECKSUM = b"00000000000\0"
_AFTER_CHECKSUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" + b"0000000\0" + bytes(167)
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_BEFORE_CHECKSUM) + sum(_AFTER_CHECKSUM) + 8 * ord(" ")


class StoredSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as it goes into a tar.

    `fields` are (extension, content) in member order. `label` is -1 where there is none. `source` is the serial
    of the raw sample in its split, `copy` is 0 or the number of this repeat of it.
    """

    key: str
    fields: Sequence[tuple[str, bytes | memoryview]]
    label: int
    source: int
    copy: int = 0


def index_dtype(fields: Sequence[str], key_bytes: int) -> np.dtype:
    """One index record.

    `offset` of the first header, `crc32c` over the contents of the fields in member order, `label`, `source`,
    `copy`, `key` (ASCII), then for each field of the split a column `.jpg`, `.cls`, ... with the pair (`offset`,
    `num_bytes`) of its content; (0, 0) where the sample has no such field.
    """
    return np.dtype([*_HEAD, ("key", f"S{key_bytes}"), *((f".{field}", _PLACE) for field in fields)])


def fits_index(fields: Sequence[str]) -> bool:
    """Whether an index has room for the names of all these fields: its header has 64 KiB at most."""
    descr = np.lib.format.dtype_to_descr(index_dtype(fields, 100))
    try:
        np.lib.format.write_array_header_1_0(
            io.BytesIO(), {"descr": descr, "fortran_order": False, "shape": (10**12 - 1,)}
        )
    except ValueError:
        return False
    return True


def header(name: bytes, num_bytes: int) -> bytes:
    """The 512-byte USTAR header of a regular file."""
    size = b"%011o\0" % num_bytes
    if len(name) > 100 or num_bytes > MAX_MEMBER_BYTES:
        raise ValueError(f"member {name!r} of {num_bytes} bytes does not fit a USTAR header")
    checksum = b"%06o\0 " % (_FIXED_SUM + sum(name) + sum(size))
    return name.ljust(100, b"\0") + _BEFORE_SIZE + size + _BEFORE_CHECKSUM + checksum + _AFTER_CHECKSUM


class TarBuilder:
    """Turns samples into tar bytes as they come, and counts what the index and the manifest will say.

    `fields` are those expected, in the order of the index's columns; others are added as they turn up.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = list(fields)
        self.num_bytes = 0
        self.num_content_bytes = 0
        self._crc = 0
        self._sha = hashlib.sha256()
        self._rows: list[tuple] = []

    def add(self, sample: StoredSample) -> bytes:
        """The tar bytes of one sample: for each field header, content, padding."""
        start = self.num_bytes
        parts: list[bytes | memoryview] = []
        places = dict.fromkeys(self.fields, (0, 0))
        crc = 0
        for field, content in sample.fields:
            size = len(content)
            parts += (header(f"{sample.key}.{field}".encode("ascii"), size), content, bytes(-size % BLOCK))
            places[field] = (self.num_bytes + BLOCK, size)
            crc = extend_crc32c(crc, content)
            self.num_bytes += BLOCK + size + -size % BLOCK
            self.num_content_bytes += size
        self.fields = list(places)
        self._rows.append((start, crc, sample.label, sample.source, sample.copy, sample.key.encode(), *places.values()))
        return self._count(b"".join(parts))

    def finish(self) -> bytes:
        """The two zero blocks that end the tar."""
        self.num_bytes += len(END)
        return self._count(END)

    def index(self) -> np.ndarray:
        """One record a sample (see `index_dtype`)."""
        key_bytes = max((len(row[5]) for row in self._rows), default=1)
        width = len(_HEAD) + 1 + len(self.fields)
        rows = [row + ((0, 0),) * (width - len(row)) for row in self._rows]
        return np.array(rows, dtype=index_dtype(self.fields, key_bytes))

    @property
    def crc32c(self) -> str:
        """CRC32C of all bytes so far, base64."""
        return crc32c_text(self._crc)

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far, hexadecimal."""
        return self._sha.hexdigest()

    def _count(self, data: bytes) -> bytes:
        self._crc = extend_crc32c(self._crc, data)
        self._sha.update(data)
        return data


def index_to_bytes(index: np.ndarray) -> bytes:
    """An index as the bytes of an `.npy` file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(index), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def index_header(data: bytes, where: str) -> tuple[np.dtype, int, int]:
    """(record type, number of records, where the first begins) from the first bytes of an index, all of its header.

    Raises DamagedShard unless it is one.
    """
    size = int.from_bytes(data[8:10], "little")
    text = data[10 : 10 + size]
    key, shape = _KEY_COLUMN.search(text), _SHAPE.search(text)
    if not data.startswith(_NPY_1_0) or key is None or shape is None:
        raise DamagedShard(f"{where}: not a shard index; rebuild the shard with --only-shards")
    fields = [name.decode("ascii") for name in dict.fromkeys(_FIELD_COLUMN.findall(text))]
    dtype, num_samples = index_dtype(fields, int(key[1])), int(shape[1])
    descr = np.lib.format.dtype_to_descr(dtype)
    expected = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': ({num_samples},), }}"
    if text.rstrip() != expected.encode("ascii"):
        raise DamagedShard(f"{where}: its columns are not those of a shard index; rebuild the shard with --only-shards")
    return dtype, num_samples, 10 + size


def index_from_bytes(data: bytes, where: str) -> np.ndarray:
    """The records of an index; raises DamagedShard unless `data` is what `index_to_bytes` writes.

    NumPy's own reader is not used: it builds a syntax tree of the header, and CPython 3.11 now and then fails to do
    so ("AST constructor recursion depth mismatch") while another thread does the same.
    """
    dtype, num_samples, start = index_header(data, where)
    if len(data) != start + num_samples * dtype.itemsize:
        raise DamagedShard(f"{where}: {len(data)} bytes do not hold {num_samples} samples; rebuild the shard")
    return np.frombuffer(data, dtype, offset=start).copy()


def index_fields(index: np.ndarray) -> list[str]:
    """The fields that an index has columns for, in their order; a sample's members may stand in another."""
    return [name.removeprefix(".") for name in (index.dtype.names or ())[len(_HEAD) + 1 :]]


@dataclass(frozen=True, slots=True)
class TarMember:
    """One regular file in a tar: where its header and its content start, and the content's size in bytes."""

    key: str
    field: str
    header_offset: int
    offset: int
    num_bytes: int


def members(data: bytes | memoryview, where: str) -> Iterator[TarMember]:
    """The members of a shard, front to back; raises DamagedShard at the first byte that our writer can't have written.

    Strict on purpose: anything but plain files with right checksums, zero padding and two zero blocks at the end
    is damage, because a lenient reader turns a flipped bit into a shorter shard.
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
        raise DamagedShard(f"{where}: the end at byte {offset} is {len(view) - offset} bytes, expected 1024 zero bytes")


def sample_members(found: Iterable[TarMember]) -> Iterator[list[TarMember]]:
    """Members grouped into samples: neighbours with the same key."""
    group: list[TarMember] = []
    for member in found:
        if group and group[0].key != member.key:
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def _member(view: memoryview, offset: int, where: str) -> TarMember:
    block = bytes(view[offset : offset + BLOCK])
    if len(block) < BLOCK:
        raise DamagedShard(f"{where}: cut at byte {len(view)}: no end mark; fetch or rebuild it")
    name, digits = block[:100].rstrip(b"\0"), block[124:135]
    # Digits alone: Python also reads a sign, and a negative size would lead back to members that were seen before.
    if not _SIZE.fullmatch(digits):
        raise DamagedShard(f"{where}: header at byte {offset} has no valid size ({digits!r}); fetch or rebuild it")
    size = int(digits, 8)
    if block != header(name, size) or not is_member(name.decode("ascii", "replace")):
        raise DamagedShard(f"{where}: header at byte {offset} is not what was written for {name!r}")
    if offset + BLOCK + size > len(view):
        raise DamagedShard(f"{where}: cut at byte {len(view)} inside {name!r}, which ends at {offset + BLOCK + size}")
    key, field = split_member(name.decode("ascii"))
    return TarMember(key, field, offset, offset + BLOCK, size)
