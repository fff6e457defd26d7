"""Views as files: what any program may write, what is refused, and what a loaded one says."""

import pickle

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import shardset
from shardset.errors import ConfigError, ManifestError
from shardset.format.manifest import load, load_whole
from shardset.format.view import (
    STORED,
    ViewHead,
    ViewTable,
    address_from,
    parse_view,
    relative_parent,
    view_to_bytes,
)
from shardset.storage.open import open_file
from tests.makers.shardset import put
from tests.makers.views import NUM_TRAIN, put_view, small_set

HEAD = ViewHead(parent="../set", parent_digest="0" * 64, split="train", reason="wide")


@pytest.fixture(scope="module")
def whole():
    return small_set()


def table_of(**columns):
    kinds = {"ids": np.int64, "labels": np.int64, "weights": np.float32, "codes": np.int32}
    return ViewTable(**{name: np.array(one, kinds[name]) if name in kinds else one for name, one in columns.items()})


FULL = table_of(ids=[2, 5, 9], labels=[1, STORED, -1], weights=[1, 0.5, 3], names=("a", "b"), codes=[1, 0, 1])


@pytest.mark.parametrize("table", [FULL, table_of(ids=[0, 1, 4])])
def test_a_view_comes_back_as_it_was_written(table):
    digest = table.digest(HEAD.parent_digest, "train")
    head, found = parse_view(view_to_bytes(msgspec.structs.replace(HEAD, digest=digest), table), "it")
    assert (head.parent, head.split, head.reason, head.digest) == ("../set", "train", "wide", digest)
    assert found.names == table.names
    for name in ("ids", "labels", "weights", "codes"):
        assert np.array_equal(getattr(found, name), getattr(table, name))


def test_the_digest_is_that_of_each_value_and_of_the_set():
    digests = {FULL.digest("0" * 64, "train"), FULL.digest("1" * 64, "train"), FULL.digest("0" * 64, "test")}
    digests |= {FULL[np.array([0, 1])].digest("0" * 64, "train"), table_of(ids=[2, 5, 9]).digest("0" * 64, "train")}
    digests.add(table_of(ids=[2, 5, 9], labels=[1, STORED, -1], weights=[1, 0.5, 2]).digest("0" * 64, "train"))
    assert len(digests) == 6


def test_any_program_can_write_a_view_of_some_samples_in_any_order(whole):
    url, loaded = whole
    view = load(put_view(url, loaded, id=[7, 3, 50], label=[4, None, 2], weight=[0.5, 1, None]))
    assert view.manifest.splits.keys() == {"train", "test"}
    assert view.whole == loaded.manifest
    assert (view.num_samples("train"), view.num_samples("test")) == (3, 20)
    part, ids = view.part("train"), np.array([3, 7, 50])
    assert part.selection.id_of(np.arange(3)).tolist() == [3, 7, 50]
    assert part.labels_of(ids, np.array([9, 9, 9])).tolist() == [9, 4, 2]
    assert part.weights_of(ids).tolist() == [1, 0.5, 1]
    assert view.part("test") is None
    assert len(view.digest) == 64
    assert pickle.loads(pickle.dumps(view)).digest == view.digest


def test_the_splits_of_a_view_take_the_place_of_the_split_that_it_is_of(whole):
    url, loaded = whole
    view = shardset.load(put_view(url, loaded, id=[1, 2, 3], split=["val", "train", "val"]))
    assert {name: view.num_samples(name) for name in view.manifest.splits} == {"train": 1, "val": 2, "test": 20}
    assert [view.stored_split(name) for name in ("val", "test")] == ["train", "test"]
    view = load(put_view(url, loaded, id=[1], split=["part"]))
    assert view.manifest.splits.keys() == {"part", "test"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"key": ["a"]}, "it has no ids"),
        ({"id": pa.array([], pa.int64())}, "it has no ids"),
        ({"id": [1, None]}, "id is null"),
        ({"id": [4, 1, 4]}, "lists id 4 twice"),
        ({"id": ["one"]}, "not a view"),
        ({"id": [1.5]}, "not a view"),
        ({"id": [1], "weight": [0.0]}, "a weight is not above 0"),
        ({"id": [1], "weight": [float("nan")]}, "a weight is not above 0"),
        ({"id": [1], "split": [None]}, "can't name its splits"),
        ({"id": [1], "split": ["plan"]}, "can't name its splits"),
        ({"id": [1, NUM_TRAIN]}, "reach 1 to 60, expected 0 to 59"),
        ({"id": [-1]}, "reach -1"),
        ({"id": [1], "label": [10]}, "labels reach 10 to 10, the set has the classes 0 to 9"),
        ({"id": [1], "split": ["test"]}, "has a split 'test' already"),
        ({"id": [1], "head": {"parent_digest": "f" * 64}}, "a view of the set with digest ffffffffffff"),
        ({"id": [1], "head": {"split": "val"}}, "no split 'val'"),
        ({"id": [1], "head": {"digest": "f" * 64}}, "do not fit the digest in its footer"),
        ({"id": [1], "head": {"parent": "elsewhere"}}, "no manifest there"),
        ({"id": [1], "head": {"parent": 3}}, "not a view"),
    ],
)
def test_a_file_that_is_no_view_of_the_set_is_refused(whole, columns, words):
    url, loaded = whole
    address = put_view(url, loaded, **columns)
    with pytest.raises((ConfigError, ManifestError), match=words):
        load(address)


def test_a_flipped_bit_is_found():
    table = table_of(ids=range(0, 60, 2), weights=np.arange(1, 31))
    head = msgspec.structs.replace(HEAD, digest=table.digest(HEAD.parent_digest, "train"))
    data = view_to_bytes(head, table)
    assert parse_view(data, "it")
    for at in range(4, len(data), 7):
        damaged = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        try:
            found, rows = parse_view(damaged, "it")
        except ManifestError:
            continue
        assert (found is None or found.digest == head.digest) == (rows.digest("0" * 64, "train") == head.digest)


def test_a_file_without_a_footer_says_how_to_seal_it(whole):
    url, _ = whole
    address = f"{url.rpartition('/')[0]}/plain.parquet"
    out = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"id": [1]}), out)
    put(*open_file(address), out.getvalue().to_pybytes())
    with pytest.raises(ConfigError, match="pipelines view OUT --of SET --ids"):
        load(address)


def test_what_needs_the_files_of_a_set_refuses_a_view(whole):
    url, loaded = whole
    assert load_whole(url).digest == loaded.digest
    with pytest.raises(ConfigError, match="a view has no shards of its own"):
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
