"""Indexes: any rows come back, whole or by groups, to our reader and to stock ones; what is none is
refused before it is decoded.
"""

import io
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from shardset.errors import DamagedShard
from shardset.format.rows import (
    GROUP_ROWS,
    WHOLE_ROWS,
    Footer,
    Origin,
    footer_of,
    from_bytes,
    schema_of,
    to_bytes,
)
from shardset.format.tar import BLOCK, StoredSample, TarBuilder

NUMBERS = {pa.uint32(): 32, pa.int32(): 31, pa.int64(): 63}


def values_of(field: pa.Field) -> st.SearchStrategy:
    bits = NUMBERS.get(field.type)
    known = st.integers(0, 2**bits - 1) if bits else st.text(max_size=9)
    return st.none() | known if field.nullable else known


def table_of(schema: pa.Schema) -> st.SearchStrategy[pa.Table]:
    row = st.fixed_dictionaries({field.name: values_of(field) for field in schema})
    return st.lists(row, min_size=1, max_size=5).map(
        lambda found: pa.Table.from_pylist(found, schema)
    )


tables = st.sets(st.sampled_from(["jpg", "cls", "seg.png"])).map(schema_of).flatmap(table_of)


@settings(max_examples=50, deadline=None)
@given(tables, st.integers(1, WHOLE_ROWS) | st.integers(WHOLE_ROWS + 1, 5 * GROUP_ROWS), st.data())
def test_rows_come_back_whole_and_by_groups(few, num_rows, data):
    rows = few.take(np.arange(num_rows) % len(few))
    stored, names = to_bytes(rows), st.sampled_from(rows.column_names)
    columns = data.draw(st.lists(names, min_size=1, unique=True))
    wanted = rows.select(columns)
    assert from_bytes(stored, num_rows, "here").equals(rows)
    assert from_bytes(stored, num_rows, "here", [*columns, "gif.offset"]).equals(wanted)
    if num_rows > WHOLE_ROWS:
        footer = Footer(footer_of(stored), len(stored), "here")
        groups = st.sets(st.integers(0, (num_rows - 1) // GROUP_ROWS), min_size=1).map(sorted)
        parts = {
            group: stored[slice(*footer.byte_range(group, columns))] for group in data.draw(groups)
        }
        slices = [wanted.slice(group * GROUP_ROWS, GROUP_ROWS) for group in parts]
        assert footer.rows(parts, columns, num_rows).equals(pa.concat_tables(slices))
        assert not any(footer.problem_of(group, columns, part) for group, part in parts.items())


def test_an_index_of_photos_with_their_names_and_sizes_takes_55_bytes_a_sample():
    draw, builder, start = random.Random(0), TarBuilder(["jpg", "cls"]), 0
    for _ in range(1252):
        label, num_bytes = draw.randrange(1000), draw.randrange(50_000, 200_000)
        wnid = f"n{1440764 + 13_337 * label:08d}"
        key = f"{wnid}_{draw.randrange(20_000)}"
        sample = StoredSample(
            key=key,
            fields=(),
            label=label,
            serial=draw.randrange(1_281_167),
            origin=Origin(
                name=f"train/{wnid}/{key}.JPEG",
                generation=str(1_700_000_000_000_000 + draw.randrange(10**10)),
                offset=0,
                num_bytes=num_bytes,
            ),
        )
        stop = start + BLOCK + num_bytes + -num_bytes % BLOCK
        ranges = {"jpg": (start + BLOCK, num_bytes), "cls": (stop + BLOCK, len(str(label)))}
        checks, size = (draw.getrandbits(32), draw.getrandbits(32)), (500, draw.randrange(333, 500))
        builder.add_row(sample, *checks, size, ranges)
        start = stop + 2 * BLOCK
    assert len(to_bytes(builder.take_index())) <= 55 * 1252


def written(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    parquet.write_table(rows, out, compression="zstd", store_schema=False)
    return out.getvalue()


GOOD = pa.Table.from_pylist(
    [
        {"crc32c": 1, "label": 0, "key": key, "image_crc32c": 0, "serial": 0, "copy": 0}
        for key in "ab"
    ],
    schema_of(["jpg"]),
)
ABSENT = pa.nulls(2, pa.int64())
CLAIMS = {
    "3 rows, expected 2": pa.concat_tables([GOOD, GOOD.slice(1)]),
    r"[0-9,]+ bytes for 2 rows": GOOD.set_column(
        GOOD.column_names.index("name"), "name", pa.array([None, "x" * (1 << 18)])
    ),
    "the columns crc32c, .*, age": GOOD.append_column("age", ABSENT),
    "the columns crc32c, jpg.offset": GOOD.drop_columns("label"),
    "the columns fix, object_bytes": GOOD.select([*GOOD.column_names[::-1]]),
    "the columns crc32c, label, jpg.bytes": GOOD.drop_columns("jpg.offset"),
    "the columns crc32c, label": GOOD.set_column(
        0, GOOD.schema.field(0).with_type(pa.int64()), GOOD["label"]
    ),
}


@pytest.mark.parametrize("said", CLAIMS)
def test_an_index_that_claims_something_else_is_refused_before_it_is_decoded(said, monkeypatch):
    data = written(CLAIMS[said])
    for name in ("read", "read_row_groups"):
        monkeypatch.setattr(parquet.ParquetFile, name, lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(DamagedShard, match=rf"^here: not a shard index \({said}.*; restore it, or"):
        from_bytes(data, 2, "here")


@pytest.mark.parametrize("data", [b"", written(GOOD)[:-1], b"PAR1" * 9, b"\x93NUMPY\x01\0" * 9])
def test_what_is_no_parquet_file_is_refused(data):
    for read in (lambda: from_bytes(data, 2, "here"), lambda: Footer(data, 99, "here")):
        with pytest.raises(DamagedShard, match=r"^here: not a shard index \("):
            read()


def test_other_bytes_than_text_are_refused():
    buffers = [None, pa.py_buffer(np.arange(3, dtype="<i4")), pa.py_buffer(b"\xff\xfe")]
    texts = pa.Array.from_buffers(pa.string(), 2, buffers)
    forged = GOOD.set_column(GOOD.column_names.index("name"), "name", texts)
    with pytest.raises(DamagedShard, match=r"^here: not a shard index \(.*UTF8"):
        from_bytes(to_bytes(forged), 2, "here")
