"""Tables as bytes: an Arrow IPC stream, and behind its end the CRC32C of it.

Whoever reads Arrow reads such a file; here a flipped bit is found before Arrow follows an offset that it changed.
"""

import io
from collections.abc import Sequence

import pyarrow as pa

from shardset.checksum import extend_crc32c

_CRC_BYTES = 4


def to_bytes(table: pa.RecordBatch, compression: str | None = None) -> memoryview:
    """The bytes of a table, its columns compressed with that codec."""
    sink = io.BytesIO()
    # Not in threads: of the many small columns each would wait for one longer than it takes to compress.
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    sink.write(_crc32c(sink.getbuffer()))
    return sink.getbuffer()


def from_bytes(data: bytes | memoryview, schema: pa.Schema, columns: Sequence[str] = ()) -> pa.RecordBatch:
    """The table, or these columns of it, the others left compressed; ValueError says what else the bytes are."""
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
