"""The catalogue beside the tars: its rows, when it is made anew,
and that other programs open it.
"""

import json
import shutil

import numpy as np
import pandas
import pytest
from pyarrow import parquet

from pipelines.config import AdoptConfig
from pipelines.sets.adopt import adopt
from pipelines.sets.catalog import read_catalog, write_catalog
from shardset.errors import ConfigError, DamagedShard
from shardset.format.manifest import load
from shardset.format.naming import references_path
from shardset.format.tar import StoredSample
from shardset.order.epoch import Order
from shardset.storage.open import open_storage
from shardset.stream.timetable import Timetable
from tests.makers.built import HERE, inspected
from tests.makers.shardset import encode, new_set, pixels, put, references
from tests.makers.tars import tar_bytes

BASE = ["id", "key", "label", "class", "width", "height", "bytes", "source", "json"]


def sample(number, *, info=None, image=True, label=1):
    fields = [("png", encode(pixels(number, 8, 10 + number), "png"))] if image else []
    fields += [("json", json.dumps(info).encode())] if info is not None else [("txt", b"text")]
    return StoredSample(key=f"s{number}", fields=tuple(fields), label=label, source=number)


def with_names(url, samples):
    """A set in two shards, with the plan that says what its samples were called."""
    new_set(samples, url)
    for number, part in enumerate((samples[:2], samples[2:])):
        names = references(part, [f"raw/{one.key}.png" for one in part])
        put(open_storage(url), references_path("train", number), names)


def test_a_row_is_a_sample_in_the_order_of_its_tar(tmp_path):
    samples = [
        sample(0, info={"artist": "A", "year": 1900, "tags": ["x"]}),
        # which Python writes, and DuckDB and others don't read
        sample(1, info={"year": float("nan"), "size": [float("-inf")]}),
        sample(2, info=[1], image=False, label=-1),
        sample(3),
    ]
    with_names(str(tmp_path), samples)
    files = ["train/train-000000.parquet", "train/train-000001.parquet"]
    assert write_catalog(str(tmp_path)) == files
    first = parquet.read_table(tmp_path / files[0])
    assert first.column_names == BASE
    info = '{"artist": "A", "year": 1900, "tags": ["x"]}'
    assert [[*row.values()] for row in first.drop_columns("bytes").to_pylist()] == [
        [0, "s0", 1, "class 1", 10, 8, "raw/s0.png", info],
        [1, "s1", 1, "class 1", 11, 8, "raw/s1.png", '{"year": null, "size": [null]}'],
    ]
    whole = read_catalog(load(str(tmp_path)), "train")
    assert whole["id"].to_pylist() == [0, 1, 2, 3]
    assert whole["width"].to_pylist() == [10, 11, None, 13]
    assert whole["class"].to_pylist() == ["class 1", "class 1", None, "class 1"]
    assert whole["bytes"].to_pylist()[2] == 0
    assert whole["json"].to_pylist()[2:] == ["[1]", None]
    read = pandas.concat(pandas.read_parquet(tmp_path / name) for name in files)
    assert read.groupby("class").size().to_dict() == {"class 1": 3}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_is_what_the_build_takes_for_json(tmp_path, encoding):
    texts = ['{"label": 7, "name": "é"}', '{"label": 7, "x": NaN}', '{"label": 7', "\udcff"]
    members = dict[str, bytes]()
    for number, text in enumerate(texts):
        members[f"{number}.png"] = encode(pixels(number, 8, 8), "png")
        members[f"{number}.json"] = text.encode(encoding, "surrogatepass")
    (tmp_path / "t-0.tar").write_bytes(tar_bytes(members))
    adopt(AdoptConfig(input=str(tmp_path)), HERE)
    write_catalog(str(tmp_path))
    rows = read_catalog(load(str(tmp_path)), "t").to_pylist()
    assert [json.loads(row["json"]) for row in rows] == [
        {"label": 7, "name": "é"},
        {"label": 7, "x": None},
    ]
    assert [row["label"] for row in rows] == [7, 7]


def test_a_file_of_another_tar_or_a_damaged_one_is_made_anew(tmp_path):
    url = new_set([*map(sample, range(4))], tmp_path)
    assert len(write_catalog(url)) == 2
    assert write_catalog(url) == []
    new_set([*map(sample, range(5, 9))], tmp_path)
    with pytest.raises(
        ConfigError, match=r"train/train-000000\.tar: no catalogue of this tar is beside it"
    ):
        read_catalog(load(url), "train")
    assert len(write_catalog(url)) == 2
    path = tmp_path / "train" / "train-000001.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    assert write_catalog(url) == ["train/train-000001.parquet"]


def test_a_damaged_tar_gets_no_catalogue():
    url = new_set([*map(sample, range(4))])
    storage = open_storage(url)
    data = storage.read("train/train-000001.tar")
    put(storage, "train/train-000001.tar", data[:700] + b"!" + data[701:])
    with pytest.raises(DamagedShard, match=r"train-000001\.tar.*repeat the command"):
        write_catalog(url)


def test_names_come_from_the_catalogue_where_it_is_and_no_plan_is_needed(tmp_path):
    url = str(tmp_path)
    with_names(url, [*map(sample, range(4))])
    write_catalog(url)
    shutil.rmtree(tmp_path / "plan")
    assert [(one.key, one.name) for one in inspected(url, name="s2.png")] == [("s2", "raw/s2.png")]
    assert [one.name for one in inspected(url, shard=0)] == ["raw/s0.png", "raw/s1.png"]
    order = Order(
        shard_sizes=[2, 2], seed=0, global_batch_size=2, num_lanes=1, block_size=1, window=1
    )
    timetable = Timetable(loaded=load(url), split_name="train", order=order, num_epochs=1)
    assert [one.name for one in timetable.samples(np.array([3, 0]))] == ["raw/s3.png", "raw/s0.png"]
    (tmp_path / "train" / "train-000001.parquet").unlink()
    with pytest.raises(ConfigError, match=r"original names are not available.*train-000001\.tar"):
        inspected(url, name="s2.png")
