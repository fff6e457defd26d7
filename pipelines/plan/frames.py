"""What the plan of a build says of raw samples: the keys that they get, and the files of its
tables.

The tables are Arrow IPC streams, in files with a frame: a line behind the content with the
build's digest, the length, and the CRC32C of the content and the line before it. Readers of JSON or
Arrow that stop at its end read such a file too.
"""

import io
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from shardset.checksum import crc32c_of
from shardset.format import naming

_MARK = b"\nshardset "
_BUILD_BYTES, _LENGTH_BYTES, _CRC_BYTES = 16, 16, 8
NUM_BYTES = len(_MARK) + _BUILD_BYTES + 1 + _LENGTH_BYTES + 1 + _CRC_BYTES + 1
"""The bytes that a frame adds to a file."""

REFERENCE = pa.schema(
    [("row", pa.binary()), ("occurrence", pa.int32()), ("source", pa.int64()), ("copy", pa.int32())]
)
"""One stored sample in the plan of a shard: its raw sample as MessagePack (which begins with an
Original), how many samples before it wanted the same key, its serial, and the number of this copy.
"""


class Framed(NamedTuple):
    """The content of a file, and the digest of the build that it belongs to."""

    build: str
    content: memoryview


def frame(build: str, content: bytes | memoryview) -> bytes:
    """The line to put behind the content of a file of that build; `build` has at most 16 letters
    and digits.
    """
    line = b"%s%s %016x " % (_MARK, build.encode().rjust(_BUILD_BYTES, b"-"), len(content))
    return b"%s%08x\n" % (line, crc32c_of(content, line))


def open_frame(data: bytes) -> Framed:
    """The content and its build; raises ValueError, which says what is wrong with the bytes."""
    content, end = memoryview(data)[:-NUM_BYTES], data[-NUM_BYTES:]
    if len(end) < NUM_BYTES or not end.startswith(_MARK):
        raise ValueError(f"its {len(data)} bytes don't end with a length and a CRC32C")
    build = end[len(_MARK) : len(_MARK) + _BUILD_BYTES].lstrip(b"-").decode("ascii", "replace")
    if end != frame(build, content):
        raise ValueError("its length and CRC32C don't fit its bytes")
    return Framed(build, content)


class Original(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name of a raw sample and the key it wants; `fix` is what the build repairs in its image,
    "" if nothing.
    """

    split: str
    name: str
    key: str
    fix: str


def table_to_bytes(table: pa.RecordBatch, compression: str | None = None) -> memoryview:
    """The bytes of a table, its columns compressed with a codec of Arrow."""
    sink = io.BytesIO()
    # No threads: each of the many small columns would wait for one longer than its compression
    # takes.
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    return sink.getbuffer()


def table_from_bytes(
    data: bytes | memoryview, schema: pa.Schema, columns: Sequence[str] = ()
) -> pa.RecordBatch:
    """The table, or only these columns of it; raises ValueError unless it has that schema.

    Its frame must have been checked: Arrow follows offsets that a flipped bit has changed.
    """
    with pa.ipc.open_stream(data) as reader:
        if not reader.schema.equals(schema):
            names, expected = (", ".join(one.names) for one in (reader.schema, schema))
            raise ValueError(f"it has the columns {names}, expected {expected}")
    wanted = [schema.get_field_index(name) for name in columns or schema.names]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    return pa.ipc.open_stream(data, options=options).read_next_batch()


def stored_key(origin: Original, occurrence: int, copy: int) -> str:
    """The key of a stored sample: the wanted one, or a short one if that can't be a key or is
    taken.

    `occurrence` samples before it wanted the same key. The short key depends on the wanted one too,
    because samples with different keys may share a name; it does not on the split.
    """
    key = origin.key
    if occurrence or not naming.is_key(key):
        key = naming.short_key(f"{origin.name}\0{key}", occurrence)
    return naming.copy_key(key, copy)
