"""Tables as bytes: an Arrow IPC stream, followed by its CRC32C.

Any Arrow reader reads such a file. The CRC32C reveals a flipped bit before Arrow follows an offset that it changed.
"""

import io
from collections.abc import Sequence

import pyarrow as pa

from shardset.checksum import extend_crc32c

_CRC_BYTES = 4


def to_bytes(table: pa.RecordBatch, compression: str | None = None) -> memoryview:
    """The bytes of a table, its columns compressed with a codec of Arrow."""
    sink = io.BytesIO()
    # No threads: each of the many small columns would wait for one longer than its compression takes.
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    sink.write(_crc32c(sink.getbuffer()))
    return sink.getbuffer()


def from_bytes(data: bytes | memoryview, schema: pa.Schema, columns: Sequence[str] = ()) -> pa.RecordBatch:
    """The table, or only these columns of it; raises ValueError unless the bytes are a table of that schema."""
    stream = memoryview(data)[:-_CRC_BYTES]
    if _crc32c(stream) != data[-_CRC_BYTES:]:
        raise ValueError("its CRC32C does not fit its bytes")
    with pa.ipc.open_stream(stream) as reader:
        if not reader.schema.equals(schema):
            names, expected = (", ".join(one.names) for one in (reader.schema, schema))
            raise ValueError(f"it has the columns {names}, expected {expected}")
    wanted = [schema.get_field_index(name) for name in columns or schema.names]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    return pa.ipc.open_stream(stream, options=options).read_next_batch()


def _crc32c(data: memoryview) -> bytes:
    return extend_crc32c(0, data).to_bytes(_CRC_BYTES, "little")
