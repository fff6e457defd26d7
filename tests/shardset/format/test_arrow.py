"""Tables as bytes: what any reader of Arrow reads, and no flipped bit is missed."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.format import arrow

SCHEMA = pa.schema([("name", pa.string()), ("number", pa.int64()), ("data", pa.binary())])
ROWS = st.lists(st.tuples(st.text(), st.integers(-(2**63), 2**63 - 1), st.binary()), max_size=5)
CODECS = st.sampled_from([None, "lz4"])


def a_table(rows: list[tuple]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], schema=SCHEMA)


@given(ROWS, CODECS)
def test_what_is_read_is_what_was_written_or_some_columns_of_it(rows, codec):
    table = a_table(rows)
    data = bytes(arrow.to_bytes(table, codec))
    assert arrow.from_bytes(data, SCHEMA).equals(table)
    assert arrow.from_bytes(data, SCHEMA, ["number"]).equals(table.select(["number"]))
    assert pa.ipc.open_stream(data).read_all().equals(pa.Table.from_batches([table]))


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_every_flipped_bit_and_every_cut_is_found(codec):
    data = bytes(arrow.to_bytes(a_table([("a", 1, b"x"), ("", 2, b"")]), codec))
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="its CRC32C does not fit its bytes"):
            arrow.from_bytes(bytes(wrong), SCHEMA)
    for num_bytes in range(len(data)):
        with pytest.raises(ValueError, match="its CRC32C"):
            arrow.from_bytes(data[:num_bytes], SCHEMA)


def test_other_columns_are_named():
    data = bytes(arrow.to_bytes(a_table([]).select(["data", "name"])))
    with pytest.raises(ValueError, match="it has the columns data, name, expected name, number, data"):
        arrow.from_bytes(data, SCHEMA)
