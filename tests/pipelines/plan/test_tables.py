"""The tables of a plan: what is written is what is read, whatever is done with the rows between."""

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.plan import tables
from pipelines.plan.tables import REFERENCE, UNIT, SampleRow
from pipelines.sources.base import Extent
from shardset.errors import ConfigError
from shardset.format import naming

KEYS = st.lists(st.text() | st.text("aZ0_+=-/@.\n", max_size=80))


def a_row(**given: Any) -> SampleRow:
    row = SampleRow(split="train", name="", key="", label=0, fix="", image="", fields=[])
    return msgspec.structs.replace(row, **given)


@given(
    st.text() | st.sampled_from(["a", "b/c", "b/c@1", "d"]), st.integers(0, 3), st.integers(0, 3)
)
def test_a_key_stays_if_it_can_be_one_and_nobody_had_it_before(key, occurrence, copy):
    found = a_row(name="a b.JPEG", key=key, occurrence=occurrence).stored_key(copy)
    stays = occurrence == 0 and naming.is_key(key)
    short = naming.short_key(f"a b.JPEG\0{key}", occurrence)
    assert found == naming.copy_key(key if stays else short, copy)
    assert naming.is_member(f"{found}.jpg")


def test_keys_of_samples_whose_own_can_not_stay_are_frozen():
    # Those of every shard set that holds one. To change them, raise PLAN_VERSION.
    assert a_row(name="a b.JPEG", key="a b").stored_key(0) == "k5ddh5xh6apz99"
    assert a_row(name="a.jpg", key="a", occurrence=1).stored_key(2) == "k1nd2g6bcs5bk5@2"


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
        SampleRow,
        split=st.sampled_from(["train", "test"]),
        name=st.text(max_size=9),
        key=st.text(max_size=9),
        label=st.integers(-1, 5),
        fix=st.sampled_from(["", "rgb"]),
        image=st.sampled_from(["jpg", ""]),
        fields=st.lists(
            st.tuples(st.sampled_from(["jpg", "cls", "json"]), EXTENTS | st.binary(max_size=9)),
            max_size=3,
        ),
        occurrence=st.integers(0, 3),
        draw=st.integers(0, 2**64 - 1),
    ),
    max_size=8,
)


def stored(table: pa.RecordBatch, schema: pa.Schema = UNIT) -> pa.RecordBatch:
    """The table as it is read back."""
    return tables.from_bytes(tables.to_bytes(table), schema)


def photos() -> list[SampleRow]:
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
        fields = [("jpg", image), ("cls", b"%03d" % (number % 1000))]
        label = number % 1000
        rows.append(a_row(name=f"{photo}.JPEG", key=photo, label=label, image="jpg", fields=fields))
    return rows


def test_each_of_many_rows_takes_less_than_100_bytes():
    assert len(tables.to_bytes(tables.unit_table(photos(), []))) < 100 * 2000


@given(ROWS)
def test_the_table_of_a_unit_holds_its_rows_and_what_was_rejected(rows):
    rejected = [tables.QuarantineEntry(name="a.jpg", split="train", reason="empty")]
    table = stored(tables.unit_table(rows, rejected))
    assert tables.rows_of(table) == rows
    assert tables.rejected_of(table) == rejected
    assert [row.num_bytes for row in rows] == [
        sum(part.num_bytes if isinstance(part, Extent) else len(part) for _, part in row.fields)
        for row in rows
    ]


@given(st.lists(ROWS, min_size=1, max_size=3), st.randoms())
@settings(max_examples=30)
def test_rows_that_were_joined_put_in_another_order_and_cut_are_the_same_rows(units, random):
    table = tables.concat([stored(tables.unit_table(rows, [])) for rows in units])
    rows = [msgspec.structs.replace(row, draw=0) for unit in units for row in unit]
    order = list(range(len(rows)))
    random.shuffle(order)
    numbers = np.array(order, np.int64)
    added = {"serial": numbers, "copy": numbers % 3}
    references = tables.with_columns(tables.take(table, numbers), added, REFERENCE)
    start = random.randint(0, len(rows))
    found = stored(references, REFERENCE).slice(start)
    assert tables.rows_of(found) == [rows[row] for row in order[start:]]
    assert {name: found[name].to_pylist() for name in added} == {
        name: added[name][start:].tolist() for name in added
    }


def test_the_digest_of_rows_is_of_the_samples_and_not_of_where_their_bytes_are():
    def digest(*fields: tuple[str, Extent | bytes], **given: Any) -> str:
        return tables.digest_of([a_row(image="jpg", fields=list(fields), **given)])

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
    turned = tables.to_bytes(tables.unit_table([], []).select(UNIT.names[::-1]))
    for wrong in (b"", b"not a table", turned):
        with pytest.raises(
            ConfigError, match=r"a table of the plan .* damaged; remove plan/ at the output"
        ):
            tables.from_bytes(wrong, REFERENCE)
    with pytest.raises(ConfigError, match=r"has the columns key_hash, .* split, expected split"):
        tables.from_bytes(turned, UNIT)
