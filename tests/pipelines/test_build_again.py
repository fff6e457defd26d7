"""Builds at an output with files: one that is finished, stopped, damaged, replaced, or that is the
input.
"""

import os
import re
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import PIL
import pytest

from pipelines.begin import prepare
from pipelines.build import build, dry_run
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.images.options import ImageOptions
from pipelines.plan import paths
from pipelines.runners import beam_options as options
from pipelines.runners import on_beam
from shardset.errors import (
    ChangedInput,
    ConfigError,
    ManifestError,
    PreconditionFailed,
    SourceError,
)
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.open import open_storage
from tests.makers import odd_images, planned
from tests.makers.built import HERE, add, built, config_of, unfinished
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.doors import told
from tests.makers.folders import write_class_folders, write_csv
from tests.makers.stored import files_of
from tests.makers.tars import tar_bytes


def test_a_rerun_finds_everything_finished_and_changes_nothing(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tar")}
    add(raw, "README.txt", b"beside the images")
    again = build(config_of(raw, tmp_path / "out"), HERE)
    assert again.counters["shards_skipped"] == 6
    assert "shards_written" not in again.counters
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tar")} == before


def test_a_finished_set_whose_classes_have_other_names_now_is_another_set(raw, tmp_path):
    def config_with(name: str) -> BuildConfig:
        rows = [
            (f"train/{folder}/000.png", label) for folder, label in (("cat", name), ("dog", "dog"))
        ]
        listing = write_csv(raw / "list.csv", ["path", "label"], rows)
        return config_of(listing, tmp_path / "out", source="listing", num_shards={"": 1})

    built(config_with("cat"))
    with pytest.raises(
        ConfigError, match=r"already holds another shard set \(the input has other classes\)"
    ):
        build(config_with("cot"), HERE)
    manifest = built(replace(config_with("cot"), overwrite=True))
    assert [info.name for info in manifest.classes] == ["cot", "dog"]


def test_a_rerun_repairs_a_damaged_shard_and_only_that(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    expected = files_of(tmp_path / "out")
    tar, index = (tmp_path / "out/train" / f"train-000001.{kind}" for kind in ("tar", "parquet"))
    whole = tar.read_bytes()
    flipped = whole[:700] + bytes([whole[700] ^ 1]) + whole[701:]
    for damage in (
        tar.unlink,
        index.unlink,
        lambda: tar.write_bytes(flipped),
        lambda: tar.write_bytes(whole[:-512]),
    ):
        damage()
        again = build(config_of(raw, tmp_path / "out"), HERE)
        assert again.counters["shards_written"] == 1
        assert files_of(tmp_path / "out") == expected


def test_a_damaged_manifest_is_named_and_what_the_message_says_helps(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    expected = built(config)
    manifest = tmp_path / "out" / naming.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-100])
    with pytest.raises(
        ManifestError,
        match=r"manifest\.json: not valid JSON.*remove it, then run the same command again",
    ):
        build(config, HERE)
    manifest.unlink()
    assert built(config) == expected


def test_a_build_that_stopped_before_the_manifest_resumes_and_redoes_only_what_is_missing(
    raw, tmp_path
):
    build(config_of(raw, tmp_path / "out"), HERE)
    expected = files_of(tmp_path / "out")
    for name in ("manifest.json", "plan/done/train-000002.json", "train/train-000002.parquet"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(ManifestError, match="no manifest there"):
        manifests.load(str(tmp_path / "out"))
    again = build(config_of(raw, tmp_path / "out"), HERE)
    assert (again.counters["shards_written"], again.counters["shards_skipped"]) == (1, 5)
    assert files_of(tmp_path / "out") == expected


def test_only_some_shards_can_be_written_and_then_the_rest(raw, tmp_path):
    build(config_of(raw, tmp_path / "whole"), HERE)
    part = build(config_of(raw, tmp_path / "out", only_shards=frozenset({("train", 1)})), HERE)
    assert part.published is None
    assert [p.name for p in (tmp_path / "out").rglob("*.tar")] == ["train-000001.tar"]
    build(config_of(raw, tmp_path / "out"), HERE)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_shard_of_unknown_origin_that_comes_later_is_refused_and_its_removal_helps(raw):
    storage, name = open_storage(f"memory://{uuid.uuid4().hex}"), "train/train-000001.tar"
    config = config_of(raw, storage.url)

    def put_once(verb, path):
        if (verb, path) == ("close", paths.PLAN):
            storage.write(name, b"somebody's")

    def write(output):
        on_beam.run(prepare(config, output), options.beam_options(HERE, output))

    with pytest.raises(
        PreconditionFailed, match=r"train-000001\.tar: a different object exists.*remove it"
    ):
        write(told(storage, uuid.uuid4().hex, put_once))
    assert storage.read(name) == b"somebody's"
    storage.delete(name)
    write(storage)
    assert verify(storage.url, deep=True).problems == ()


@pytest.mark.parametrize(
    ("differences", "options"),
    [
        ("seed was 0 and is 1", {"seed": 1}),
        (
            "num_shards was [^;]* and is [^;]*; seed was 0 and is 1",
            {"num_shards": {"": 2}, "seed": 1},
        ),
        ("the input is not the same [^;]*", {"input": "train"}),
    ],
)
def test_a_build_that_differs_is_told_its_options_or_its_input_and_nothing_else(
    raw, tmp_path, differences, options
):
    config = config_of(raw, tmp_path / "out")
    prepare(config, open_storage(config.output))
    if "input" in options:
        options = {"input": f"{raw}/train"}
    with pytest.raises(
        ConfigError, match=rf"already holds an unfinished build \({differences}\); finish"
    ):
        prepare(replace(config, **options), open_storage(config.output))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_looks_like_a_shard_of_somebody_else_is_not_overwritten(
    raw, tmp_path, overwrite
):
    add(tmp_path / "out", "train/train-000000.tar", b"precious")
    with pytest.raises(
        ConfigError, match=r"holds train/train-000000\.tar without a manifest or plan"
    ):
        build(config_of(raw, tmp_path / "out", overwrite=overwrite), HERE)
    assert (tmp_path / "out" / "train" / "train-000000.tar").read_bytes() == b"precious"


def test_overwrite_replaces_a_set_at_once_and_leaves_nothing_of_the_old_one(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    old = manifests.load(str(tmp_path / "out"))[0]
    new = built(config_of(raw, tmp_path / "out", seed=1, overwrite=True))
    assert new != old
    assert verify(str(tmp_path / "out"), deep=True).problems == ()
    again = build(config_of(raw, tmp_path / "out", seed=1), HERE)
    assert again.published is not None
    assert (again.published.digest, again.published.quarantine) == (new.digest, new.quarantine)
    assert manifests.load(str(tmp_path / "out"))[0] == new


def test_overwrite_leaves_what_the_replaced_set_does_not_list(raw, tmp_path):
    out = tmp_path / "out"
    built(config_of(raw, out))
    foreign = [
        "laion/part-000000.tar",
        "train/train-000099.tar",
        "quarantine-ab.jsonl",
        "plan/cat/1.png",
    ]
    for name in foreign:
        add(out, name, b"precious")
    new = built(config_of(raw, out, seed=5, overwrite=True))
    ours = {shard.path for split in new.splits.values() for shard in split.shards}
    assert {str(path.relative_to(out)) for path in out.rglob("*.tar")} == ours | {*foreign[:2]}
    assert all((out / name).read_bytes() == b"precious" for name in foreign)


def test_overwrite_leaves_a_manifest_that_is_not_ours(raw, tmp_path):
    add(tmp_path / "out", "manifest.json", b'{"name": "an app"}')
    with pytest.raises(ManifestError, match="expected a shardset manifest"):
        build(config_of(raw, tmp_path / "out", overwrite=True), HERE)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == b'{"name": "an app"}'


@pytest.mark.parametrize("place", ["out", "link"])
def test_a_set_that_is_the_input_is_not_overwritten(raw, tmp_path, place):
    out = tmp_path / "sets" / "out"
    built(config_of(raw, out))
    (tmp_path / "sets" / "link").symlink_to(out)
    before = files_of(out)
    config = config_of(tmp_path / "sets" / place, out, source="shardset", overwrite=True)
    with pytest.raises(ConfigError, match=r"-000000\.tar is read by this build.*another --output"):
        build(config, HERE)
    assert files_of(out) == before


@pytest.mark.parametrize("place", ["new", "deep/new"])
@pytest.mark.parametrize(
    ("act", "source", "reason"),
    [
        (build, "folder", "so the tars would be among.* outside of it$"),
        (dry_run, "folder", "so the tars would be among.* outside of it$"),
        (build, "webdataset", "whose tars are the input.*outside of it"),
    ],
)
@pytest.mark.parametrize("folder", ["input", "link"])
def test_an_output_in_the_input_is_refused_before_anything_is_written(
    tmp_path, act, source, reason, folder, place
):
    files = write_class_folders(tmp_path / "input", ["a", "b"], 2)
    add(files, "train-0.tar", tar_bytes({"a.png": odd_images.png(1)}))
    (tmp_path / "link").symlink_to("input")
    before = files_of(files)
    config = config_of(files, tmp_path / folder / place, source=source)
    with pytest.raises(ConfigError, match=rf"is in the input .*input, {reason}"):
        act(config, HERE)
    assert files_of(files) == before


@pytest.mark.parametrize("place", ["in", "in/photos-shards"])
def test_an_output_beside_or_around_the_raw_images_is_allowed(tmp_path, place):
    photos = write_class_folders(tmp_path / "in/photos", ["a", "b"], 2)
    config = config_of(photos, tmp_path / place, num_shards={"": 1})
    assert built(config) == built(config)


def test_an_output_next_to_the_one_tar_that_is_read_is_allowed(tmp_path):
    pictures = {"a.png": odd_images.png(1), "b.png": odd_images.png(2)}
    add(tmp_path, "tars/train-0.tar", tar_bytes(pictures))
    where = tmp_path / "tars/train-0.tar", tmp_path / "tars/new"
    config = config_of(*where, source="webdataset", num_shards={"": 1})
    assert built(config) == built(config)


def test_an_output_in_the_bucket_folder_of_raw_images_is_refused(storage):
    for url in (storage.url, f"{storage.url}/", f"{storage.url}/shards"):
        with pytest.raises(ConfigError, match="is in the input"):
            build(config_of(f"{storage.url}/", url), HERE)
    with pytest.raises(SourceError, match="no files there"):
        build(config_of(storage.url, f"{storage.url}-shards"), HERE)


def test_a_spool_that_is_gone_where_a_shard_is_to_be_repaired_is_named_with_what_helps(tmp_path):
    (tmp_path / "raw").mkdir()
    write_archive(
        tmp_path / "raw/cifar-10-python.tar.gz", python_files(cifar10(20)), "cifar-10-batches-py"
    )
    config = BuildConfig(
        source="cifar10",
        input=str(tmp_path / "raw"),
        output=str(tmp_path / "out"),
        num_shards={"": 2},
    )
    manifest = built(config)
    for path in (paths.spool_path(0), manifest.split("train").shards[0].path):
        (tmp_path / "out" / path).unlink()
    with pytest.raises(ChangedInput, match=r"restore it, or remove plan/ at the output"):
        build(config, HERE)
    shutil.rmtree(tmp_path / "out" / naming.PLAN_FOLDER)
    again = built(replace(config, overwrite=True))
    assert [shard.sha256 for shard in again.split("train").shards] == [
        s.sha256 for s in manifest.split("train").shards
    ]


def test_a_table_of_the_plan_that_a_repair_misses_is_named_with_what_helps(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    build(config, HERE)
    (tmp_path / "out" / paths.unit_path(0)).unlink()
    (tmp_path / "out" / naming.shard_path("train", "train", 1)).unlink()
    with pytest.raises(
        ConfigError,
        match=r"0000000\.arrow.*remove plan/ at the output.*then build again with --over",
    ):
        build(config, HERE)


def test_a_build_that_another_version_began_is_refused_and_starts_over_when_told_to(raw, tmp_path):
    config = unfinished(raw, tmp_path / "out", tool="shardset 0.1.0, plan 1")
    with pytest.raises(
        ConfigError,
        match=r"already holds an unfinished build \(it was begun by shardset 0\.1\.0, plan 1",
    ):
        build(config, HERE)
    again = build(replace(config, overwrite=True), HERE)
    assert again.counters.get("shards_skipped", 0) == 0
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_a_damaged_plan_is_named_and_what_the_message_says_helps(raw, tmp_path):
    config = unfinished(raw, tmp_path / "out")
    unit = tmp_path / "out" / paths.unit_path(0)
    unit.write_bytes(unit.read_bytes()[:-100])
    with pytest.raises(
        ConfigError, match=r"remove plan/ at the output.*then build again with --overwrite"
    ):
        build(config, HERE)
    shutil.rmtree(tmp_path / "out" / naming.PLAN_FOLDER)
    with pytest.raises(ConfigError, match=r"holds .* without a manifest or plan"):
        build(replace(config, overwrite=True), HERE)
    for split in ("train", "test"):
        shutil.rmtree(tmp_path / "out" / split)
    build(replace(config, overwrite=True), HERE)
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_an_input_that_changes_while_it_is_written_fails_the_build(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    prepared = prepare(config, open_storage(config.output))
    (raw / "test" / "cat" / "000.png").write_bytes(odd_images.png(99))
    with pytest.raises(ChangedInput, match=r"test/cat/000\.png: not the object that was planned"):
        on_beam.run(prepared, options.beam_options(HERE, prepared.build.files.output))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_an_input_that_changes_behind_its_time_stamp_is_named_and_what_the_message_says_helps(
    tmp_path,
):
    for number in range(4):
        add(
            tmp_path / "raw",
            f"train/cat/{number}.bmp",
            odd_images.encoded(odd_images.picture(number), "BMP"),
        )
    config = config_of(tmp_path / "raw", tmp_path / "out", num_shards={"": 2}, overwrite=True)
    build(replace(config, only_shards=frozenset({("train", 0)})), HERE)
    for path in (tmp_path / "raw").rglob("*.bmp"):
        facts, data = path.stat(), path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    # --overwrite sees the same names, sizes and times, so it goes on with the same plan
    for _ in range(2):
        with pytest.raises(
            ChangedInput, match=r"its bytes changed.*remove plan/ at the output.*with --overwrite"
        ):
            build(config, HERE)
    shutil.rmtree(tmp_path / "out" / naming.PLAN_FOLDER)
    shutil.rmtree(tmp_path / "out" / "train")
    build(config, HERE)
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def begun_with_pillow(output: Path, version: str) -> None:
    """Makes a build look as if it had been begun with that version of Pillow."""
    file = planned.record_of(output, paths.BUILD)
    planned.rewrite(
        output, paths.BUILD, file | {"libraries": file["libraries"] | {"pillow": version}}
    )


@pytest.mark.parametrize(
    "options", [{"image": ImageOptions(image_format="png")}, {}], ids=["re-encoded", "repaired"]
)
def test_images_that_another_pillow_wrote_are_not_mixed_with_those_of_this_one(tmp_path, options):
    for number in range(4):
        add(tmp_path / "raw", f"train/cat/{number}.jpg", odd_images.cmyk())
    config = config_of(tmp_path / "raw", tmp_path / "out", num_shards={"": 2}, **options)
    build(replace(config, only_shards=frozenset({("train", 0)})), HERE)
    begun_with_pillow(tmp_path / "out", "9.9")
    here = PIL.__version__
    with pytest.raises(
        ConfigError,
        match=(
            r"already holds an[a-z ]+ \(pillow was 9\.9 and is"
            rf" {re.escape(here)}\).*--overwrite"
        ),
    ):
        build(config, HERE)
    assert built(replace(config, overwrite=True)).provenance.libraries["pillow"] == here
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_another_pillow_resumes_with_a_build_that_copies_all_images(raw, tmp_path):
    config = unfinished(raw, tmp_path / "out")
    begun_with_pillow(tmp_path / "out", "9.9")
    assert build(config, HERE).counters["shards_skipped"] == 5
    assert "9.9" not in (tmp_path / "out" / paths.BUILD).read_text()
