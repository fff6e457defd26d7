"""Forgetting samples: their shards are written anew, the next version is published, the old files
go later, and nothing of them stays in silence.
"""

import json
import re
import shutil

import msgspec
import numpy as np
import pytest
from pyarrow import parquet

import shardset
from pipelines.begin import prepare
from pipelines.check.verify import verify
from pipelines.config import ColumnConfig
from pipelines.export.side_files import export
from pipelines.plan import paths
from pipelines.runners import beam_options, on_beam
from pipelines.sets import version_history
from pipelines.sets.column import column
from pipelines.sets.compact import NOT_REACHED, lines
from pipelines.sets.samples_table import samples_table
from pipelines.write.set_files import listed_by
from shardset.errors import ConfigError, ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.storage.local import LocalStorage
from tests.makers.built import (
    DAY,
    HERE,
    NOW,
    append_of,
    built,
    config_of,
    forget,
    inspected,
    manifest_of,
    verified,
)
from tests.makers.folders import write_class_folders
from tests.makers.stored import files_of, samples_of

CAT = "train/cat/007"


@pytest.fixture(scope="module")
def made_grown(tmp_path_factory):
    """Two versions: 60 samples and a copy of each in six shards, then two more in one."""
    folder = tmp_path_factory.mktemp("compact")
    raw = write_class_folders(folder / "raw", ["cat", "dog"], 30, splits=["train"])
    built(config_of(raw, folder / "set", num_shards={"": 6}, repeat={"": 2}))
    names = "train/cat/new0.jpg", "train/dog/new1.jpg"
    built(append_of(folder / "set", folder / "more", *names))
    return folder / "set"


@pytest.fixture
def grown(made_grown, tmp_path):
    return shutil.copytree(made_grown, tmp_path / "set")


def rows_of(folder):
    """What the indexes say of each key but its place."""
    loaded = manifests.load(str(folder))
    rows = samples_table(loaded, "train").drop_columns("id").to_pylist()
    return {row["key"]: row for row in rows}


def contents_of(folder):
    return samples_of(folder, manifest_of(folder), "train")


def test_the_touched_shards_are_written_anew_and_the_rest_stays(grown):
    before, samples, rows = files_of(grown), contents_of(grown), rows_of(grown)
    split = manifest_of(grown).split("train")
    done = forget(grown, CAT, grace=DAY)
    touched = {sample.number for sample in inspected(f"{grown}@2", key=CAT)}
    assert (done.version, done.num_samples, done.num_shards) == (3, 2, len(touched))
    assert {name for name, data in before.items() if files_of(grown)[name] != data} == {
        naming.MANIFEST
    }
    verified(f"{grown}@2")
    after = verified(grown).split("train")
    for found, old in ((contents_of(grown), samples), (rows_of(grown), rows)):
        assert found == {key: one for key, one in old.items() if not key.startswith(CAT)}
    assert all(row["name"] and row["width"] == 8 for row in rows.values())
    assert [shard.path for shard in after.shards if "-" not in shard.path.partition("/")[0]] == [
        shard.path for number, shard in enumerate(split.shards[:6]) if number not in touched
    ]
    assert (after.num_source_samples, after.num_dropped, after.num_repeats) == (62, 1, 59)
    assert inspected(grown, name="cat/008.png")[0].name == "train/cat/008.png"


def test_old_files_wait_for_the_grace_period_and_then_only_the_newest_version_is_left(grown):
    url = str(grown)
    first = forget(url, CAT, grace=DAY)
    assert first.waiting
    none = msgspec.structs.replace(first, num_samples=0, num_shards=0)
    assert forget(url, CAT, grace=DAY, now=NOW + DAY / 2) == none
    assert {one.number for one in manifests.older(manifests.load(url).storage)} == {1, 2}
    done = forget(url, CAT, grace=DAY, now=NOW + DAY)
    assert done.removed.keys() >= {"train", "versions", "plan", "plan/shards"}
    assert files_of(grown).keys() == {*listed_by(verified(url)), naming.MANIFEST}
    assert inspected(url, name="cat/008.png")[0].name == "train/cat/008.png"
    with pytest.raises(ManifestError, match="version 1 was removed"):
        manifests.load(f"{url}@1")
    again = forget(url, CAT, grace=DAY, now=NOW + DAY)
    assert again == msgspec.structs.replace(none, waiting=0, after=None)
    assert "\n".join(lines(done)).endswith(NOT_REACHED)


def test_a_reader_ends_on_its_version_and_tags_that_go_are_named(grown):
    version_history.tag(f"{grown}@1", "paper")
    before, reader = (
        (
            [*batch["key"]]
            for batch in shardset.Stream(
                str(grown), "train", batch_size=8, image=None, with_key=True
            )
        )
        for _ in range(2)
    )
    expected, found = [*before], [next(reader)]
    done = forget(grown, CAT, grace=DAY)
    assert "tags of versions that wait: paper" in lines(done)
    assert [*found, *reader] == expected
    assert manifest_of(f"{grown}@paper").number == 1
    done = forget(grown, CAT, grace=DAY, now=NOW + DAY)
    assert "tags of versions that were removed: paper" in lines(done)
    assert not list(grown.glob("versions/tags/*"))
    tag = msgspec.json.encode(versions.Tag(version=1, digest="gone"))
    (grown / "versions/tags/late.json").write_bytes(tag)
    forget(grown, "train/cat/008")
    assert not list(grown.glob("versions/tags/*"))


def test_an_append_follows_a_compaction_of_all_that_the_last_one_added(grown, tmp_path):
    forget(grown, "train/cat/new0", grace=DAY)
    built(append_of(grown, tmp_path / "more", "train/cat/a.png", "train/dog/b.png"))
    for version in (2, 3, 4):
        verified(f"{grown}@{version}")


def test_an_append_that_meets_a_compaction_is_refused_and_nothing_is_lost(grown, tmp_path):
    config = append_of(grown, tmp_path / "more", "train/cat/a.png", "train/dog/b.png")
    prepared = prepare(config, LocalStorage(str(grown)))
    with pytest.raises(ConfigError, match="unfinished build or append"):
        forget(grown, CAT)
    shutil.move(grown / "plan", tmp_path / "plan")  # as if it had looked before the append began
    forget(grown, CAT, grace=DAY)
    shutil.copytree(tmp_path / "plan", grown / "plan", dirs_exist_ok=True)
    with pytest.raises(ManifestError, match="another version was published meanwhile"):
        on_beam.run(prepared, beam_options.beam_options(HERE, prepared.build.files.output))
    assert manifest_of(grown).number == 3
    verified(f"{grown}@2")


def test_no_byte_of_a_dropped_sample_is_left(grown, tmp_path, said):
    image = contents_of(grown)["train/dog/003"]["png"]
    (tmp_path / "keys").write_text("train/dog/003\n")
    (grown / naming.REPORT).write_text("pictures")
    words = "compact", grown, "--drop-keys", tmp_path / "keys", "--grace", 0
    assert re.search(r"removed [0-9]+ files, [0-9.]+ MB", said(*words))
    assert not any((grown / "plan/units").glob("*"))
    files = [path for path in grown.rglob("*") if path.is_file()]
    rows = [parquet.read_table(path).to_pylist() for path in files if path.suffix == ".parquet"]
    left = b"".join(path.read_bytes() for path in files) + repr(rows).encode()
    assert image not in left
    assert b"train/dog/003" not in left
    assert not (grown / naming.REPORT).exists()
    assert files_of(grown).keys() == {*listed_by(manifest_of(grown)), naming.MANIFEST}


def test_a_shard_of_which_nothing_is_left_goes(grown):
    num_shards = manifest_of(grown).split("train").num_shards
    keys = [sample.key for sample in inspected(grown, shard=6)]
    forget(grown, *keys)
    assert verified(grown).split("train").num_shards == num_shards - 1
    for address, dropped, message in (
        (grown, [], "no key was given"),
        (f"{grown}@2", keys, "version 2 was removed"),
    ):
        with pytest.raises((ConfigError, ManifestError), match=message):
            forget(address, *dropped)


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
    built(config_of(raw, folder, num_shards={"": 3}, max_bad_fraction=0.5))
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
    known = listed_by(loaded.manifest, *manifests.older(loaded.storage))
    known |= {naming.MANIFEST, *map(paths.references_path, known)}
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
        assert re.search(found, said(*words, code=2))
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
        inspected(stored, key=A)
    with pytest.raises(
        ConfigError,
        match="check the spelling, or `compact` dropped it; older versions",
    ):
        inspected(stored, name=f"{A}.png")


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
    built(append_of(stored, tmp_path / "more", "val/cat/a.png", "val/dog/b.png"))
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
    named = f"may still name dropped samples or old tars: {', '.join(sides)}; make them"
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
        (view, "a view has no shards"),
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
    built(config_of(raw, stored, num_shards={"": 2}, max_bad_fraction=0.5, overwrite=True))
    assert not loose(stored)


def test_a_removal_that_was_stopped_after_a_quarantine_list_is_finished(stored):
    forget(stored, A, BAD, grace=DAY)
    (stored / "quarantine.jsonl").unlink()  # the list of version 1, whose manifest goes last
    assert forget(stored, A, BAD).removed
    verified(stored)
    assert not list(manifests.older(LocalStorage(str(stored))))
