"""Appending: a build whose commit publishes the next version of a set; nothing that exists is
touched.
"""

import shutil

import msgspec
import numpy as np
import pytest

from pipelines.begin import prepare
from pipelines.build import build, dry_run
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan.append import extended_classes, relabelled
from pipelines.runners import beam_options as options
from pipelines.runners import on_beam
from pipelines.sources.base import RawSample, Rejected, class_infos
from pipelines.write import history, replace
from shardset.errors import ConfigError, ManifestError, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming, rows, versions
from shardset.format.manifest import ClassInfo
from shardset.format.parquet import table_to_bytes
from shardset.read.indexes import read_index
from shardset.storage.local import LocalStorage
from tests.makers.built import HERE, add, built, config_of, inspected, manifest_of, verified
from tests.makers.folders import write_images
from tests.makers.images import image_bytes
from tests.makers.reading import stream_of, together
from tests.makers.stored import files_of, samples_of

NUM_OLD, NUM_NEW = 61, 7


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A set of 61 pictures in three shards, with one more that could not be decoded."""
    folder = tmp_path_factory.mktemp("append")
    raw = write_images(
        folder / "raw",
        [f"train/{'cat' if n % 2 else 'dog'}/old {n:03d}.png" for n in range(NUM_OLD)],
    )
    (raw / "train/cat/bad.png").write_bytes(b"<html>404</html>")
    build(config_of(raw, folder / "set"), HERE)
    return folder / "set"


@pytest.fixture
def old(made, tmp_path):
    return shutil.copytree(made, tmp_path / "set")


@pytest.fixture
def more(tmp_path):
    """Seven pictures of a class that comes first, and of one that the set has; and a broken one."""
    names = [f"train/{name}/new{n}.jpg" for n, name in enumerate(["ant", "dog"] * 3 + ["ant"])]
    raw = write_images(tmp_path / "more", names)
    (raw / "train/ant/bad.jpg").write_bytes(b"<html>405</html>")
    return raw


def append_of(raw, output, **options) -> BuildConfig:
    return config_of(raw, output, **{"append": "store", "num_shards": {"": 2}, **options})


def key_of_ids(folder, split="train"):
    manifest, storage, _ = manifests.load(str(folder))
    return [
        key
        for shard in manifest.split(split).shards
        for key in read_index(storage, shard)["key"].to_pylist()
    ]


def test_an_append_adds_files_and_a_version_and_changes_nothing_else(old, more):
    before, keys, first = files_of(old), key_of_ids(old), manifests.load(str(old)).manifest
    second = built(append_of(more, old))
    after = files_of(old)
    assert {name for name in before if after[name] != before[name]} == {naming.MANIFEST}
    assert after[versions.path(1)] == before[naming.MANIFEST]
    assert manifests.load(f"{old}@1").manifest == first
    assert manifests.load(f"{old}@2").manifest == second
    assert (first.number, second.number) == (1, 2)
    assert key_of_ids(old)[:NUM_OLD] == keys
    assert [info.name for info in second.classes] == ["cat", "dog", "ant"]
    split = second.split("train")
    assert (split.num_samples, split.class_totals) == (NUM_OLD + NUM_NEW, [30, 34, 4])
    assert split.shard_sizes == [21, 20, 20, 4, 3]
    assert split.fields == ["png", "cls", "jpg"]
    assert second.quarantine.count == 2
    assert second.provenance.appended[0].source == "folder"
    assert verify(str(old), deep=True).problems == verify(f"{old}@1", deep=True).problems == ()
    stored = samples_of(old, second, "train")
    assert stored["train/ant/new0"]["cls"] == b"2"
    assert stored["train/dog/new1"]["cls"] == b"1"
    serials = [read_index(LocalStorage(str(old)), shard)["serial"] for shard in split.shards]
    assert sorted(np.concatenate(serials).tolist()) == list(range(NUM_OLD + NUM_NEW))
    shutil.rmtree(old / "plan")
    for name in ("cat/old 001.png", "ant/new0.jpg"):
        [sample] = inspected(old, name=name)
        assert sample.name.endswith(name)
    with pytest.raises(ConfigError, match=r"cat/bad\.png"):
        inspected(old, name="cat/bad.png")


def test_older_versions_are_not_read_to_append_or_verify(old, more, monkeypatch):
    build(append_of(more, old), HERE)
    for number in range(2, 300):
        shutil.copy(old / versions.path(1), old / versions.path(number))
    read, head = [], manifests.read_head
    monkeypatch.setattr(
        manifests,
        "read_head",
        lambda storage, name=naming.MANIFEST: (read.append(name), head(storage, name))[1],
    )
    prepare(append_of(more, old, seed=1), LocalStorage(str(old)))
    verify(str(old), deep=False)
    assert {*read} <= {naming.MANIFEST, versions.path(1), versions.path(299)}


def test_of_two_appends_at_once_one_wins_and_a_published_version_stays(old, more):
    first, second = (
        prepare(append_of(more, old, seed=seed), LocalStorage(str(old))) for seed in (1, 2)
    )
    with pytest.raises(
        ManifestError, match=r"another build.* or append again when that one is done"
    ):
        on_beam.run(first, options.beam_options(HERE, first.build.files.output))
    on_beam.run(second, options.beam_options(HERE, second.build.files.output))
    assert manifests.load(str(old)).manifest.split("train").num_samples == NUM_OLD + NUM_NEW


def test_an_append_is_not_withdrawn_because_another_one_builds_on_it(old, more, monkeypatch):
    publish = history.publish

    def followed(storage, base, manifest):
        publish(storage, base, manifest)
        prepare(append_of(more, old, seed=2), LocalStorage(str(old)))

    monkeypatch.setattr(history, "publish", followed)
    with pytest.raises(ManifestError, match="another build"):
        build(append_of(more, old, seed=1), HERE)
    assert manifests.load(str(old)).manifest.number == 2
    monkeypatch.undo()
    assert built(append_of(more, old, seed=2)).number == 3


def test_the_same_command_again_finds_everything_finished_and_repairs_a_shard(old, more):
    build(append_of(more, old), HERE)
    expected = files_of(old)
    assert build(append_of(more, old), HERE).counters["shards_skipped"] == 2
    assert files_of(old) == expected
    tar = next(old.glob("train-*/*000001.tar"))
    tar.write_bytes(tar.read_bytes()[:-512])
    assert build(append_of(more, old), HERE).counters["shards_written"] == 1
    assert files_of(old) == expected


def test_what_another_version_of_arrow_repairs_is_the_same_build_and_the_same_append(
    made, old, more, monkeypatch
):
    for config, folder in (
        (config_of(made.parent / "raw", old), "train"),
        (append_of(more, old), "train-*"),
    ):
        first = built(config)
        next(old.glob(f"{folder}/train-000001.parquet")).unlink()
        with monkeypatch.context() as patched:
            patched.setattr(rows, "_written", lambda table, metadata=None: table_to_bytes(table))
            again = built(config)
        assert again.digest == first.digest
        assert again != first
        verified(old)
        files = files_of(old)
        assert built(config) == again
        assert files_of(old) == files


def test_an_unfinished_append_is_started_over_by_overwrite_and_only_its_files_are_removed(
    old, more
):
    before = files_of(old)
    build(append_of(more, old, only_shards=frozenset({("train", 0)})), HERE)
    with pytest.raises(ConfigError, match="its own options, or --overwrite to start over"):
        prepare(append_of(more, old, seed=3), LocalStorage(str(old)))
    manifest = built(append_of(more, old, seed=1, overwrite=True))
    assert before.items() - files_of(old).items() == {(naming.MANIFEST, before[naming.MANIFEST])}
    assert manifest.number == 2
    assert verify(str(old), deep=True).problems == ()
    assert len({path.parent for path in old.glob("train-*/*")}) == 1


def test_an_append_whose_version_was_overtaken_is_refused(old, more, tmp_path):
    build(append_of(more, old, only_shards=frozenset({("train", 0)})), HERE)
    other = shutil.copytree(old, tmp_path / "other")
    second = built(append_of(more, other, seed=1, overwrite=True))
    # as another writer would
    shutil.copytree(other, old, dirs_exist_ok=True, ignore=shutil.ignore_patterns("plan"))
    with pytest.raises(ConfigError, match=r"the set has another version since.*--overwrite"):
        build(append_of(more, old), HERE)
    assert manifests.load(str(old)).manifest == second
    third = built(append_of(more, old, overwrite=True))
    assert (third.number, third.split("train").num_samples) == (3, NUM_OLD + 2 * NUM_NEW)
    assert verify(str(old), deep=True).problems == ()


# What the set has already


def test_samples_of_the_same_name_get_other_keys(old, made):
    raw = made.parent / "raw"
    for times in (2, 3):
        manifest = built(append_of(raw, old, seed=times))
        assert manifest.split("train").num_samples == times * NUM_OLD
        assert len(set(key_of_ids(old))) == times * NUM_OLD
    assert verify(str(old), deep=True).problems == ()


@pytest.mark.parametrize("label", [-7, 3, 10**9])
def test_a_label_without_a_class_is_refused_at_its_row(label):
    sample = RawSample(name="x.png", key="x", split="train", label=label, image="", fields={})
    rejected = relabelled(sample, [], 3)
    assert rejected == Rejected(
        name="x.png", split="train", reason=f"label {label}, expected 0 to 2"
    )
    assert isinstance(relabelled(sample, [5, 1, 0], 9), Rejected)
    kept = msgspec.structs.replace(sample, label=2)
    assert relabelled(kept, [], 3) == kept
    assert relabelled(kept, [5, 1, 0], 9) == msgspec.structs.replace(sample, label=0)


def test_names_that_a_holdout_has_are_known_without_being_read_also_those_with_short_keys(tmp_path):
    raw = write_images(tmp_path / "raw", [f"a/photo ({n}).png" for n in range(12)])
    build(config_of(raw, tmp_path / "set", holdout={"test": 0.3}), HERE)
    before = samples_of(tmp_path / "set", manifest_of(tmp_path / "set"), "test")
    for path in raw.rglob("*.png"):
        path.write_bytes(b"damaged since")
    add(raw, "a/photo (new).png", image_bytes(1000))
    manifest = built(append_of(raw, tmp_path / "set", append="skip", num_shards={"": 1}))
    assert samples_of(tmp_path / "set", manifest, "test") == before
    assert sum(split.num_samples for split in manifest.splits.values()) == 13
    assert not manifest.quarantine.count


def test_the_names_of_files_that_a_set_has_are_skipped_by_default(old, made, said):
    raw = made.parent / "raw"
    text = said("append", old, "--source", "folder", "--input", raw, code=1)
    assert "nothing to append: the set has all of it; 61 samples skipped, because the set" in text
    assert "has their names (61 in train); --known store stores them again" in text


def test_known_names_are_skipped_and_told_and_known_images_under_other_names_are_counted(
    old, made, tmp_path
):
    old_images = sorted((made.parent / "raw/train/cat").glob("old*.png"))
    changed = f"train/cat/{old_images[5].name}"
    images = {
        "train/cat/a.png": image_bytes(1000),
        "train/cat/copy.png": old_images[0].read_bytes(),
        changed: image_bytes(1001),
    }
    for name, data in images.items():
        add(tmp_path / "more", name, data)
    manifest = built(append_of(tmp_path / "more", old, append="skip", num_shards={"": 1}))
    stored = [fields["png"] for fields in samples_of(old, manifest, "train").values()][NUM_OLD:]
    assert {*stored} == {images["train/cat/a.png"], images["train/cat/copy.png"]}
    assert manifest.provenance.appended[0].notes == [
        "1 sample skipped, because the set has their names (1 in train); --known store stores them"
        " again",
        f"1 sample of these had another size or generation when it was stored ({changed}); the set"
        " keeps the old ones",
        "1 new image of the same bytes as others of the set, under other names",
    ]


def test_an_append_may_be_planned_and_writes_nothing(old, more):
    before = files_of(old)
    result = dry_run(append_of(more, old), HERE)
    assert files_of(old) == before
    assert result.plan.splits["train"].num_stored == NUM_NEW
    assert len(result.rejected) == 1


def test_an_append_that_failed_before_its_first_shard_blocks_no_other(old, more, tmp_path):
    write_images(tmp_path / "bad", ["train/cat/x.png"])
    (tmp_path / "bad/train/cat/x.png").write_bytes(b"no image")
    with pytest.raises(ShardsetError, match="are bad"):
        build(append_of(tmp_path / "bad", old), HERE)
    assert built(append_of(more, old)).number == 2


def categories(**ids):
    return [
        ClassInfo(label=label, name=name.strip("_"), category_id=number)
        for label, (name, number) in enumerate(ids.items())
    ]


@pytest.mark.parametrize(
    ("old", "new", "labels", "ids", "further"),
    [
        ({"cat": 1, "dog": 2}, {"dog": 1, "cat": 2}, [1, 0], {1: 2, 2: 1}, {}),
        ({"cat": 1, "dog": 2}, {"cat": 7}, [], {7: 1}, {}),
        ({"cat": 1, "dog": 2}, {"ox": 1, "dog": 2}, [2, 1], {1: 3}, {"ox": 3}),
        ({"cat": 1}, {"ox": 9}, [1], {}, {"ox": 9}),
        ({"plate": 0, "plate_": 1}, {"plate": 0, "plate_": 1}, [], {}, {}),
        (
            {"gnu": 4, "gnu_": 9, "cat": 5},
            {"cat": 1, "gnu": 2, "gnu_": 3},
            *([2, 0, 1], {1: 5, 2: 4, 3: 9}, {}),
        ),
    ],
)
def test_the_name_of_a_category_is_its_identity(old, new, labels, ids, further):
    classes, *found = extended_classes(categories(**old), categories(**new))
    assert found == [labels, ids]
    assert classes == categories(**old, **further)


@pytest.mark.parametrize(
    ("old", "new"),
    [({"plate": 0, "plate_": 1}, {"plate": 5}), ({"plate": 1}, {"plate": 0, "plate_": 1})],
)
def test_categories_that_names_do_not_tell_apart_are_refused(old, new):
    with pytest.raises(ConfigError, match="all called 'plate'; give the input their wnids, or the"):
        extended_classes(categories(**old), categories(**new))


def test_categories_are_not_appended_to_classes_without_their_ids():
    with pytest.raises(ConfigError, match="class 'cat' of the set has no category id, and in the"):
        extended_classes(class_infos(["cat"]), categories(cat=3))


def test_classes_are_the_same_by_wnid_or_else_by_name():
    old = [ClassInfo(label=0, name="crane", wnid="n1"), ClassInfo(label=1, name="crane", wnid="n2")]
    classes, labels, _ = extended_classes(
        old, [ClassInfo(label=0, name="heron", wnid="n2"), *class_infos(["", "owl"])[1:]]
    )
    assert (labels, [info.name for info in classes]) == ([1, 2], ["crane", "crane", "owl"])
    with pytest.raises(ConfigError, match=r"classes \[0, 1\] of the set are all called 'crane'"):
        extended_classes(old, class_infos(["crane"]))
    assert extended_classes(class_infos(["0", "1"]), None) == (None, [], {})
    assert (
        extended_classes(old, None)
        == extended_classes(old, class_infos(["0", "1"]))
        == (old, [], {})
    )
    numbers = class_infos(["0", "1", "2"])
    assert extended_classes(numbers[:1], numbers) == (numbers, [], {})
    assert extended_classes(old[:1], old) == (old, [], {})


def test_there_must_be_a_set_to_append_to(more, tmp_path):
    with pytest.raises(ConfigError, match="no finished shard set there to append to"):
        build(append_of(more, tmp_path / "none"), HERE)


def test_an_overwriting_build_removes_all_versions_with_their_files(old, more, made):
    build(append_of(more, old), HERE)
    replaced = built(config_of(made.parent / "raw", old, overwrite=True))
    assert replaced.number == 1
    assert sorted({name.partition("/")[0] for name in files_of(old)}) == sorted(
        [
            naming.MANIFEST,
            replaced.quarantine.path,
            replaced.split("train").groups[0].table.partition("/")[0],
        ]
    )


def test_a_set_whose_replaced_versions_are_still_there_is_not_appended_to(
    old, more, made, monkeypatch
):
    build(append_of(more, old), HERE)
    again = config_of(made.parent / "raw", old, overwrite=True)
    # as if it were killed there
    monkeypatch.setattr(replace, "remove_replaced", lambda files: {})
    build(again, HERE)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="give the command of that build again"):
        build(append_of(more, old), HERE)
    build(again, HERE)
    assert not list(old.glob("versions/*"))
    assert built(append_of(more, old)).number == 2


# Readers


def keys_of(url, **options):
    """A stream of the labels and keys of an address."""
    options = {"global_batch_size": 8, "image": None, "fields": ("cls",), **options}
    return stream_of(str(url), with_key=True, **options)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_epoch_mixes_all_groups_and_holds_each_sample_once(old, more, world):
    build(append_of(more, old), HERE)
    keys = key_of_ids(old)
    batches = [
        together(parts)
        for parts in zip(
            *(keys_of(old, rank=rank, world_size=world).epoch(1) for rank in range(world)),
            strict=True,
        )
    ]
    found = together(batches)
    real = found["weight"] == 1
    assert sorted(found["id"][real].tolist()) == list(range(NUM_OLD + NUM_NEW))
    assert [*found["key"]] == [keys[id_] for id_ in found["id"]]
    assert [batch["id"].tolist() for batch in batches] == [
        batch["id"].tolist() for batch in keys_of(old).epoch(1)
    ]


def test_a_reader_that_began_on_a_version_ends_on_it_and_resumes_by_its_number(old, more):
    expected = [[*batch["key"]] for batch in keys_of(old).epoch(0)]
    stream = keys_of(old)
    batches = stream.epoch(0)
    found = [[*next(batches)["key"]]]
    state = stream.state(0, 1)
    build(append_of(more, old), HERE)
    found += [[*batch["key"]] for batch in batches]
    assert found == expected
    again = keys_of(f"{old}@1")
    assert [[*batch["key"]] for batch in again.epoch(*again.load_state_dict(state))] == expected[1:]
    with pytest.raises(ConfigError, match=r"of version 1 of .*, and this is version 2; give .*@1,"):
        keys_of(old).load_state_dict(state)
    assert len(list(keys_of(old).epoch(0))) > len(expected)
