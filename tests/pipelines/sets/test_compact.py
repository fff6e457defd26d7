"""Forgetting samples: their shards are written anew, the next version is published, and the old
files go later.
"""

import shutil
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

import shardset
from pipelines import build as builds
from pipelines.begin import prepare
from pipelines.build import build
from pipelines.check import inspect
from pipelines.check.verify import verify
from pipelines.cli import main
from pipelines.runners import options
from pipelines.sets import compact as compacting
from pipelines.sets import versions as verbs
from pipelines.sets.catalog import write_catalog
from pipelines.sets.compact import compact
from shardset.errors import ConfigError, ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.storage.local import LocalStorage
from tests.makers.built import HERE, config_of
from tests.makers.folders import write_class_folders, write_images
from tests.makers.stored import files_of, samples_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(hours=24)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two versions: 60 samples and a copy of each in six shards, then two more in one."""
    folder = tmp_path_factory.mktemp("compact")
    raw = write_class_folders(folder / "raw", ["cat", "dog"], 30, splits=["train"])
    build(config_of(raw, folder / "set", num_shards={"": 6}, repeat={"": 2}), HERE)
    more = write_images(folder / "more", ["train/cat/new0.jpg", "train/dog/new1.jpg"])
    build(config_of(more, folder / "set", num_shards={"": 1}, append="none"), HERE)
    return folder / "set"


@pytest.fixture
def stored(made, tmp_path):
    return shutil.copytree(made, tmp_path / "set")


def contents_of(folder):
    manifest = manifests.load(str(folder)).manifest
    return samples_of(folder, manifest, "train")


def test_the_touched_shards_are_written_anew_and_the_rest_stays(stored):
    before, samples = files_of(stored), contents_of(stored)
    split = manifests.load(str(stored)).manifest.split("train")
    done = compact(str(stored), ["train/cat/007"], grace=DAY, now=NOW)
    touched = {sample.number for sample in inspect.inspect(f"{stored}@2", key="train/cat/007")}
    assert (done.version, done.num_samples, done.num_shards) == (3, 2, len(touched))
    assert {name for name, data in before.items() if files_of(stored)[name] != data} == {
        naming.MANIFEST
    }
    after = manifests.load(str(stored)).manifest.split("train")
    assert contents_of(stored) == {
        key: one for key, one in samples.items() if not key.startswith("train/cat/007")
    }
    assert [shard.path for shard in after.shards if "-" not in shard.path.partition("/")[0]] == [
        shard.path for number, shard in enumerate(split.shards[:6]) if number not in touched
    ]
    assert (after.num_source_samples, after.num_dropped, after.num_repeats) == (62, 1, 59)
    assert (
        verify(str(stored), deep=True).problems == verify(f"{stored}@2", deep=True).problems == ()
    )
    assert inspect.inspect(str(stored), name="cat/008.png")[0].name == "train/cat/008.png"


def test_old_files_wait_for_the_grace_period_and_then_only_the_newest_version_is_left(
    stored, capsys
):
    url = str(stored)
    first = compact(url, ["train/cat/007"], grace=DAY, now=NOW)
    assert first.waiting
    assert compact(url, ["train/cat/007"], grace=DAY, now=NOW + DAY / 2) == _waiting(first, 0)
    assert {one.number for one in manifests.older(manifests.load(url).storage)} == {1, 2}
    done = compact(url, ["train/cat/007"], grace=DAY, now=NOW + DAY)
    assert done.removed.keys() >= {"train", "versions", "plan", "plan/shards"}
    assert not [name for name in files_of(stored) if name.startswith(versions.FOLDER)]
    listed = {*manifests.files_of(manifests.load(url).manifest), naming.MANIFEST}
    assert files_of(stored).keys() == listed
    assert verify(url, deep=True).problems == ()
    assert inspect.inspect(url, name="cat/008.png")[0].name == "train/cat/008.png"
    with pytest.raises(ManifestError, match="version 1 was removed"):
        manifests.load(f"{url}@1")
    assert compact(url, ["train/cat/007"], grace=DAY, now=NOW + DAY) == _waiting(
        first, 0, waiting=0, after=None
    )
    assert "\n".join(compacting.lines(done)).endswith(compacting.NOT_REACHED)


def test_a_reader_ends_on_its_version_and_tags_that_go_are_named(stored):
    verbs.tag(f"{stored}@1", "paper")
    choices = {
        "global_batch_size": 8,
        "rank": 0,
        "world_size": 1,
        "image": None,
        "fields": ("cls",),
        "with_key": True,
    }
    expected = [
        [*batch["key"]] for batch in shardset.Stream(str(stored), "train", **choices).epoch(0)
    ]
    batches = shardset.Stream(str(stored), "train", **choices).epoch(0)
    found = [[*next(batches)["key"]]]
    done = compact(str(stored), ["train/cat/007"], grace=DAY, now=NOW)
    assert "tags of versions that wait: paper" in compacting.lines(done)
    assert found + [[*batch["key"]] for batch in batches] == expected
    assert manifests.load(f"{stored}@paper").manifest.number == 1
    done = compact(str(stored), ["train/cat/007"], grace=DAY, now=NOW + DAY)
    assert "tags of versions that were removed: paper" in compacting.lines(done)
    assert not list(stored.glob("versions/tags/*"))
    (stored / "versions/tags/late.json").write_bytes(
        msgspec.json.encode(versions.Tag(version=1, digest="gone"))
    )
    compact(str(stored), ["train/cat/008"], grace=timedelta(0), now=NOW)
    assert not list(stored.glob("versions/tags/*"))


def test_an_append_follows_a_compaction_of_all_that_the_last_one_added(stored, tmp_path):
    compact(str(stored), ["train/cat/new0"], grace=DAY, now=NOW)
    more = write_images(tmp_path / "more", ["train/cat/a.png", "train/dog/b.png"])
    build(config_of(more, stored, num_shards={"": 1}, append="none"), HERE)
    for version in (2, 3, 4):
        assert verify(f"{stored}@{version}", deep=True).problems == ()


def test_an_append_that_meets_a_compaction_is_refused_and_nothing_is_lost(stored, tmp_path):
    more = write_images(tmp_path / "more", ["train/cat/a.png", "train/dog/b.png"])
    prepared = prepare(
        config_of(more, stored, num_shards={"": 1}, append="none"), LocalStorage(str(stored))
    )
    with pytest.raises(ConfigError, match="unfinished build or append"):
        compact(str(stored), ["train/cat/007"], grace=DAY, now=NOW)
    shutil.move(stored / "plan", tmp_path / "plan")  # as if it had looked before the append began
    compact(str(stored), ["train/cat/007"], grace=DAY, now=NOW)
    shutil.copytree(tmp_path / "plan", stored / "plan", dirs_exist_ok=True)
    with pytest.raises(ManifestError, match="another version was published meanwhile"):
        builds.run(prepared, options.beam_options(HERE, prepared.files.output))
    assert manifests.load(str(stored)).manifest.number == 3
    assert verify(f"{stored}@2", deep=True).problems == ()


def _waiting(done, num_samples, **others):
    return msgspec.structs.replace(done, num_samples=num_samples, num_shards=0, **others)


def test_no_byte_of_a_dropped_sample_is_left(stored, tmp_path, capsys):
    images = [
        fields["png"]
        for key, fields in contents_of(stored).items()
        if key.startswith("train/dog/003")
    ]
    (tmp_path / "keys").write_text("train/dog/003\n")
    (stored / naming.REPORT).write_text("pictures")
    write_catalog(str(stored))
    assert (
        main(["compact", str(stored), "--drop-keys", str(tmp_path / "keys"), "--grace", "0"]) == 0
    )
    assert "removed from plan/units" in capsys.readouterr().out
    left = b"".join(path.read_bytes() for path in stored.rglob("*") if path.is_file())
    assert images[0] not in left
    assert b"train/dog/003" not in left
    assert not (stored / naming.REPORT).exists()
    listed = set(files_of(stored)) - set(manifests.files_of(manifests.load(str(stored)).manifest))
    assert {path for path in listed if not path.endswith(".parquet")} == {naming.MANIFEST}
    assert write_catalog(str(stored))


def test_a_shard_of_which_nothing_is_left_goes_and_the_set_may_not(stored):
    url = str(stored)
    split = manifests.load(url).manifest.split("train")
    keys = [sample.key for sample in inspect.inspect(url, shard=6)]
    compact(url, keys, grace=timedelta(0), now=NOW)
    assert manifests.load(url).manifest.split("train").num_shards == split.num_shards - 1
    assert verify(url, deep=True).problems == ()
    every = {key.partition("@")[0] for key in contents_of(stored)}
    with pytest.raises(ConfigError, match="no sample would be left"):
        compact(url, every, grace=timedelta(0), now=NOW)
    with pytest.raises(ConfigError, match="no key was given"):
        compact(url, [], grace=timedelta(0), now=NOW)
    with pytest.raises(ManifestError, match="version 2 was removed"):
        compact(f"{url}@2", keys, grace=timedelta(0), now=NOW)


@pytest.mark.gcs
def test_a_set_in_a_bucket_grows_and_forgets(gcs_root, tmp_path):
    url = f"{gcs_root}/set"
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 10, splits=["train"])
    more = write_images(tmp_path / "more", ["train/cat/new0.jpg", "train/dog/new1.jpg"])
    for folder, known in ((raw, None), (more, "name")):
        build(config_of(folder, url, num_shards={"": 2}, append=known), HERE)
    assert verify(url, deep=True).problems == verify(f"{url}@1", deep=True).problems == ()
    done = compact(url, ["train/cat/000", "train/dog/new1"], grace=timedelta(0), now=NOW)
    assert (done.version, done.num_samples) == (3, 2)
    assert files_of(url).keys() == {
        *manifests.files_of(manifests.load(url).manifest),
        naming.MANIFEST,
    }
    assert verify(url, deep=True).problems == ()
