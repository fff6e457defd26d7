"""Forgetting samples: their shards are written anew, the next version is published, and the old
files go later.
"""

import shutil

import msgspec
import pytest

import shardset
from pipelines import build as builds
from pipelines.build import build
from pipelines.check import inspect
from pipelines.runners import options
from pipelines.sets import versions as verbs
from pipelines.sets.catalog import write_catalog
from pipelines.sets.compact import NOT_REACHED, lines
from shardset.errors import ConfigError, ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.storage.local import LocalStorage
from tests.makers.built import (
    DAY,
    HERE,
    NOW,
    append_of,
    config_of,
    forget,
    manifest_of,
    verified,
)
from tests.makers.folders import write_class_folders
from tests.makers.stored import files_of, samples_of

CAT = "train/cat/007"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two versions: 60 samples and a copy of each in six shards, then two more in one."""
    folder = tmp_path_factory.mktemp("compact")
    raw = write_class_folders(folder / "raw", ["cat", "dog"], 30, splits=["train"])
    build(config_of(raw, folder / "set", num_shards={"": 6}, repeat={"": 2}), HERE)
    names = "train/cat/new0.jpg", "train/dog/new1.jpg"
    build(append_of(folder / "set", folder / "more", *names), HERE)
    return folder / "set"


@pytest.fixture
def stored(made, tmp_path):
    return shutil.copytree(made, tmp_path / "set")


def contents_of(folder):
    return samples_of(folder, manifest_of(folder), "train")


def test_the_touched_shards_are_written_anew_and_the_rest_stays(stored):
    before, samples = files_of(stored), contents_of(stored)
    split = manifest_of(stored).split("train")
    done = forget(stored, CAT, grace=DAY)
    touched = {sample.number for sample in inspect.inspect(f"{stored}@2", key=CAT)}
    assert (done.version, done.num_samples, done.num_shards) == (3, 2, len(touched))
    assert {name for name, data in before.items() if files_of(stored)[name] != data} == {
        naming.MANIFEST
    }
    verified(f"{stored}@2")
    after = verified(stored).split("train")
    assert contents_of(stored) == {
        key: one for key, one in samples.items() if not key.startswith(CAT)
    }
    assert [shard.path for shard in after.shards if "-" not in shard.path.partition("/")[0]] == [
        shard.path for number, shard in enumerate(split.shards[:6]) if number not in touched
    ]
    assert (after.num_source_samples, after.num_dropped, after.num_repeats) == (62, 1, 59)
    assert inspect.inspect(str(stored), name="cat/008.png")[0].name == "train/cat/008.png"


def test_old_files_wait_for_the_grace_period_and_then_only_the_newest_version_is_left(stored):
    url = str(stored)
    first = forget(url, CAT, grace=DAY)
    assert first.waiting
    none = msgspec.structs.replace(first, num_samples=0, num_shards=0)
    assert forget(url, CAT, grace=DAY, now=NOW + DAY / 2) == none
    assert {one.number for one in manifests.older(manifests.load(url).storage)} == {1, 2}
    done = forget(url, CAT, grace=DAY, now=NOW + DAY)
    assert done.removed.keys() >= {"train", "versions", "plan", "plan/shards"}
    assert files_of(stored).keys() == {*manifests.files_of(verified(url)), naming.MANIFEST}
    assert inspect.inspect(url, name="cat/008.png")[0].name == "train/cat/008.png"
    with pytest.raises(ManifestError, match="version 1 was removed"):
        manifests.load(f"{url}@1")
    again = forget(url, CAT, grace=DAY, now=NOW + DAY)
    assert again == msgspec.structs.replace(none, waiting=0, after=None)
    assert "\n".join(lines(done)).endswith(NOT_REACHED)


def test_a_reader_ends_on_its_version_and_tags_that_go_are_named(stored):
    verbs.tag(f"{stored}@1", "paper")
    before, reader = (
        (
            [*batch["key"]]
            for batch in shardset.Stream(
                str(stored), "train", batch_size=8, image=None, with_key=True
            )
        )
        for _ in range(2)
    )
    expected, found = [*before], [next(reader)]
    done = forget(stored, CAT, grace=DAY)
    assert "tags of versions that wait: paper" in lines(done)
    assert [*found, *reader] == expected
    assert manifest_of(f"{stored}@paper").number == 1
    done = forget(stored, CAT, grace=DAY, now=NOW + DAY)
    assert "tags of versions that were removed: paper" in lines(done)
    assert not list(stored.glob("versions/tags/*"))
    tag = msgspec.json.encode(versions.Tag(version=1, digest="gone"))
    (stored / "versions/tags/late.json").write_bytes(tag)
    forget(stored, "train/cat/008")
    assert not list(stored.glob("versions/tags/*"))


def test_an_append_follows_a_compaction_of_all_that_the_last_one_added(stored, tmp_path):
    forget(stored, "train/cat/new0", grace=DAY)
    build(append_of(stored, tmp_path / "more", "train/cat/a.png", "train/dog/b.png"), HERE)
    for version in (2, 3, 4):
        verified(f"{stored}@{version}")


def test_an_append_that_meets_a_compaction_is_refused_and_nothing_is_lost(stored, tmp_path):
    config = append_of(stored, tmp_path / "more", "train/cat/a.png", "train/dog/b.png")
    prepared = builds.prepare(config, LocalStorage(str(stored)))
    with pytest.raises(ConfigError, match="unfinished build or append"):
        forget(stored, CAT)
    shutil.move(stored / "plan", tmp_path / "plan")  # as if it had looked before the append began
    forget(stored, CAT, grace=DAY)
    shutil.copytree(tmp_path / "plan", stored / "plan", dirs_exist_ok=True)
    with pytest.raises(ManifestError, match="another version was published meanwhile"):
        builds.run(prepared, options.beam_options(HERE, prepared.files.output))
    assert manifest_of(stored).number == 3
    verified(f"{stored}@2")


def test_no_byte_of_a_dropped_sample_is_left(stored, tmp_path, said):
    image = contents_of(stored)["train/dog/003"]["png"]
    (tmp_path / "keys").write_text("train/dog/003\n")
    (stored / naming.REPORT).write_text("pictures")
    write_catalog(str(stored))
    words = "compact", stored, "--drop-keys", tmp_path / "keys", "--grace", 0
    assert "removed from plan/units" in said(*words)
    left = b"".join(path.read_bytes() for path in stored.rglob("*") if path.is_file())
    assert image not in left
    assert b"train/dog/003" not in left
    assert not (stored / naming.REPORT).exists()
    listed = files_of(stored).keys() - manifests.files_of(manifest_of(stored))
    assert {path for path in listed if not path.endswith(".parquet")} == {naming.MANIFEST}
    assert write_catalog(str(stored))


def test_a_shard_of_which_nothing_is_left_goes_and_the_set_may_not(stored):
    num_shards = manifest_of(stored).split("train").num_shards
    keys = [sample.key for sample in inspect.inspect(str(stored), shard=6)]
    forget(stored, *keys)
    assert verified(stored).split("train").num_shards == num_shards - 1
    every = {key.partition("@")[0] for key in contents_of(stored)}
    for address, dropped, error, message in (
        (stored, every, ConfigError, "no sample would be left"),
        (stored, [], ConfigError, "no key was given"),
        (f"{stored}@2", keys, ManifestError, "version 2 was removed"),
    ):
        with pytest.raises(error, match=message):
            forget(address, *dropped)
