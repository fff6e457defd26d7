"""Side files that list other tars than the newest version, for `append`, `compact` and `verify`."""

import json

import pytest
from msgspec.structs import replace

from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.export.side_files import export
from pipelines.export.stale import STALE
from shardset.format import manifest as manifests
from tests.makers.built import DAY, HERE, append_of, built, config_of, forget, verified
from tests.makers.folders import write_class_folders, write_jsonl
from tests.makers.images import image_bytes
from tests.makers.shardset import publish, put

SIDES = [".nv-meta/.info.json", "README.md", "_info.json", "train-index.json", "wids-train.json"]


@pytest.fixture
def stored(tmp_path):
    """A set of twelve samples in three shards with the side files of six readers."""
    folder = tmp_path / "raw"
    folder.mkdir()
    annotations = [{"bbox": [1, 1, 3, 3], "category_id": 0}]
    rows = [{"path": f"{number}.png", "annotations": annotations} for number in range(12)]
    for number in range(12):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    listing = write_jsonl(folder / "all.jsonl", rows)
    config = config_of(listing, tmp_path / "set", source="listing", label_column="")
    manifest = built(config)
    loaded = manifests.load(config.output)
    classes = [manifests.ClassInfo(label=0, name="cat", category_id=0)]
    splits = {name: replace(split, class_totals=[0]) for name, split in manifest.splits.items()}
    publish(loaded.storage, replace(manifest, classes=classes, splits=splits))
    export(config.output, ["wids", "hf", "rfdetr", "openclip"])
    tars = [shard.path for shard in manifest.shards]
    put(loaded.storage, "_info.json", json.dumps({"filenames": tars}).encode())
    counts = {"shard_counts": dict.fromkeys(tars, 4)}
    put(loaded.storage, ".nv-meta/.info.json", json.dumps(counts).encode())
    put(loaded.storage, "wids-far.json", b'["gs://bucket/train/train-000000.tar"]')
    verified(config.output)
    return config.output


def found(url):
    return sorted(one.where for one in verify(url, deep=False).problems if one.sentence == STALE)


def test_after_a_compaction_all_that_name_old_tars_are_listed_and_made_again_or_removed(stored):
    expected = sorted([*SIDES, "train/sizes.json"])
    named = forget(stored, "5", grace=DAY).side_files
    assert named == sorted({".nv-meta/", *expected} - {SIDES[0]})
    assert found(stored) == expected
    export(stored, ["wids", "hf", "rfdetr", "openclip"], overwrite=True)
    assert found(stored) == [SIDES[0], "_info.json"]
    forget(stored, "5", side_files=True)
    verified(stored)
    forget(stored, "6", side_files=True)
    assert found(stored) == ["README.md"]  # where people write, too


def test_a_card_that_only_mentions_tars_is_none_of_an_export(stored):
    storage = manifests.load(stored).storage
    put(storage, "README.md", b"Begin with train/train-000000.tar.")
    forget(stored, "5", grace=DAY)
    assert "README.md" not in found(stored)


def test_an_append_names_the_side_files_that_lack_its_tars(tmp_path):
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4, splits=["train", "test"])
    config = config_of(raw, tmp_path / "set")
    built(config)
    export(config.output, ["wids", "hf"])
    assert build(config, HERE).notes == []
    more = append_of(config.output, tmp_path / "more", "train/cat/new.png")
    names = ["README.md", "wids-train.json"]
    assert build(more, HERE).notes == [f"{name} {STALE}" for name in names]
    assert found(config.output) == names
    export(config.output, ["wids", "hf"], overwrite=True)
    assert build(more, HERE).notes == []
    verified(config.output)
