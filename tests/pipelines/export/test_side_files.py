"""Side files of other readers, without those readers (tests/peers has them)."""

import json
import re

import pytest
import yaml
from msgspec.structs import replace

from pipelines.check.verify import verify
from pipelines.export.side_files import ExportedFile, export
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.format.tar import StoredSample
from shardset.storage.base import Storage
from tests.makers.shardset import jpeg_samples, new_set, png_samples, publish, put, write_shard_set

FOR_ALL_SETS = ["wids", "hf"]


def made(**changes) -> tuple[Storage, Manifest]:
    """Splits train (11 PNGs, 3 shards of 3 and 4) and test (5 JPEGs) in memory."""
    samples = {"train": png_samples("train", 11, size=8), "test": jpeg_samples("test", 5)}
    manifest, storage, _ = manifests.load(new_set(samples | changes, num_shards=3))
    return storage, manifest


def content_of(storage: Storage) -> dict[str, bytes]:
    return {stat.name: storage.read(stat.name) for stat in storage.list()}


def test_wids_lists_shards_with_their_sizes():
    storage, manifest = made()
    export(storage.url, ["wids"])
    for name, split in manifest.splits.items():
        listed = json.loads(storage.read(f"wids-{name}.json"))
        assert [listed["__kind__"], listed["wids_version"]] == ["wids-shard-index-v1", 1]
        for entry, shard in zip(listed["shardlist"], split.shards, strict=True):
            size = storage.stat(shard.path).num_bytes
            assert entry == {"url": shard.path, "nsamples": shard.num_samples, "filesize": size}


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
    untyped = StoredSample(key="a", fields=(("png", b"x"), ("npy", b"x")), label=-1, serial=0)
    storage, _ = made(train=[untyped] * 4)
    export(storage.url, ["hf"])
    assert b"dataset_info" not in storage.read("README.md")


def test_every_storage_gets_the_same_files_once_and_keeps_its_set(storage):
    write_shard_set(storage, {"train": png_samples("train", 6, size=8)}, num_shards=2)
    before = content_of(storage)
    first = export(storage.url, FOR_ALL_SETS)
    after = content_of(storage)
    assert {one.path for one in first} == after.keys() - before.keys()
    assert all(after[name] == content for name, content in before.items())
    assert {one.outcome for one in first} == {"written"}
    again = export(storage.url, FOR_ALL_SETS)
    assert [one.path for one in again] == [one.path for one in first]
    assert {one.outcome for one in again} == {"unchanged"}
    assert content_of(storage) == after
    assert verify(storage.url, deep=True).ok


def test_a_file_in_the_way_stays_unless_it_may_be_replaced():
    storage, _ = made()
    *others, last = export(storage.url, FOR_ALL_SETS)
    wanted = storage.read(last.path)
    put(storage, last.path, b"# somebody's own")
    for one in others:
        storage.delete(one.path)
    written = content_of(storage)
    with pytest.raises(ConfigError, match=re.escape(last.path) + ".*--overwrite"):
        export(storage.url, FOR_ALL_SETS)
    assert content_of(storage) == written
    done = export(storage.url, FOR_ALL_SETS, overwrite=True)
    assert [one.path for one in done if one.outcome == "replaced"] == [last.path]
    assert storage.read(last.path) == wanted


def test_relative_paths_lead_back_from_another_folder_and_from_behind_a_link(tmp_path):
    url = new_set(png_samples("train", 4, size=8), tmp_path / "set")
    (tmp_path / "scratch" / "me").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "me")
    before = sorted((tmp_path / "set").iterdir())
    for output in (tmp_path / "for" / "them", tmp_path / "link" / "for"):
        export(url, FOR_ALL_SETS, output=str(output))
        listed = json.loads((output / "wids-train.json").read_text())["shardlist"]
        for entry, shard in zip(listed, manifests.load(url).manifest.shards, strict=True):
            stored = (tmp_path / "set" / shard.path).read_bytes()
            assert (output / entry["url"]).read_bytes() == stored
    assert sorted((tmp_path / "set").iterdir()) == before


def test_wids_gets_urls_of_remote_tars_and_others_say_that_nothing_leads_there(tmp_path):
    storage, manifest = made()
    with pytest.raises(ConfigError, match="hf takes relative paths"):
        export(storage.url, ["wids", "hf"], output=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    local = new_set(png_samples("train", 4, size=8), tmp_path)
    with pytest.raises(ConfigError, match="none leads from memory://elsewhere/x to"):
        export(local, ["wids"], output="memory://elsewhere/x")
    export(storage.url, ["wids"], output=str(tmp_path))
    listed = json.loads((tmp_path / "wids-train.json").read_text())["shardlist"]
    assert [entry["url"] for entry in listed] == [
        f"{storage.url}/{shard.path}" for shard in manifest.split("train").shards
    ]


def test_a_split_s_name_that_a_reader_misreads_is_refused():
    storage, _ = made(**{"a-b": png_samples("train", 4, size=8)})
    with pytest.raises(ConfigError, match="letters, digits"):
        export(storage.url, ["hf"])


def test_the_command_says_what_it_wrote_and_refuses_an_unknown_format(said):
    words = "export", made()[0].url, "--to"
    files = [line.partition(",")[0] for line in said(*words, "wids,hf").splitlines()]
    assert files == ["wids: wids-test.json", "wids: wids-train.json", "hf: README.md"]
    (found,) = json.loads(said(*words, "hf", "--json"))
    assert ExportedFile(**found).outcome == "unchanged"
    for names in ("wids,parquet", ""):
        assert "there are wids, hf" in said(*words, names, code=2)


def test_rfdetr_and_openclip_get_the_samples_of_each_tar(tmp_path):
    storage, _ = made()
    for name in ("rfdetr", "openclip"):
        with pytest.raises(ConfigError, match=f"{name} reads"):
            export(storage.url, [name])
    samples = [
        StoredSample(key=f"{number}", fields=(("png", b"x"), ("json", b"{}")), label=-1, serial=0)
        for number in range(5)
    ]
    storage, manifest = made(train=samples, test=samples)
    with pytest.raises(ConfigError, match="leave --output out"):
        export(storage.url, ["openclip"], output=str(tmp_path))
    classes = [replace(info, category_id=2 * info.label + 1) for info in manifest.classes]
    publish(storage, replace(manifest, classes=classes))
    export(storage.url, ["rfdetr", "openclip"])
    shards = manifest.split("train").shards
    index = json.loads(storage.read("train-index.json"))
    assert index["shards"] == [shard.path for shard in shards]
    assert index["samples_per_shard"] == [shard.num_samples for shard in shards] == [1, 2, 2]
    assert index["categories"][3] == {"id": 7, "name": "class 3"}
    sizes = json.loads(storage.read("train/sizes.json"))
    assert sizes == {shard.path.split("/")[1]: shard.num_samples for shard in shards}
    assert verify(storage.url, deep=False).ok
