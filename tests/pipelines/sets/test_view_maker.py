"""`view` chooses samples, and every verb takes what it made."""

import io
import json
import re
import shlex
import uuid

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from pyarrow import parquet

import shardset
from pipelines.config import ColumnConfig
from pipelines.sets.column import column
from pipelines.sets.view_maker import Choice, make_view
from shardset.errors import ConfigError, ManifestError, ShardsetError
from shardset.format.manifest import load
from shardset.storage.open import open_file
from tests.makers.built import HERE, inspected
from tests.makers.documented import commands_of, page, python_of
from tests.makers.shardset import new_set, png_samples, put
from tests.makers.views import NUM_TRAIN, put_view, small_set


@pytest.fixture(scope="module")
def whole():
    return small_set()


def made(whole, **choice):
    """The loaded view of a choice."""
    address = f"{whole[0].rpartition('/')[0]}/views/{uuid.uuid4().hex[:8]}.parquet"
    of = choice.pop("of", whole[0])
    make_view(address, of, Choice(**choice))
    return load(address)


def file(data):
    """The address of a file."""
    address = f"memory://files/{uuid.uuid4().hex}"
    put(*open_file(address), data)
    return address


def text(*lines):
    return file("\n".join(lines).encode() + b"\n")


def table(**columns):
    parquet.write_table(pa.table(columns), out := io.BytesIO())
    return file(out.getvalue())


def ids_of(view, split="train"):
    selection = view.part(split).selection
    return selection.id_of(np.arange(selection.num_kept)).tolist()


def test_ids_come_from_a_parquet_file_with_labels(whole):
    view = made(whole, ids=table(id=[9, 3], label=[0, 1], loss=[0.5, 0.25]), from_split="test")
    assert (ids_of(view, "test"), view.part("test").labels.tolist()) == ([3, 9], [1, 0])
    assert (view.view.head.parent, view.view.head.reason[:4]) == ("../set", "ids ")
    view = made(whole, ids=table(id=[9, 3, 4], split=["a", "a", "b"]))
    assert [ids_of(view, split) for split in "ab"] == [[3, 9], [4]]


def test_keys_are_taken_or_dropped(whole):
    keys = text("train-000007", "train-000050")
    assert ids_of(made(whole, keys=keys)) == [7, 50]
    assert ids_of(made(whole, drop_keys=keys)) == [
        id_ for id_ in range(NUM_TRAIN) if id_ not in (7, 50)
    ]


def test_splits_and_classes_are_drawn_at_random_and_always_alike(whole):
    views = [made(whole, split={"train": 0.8, "val": 0.1}) for _ in range(2)]
    assert views[0].digest == views[1].digest
    counts = {name: views[0].part(name).selection.num_kept for name in views[0].manifest.splits}
    assert counts == {"train": 48, "val": 6, "test": 20}
    assert not set(ids_of(views[0])) & set(ids_of(views[0], "val"))
    few = made(whole, per_class=2)
    assert sorted(id_ % 10 for id_ in ids_of(few)) == sorted([*range(10)] * 2)
    assert ids_of(few) != list(range(20))


def test_a_view_of_a_view_keeps_its_labels_and_weights(whole):
    url, loaded = whole
    first = put_view(
        url, loaded, id=[1, 2, 3, 4], label=[5, 5, 5, 6], weight=[1.0, 2, 3, 4], split=[*"abba"]
    )
    view = made(whole, of=first, ids=table(id=[2]), from_split="b")
    part = view.part("train")
    assert (ids_of(view), part.weights.tolist(), part.labels.tolist()) == ([2], [2], [5])
    assert len(ids_of(made(whole, of=first, per_class=1, from_split="b"))) == 1
    assert len(ids_of(made(whole, of=first, per_class=3, from_split="test"), "test")) == 20
    for columns, message in (
        ({"id": [1, 2]}, "1 of its ids are not in the split, such as 1"),
        ({"id": [2], "label": [3]}, "make it a view, then choose from that"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(whole, of=first, ids=table(**columns), from_split="b")


def test_of_samples_with_one_image_the_first_is_kept():
    samples = png_samples("train", 7, size=8)
    samples[4] = replace(samples[4], fields=samples[1].fields)
    for number in (5, 6):
        samples[number] = replace(samples[number], fields=(("txt", b"no image"),))
    assert ids_of(made((new_set(samples), None), drop_duplicates=True)) == [0, 1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("label = 3 or key = 'train-000008'", sorted([8, *range(3, NUM_TRAIN, 10)])),
        ("width = 16 and class = 'class 2' and id < 20", [2, 12]),
        ("name is null and json is null and copy = 0 and serial = 9", [9]),
    ],
)
def test_sql_chooses_by_what_is_known_of_samples(whole, where, found):
    pytest.importorskip("duckdb")
    assert ids_of(made(whole, where=where)) == found


def test_sql_knows_the_columns_of_the_set(tmp_path):
    pytest.importorskip("duckdb")
    url, _ = small_set(str(tmp_path))
    keys = [f"train-{number:06d}" for number in range(NUM_TRAIN)]
    some = range(3, 9)
    arrays = {
        "score": pa.array([1.5 * number if number < 8 else None for number in some]),
        "caption": pa.array([f"a cat {number}" for number in some]),
        "raw-bytes": pa.array([b"%d" % number for number in some]),
        "vector": pa.array([[number, -number] for number in some], pa.list_(pa.float16())),
        "width": pa.array([7.0 for _ in some]),
    }
    for name, values in arrays.items():
        parquet.write_table(pa.table({"key": keys[3:9], name: values}), tmp_path / "v.parquet")
        source = str(tmp_path / "v.parquet")
        column(ColumnConfig(set=url, name=name, source=source, split="train"), HERE)
    for where, ids in (
        ("score > 6", [5, 6, 7]),
        ("score is null and id < 12", [0, 1, 2, 8, 9, 10, 11]),
        ("CAPTION like '%5' or \"raw-bytes\" = '7'::blob", [5, 7]),
        ("vector[1] = 4 and list_sum(vector) = 0", [4]),
        ("width = 7 and score > 0", []),  # the width of the image
        ("len(vector) = 2 and json is null and label = 3", [3]),
    ):
        if ids:
            assert ids_of(made((url, None), where=where, from_split="train")) == ids
            continue
        with pytest.raises(ConfigError, match="no sample"):
            made((url, None), where=where, from_split="train")
    with pytest.raises(ManifestError, match="no split 'test'"):
        made((url, None), where="score > 0", from_split="test")


def test_sql_is_one_expression_that_reads_no_files_and_changes_nothing(whole, tmp_path):
    pytest.importorskip("duckdb")
    with pytest.raises(
        ConfigError, match=r"FROM clause! Candidate .*; columns are id, label, class, bytes, key"
    ):
        made(whole, where="loss > 3")
    (tmp_path / "ids.csv").write_text("id\n1\n")
    for where in (
        f"id in (select id from read_csv('{tmp_path}/ids.csv'))",
        f"id in (select id from '{tmp_path}/ids.csv')",
        f"true); copy (select 1) to '{tmp_path}/stolen.csv'; select id from samples where (true",
        "true) union select 1 as id where (true",
        "id in (select id from samples)",  # a variable of this program
        "",
    ):
        with pytest.raises(ConfigError, match="--where"):
            made(whole, where=where)
    assert [path.name for path in tmp_path.iterdir()] == ["ids.csv"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({}, "nothing is chosen"),
        ({"ids": ["one"]}, "not a view"),
        ({"keys": ["train-000001", "cat"]}, "1 key not in split 'train' of .*: cat; correct"),
        ({"from_split": "val", "per_class": 1}, "no split 'val'"),
        ({"split": {"train": 0.9, "val": 0.2}}, "add up to 1 at most"),
        ({"split": {"test": 0.5}}, "has a split 'test' already"),
        ({"split": {"train": 0.9, "val": 0.001}}, "no sample of 60 is left for val"),
    ],
)
def test_a_choice_that_names_what_is_not_there_is_refused(whole, choice, words):
    named = {
        name: text(*value) if isinstance(value, list) else value for name, value in choice.items()
    }
    with pytest.raises(ShardsetError, match=words):
        made(whole, **named)


def test_a_view_never_replaces_another_one(whole):
    address = f"{whole[0]}-kept.parquet"
    for number in (1, 1):
        make_view(address, whole[0], Choice(per_class=number))
    with pytest.raises(ConfigError, match="a file of this name is there, and a view"):
        make_view(address, whole[0], Choice(per_class=2))
    with pytest.raises(ConfigError, match=r"call it .*/views\.parquet"):
        make_view("memory://x/views/", whole[0], Choice(per_class=1))


def test_the_verbs_take_a_view(tmp_path, said):
    url, loaded = small_set(str(tmp_path))
    said("report", put_view(url, loaded, id=[0, 1], label=[3, 3]))
    view = str(tmp_path / "v.parquet")
    head = json.loads(said("view", view, "--of", url, "--split", "train=0.5,val=0.2", "--json"))
    assert (head["num_samples"], head["parent"]) == ({"train": 30, "val": 12}, "set")
    said("verify", view, "--deep")
    assert json.loads(said("report", view, "--json"))["num_images_decoded"] == 62
    assert (tmp_path / "v.html").stat().st_size
    found = json.loads(said("estimate", view, "--split", "val", "--json"))
    assert found["steps"]["num_last"] == 12
    assert 1 <= found["amplification"] <= 1.3
    said("export", view, "--to", "wids", code=2)
    shown = inspected(view)
    counts = {row.name: row.num_samples for row in shown["splits"]}
    assert counts == head["num_samples"] | {"test": 20}
    assert sum(sum(one["counts"].values()) for one in shown["classes"]) == 62
    [sample] = inspected(view, key=f"train-{ids_of(load(view), 'val')[0]:06d}")
    assert sample.split == "val"
    in_train = [inspected(view, split="train", shard=number) for number in range(4)]
    assert sorted(one.id for part in in_train for one in part) == ids_of(load(view))


def test_a_build_makes_a_view_a_set_of_its_own(tmp_path, said):
    url, loaded = small_set(str(tmp_path))
    view = put_view(
        url, loaded, id=[3, 17, 18, 19, 40], label=[7, 7, -1, 9, 0], split=["val", *["train"] * 4]
    )
    source = "--source", "shardset", "--input", view, "--num-shards", 1
    said("build", *source, "--output", tmp_path / "own", "--no-report", *HERE)
    own = load(str(tmp_path / "own"))
    counts = {name: split.num_samples for name, split in own.manifest.splits.items()}
    assert counts == {"test": 20, "train": 4, "val": 1}
    assert [info.name for info in own.manifest.classes] == [
        info.name for info in loaded.manifest.classes
    ]
    assert any(loaded.digest in note for note in own.manifest.provenance.notes)
    with shardset.open(own, "train") as samples, shardset.open(url, "train") as stored:
        assert {one.key: one.label for one in samples} == {
            "train-000017": 7, "train-000018": -1, "train-000019": 9, "train-000040": 0
        }  # fmt: skip
        assert samples["train-000040"].fields == stored["train-000040"].fields
    with shardset.open(own, "val") as samples:
        assert (samples[0].label, samples[0].fields["cls"]) == (7, b"7")


def test_the_page_of_views_works_as_it_stands(tmp_path, monkeypatch, said, capsys):
    duckdb = pytest.importorskip("duckdb")
    small_set(str(tmp_path))
    (tmp_path / "set").rename(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    for command in commands_of("docs/how-to/select.md"):
        _, verb, *words = shlex.split(command)
        if verb != "train":
            said(verb, *words, *["--no-report", *HERE] * (verb == "build"))
    assert load("small").part("val").selection.num_kept == 12
    [asked] = re.findall(r'duckdb -c "(.*)"', page("docs/how-to/select.md"))
    assert sorted(duckdb.sql(asked).fetchall()) == [(label, 6, 16.0) for label in range(10)]
    balance, by_hand = python_of(page("docs/how-to/select.md"))
    exec(balance, {})
    assert capsys.readouterr().out.splitlines()[-1] == "[0 0 0 0 1 1 1 1]"
    exec(by_hand, {})
    assert capsys.readouterr().out.splitlines()[-1] == "3 3 0"
