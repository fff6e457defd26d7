"""The samples of a split as a table, and as other programs read the indexes."""

import json

import duckdb
import pandas
import pytest
from pyarrow import parquet

from pipelines.config import AdoptConfig
from pipelines.sets.adopt import adopt
from pipelines.sets.samples_table import samples_table
from shardset.errors import DamagedShard
from shardset.format.manifest import load
from shardset.format.rows import Origin, from_bytes
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from tests.makers import odd_images
from tests.makers.built import HERE, add, built, config_of
from tests.makers.folders import write_images
from tests.makers.shardset import encode, new_set, pixels, png_samples, put
from tests.makers.tars import tar_bytes


def sample(number, *, info=None, image=True, label=1):
    fields = [("png", encode(pixels(number, 8, 10 + number), "png"))] if image else []
    fields += [("json", json.dumps(info).encode())] if info is not None else [("txt", b"text")]
    name = f"raw/s{number}.png"
    origin = Origin(name, "raw.zip", "7", 100 * number, 90, None if number else "cmyk-to-rgb")
    return StoredSample(
        key=f"s{number}", fields=fields, label=label, serial=number, copy=number, origin=origin
    )


def test_a_row_is_a_sample_by_its_id(tmp_path):
    samples = [
        sample(0, info={"artist": "A", "year": 1900, "tags": ["x"]}),
        # which Python writes, and DuckDB and others don't read
        sample(1, info={"year": float("nan"), "size": [float("-inf")]}),
        sample(2, info=[1], image=False, label=-1),
        sample(3),
    ]
    loaded = load(new_set(samples, tmp_path))
    whole = samples_table(loaded, "train", ["json"])
    sizes = whole["bytes"].to_pylist()
    assert [*whole.drop_columns(["bytes", "image_crc32c"]).to_pylist()[1].values()] == [
        *(1, 1, "class 1", "s1", 11, 8, 1, 1, "raw/s1.png"),
        *("raw.zip", "7", 100, 90, None, '{"year": null, "size": [null]}'),
    ]
    assert whole["id"].to_pylist() == [0, 1, 2, 3]
    assert whole["width"].to_pylist() == [10, 11, None, 13]
    assert whole["class"].to_pylist() == ["class 1", "class 1", None, "class 1"]
    assert sizes == [len(dict(one.fields).get("png", b"")) for one in samples]
    assert whole["fix"].to_pylist()[:2] == ["cmyk-to-rgb", None]
    info = '{"artist": "A", "year": 1900, "tags": ["x"]}'
    assert [whole["json"][number].as_py() for number in (0, 2, 3)] == [info, "[1]", None]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_is_what_the_build_takes_for_json(tmp_path, encoding):
    texts = ['{"label": 7, "name": "é"}', '{"label": 7, "x": NaN}', '{"label": 7', "\udcff"]
    members = dict[str, bytes]()
    for number, text in enumerate(texts):
        members[f"{number}.png"] = encode(pixels(number, 8, 8), "png")
        members[f"{number}.json"] = text.encode(encoding, "surrogatepass")
    (tmp_path / "t-0.tar").write_bytes(tar_bytes(members))
    adopt(AdoptConfig(input=str(tmp_path)), HERE)
    rows = samples_table(load(str(tmp_path)), "t", ["json"]).to_pylist()
    assert [json.loads(row["json"]) for row in rows] == [
        {"label": 7, "name": "é"},
        {"label": 7, "x": None},
    ]
    assert [row["label"] for row in rows] == [7, 7]
    assert [(row["width"], row["name"]) for row in rows] == [(8, None)] * 2


@pytest.mark.parametrize(("verify", "mark"), [("none", None), ("decode", "turned")])
def test_a_build_tells_names_objects_and_upright_sizes(tmp_path, verify, mark):
    raw = write_images(tmp_path / "raw", ["cat/a b.jpg"])
    add(raw, "cat/c.jpg", odd_images.exif_rotated())
    built(config_of(raw, tmp_path / "out", num_shards={"": 1}, verify=verify))
    rows = samples_table(load(str(tmp_path / "out")), "train").to_pylist()
    names = ("name", "width", "height", "object", "object_offset", "fix")
    assert sorted([row[name] for name in names] for row in rows) == [
        ["cat/a b.jpg", 8, 8, None, 0, None],
        ["cat/c.jpg", 32, 48, None, 0, mark],
    ]
    for row in rows:
        found = (raw / row["name"]).stat()
        assert row["object_bytes"] == row["bytes"] == found.st_size


def test_a_damaged_index_is_named():
    url = new_set([*map(sample, range(4))])
    storage, name = open_storage(url), "train/train-000001.parquet"
    data = storage.read(name)
    put(storage, name, data[:700] + b"!" + data[701:])
    with pytest.raises(DamagedShard, match=r"train-000001\.parquet: .*crc32c"):
        samples_table(load(url), "train")


def test_stock_programs_read_indexes(tmp_path):
    new_set(png_samples("train", 12, size=7), tmp_path / "shards", num_shards=3)
    path = tmp_path / "shards/train/train-000001.parquet"
    expected = from_bytes(path.read_bytes(), 4, "here")
    assert parquet.read_table(path).equals(expected)
    assert pandas.read_parquet(path)["key"].tolist() == [f"train-00000{n}" for n in range(4, 8)]
    query = (
        f"select label, count(*), avg(width) from '{tmp_path}/shards/train/*.parquet' group by 1"
    )
    assert dict((label, facts) for label, *facts in duckdb.sql(query).fetchall()) == {
        label: [1 + (label < 2), 7.0] for label in range(10)
    }
