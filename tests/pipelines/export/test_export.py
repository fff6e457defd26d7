"""Side files of other readers: each against the bytes of the tars, without those readers
(tests/peers has them).
"""

import itertools
import json
import re
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import yaml

from pipelines import cli
from pipelines.check.verify import verify
from pipelines.export.write import FORMATS, ExportedFile, export
from shardset.errors import ConfigError, DamagedShard, NotFound
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest, Shard
from shardset.format.tar import StoredSample, members, sample_members
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import jpeg_samples, png_samples, put, write_shard_set

_counter = itertools.count()


def made(**changes: object) -> tuple[Storage, Manifest]:
    """Splits train (11 PNGs, 3 shards of 3 and 4) and test (5 JPEGs) in memory."""
    storage = open_storage(f"memory://export-{next(_counter)}/set")
    samples = {
        "train": png_samples("train", 11, size=8),
        "test": jpeg_samples("test", 5, height=16, width=16),
    }
    write_shard_set(storage, samples | changes, num_shards=3)
    return storage, manifests.load(storage.url)[0]


def with_fields(
    split: str, num_samples: int, *fields: tuple[str, bytes], label: int = -1
) -> list[StoredSample]:
    return [
        StoredSample(
            key=f"{split}-{n}", fields=[*fields, ("txt", b"%d" % n)], label=label, source=n
        )
        for n in range(num_samples)
    ]


def shards_of(manifest: Manifest) -> list[Shard]:
    return [shard for split in manifest.splits.values() for shard in split.shards]


def content_of(storage: Storage) -> dict[str, bytes]:
    return {stat.name: storage.read(stat.name) for stat in storage.list()}


def test_energon_s_offsets_and_database_list_every_sample_and_every_part_once(tmp_path):
    storage, manifest = made()
    export(storage.url, ["energon"])
    (tmp_path / "db").write_bytes(storage.read(".nv-meta/index.sqlite"))
    with closing(sqlite3.connect(tmp_path / "db")) as database:
        samples = database.execute("SELECT * FROM samples").fetchall()
        parts = database.execute("SELECT * FROM sample_parts").fetchall()
    expected_samples, expected_parts = [], []
    for number, shard in enumerate(shards_of(manifest)):
        tar = storage.read(shard.path)
        *starts, end = np.frombuffer(storage.read(f"{shard.path}.idx"), "<u8").tolist()
        groups = list(sample_members(members(tar, shard.path)))
        assert starts == [group[0].header_offset for group in groups]
        assert tar[end:] == bytes(1024)
        for position, (group, stop) in enumerate(zip(groups, [*starts[1:], end], strict=True)):
            start = group[0].header_offset
            expected_samples.append((number, group[0].key, position, start, stop - start))
            expected_parts += [(number, position, m.field, m.offset, m.num_bytes) for m in group]
    assert samples == expected_samples
    assert sorted(parts) == sorted(expected_parts)


def test_energon_s_settings_name_every_shard_of_every_split():
    storage, manifest = made()
    export(storage.url, ["energon"])
    info = json.loads(storage.read(".nv-meta/.info.json"))
    assert info["shard_counts"] == {shard.path: shard.num_samples for shard in shards_of(manifest)}
    parts = yaml.safe_load(storage.read(".nv-meta/split.yaml"))["split_parts"]
    assert parts == {
        name: [shard.path for shard in split.shards] for name, split in manifest.splits.items()
    }
    kind = yaml.safe_load(storage.read(".nv-meta/dataset.yaml"))
    assert kind["sample_type"]["__class__"] == "ImageClassificationSample"
    assert kind["field_map"] == {"image": "jpg,png", "label": "cls"}


@pytest.mark.parametrize("fields", [[("png", b"x")], [("cls", b"1")]])
def test_energon_gets_raw_fields_where_images_or_labels_are_missing(fields):
    label = 1 if fields[0][0] == "cls" else -1
    changes = {name: with_fields(name, 4, *fields, label=label) for name in ("train", "test")}
    storage, _ = made(**changes)
    export(storage.url, ["energon"])
    kind = yaml.safe_load(storage.read(".nv-meta/dataset.yaml"))
    assert kind == {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


def test_wids_and_timm_list_shards_with_their_sizes():
    storage, manifest = made()
    export(storage.url, ["wids", "timm"])
    info = json.loads(storage.read("_info.json"))["splits"]
    assert list(info) == ["test", "train"]
    for name, split in manifest.splits.items():
        listed = json.loads(storage.read(f"wids-{name}.json"))
        assert [listed["__kind__"], listed["wids_version"]] == ["wids-shard-index-v1", 1]
        for entry, shard in zip(listed["shardlist"], split.shards, strict=True):
            size = storage.stat(shard.path).num_bytes
            assert entry == {"url": shard.path, "nsamples": shard.num_samples, "filesize": size}
        assert info[name]["filenames"] == [shard.path for shard in split.shards]
        assert info[name]["shard_lengths"] == [shard.num_samples for shard in split.shards]
        assert info[name]["num_samples"] == sum(info[name]["shard_lengths"])


def test_the_card_types_its_columns_if_it_knows_them_and_names_the_classes():
    storage, manifest = made()
    export(storage.url, ["hf"])
    _, header, text = storage.read("README.md").decode().split("---\n", 2)
    card = yaml.safe_load(header)
    files = {each["split"]: each["path"] for each in card["configs"][0]["data_files"]}
    assert files == {"test": ["test/test-*.tar"], "train": ["train/train-*.tar"]}
    columns = {column["name"]: column["dtype"] for column in card["dataset_info"]["features"]}
    assert list(columns) == ["jpg", "cls", "png", "__key__", "__url__"]
    assert columns["cls"]["class_label"]["names"]["3"] == "class 3"
    assert manifest.digest in text
    storage, _ = made(train=with_fields("train", 4, ("png", b"x"), ("npy", b"x")))
    export(storage.url, ["hf"])
    assert b"dataset_info" not in storage.read("README.md")


def test_every_storage_gets_the_same_files_once_and_keeps_its_set(storage):
    write_shard_set(storage, {"train": png_samples("train", 6, size=8)}, num_shards=2)
    before = content_of(storage)
    first = export(storage.url, list(FORMATS))
    after = content_of(storage)
    assert {one.path for one in first} == after.keys() - before.keys()
    assert all(after[name] == content for name, content in before.items())
    assert {one.outcome for one in first} == {"written"}
    again = export(storage.url, list(FORMATS))
    assert [one.path for one in again] == [one.path for one in first]
    assert {one.outcome for one in again} == {"unchanged"}
    assert content_of(storage) == after
    assert verify(storage.url, deep=True).ok


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_in_the_way_stays_unless_it_may_be_replaced(name):
    storage, _ = made()
    *others, last = export(storage.url, [name])
    wanted = storage.read(last.path)
    put(storage, last.path, b"# somebody's own")
    for one in others:
        storage.delete(one.path)
    written = content_of(storage)
    with pytest.raises(ConfigError, match=re.escape(last.path) + ".*--overwrite"):
        export(storage.url, [name])
    assert content_of(storage) == written
    done = export(storage.url, [name], overwrite=True)
    assert [one.path for one in done if one.outcome == "replaced"] == [last.path]
    assert storage.read(last.path) == wanted


def test_relative_paths_lead_back_from_another_folder_and_from_behind_a_link(tmp_path):
    manifest = write_shard_set(
        open_storage(str(tmp_path / "set")), {"train": png_samples("train", 4, size=8)}
    )
    (tmp_path / "scratch" / "me").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "me")
    for output in (tmp_path / "for" / "them", tmp_path / "link" / "for"):
        export(str(tmp_path / "set"), ["wids", "timm", "hf"], output=str(output))
        listed = json.loads((output / "wids-train.json").read_text())["shardlist"]
        for entry, shard in zip(listed, manifest.split("train").shards, strict=True):
            assert (output / entry["url"]).read_bytes() == (
                tmp_path / "set" / shard.path
            ).read_bytes()
        info = json.loads((output / "_info.json").read_text())["splits"]["train"]["filenames"]
        assert info == [entry["url"] for entry in listed]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "manifest.json",
        "quarantine.jsonl",
        "train",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("energon", "only beside the tars"),
        ("timm", "takes relative paths to"),
        ("hf", "takes relative paths to"),
    ],
)
def test_a_format_that_can_t_name_remote_tars_says_so_and_wids_gets_their_urls(
    tmp_path, name, message
):
    storage, manifest = made()
    with pytest.raises(ConfigError, match=message):
        export(storage.url, [name], output=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    write_shard_set(open_storage(str(tmp_path)), {"train": png_samples("train", 4, size=8)})
    with pytest.raises(ConfigError, match="none leads from memory://elsewhere/x to"):
        export(str(tmp_path), [name], output="memory://elsewhere/x")
    export(storage.url, ["wids"], output=str(tmp_path))
    listed = json.loads((tmp_path / "wids-train.json").read_text())["shardlist"]
    assert [entry["url"] for entry in listed] == [
        f"{storage.url}/{s.path}" for s in manifest.split("train").shards
    ]


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [("timm", "target", "mistakes the split name"), ("hf", "a-b", "letters, digits")],
)
def test_a_split_s_name_that_a_reader_misreads_is_refused(name, split, message):
    storage = open_storage(f"memory://export-{next(_counter)}/set")
    write_shard_set(storage, {split: png_samples("train", 4, size=8)})
    with pytest.raises(ConfigError, match=message):
        export(storage.url, [name])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            with_fields("train", 4, ("bmp", b"x"), ("cls", b"1"), label=1),
            "images as bmp; timm reads jpg, png, webp",
        ),
        (with_fields("train", 4, ("cls", b"1"), label=1), "no known field"),
        (with_fields("train", 4, ("png", b"x")), "has 4 of 4 samples without a label"),
    ],
)
def test_timm_gets_no_promise_of_samples_that_its_reader_skips(samples, message):
    storage, _ = made(train=samples)
    with pytest.raises(ConfigError, match=message):
        export(storage.url, ["timm"])


def test_a_changed_index_and_a_key_that_is_there_twice_are_not_exported():
    storage, manifest = made()
    path = manifest.split("train").shards[1].index.path
    data = bytearray(storage.read(path))
    data[-1] ^= 1
    put(storage, path, bytes(data))
    with pytest.raises(DamagedShard, match=re.escape(path)):
        export(storage.url, ["energon"])
    storage.delete(path)
    with pytest.raises(NotFound):
        export(storage.url, ["energon"])
    storage, _ = made(test=png_samples("train", 4, size=4))
    with pytest.raises(
        ConfigError, match=r"a key is there twice.*needs each key once; `build --source webdataset`"
    ):
        export(storage.url, ["energon"])


def test_the_command_says_what_it_wrote_and_refuses_an_unknown_format(capsys):
    storage, _ = made()
    assert cli.main(["export", storage.url, "--to", "wids,timm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["wids", "timm"]
    assert "2 written" in lines[0]
    assert cli.main(["export", storage.url, "--to", "timm", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert ExportedFile(**found).outcome == "unchanged"
    for names in ("wids,parquet", "", "TIMM"):
        assert cli.main(["export", storage.url, "--to", names]) == 2
        assert "there are wids, timm, energon, hf" in capsys.readouterr().err
