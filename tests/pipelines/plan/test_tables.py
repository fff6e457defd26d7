"""The tables of a plan: what is written is what is read, whatever is done with the rows between."""

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.plan import tables
from pipelines.plan.frames import REFERENCE
from pipelines.plan.tables import Content, UnitRow
from pipelines.sources.base import Extent
from shardset.errors import ConfigError

KEYS = st.lists(st.text() | st.text("aZ0_+=-/@.\n", max_size=80))


def a_row(**given: Any) -> UnitRow:
    row = UnitRow(split="train", name="", key="", label=0, fix="", content=Content("", []))
    return msgspec.structs.replace(row, **given)


@given(KEYS)
@settings(max_examples=30)
def test_equal_keys_have_equal_hashes_and_others_do_not(keys):
    hashes = tables.hash_keys(keys).tolist()
    assert len(set(hashes)) == len(set(keys))
    assert [hashes.index(value) for value in hashes] == [keys.index(key) for key in keys]


EXTENTS = st.builds(
    Extent,
    object=st.sampled_from(["a.tar", "b.tar"]) | st.text(max_size=3),
    generation=st.sampled_from(["17", ""]),
    offset=st.integers(0, 2**40),
    num_bytes=st.integers(0, 2**40),
    crc32c=st.integers(-1, 2**32 - 1),
)
ROWS = st.lists(
    st.builds(
        UnitRow,
        split=st.sampled_from(["train", "test"]),
        name=st.text(max_size=9),
        key=st.text(max_size=9),
        label=st.integers(-1, 5),
        fix=st.sampled_from(["", "rgb"]),
        content=st.builds(
            Content,
            image=st.sampled_from(["jpg", ""]),
            fields=st.lists(
                st.tuples(st.sampled_from(["jpg", "cls", "json"]), EXTENTS | st.binary(max_size=9)),
                max_size=3,
            ),
        ),
    ),
    max_size=8,
)


def photos() -> list[UnitRow]:
    """Rows as they are of ImageNet in a bucket."""
    random, num = np.random.default_rng(0), 2000
    names = [
        f"n{number % 1000:08d}/n{number % 1000:08d}_{random.integers(10**5)}"
        for number in range(num)
    ]
    rows = []
    for number, photo in enumerate(names):
        offset, num_bytes, crc32c = random.integers([2**37, 200_000, 2**32]).tolist()
        image = Extent("ILSVRC2012_img_train.tar", "1700000000000000", offset, num_bytes, crc32c)
        content = Content("jpg", [("jpg", image), ("cls", b"%03d" % (number % 1000))])
        rows.append(a_row(name=f"{photo}.JPEG", key=photo, label=number % 1000, content=content))
    return rows


def test_of_many_rows_each_takes_less_than_80_bytes_and_of_many_references_less_than_180():
    table = tables.unit_table(photos(), [])
    assert len(tables.unit_to_bytes(table)) < 80 * len(table)
    numbers = np.arange(len(table))
    columns = {
        "row": table["row"],
        "occurrence": 0 * numbers,
        "source": numbers,
        "copy": 0 * numbers,
    }
    references = pa.RecordBatch.from_pydict(columns, REFERENCE)
    assert len(tables.references_to_bytes(references)) < 180 * len(table)


@given(ROWS)
def test_the_table_of_a_unit_holds_its_rows_and_what_was_rejected(rows):
    rejected = [tables.QuarantineEntry(name="a.jpg", split="train", reason="empty")]
    table = tables.unit_from_bytes(tables.unit_to_bytes(tables.unit_table(rows, rejected)))
    assert tables.rows_of(table) == rows
    assert tables.rejected_of(table) == rejected
    assert [row.content.num_bytes for row in rows] == [
        sum(
            part.num_bytes if isinstance(part, Extent) else len(part)
            for _, part in row.content.fields
        )
        for row in rows
    ]


@given(st.lists(ROWS, min_size=1, max_size=3), st.randoms())
@settings(max_examples=30)
def test_rows_that_were_joined_put_in_another_order_and_cut_are_the_same_rows(units, random):
    read = [
        tables.unit_from_bytes(tables.unit_to_bytes(tables.unit_table(rows, []))) for rows in units
    ]
    rows = [row for unit in units for row in unit]
    order = list(range(len(rows)))
    random.shuffle(order)
    cut = random.randint(0, len(rows))
    numbers = np.array(order, np.int64)
    added = {
        "occurrence": numbers % 2,
        "source": numbers,
        "copy": numbers % 3,
        "shard": numbers % 5,
        "rank": numbers * 7,
    }
    taken = tables.take(tables.concat(read), numbers)
    placed = pa.RecordBatch.from_pydict({"row": taken["row"]} | added, tables.PLACEMENT)
    parts = [
        tables.placements_from_bytes(bytes(tables.placements_to_bytes(part)))
        for part in (placed.slice(0, cut), placed.slice(cut))
    ]
    again = tables.concat(parts)
    assert {name: again[name].to_pylist() for name in added} == {
        name: added[name].tolist() for name in added
    }
    data = bytes(tables.references_to_bytes(again.select(REFERENCE.names)))
    assert tables.rows_of(tables.references_from_bytes(data)) == [rows[row] for row in order]


def test_the_digest_of_rows_is_of_the_samples_and_not_of_where_their_bytes_are():
    def digest(*fields: tuple[str, Extent | bytes], **given: Any) -> str:
        return tables.digest_of([a_row(content=Content("jpg", list(fields)), **given)])

    image = ("jpg", Extent("a.tar", "17", 512, 100))
    assert digest(image) == digest(("jpg", Extent("b.tar", "18", 1024, 100)))
    others = [
        digest(image, key="k"),
        digest(image, label=3),
        digest(image, fix="rgb"),
        digest(image, name="n"),
        digest(image, split="test"),
        digest(("png", image[1])),
        digest(("jpg", Extent("a.tar", "17", 512, 101))),
        digest(image, ("cls", b"3")),
        digest(image, ("cls", b"4")),
    ]
    assert len({digest(image), *others}) == 10


def test_what_is_no_table_says_what_to_do():
    table = tables.unit_table([a_row(key="a")], [])
    turned = bytes(tables.unit_to_bytes(table.select(tables.UNIT.names[::-1])))
    for read in (tables.unit_from_bytes, tables.references_from_bytes):
        for wrong in (b"", b"not a table", turned):
            with pytest.raises(
                ConfigError, match=r"a table of the plan .* damaged; remove plan/ at the output"
            ):
                read(wrong)
    with pytest.raises(
        ConfigError,
        match="has the columns row, image, draw, key_hash, label, split, expected split",
    ):
        tables.unit_from_bytes(turned)
