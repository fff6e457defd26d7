"""The rows of sets and views in a pipeline: what a stream has, checked."""

import pickle
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines import ReadShards, StoredRow
from pipelines.config import ColumnConfig
from pipelines.sets.column import column
from pipelines.sources.shardset import load_in_worker
from shardset import Stream
from shardset.errors import ConfigError, DamagedShard, SourceError
from shardset.format.manifest import load
from shardset.format.tar import StoredSample
from tests.makers.built import HERE, append_of, built, config_of
from tests.makers.folders import write_images
from tests.makers.shardset import encode, new_set, pixels, png_samples
from tests.makers.stored import samples_of
from tests.makers.views import put_view

NUM = 23


def samples() -> list[StoredSample]:
    """Samples with a text before the image, without one, without an image, without a label."""
    orders = [("txt", "png", "cls"), ("png", "cls"), ("json", "txt"), ("png",)]
    found = []
    for number in range(NUM):
        contents = {"png": encode(pixels(number, 8, 8), "png"), "cls": b"%d" % (number % 3)}
        fields = [(name, contents.get(name, name.encode())) for name in orders[number % 4]]
        label = number % 3 if "cls" in dict(fields) else -1
        found.append(StoredSample(key=f"s{number}", fields=fields, label=label, serial=number))
    return found


def rows_of(transform: ReadShards, folder: Path) -> list[StoredRow]:
    """The rows of a pipeline in this process, by id."""
    found = folder / uuid.uuid4().hex
    with beam.Pipeline("FnApiRunner") as pipeline:
        rows = pipeline | transform | beam.Reshuffle()
        assert rows.element_type is StoredRow
        _ = (
            rows
            | beam.combiners.ToList()
            | beam.Map(lambda rows: found.write_bytes(pickle.dumps(rows)))
        )
    return sorted(pickle.loads(found.read_bytes()), key=lambda row: row.id)


def streamed(url: str, fields: tuple[str, ...], *columns: str) -> list[StoredRow]:
    """The same rows from a stream."""
    stream = Stream(
        url, "train", batch_size=NUM, seed=None, image=None, with_key=True, last_batch="pad",
        fields=fields, columns=columns,
    )  # fmt: skip
    found = []
    for batch in stream:
        for row in np.flatnonzero(batch["weight"]):
            stored = {name: batch[name][row] for name in fields if batch[name][row] is not None}
            values = {name: batch[name][row] for name in columns}
            key, id_, label = (batch[name][row] for name in ("key", "id", "label"))
            found.append(StoredRow(key, id_, label, stored, values))
    return found


@pytest.mark.parametrize("where", ["memory", "disk", pytest.param("gs", marks=pytest.mark.gcs)])
def test_rows_are_those_of_the_tars_and_of_a_stream(where, tmp_path, request):
    urls = {"memory": f"memory://{uuid.uuid4().hex}/set", "disk": str(tmp_path / "set")}
    url = new_set(
        samples(),
        urls[where] if where in urls else request.getfixturevalue("gcs_root"),
        num_shards=4,
    )
    rows = rows_of(ReadShards(url, "train"), tmp_path)
    assert {row.key: row.fields for row in rows} == samples_of(url, load(url).manifest, "train")
    assert rows == streamed(url, ("txt", "png", "cls", "json"))
    some = rows_of(ReadShards(url, "train", fields=("png", "txt")), tmp_path)
    assert some == streamed(url, ("png", "txt"))
    none = rows_of(ReadShards(url, "train", fields=()), tmp_path)
    assert none == [row._replace(fields={}) for row in rows]


def test_a_view_has_its_samples_with_its_labels(tmp_path):
    url = new_set({"train": samples(), "other": png_samples("other", 5)}, num_shards=4)
    view = put_view(url, load(url), id=[1, 2, 20], label=[7, -1, 0])
    rows = rows_of(ReadShards(view, "train"), tmp_path)
    assert [(row.id, row.key, row.label) for row in rows] == [
        (1, "s1", 7),
        (2, "s2", -1),
        (20, "s20", 0),
    ]
    assert rows == streamed(view, ("txt", "png", "cls", "json"))
    assert len(rows_of(ReadShards(view, "other"), tmp_path)) == 5


def test_an_older_version_has_its_samples_from_a_relative_path_too(tmp_path, monkeypatch):
    raw = write_images(tmp_path / "raw", ["a/1.png", "a/2.png"])
    built(config_of(raw, tmp_path / "set", num_shards={"": 1}))
    built(append_of(tmp_path / "set", tmp_path / "more", "a/3.png"))
    monkeypatch.chdir(tmp_path)
    for address, number in (("set", 3), ("set@2", 3), ("set@1", 2)):
        read = ReadShards(address, "train", fields=())
        monkeypatch.chdir("/")
        assert len(rows_of(read, tmp_path)) == number
        monkeypatch.chdir(tmp_path)


def write_column(url: str, name: str, keys: list[str], values: list[Any], folder: Path) -> None:
    path = folder / "values.parquet"
    pq.write_table(pa.table({"key": keys, name: values}), path)
    column(ColumnConfig(set=url, name=name, source=str(path)), HERE)


def test_columns_come_with_the_rows_and_a_sample_without_a_value_says_so(tmp_path):
    url, names = new_set(samples(), tmp_path / "set", num_shards=4), ("vector", "score", "caption")
    keys = [f"s{number}" for number in range(NUM - 1)]
    vectors = [[number / 2, 0.5] for number in range(NUM - 1)]
    write_column(url, "vector", keys, vectors, tmp_path)
    write_column(url, "score", keys, [row[0] for row in vectors], tmp_path)
    write_column(url, "caption", ["s3"], ["a cat"], tmp_path)
    rows = rows_of(ReadShards(url, "train", fields=("cls",), columns=names), tmp_path)
    for row, expected in zip(rows, streamed(url, ("cls",), *names), strict=True):
        assert row[:4] == expected[:4]
        for name in names:
            np.testing.assert_array_equal(row.columns[name], expected.columns[name], strict=True)
    assert rows[3].columns["vector"].tolist() == [1.5, 0.5]
    assert [row.columns["caption"] for row in rows[2:5]] == [b"", b"a cat", b""]
    assert np.isnan(rows[-1].columns["score"])
    view = put_view(url, load(url), id=[3, 22])
    only = rows_of(ReadShards(view, "train", fields=(), columns=("caption",)), tmp_path)
    assert [row.columns["caption"] for row in only] == [b"a cat", b""]


def test_samples_of_an_append_have_no_value_until_the_column_is_completed(tmp_path):
    raw = write_images(tmp_path / "raw", ["a/1.png", "a/2.png"])
    built(config_of(raw, tmp_path / "set", num_shards={"": 1}))
    url = str(tmp_path / "set")
    keys = [row.key for row in rows_of(ReadShards(url, "train", fields=()), tmp_path)]
    write_column(url, "score", keys, [0.25, 0.5], tmp_path)
    built(append_of(tmp_path / "set", tmp_path / "more", "a/3.png"))
    rows = rows_of(ReadShards(url, "train", fields=(), columns=("score",)), tmp_path)
    scores = [float(row.columns["score"]) for row in rows]
    assert scores[:2] == [0.25, 0.5]
    assert np.isnan(scores[2])


def test_what_is_not_there_is_refused_when_the_pipeline_is_made(tmp_path):
    url = new_set(samples(), tmp_path / "set")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"split": "val"}, r"no split 'val' in this shard set; it has train"),
        ({"fields": ("jpg",)}, r"no field 'jpg' in this split; it has txt, png, cls, json"),
        ({"columns": ("clip",)}, rf"{url}: no column 'clip'; found none"),
        ({"columns": ("A",)}, r"column 'A': expected a name of a-z"),
        ({"set": tmp_path}, r"no manifest there"),
    )
    for given, said in refused:
        with pytest.raises(ConfigError, match=said):
            ReadShards(**{"set": url, "split": "train", **given})
    write_column(url, "v", ["s1"], [1.0], tmp_path)
    with pytest.raises(ConfigError, match=r"no column 'clip'; found v"):
        ReadShards(url, "train", columns=("v", "clip"))


def test_a_damaged_tar_and_a_set_that_was_replaced_stop_the_pipeline(tmp_path):
    url = new_set(samples(), tmp_path / "set", num_shards=2)
    read, path = partial(ReadShards, url, "train"), tmp_path / "set/train/train-000001.tar"
    tar = path.read_bytes()
    path.write_bytes(tar[:520] + b"!" + tar[521:])
    with pytest.raises(DamagedShard, match=r"train-000001\.tar: sample 's11' at byte 512"):
        rows_of(read(), tmp_path)
    path.write_bytes(tar)
    assert len(rows_of(read(), tmp_path)) == NUM
    made_before = read()
    load_in_worker.cache_clear()  # as in another process
    new_set(samples()[1:], tmp_path / "set", num_shards=2)
    with pytest.raises(SourceError, match=r"set: was replaced while it was read"):
        rows_of(made_before, tmp_path)


def test_a_pipeline_with_worker_processes_works_after_a_build_in_the_same_process(tmp_path):
    raw = write_images(tmp_path / "raw", ["a/1.png", "a/2.png"])
    built(config_of(raw, tmp_path / "set", num_shards={"": 1}))
    flags = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    with beam.Pipeline("FnApiRunner", options=PipelineOptions(flags)) as pipeline:
        rows = pipeline | ReadShards(tmp_path / "set", "train")
        _ = rows | beam.Map(lambda row: (tmp_path / row.key.replace("/", "-")).write_bytes(b""))
    assert len([*tmp_path.iterdir()]) == 4
