"""Columns: a value for each sample in tars of their own, from arrays, tables and tars, read with
the samples.
"""

import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from pipelines.config import AdoptConfig, ColumnConfig
from pipelines.sets.adopt import adopt
from pipelines.sets.column import column
from pipelines.sources.values import open_values
from pipelines.write import history
from shardset import Stream
from shardset.errors import ConfigError, DamagedShard, ManifestError, SourceError
from shardset.format import manifest as manifests
from shardset.format.columns import npy
from shardset.storage.open import open_storage
from tests.makers.built import HERE, add, forget, inspected, manifest_of, verified
from tests.makers.shardset import new_set, png_samples, put, write_shard_set
from tests.makers.tars import tar_bytes
from tests.makers.web import WebServer

NUM = {"train": 30, "val": 10}
SAMPLES = {name: png_samples(name, num) for name, num in NUM.items()}
KEYS = [f"{split}-{serial:06d}" for split, count in NUM.items() for serial in range(count)]
LOGITS = np.random.default_rng(1).normal(size=(NUM["train"], 1000)).astype(np.float16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_set(SAMPLES, tmp_path, num_shards=3)
    return tmp_path


def written(
    folder: Path | str, name: str, source: Path | str, **options: str
) -> manifests.Manifest:
    return column(ColumnConfig(set=str(folder), name=name, source=str(source), **options), HERE)[0]


def table(folder: Path, name: str = "values.parquet", **columns: object) -> Path:
    pq.write_table(pa.table(columns), folder / name, row_group_size=7)
    return folder / name


def array(folder: Path, values: np.ndarray) -> Path:
    np.save(folder / "values.npy", values)
    return folder / "values.npy"


def write_logits(folder: Path) -> manifests.Manifest:
    return written(folder, "logits", array(folder, LOGITS), split="train")


def check_logits(found: dict[int, list]) -> None:
    for id_, [logits] in found.items():
        assert np.array_equal(logits, LOGITS[id_])
        assert logits.dtype == np.float16


def adopted(folder: Path, *tars: bytes) -> Path:
    """A set of tars of others."""
    for number, tar in enumerate(tars):
        add(folder / "others", f"t-{number}.tar", tar)
    adopt(AdoptConfig(input=str(folder / "others")), HERE)
    return folder / "others"


def read(folder: Path | str, *names: str, split: str = "train", **options) -> dict[int, list]:
    """The values of each sample by id, as one epoch gives them."""
    found = {}
    options = {"image": None, **options}
    with Stream(str(folder), split, batch_size=8, columns=names, **options) as stream:
        for batch in stream:
            for slot in np.flatnonzero(batch["weight"]):
                found[int(batch["id"][slot])] = [batch[name][slot] for name in names]
    return found


@pytest.mark.parametrize(
    "options", [{}, {"image_size": 16, "image": "auto"}, {"seed": None}, {"fields": ("cls",)}]
)
def test_a_thousand_logits_come_with_each_sample(folder, options):
    manifest = write_logits(folder)
    assert manifest.provenance.source_digest == manifest_of(folder).digest
    verified(f"{folder}/columns/logits")
    check_logits(read(folder, "logits", **options))


def test_a_table_in_any_order_gives_values_by_key_and_what_it_lacks_is_nan_or_empty(folder):
    chosen = np.random.default_rng(0).permutation(len(KEYS))[:35].tolist()
    lists = [None if number == chosen[0] else [float(number), 1.0] for number in chosen]
    keys, texts = [KEYS[number] for number in chosen], [f"number {number}" for number in chosen]
    manifest = written(
        folder, "vector", table(folder, key=keys, vector=pa.array(lists, pa.list_(pa.float32())))
    )
    assert manifest.provenance.options["num_values"] == 34
    written(folder, "caption", table(folder, key=keys, caption=pa.array(texts, pa.large_string())))
    categories = pa.array(texts).dictionary_encode()  # as pandas writes a categorical
    coded = table(folder, key=pa.array(keys).dictionary_encode(), category=categories)
    written(folder, "category", coded)
    for split, first in (("train", 0), ("val", NUM["train"])):
        found = read(folder, "vector", "caption", "category", split=split)
        for id_, [vector, caption, category] in found.items():
            number = first + id_
            assert vector.dtype == np.float32
            expected = [number, 1] if number in chosen[1:] else [np.nan] * 2
            assert np.array_equal(vector, expected, equal_nan=True)
            assert caption == category == (f"number {number}".encode() if number in chosen else b"")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array(np.arange(40, dtype=np.float32)), np.float32(3)),
        (pa.array(range(40), pa.uint8()), np.uint8(3)),
        (pa.array([number % 2 == 1 for number in range(40)]), np.True_),
        (pa.array([[1.0, number] for number in range(40)]), np.array([1.0, 3.0])),
        (
            pa.array([[number] for number in range(40)], pa.list_view(pa.float32())),
            np.array([3], np.float32),
        ),
        (pa.array([f"n{number}" for number in range(40)], pa.string_view()), b"n3"),
        (pa.array([b"%d" % number for number in range(40)], pa.binary_view()), b"3"),
        (pa.array([b"%d" % (number % 10) for number in range(40)], pa.binary(1)), b"3"),
    ],
    ids=lambda values: str(getattr(values, "type", "")),
)
def test_a_table_has_numbers_texts_bytes_or_lists_of_any_type_of_arrow(folder, values, expected):
    written(folder, "v", table(folder, key=pa.array(KEYS, pa.string_view()), v=values))
    [value] = read(folder, "v")[3]
    assert value == expected if isinstance(expected, bytes) else np.array_equal(value, expected)
    assert isinstance(expected, bytes) or value.dtype == expected.dtype


def test_tars_of_others_give_values_once_they_are_adopted(folder, tmp_path):
    members = [
        (f"{key}.emb.npy", npy(np.full((2, 2), number, np.int16)))
        for number, key in enumerate(KEYS)
    ]
    with pytest.raises(ManifestError, match="no manifest there"):
        written(folder, "emb", tmp_path / "others")
    others = adopted(tmp_path, tar_bytes(members[:25]), tar_bytes(members[25:]))
    written(folder, "emb", others)
    for split, first in (("train", 0), ("val", NUM["train"])):
        for id_, [value] in read(folder, "emb", split=split).items():
            assert np.array_equal(value, np.full((2, 2), first + id_))


def test_threads_of_a_worker_read_an_array_at_once(folder):
    values = open_values(ColumnConfig(set="", name="x", source=str(array(folder, LOGITS))), [30])
    with ThreadPoolExecutor(8) as threads:
        found: list = [
            *threads.map(lambda row: values.values_of(["key"], row)[0], [*range(30)] * 20)
        ]
    assert np.array_equal(found, np.tile(LOGITS, (20, 1)))


def test_a_set_of_tars_of_others_has_columns_where_their_names_leave_room(folder, tmp_path):
    others = adopted(tmp_path, tar_bytes([("./a b/0.txt", b"x"), ("./a b/1.txt", b"y")]))
    np.save(tmp_path / "two.npy", np.ones((2, 3), np.float32))
    written(others, "two", tmp_path / "two.npy")
    verified(f"{others}/columns/two")
    with Stream(str(others), "t", batch_size=2, columns=("two",), image=None) as stream:
        assert next(iter(stream))["two"].shape == (2, 3)
    (others / "manifest.json").unlink()
    long = [("k" * 95 + ".a", b"x"), ("1.a", b"y")]
    adopted(tmp_path, tar_bytes(long, tarfile.PAX_FORMAT))
    with pytest.raises(ConfigError, match="does not fit a USTAR header"):
        written(others, "three", tmp_path / "two.npy")


def test_webdataset_joins_a_column_by_key(folder):
    write_logits(folder)
    tars = [f"{folder}/columns/logits/train/train-{number:06d}.tar" for number in range(3)]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == KEYS[: NUM["train"]]
    assert np.array_equal([sample["logits.npy"] for sample in samples], LOGITS)


@pytest.mark.parametrize("policy", ["raise", "mask"])
def test_a_damaged_value_is_a_damaged_sample(folder, policy):
    write_logits(folder)
    path = folder / "columns/logits/train/train-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1  # of the first value
    path.write_bytes(data)
    options = {"batch_size": 30, "image": None, "columns": ("logits",), "bad_samples": policy}
    where = r"columns/logits/train/train-000001.tar: sample 'train-000010'"
    with Stream(str(folder), "train", **options) as stream:
        if policy == "raise":
            with pytest.raises(DamagedShard, match=where):
                list(stream)
            return
        [batch] = stream
    [slot] = np.flatnonzero(batch["weight"] == 0)
    assert batch["id"][slot] == 10
    assert np.isnan(batch["logits"][slot]).all()


def test_a_transform_sees_and_changes_columns(folder):
    write_logits(folder)
    found = read(folder, "logits", transform=lambda row, rng: row | {"logits": row["logits"][:3]})
    assert all(np.array_equal(values[0], LOGITS[id_, :3]) for id_, values in found.items())


def test_a_rerun_writes_only_what_is_missing_and_other_values_need_another_name(folder):
    source = array(folder, LOGITS)
    first = written(folder, "logits", source, split="train")
    tars = sorted((folder / "columns/logits/train").glob("*.tar"))
    times = [path.stat().st_mtime_ns for path in tars]
    assert written(folder, "logits", source, split="train") == first
    (folder / "columns/logits/manifest.json").unlink()
    (folder / "columns/logits/train/train-000001.parquet").unlink()
    assert written(folder, "logits", source, split="train") == first
    same = [path.stat().st_mtime_ns == time for path, time in zip(tars, times, strict=True)]
    assert same == [True, False, True]
    array(folder, LOGITS + 1)
    with pytest.raises(ConfigError, match="finished before, from other input"):
        written(folder, "logits", source, split="train")
    assert read(folder, "logits")


def append(url: Path | str, num: int = 4) -> list[str]:
    """Publishes a version with more samples in `train`; returns their keys."""
    storage = open_storage(str(url))
    base = manifests.load(str(url)).manifest
    samples = png_samples("more", num)
    added = write_shard_set(storage, {"more": samples}, num_shards=1)
    added = msgspec.structs.replace(added, splits={"train": added.splits["more"]})
    put(storage, "manifest.json", manifests.to_json(base))
    history.publish(storage, base, manifests.seal(history.appended(base, added)))
    return [sample.key for sample in samples]


@pytest.mark.parametrize("where", ["disk", "memory", pytest.param("gs", marks=pytest.mark.gcs)])
def test_a_column_survives_an_append_and_is_completed_by_the_same_command(where, request, tmp_path):
    urls = {"disk": f"{tmp_path}/set", "memory": f"memory://{tmp_path.name}/set"}
    url = urls[where] if where in urls else request.getfixturevalue("gcs_root")
    new_set(SAMPLES, url, num_shards=3)
    written(url, "logits", array(tmp_path, LOGITS), split="train")
    written(url, "text", table(tmp_path, key=KEYS, text=KEYS))
    new = append(url)
    found = read(url, "logits", "text")
    assert len(found) == 34
    for id_, [logits, text] in found.items():
        assert np.array_equal(logits, LOGITS[id_] if id_ < 30 else [np.nan] * 1000, equal_nan=True)
        assert text == (KEYS[id_].encode() if id_ < 30 else b"")
    storage = open_storage(url)
    before = {stat.name: stat.generation for stat in storage.list("columns/")}
    longer = np.concatenate([LOGITS, LOGITS[:4] + 1])
    written(url, "logits", array(tmp_path, longer), split="train")
    assert written(url, "text", table(tmp_path, key=new[1:], text=new[1:])).number == 2
    assert written(url, "text", tmp_path / "values.parquet").number == 2
    after = {stat.name: stat.generation for stat in storage.list("columns/")}
    assert all(after[name] == before[name] for name in before if name.endswith(".tar"))
    for id_, [logits, text] in read(url, "logits", "text").items():
        assert np.array_equal(logits, longer[id_])
        assert text == [*KEYS[:30], "", *new[1:]][id_].encode()
    check_logits(found := read(f"{url}@1", "logits"))
    assert len(found) == 30
    verified(f"{url}/columns/logits")


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_samples_without_values_change_no_order_and_no_resume(where, tmp_path):
    url = f"{tmp_path}/set" if where == "disk" else f"memory://{tmp_path.name}-order"
    new_set(SAMPLES, url, num_shards=3)
    written(url, "logits", array(tmp_path, LOGITS), split="train")
    append(url, 40)

    def batches(world: int, state: dict | None = None, **options) -> list[list]:
        found = []
        for rank in range(world):
            options = {"global_batch_size": 8, "image": None, "seed": 3, **options}
            with Stream(url, "train", rank=rank, world_size=world, **options) as stream:
                if state:
                    stream.load_state_dict(state)
                found.append([(batch["id"].tolist(), batch.get("logits")) for batch in stream])
        return found

    plain = batches(1)[0]
    for world in (1, 2, 4):
        steps = zip(*batches(world, columns=("logits",)), strict=True)
        for (ids, _), parts in zip(plain, steps, strict=True):
            assert [id_ for part, _ in parts for id_ in part] == ids
            for id_, logits in zip(ids, np.concatenate([part for _, part in parts]), strict=True):
                assert np.array_equal(logits, LOGITS[id_]) if id_ < 30 else np.isnan(logits).all()
    with Stream(url, "train", batch_size=8, image=None, seed=3) as stream:
        first = iter(stream)
        next(first), next(first)
        state = stream.state_dict()
    [resumed] = batches(1, state, columns=("logits",))
    assert [ids for ids, _ in resumed] == [ids for ids, _ in plain[2:]]
    storage = open_storage(url)
    for stat in storage.list("columns/"):
        storage.delete(stat.name)
    assert batches(1)[0] == plain  # which read no column


def test_whole_numbers_can_not_say_that_a_value_is_missing(folder, tmp_path):
    source = table(folder, key=KEYS, n=list(range(40)))
    written(folder, "n", source)
    new = append(folder)
    with pytest.raises(ManifestError, match=r"4 samples of split 'train' .*`shardset column .* n "):
        read(folder, "n")
    assert len(read(f"{folder}@1", "n")) == 30
    for values, message in ((new[1:], "3 whole numbers for 4"), (["other"], "no sample")):
        with pytest.raises(ConfigError, match=message):
            written(folder, "n", table(folder, key=values, n=list(range(len(values)))))
    others: list[list[Any]] = [[1.5] * 4, new]
    for values in others:
        with pytest.raises(
            ConfigError, match=r"the column has .*n.npy|expected one shape and type"
        ):
            written(folder, "n", table(folder, key=new, n=values))
    written(folder, "n", table(folder, key=new, n=[7] * 4))
    assert [read(folder, "n")[id_][0] for id_ in (3, 30, 33)] == [3, 7, 7]


def test_a_second_split_is_written_by_a_second_command(folder):
    written(folder, "n", array(folder, np.arange(30, dtype=np.int32)), split="train")
    with pytest.raises(ManifestError, match="no split 'val'"):
        read(folder, "n", split="val")
    written(folder, "n", array(folder, np.arange(10, dtype=np.int32)), split="val")
    for split in ("train", "val"):
        for id_, [value] in read(folder, "n", split=split).items():
            assert (value, value.dtype) == (id_, np.int32)


def test_a_column_of_other_tars_is_refused(folder, tmp_path):
    write_logits(folder)
    append(folder)
    forget(folder, KEYS[12])
    message = r"was written for other tars of split 'train' .*`compact`.* remove this folder"
    with pytest.raises(ManifestError, match=message):
        read(folder, "logits")
    with pytest.raises(ManifestError, match=message):
        written(folder, "logits", array(folder, np.zeros((33, 2))), split="train")
    new_set({"train": SAMPLES["train"][::-1]}, tmp_path / "other", num_shards=3)
    shutil.copytree(folder / "columns", tmp_path / "other/columns")
    with pytest.raises(ManifestError, match=message):
        read(tmp_path / "other", "logits")
    shutil.copytree(tmp_path / "other/train", tmp_path / "other/columns/set/train")
    shutil.copy(tmp_path / "other/manifest.json", tmp_path / "other/columns/set")
    with pytest.raises(ManifestError, match="not a column"):
        read(tmp_path / "other", "set")


def test_inspect_lists_columns_and_the_samples_that_they_cover(folder, said):
    write_logits(folder)
    written(folder, "caption", table(folder, key=KEYS[:35], caption=KEYS[:35]))
    append(folder)
    (folder / "columns/logits/manifest.json").write_text("{}")
    caption, logits = inspected(folder)["columns"]
    tars = caption.pop("lacking")
    assert caption == {
        "name": "caption",
        "version": 1,
        "fields": ["caption.txt"],
        "dtype": None,
        "shape": None,
        "num_values": 35,
        "splits": {"train": 30, "val": 10},
    }
    assert "columns/logits/manifest.json" in logits["problem"]
    text = " ".join(said("inspect", folder).split())
    assert "version 2, from made" in text
    assert f"bytes, values of 35 samples; covers train 30, val 10; none of {tars[0]}" in text
    with WebServer(folder) as server:
        assert "a web server lists none" in " ".join(said("inspect", server.url).split())
        assert read(server.url, "caption")[3] == [KEYS[3].encode()]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((29, 3)), r"float64 \(29, 3\) in C order"),
        (np.asfortranarray(np.zeros((30, 3))), "in Fortran order"),
        (np.zeros(30, "U3"), "numbers of 1 to 8 bytes"),
        ({"key": ["a", "b"], "x": [[1.0], [1.0]]}, "no sample of the set has a value"),
        ({"key": KEYS[:2], "x": [[1], [2]]}, "2 whole numbers for 30 samples"),
        ({"key": KEYS[:2], "x": [[1.0], [1.0, 2.0]]}, "expected one shape and type"),
        ({"key": KEYS[:1] * 2, "x": [[1.0], [1.0]]}, "a key twice"),
        ({"id": [1, 2], "x": [[1.0], [1.0]]}, "expected a column key"),
        ({"key": KEYS[:2], "x": [{"a": 1.5}] * 2}, "struct.*expected a column key"),
    ],
)
def test_values_that_do_not_fit_are_refused(values, message, folder):
    source = table(folder, **values) if isinstance(values, dict) else array(folder, values)
    with pytest.raises((ConfigError, ManifestError), match=message):
        written(folder, "x", source, split="train")
    assert not (folder / "columns/x/manifest.json").exists()


def test_what_is_no_table_or_array_is_said(folder):
    for name in ("x.npy", "x.parquet"):
        (folder / name).write_bytes(b"no such file")
        with pytest.raises(SourceError, match=name):
            written(folder, "x", folder / name, split="train")
    with pytest.raises(ConfigError, match="expected a name of"):
        written(folder, "Logits", folder / "x.npy")


def test_names_of_columns_are_those_of_a_batch(folder):
    with pytest.raises(ConfigError, match="already has a 'label'"):
        written(folder, "label", array(folder, LOGITS), split="train")
    assert not (folder / "columns").exists()
    with pytest.raises(ConfigError, match="expected several"):
        Stream(str(folder), "train", batch_size=8, image=None, columns="label")
    with pytest.raises(ManifestError, match="no column 'none'; found none"):
        read(folder, "none")


def test_the_command_writes_a_column(folder, said):
    source = array(folder, LOGITS)
    found = said("column", folder, "logits", "--from", source, "--split", "train", *HERE)
    assert "values: 30 of float16 [1000]" in found
    assert read(folder, "logits")
