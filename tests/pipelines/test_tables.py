"""The tables of a plan: what is written is what is read, whatever is done with the rows between."""

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import tables
from pipelines.sources.base import Extent
from pipelines.tables import Content, Row
from shardset import naming
from shardset.errors import ConfigError

KEYS = st.lists(st.text() | st.from_regex(naming.KEY_PATTERN, fullmatch=True) | st.text("aZ0_+=-/@.\n", max_size=80))


def a_row(**given: Any) -> Row:
    row = Row(split="train", name="", key="", label=0, fix="", content=Content("", -1, []))
    return msgspec.structs.replace(row, **given)


@given(KEYS)
def test_keys_that_can_not_stay_are_found_all_at_once_as_one_by_one(keys):
    table = tables.unit_table([a_row(key=key) for key in keys], [])
    found = tables.unit_from_bytes(tables.to_bytes(table), "key")["key"]
    assert tables.no_keys(found).tolist() == [row for row, key in enumerate(keys) if not naming.is_key(key)]


def test_of_each_character_it_is_known_whether_a_key_may_hold_it():
    for key in [key for code in range(256) for key in (chr(code), f"a{chr(code)}b")]:
        assert (len(tables.no_keys(pa.array([key, "a"]))) == 0) == naming.is_key(key), key


@given(KEYS)
def test_equal_keys_have_equal_hashes_and_others_do_not(keys):
    hashes = tables.hash_keys(pa.array(keys, pa.string())).tolist()
    alone = [tables.hash_keys(pa.array([key], pa.string())).tolist()[0] for key in keys]
    assert len(set(hashes)) == len(set(keys))
    assert [hashes.index(value) for value in hashes] == [keys.index(key) for key in keys]
    assert alone == hashes, "whatever stands beside it"


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(0, 3))
def test_repeats_are_named_all_at_once_as_one_by_one(copies, start):
    keys = [f"k{number}" for number in range(len(copies))]
    found = tables.with_copies(pa.array(keys, pa.string()), np.array(copies, np.int64) * start)
    assert found.to_pylist() == [naming.copy_key(k, c * start) for k, c in zip(keys, copies, strict=True)]


EXTENTS = st.builds(
    Extent,
    object=st.sampled_from(["a.tar", "b.tar"]) | st.text(max_size=3), generation=st.sampled_from(["17", ""]),
    offset=st.integers(0, 2**40), num_bytes=st.integers(0, 2**40),
)  # fmt: skip
ROWS = st.lists(
    st.builds(
        Row,
        split=st.sampled_from(["train", "test"]), name=st.text(max_size=9), key=st.text(max_size=9),
        label=st.integers(-1, 5), fix=st.sampled_from(["", "rgb"]),
        content=st.builds(
            Content,
            image=st.sampled_from(["jpg", ""]), crc32c=st.integers(-1, 2**32 - 1),
            fields=st.lists(
                st.tuples(st.sampled_from(["jpg", "cls", "json"]), EXTENTS | st.binary(max_size=9)), max_size=3
            ),
        ),
    ),
    max_size=8,
)  # fmt: skip


def test_of_many_references_each_takes_less_than_80_bytes():
    random, num = np.random.default_rng(0), 2000
    photos = [f"n{number % 1000:08d}/n{number % 1000:08d}_{random.integers(10**5)}" for number in range(num)]
    rows = []
    for number, photo in enumerate(photos):
        offset, num_bytes, crc32c = random.integers([2**37, 200_000, 2**32]).tolist()
        image = Extent("ILSVRC2012_img_train.tar", "1700000000000000", offset, num_bytes)
        content = Content("jpg", crc32c, [("jpg", image), ("cls", b"%03d" % (number % 1000))])
        rows.append(a_row(name=f"{photo}.JPEG", key=photo, label=number % 1000, content=content))
    assert len(tables.to_bytes(tables.unit_table(rows, []))) < 80 * num


@given(ROWS)
def test_the_table_of_a_unit_holds_its_rows_and_what_was_rejected(rows):
    rejected = [{"name": "a.jpg", "split": "train", "reason": "empty", "num_bytes": None}]
    table = tables.unit_from_bytes(tables.to_bytes(tables.unit_table(rows, rejected)))
    assert tables.rows_of(table) == rows
    assert tables.rejected_of(table) == rejected
    assert [content.num_bytes for content in tables.contents_of(table)] == [
        sum(found.num_bytes if isinstance(found, Extent) else len(found) for _, found in row.content.fields)
        for row in rows
    ]


@given(st.lists(ROWS, min_size=1, max_size=3), st.randoms())
def test_rows_that_were_joined_put_in_another_order_and_cut_are_the_same_rows(units, random):
    found = [tables.unit_from_bytes(tables.to_bytes(tables.unit_table(rows, []))) for rows in units]
    rows = [row for unit in units for row in unit]
    order = list(range(len(rows)))
    random.shuffle(order)
    cut = random.randint(0, len(rows))
    numbers = np.array(order, np.int64)
    added = {"source": numbers, "copy": numbers % 3, "shard": numbers % 5, "rank": numbers * 7}
    taken = tables.take(tables.concat(found), numbers)
    placed = tables.with_columns(
        taken, tables.PLACED, {name: pa.array(added[name], tables.PLACED.field(name).type) for name in added}
    )
    parts = [
        tables.part_from_bytes(bytes(tables.part_to_bytes(part))) for part in tables.slices(placed, [0, cut, len(rows)])
    ]
    again = tables.concat(parts)
    assert {name: again[name].to_pylist() for name in added} == {name: added[name].tolist() for name in added}
    references = tables.references_from_bytes(tables.to_bytes(again.select(tables.REFERENCE.names)))
    assert tables.rows_of(tables.with_columns(references, tables.UNIT, {"split": taken["split"]})) == [
        rows[row] for row in order
    ]


def test_the_digest_of_rows_is_of_the_samples_and_not_of_where_their_bytes_are():
    def digest(*fields: tuple[str, Extent | bytes], **given: Any) -> str:
        return tables.digest_of([a_row(content=Content("jpg", 7, list(fields)), **given)])

    image = ("jpg", Extent("a.tar", "17", 512, 100))
    assert digest(image) == digest(("jpg", Extent("b.tar", "18", 1024, 100)))
    others = [
        digest(image, key="k"), digest(image, label=3), digest(image, fix="rgb"), digest(image, name="n"),
        digest(image, split="test"), digest(("png", image[1])), digest(("jpg", Extent("a.tar", "17", 512, 101))),
        digest(image, ("cls", b"3")), digest(image, ("cls", b"4")),
    ]  # fmt: skip
    assert len({digest(image), *others}) == 10


def test_a_damaged_table_says_what_to_do():
    table = tables.unit_table([a_row(key="a")], [])
    whole, turned = tables.to_bytes(table), tables.to_bytes(table.select(tables.UNIT.names[::-1]))
    for wrong in (b"", b"not a table", whole[: len(whole) // 2], tables.to_bytes(table.select(["key"])), turned):
        for read in (tables.unit_from_bytes, tables.references_from_bytes):
            with pytest.raises(ConfigError, match=r"a table of the plan .* damaged; remove plan/ at the output"):
                read(wrong)
    with pytest.raises(
        ConfigError, match="has the columns content, fix, label, key, name, split, expected split, name"
    ):
        tables.unit_from_bytes(turned)
