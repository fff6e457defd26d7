"""Nothing of a forgotten sample stays in silence: keys that name none, what a stopped change left,
names elsewhere.
"""

import json
import re
import shutil

import numpy as np
import pytest

from pipelines.build import build
from pipelines.check import inspect
from pipelines.check.verify import verify
from pipelines.config import ColumnConfig
from pipelines.export.write import export
from pipelines.sets.column import column
from pipelines.sets.compact import lines
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.local import LocalStorage
from tests.makers.built import DAY, HERE, append_of, config_of, forget, manifest_of, verified
from tests.makers.folders import write_class_folders
from tests.makers.stored import samples_of

A, B, TWIN, BAD = (f"train/{name}" for name in ("cat/000", "cat/001", "dog/twin", "dog/003"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = write_class_folders(
        tmp_path_factory.mktemp("raw"), ["cat", "dog"], 12, splits=["train", "val"]
    )
    shutil.copy(folder / f"{A}.png", folder / f"{TWIN}.png")
    (folder / f"{BAD}.gif").write_bytes(b"<html>404</html>")
    return folder


@pytest.fixture(scope="module")
def made(raw, tmp_path_factory):
    """25 samples of train, of which two have the same image, 24 of val, and a bad file with the
    name of a sample.
    """
    folder = tmp_path_factory.mktemp("forget") / "set"
    build(config_of(raw, folder, num_shards={"": 3}, max_bad_fraction=0.5), HERE)
    return folder


@pytest.fixture
def stored(made, tmp_path):
    return shutil.copytree(made, tmp_path / "set")


def hits(folder, data):
    """The files that have these bytes."""
    files = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    return {name for name, path in files.items() if data in path.read_bytes()}


def loose(folder):
    """The files that neither a version nor a plan names."""
    loaded = manifests.load(str(folder))
    known = manifests.files_of(loaded.manifest, *manifests.older(loaded.storage))
    known |= {naming.MANIFEST, *map(naming.references_of, known)}
    return {
        name
        for name in hits(folder, b"") - known
        if name.startswith("plan/shards/") or not name.startswith(("plan/", "versions/"))
    }


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (f"{A}\r\n\r\n{B} \r\n".encode(), 2),
        (f"{A}\n{B}".encode("utf-8-sig"), 2),
        (f"{A}\n{B}\n".encode("utf-16"), 2),
        (
            f"{A}\n{B}\n".encode("utf-16-le"),
            "3 keys not in .*: .*; correct the list .UTF-8, or UTF-16",
        ),
        (f"{A}\n\xe9".encode("latin-1"), "1 key not in .*: \ufffd; correct"),
        (f"{A}\ntrain/cat/099\n".encode(), r"1 key not in .*: train/cat/099; correct"),
        (
            f"{A}.png\n{A.upper()}\n{A}@1\n".encode(),
            r"3 keys not in .*: TRAIN/CAT/000, train/cat/000.png, train/cat/000@1",
        ),
        (b" \n", "no key"),
    ],
)
def test_a_list_of_keys_is_read_as_any_editor_writes_it_and_what_names_no_sample_is_refused(
    stored, tmp_path, said, data, found
):
    (tmp_path / "keys").write_bytes(data)
    before, words = hits(stored, b""), ("compact", stored, "--drop-keys", tmp_path / "keys")
    if isinstance(found, str):
        assert re.search(found, said(*words, code=2 if "no key" in found else 1))
        assert hits(stored, b"") == before
        return
    assert said(*words).startswith(f"version 2: {found} samples dropped")
    chosen = "--from-split", "train", "--keys", tmp_path / "keys"
    view = said("view", tmp_path / "v.parquet", "--of", f"{stored}@1", *chosen)
    assert f"train {found};" in view


def test_a_list_that_grows_may_name_what_was_forgotten_before(stored):
    forget(stored, A, TWIN)
    assert not hits(stored, A.encode())
    assert forget(stored, A, B).num_samples == 1
    assert (forget(stored, A, B).num_samples, forget(stored, B).version) == (0, 3)
    with pytest.raises(
        ConfigError, match=r"no sample has the key 'train/cat/000'; `compact` dropped it"
    ):
        inspect.inspect(str(stored), key=A)
    with pytest.raises(
        ConfigError,
        match="check the spelling, or `compact` dropped it; older versions",
    ):
        inspect.inspect(str(stored), name=f"{A}.png")


def test_a_split_may_be_emptied_but_not_the_set(stored, tmp_path):
    keys, others = (samples_of(stored, manifest_of(stored), name) for name in ("val", "train"))
    before = hits(stored, b"")
    with pytest.raises(ConfigError, match="no sample would be left; remove the set instead"):
        forget(stored, *keys, *others)
    assert hits(stored, b"") == before
    assert forget(stored, A, *keys).num_samples == 25
    manifest = manifest_of(stored)
    assert manifest.splits.keys() == {"train"}
    assert manifest.provenance.notes[-1] == "version 2: 25 samples dropped, none left in val"
    assert not loose(stored) | hits(stored, b"val/cat/00")
    build(append_of(stored, tmp_path / "more", "val/cat/a.png", "val/dog/b.png"), HERE)
    assert verified(stored).split("val").num_samples == 2


def test_the_same_image_under_another_key_is_named(stored):
    done = forget(stored, A)
    assert done.same_images == [TWIN]
    assert f"the same images stay under other keys: {TWIN}; drop these keys too" in lines(done)
    assert forget(stored, TWIN, B).same_images == []


def test_side_files_that_name_what_is_gone_are_listed_and_removed_when_asked_for(
    stored, tmp_path, said
):
    np.save(tmp_path / "values.npy", np.zeros((24, 2), np.float32))
    source = str(tmp_path / "values.npy")
    column(ColumnConfig(set=str(stored), name="old", source=source, split="val"), HERE)
    export(str(stored), ["wids"])
    listed = {shard.path: shard.num_samples for shard in manifest_of(stored).shards}
    for path in listed:
        (stored / f"{path}.idx").write_bytes(b"")
    (stored / ".nv-meta").mkdir()  # as Energon's tool indexes a set
    (stored / ".nv-meta/.info.json").write_text(json.dumps({"shard_counts": listed}))
    (stored / ".nv-meta/index.sqlite").write_text(f"val/cat/000 {BAD}")
    (stored / "wids-other.json").write_text('["gs://bucket/elsewhere/x-000000.tar"]')
    (tmp_path / "keys").write_text(f"val/cat/000\n{BAD}\n")
    words = "compact", stored, "--drop-keys", tmp_path / "keys", "--grace", 0
    sides = [".nv-meta/", "columns/old/", "wids-train.json", "wids-val.json"]
    assert forget(stored, "val/cat/000", BAD, grace=DAY).side_files == sides
    named = f"may still name dropped samples: {', '.join(sides)}; --side-files"
    assert named in said(*words)
    assert hits(stored, BAD.encode()) == {".nv-meta/index.sqlite"}
    assert "may still name" not in said(*words, "--side-files")
    assert not hits(stored, b"val/cat/000") | hits(stored, BAD.encode())
    left = hits(stored, b"")
    assert all((f"{tar}.idx" in left) == (tar in left) for tar in listed)
    assert not hits(stored / "columns", b"")
    assert "wids-other.json" in left
    assert verified(stored).quarantine.count == 0


def test_verify_names_tars_that_no_version_lists_in_any_folder_of_a_split(stored):
    forget(stored, B, grace=DAY)
    for path in (
        "train-00aa11bb/train-000000.tar",
        "train-x/train-000000.tar",
        "train_/t-000000.tar",
    ):
        (stored / path).parent.mkdir()
        (stored / path).write_bytes(b"left over")
    for version in ("", "@1", "@2"):
        found = verify(f"{stored}{version}", deep=False).problems
        assert [problem.where for problem in found] == ["train-00aa11bb/train-000000.tar"]


def test_only_the_newest_version_of_a_set_that_is_no_view_is_changed(stored, tmp_path, said):
    view, keys = tmp_path / "v.parquet", tmp_path / "keys"
    keys.write_text(f"{A}\n")
    said("view", view, "--of", stored, "--from-split", "train", "--keys", keys)
    forget(stored, B, grace=DAY)
    for url, words in (
        (view, "a view has no shards of its own"),
        (f"{stored}@1", "only the newest version can be"),
    ):
        assert words in said("append", url, "--source", "folder", "--input", tmp_path, code=2)
        assert words in said("compact", url, "--drop-keys", keys, code=2)


def test_what_a_stopped_compaction_wrote_goes_with_a_set_that_is_replaced(stored, raw, tmp_path):
    done = shutil.copytree(stored, tmp_path / "done")
    forget(done, A, grace=DAY)
    not_yet = shutil.ignore_patterns("manifest.json", "versions")
    shutil.copytree(done, stored, ignore=not_yet, dirs_exist_ok=True)
    assert loose(stored)
    build(config_of(raw, stored, num_shards={"": 2}, max_bad_fraction=0.5, overwrite=True), HERE)
    assert not loose(stored)


def test_a_removal_that_was_stopped_after_a_quarantine_list_is_finished(stored):
    forget(stored, A, BAD, grace=DAY)
    (stored / "quarantine.jsonl").unlink()  # the list of version 1, whose manifest goes last
    assert forget(stored, A, BAD).removed
    verified(stored)
    assert not list(manifests.older(LocalStorage(str(stored))))
