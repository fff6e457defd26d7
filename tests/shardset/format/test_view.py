"""Views as files: what any program may write, what is refused, and what a loaded one says."""

import io
import pickle

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import shardset
from shardset.errors import ConfigError, ManifestError
from shardset.format.manifest import load, load_whole
from shardset.format.view import (
    ViewHead,
    ViewRows,
    address_from,
    parse_view,
    relative_parent,
    view_digest,
    view_to_bytes,
)
from shardset.storage.open import open_file
from tests.makers.shardset import put
from tests.makers.views import NUM_TRAIN, put_view, small_set

HEAD = ViewHead(parent="../set", parent_digest="0" * 64, split="train", reason="wide")


@pytest.fixture(scope="module")
def whole():
    return small_set()


def rows_of(ids, labels=None, weights=None):
    return ViewRows(
        np.array(ids),
        None if labels is None else np.array(labels),
        None if weights is None else np.array(weights, np.float32),
    )


FULL = {"a": rows_of([5], [1], [0.5]), "b": rows_of([2, 9], [3, -1], [1, 3])}


@pytest.mark.parametrize("splits", [FULL, {"train": rows_of([0, 1, 4])}])
def test_a_view_comes_back_as_it_was_written(splits):
    digest = view_digest(HEAD.parent_digest, splits)
    head, found = parse_view(
        view_to_bytes(msgspec.structs.replace(HEAD, digest=digest), splits), "it"
    )
    assert (head.parent, head.split, head.reason, head.digest) == (
        "../set",
        "train",
        "wide",
        digest,
    )
    assert found.keys() == splits.keys()
    for name, rows in splits.items():
        pairs: zip = zip(found[name], rows, strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)


def test_the_digest_is_that_of_each_value_and_of_the_set():
    changed = [
        ("0", FULL),
        ("1", FULL),
        ("0", {"a": FULL["b"], "b": FULL["a"]}),
        ("0", {"a": FULL["a"], "c": FULL["b"]}),
        ("0", {**FULL, "a": rows_of([5], [1])}),
        ("0", {**FULL, "a": rows_of([5], [1], [0.25])}),
        ("0", {**FULL, "a": rows_of([5], [2], [0.5])}),
    ]
    assert len({view_digest(parent, splits) for parent, splits in changed}) == len(changed)


def test_any_program_can_write_a_view_of_some_samples_in_any_order(whole):
    url, loaded = whole
    view = load(put_view(url, loaded, id=[3, 50, 7], label=[8, 2, 4], weight=[1, 1, 0.5]))
    assert view.manifest.splits.keys() == {"train", "test"}
    assert view.without_view().manifest == loaded.manifest
    assert [view.part(name).selection.num_kept for name in ("train", "test")] == [3, 20]
    part, ids = view.part("train"), np.array([3, 7, 50])
    assert part.selection.id_of(np.arange(3)).tolist() == [3, 7, 50]
    assert part.labels_of(ids, np.array([9, 9, 9])).tolist() == [8, 4, 2]
    assert np.array_equal(part.weights_of(ids), [1, 0.5, 1])
    assert len(view.digest) == 64
    assert pickle.loads(pickle.dumps(view)).digest == view.digest


def test_the_splits_of_a_view_take_the_place_of_the_split_that_it_is_of(whole):
    url, loaded = whole
    view = shardset.load(put_view(url, loaded, id=[1, 2, 3], split=["val", "train", "val"]))
    assert {name: view.part(name).selection.num_kept for name in view.manifest.splits} == {
        "train": 1,
        "val": 2,
        "test": 20,
    }
    assert [view.stored_split(name) for name in ("val", "test")] == ["train", "test"]
    # as pandas writes categories
    unused = pa.DictionaryArray.from_arrays(pa.array([1], pa.int32()), ["none", "part"])
    view = load(put_view(url, loaded, id=[1], split=unused))
    assert view.manifest.splits.keys() == {"part", "test"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"key": ["a"]}, "it has no ids"),
        ({"id": pa.array([], pa.int64())}, "it has no ids"),
        ({"id": [1, None]}, "id is null"),
        ({"id": [1], "label": pa.array([None], pa.int64())}, "label is null"),
        ({"id": [4, 1, 4]}, "lists id 4 twice"),
        ({"id": ["one"]}, "not a view"),
        ({"id": [1.5]}, "not a view"),
        ({"id": [True, False]}, "id is null, or true or false"),
        ({"id": [1], "weight": [0.0]}, "a weight is not above 0"),
        ({"id": [1], "weight": [float("nan")]}, "a weight is not above 0"),
        ({"id": [1], "split": [None]}, "can't name its splits"),
        ({"id": [1], "split": ["columns"]}, "can't name its splits"),
        ({"id": [1, NUM_TRAIN]}, "reach 1 to 60, expected 0 to 59"),
        ({"id": [-1]}, "reach -1"),
        ({"id": [1], "label": [10]}, "labels reach 10 to 10, expected -1 to 9"),
        ({"id": [1], "split": ["test"]}, "has a split 'test' already"),
        (
            {"id": [1], "head": {"parent_digest": "f" * 64}},
            "a view of the set with digest ffffffffffff",
        ),
        ({"id": [1], "head": {"split": "val"}}, "no split 'val'"),
        ({"id": [1], "head": {"digest": "f" * 64}}, "do not fit the digest in its footer"),
        ({"id": [1], "head": {"parent": "elsewhere"}}, "no manifest there"),
        ({"id": [1], "head": {"parent": 3}}, "not a view"),
        ({"id": [1], "head": {"parent": "a\0set"}}, "names no storage"),
    ],
)
def test_a_file_that_is_no_view_of_the_set_is_refused(whole, columns, words):
    url, loaded = whole
    address = put_view(url, loaded, **columns)
    with pytest.raises((ConfigError, ManifestError), match=words):
        load(address)


@pytest.mark.parametrize("name", ["id", "label", "split"])
def test_two_columns_of_one_name_are_refused(name):
    out = io.BytesIO()
    columns = [pa.array([1, 2]), pa.array([3, 4]), pa.array([0, 1])]
    parquet.write_table(pa.table(columns, names=["id", name, name]), out)
    with pytest.raises(ManifestError, match=f"several columns {name}; leave one"):
        parse_view(out.getvalue(), "it")


def test_a_file_without_a_footer_says_how_to_seal_it(whole):
    url, _ = whole
    address = f"{url.rpartition('/')[0]}/plain.parquet"
    out = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"id": [1]}), out)
    put(*open_file(address), out.getvalue().to_pybytes())
    with pytest.raises(ConfigError, match="shardset view OUT --of SET --ids"):
        load(address)


def test_what_needs_the_files_of_a_set_refuses_a_view(whole):
    url, loaded = whole
    assert load_whole(url).digest == loaded.digest
    with pytest.raises(ConfigError, match="a view has no shards"):
        load_whole(put_view(url, loaded, id=[1]))


@pytest.mark.parametrize(
    ("folder", "parent", "named"),
    [
        ("gs://b/views", "gs://b/sets/photos", "../sets/photos"),
        ("gs://b/photos", "gs://b/photos", "."),
        ("gs://b/views", "gs://other/photos", "gs://other/photos"),
        ("/data/views", "/data/photos", "../photos"),
        ("/data/views", "gs://b/photos", "gs://b/photos"),
        ("gs://b/views", "/data/photos", "/data/photos"),
    ],
)
def test_a_set_is_named_from_the_folder_of_its_view(folder, parent, named):
    assert relative_parent(folder, parent) == named
    assert address_from(folder, named) == parent
