"""The build, on real files: every runner gives the same bytes, bad input is kept apart, half-written is never whole."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.metrics.execution import MetricKey, MetricResult
from apache_beam.metrics.metricbase import MetricName

from pipelines import build as builds
from pipelines import cli as command
from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.images.options import ImageOptions
from pipelines.pipeline import MakePlan
from pipelines.plan import files, paths
from pipelines.plan.records import PlanFile
from pipelines.runners import dataflow, options
from pipelines.write.commit import Committer
from shardset.errors import ChangedInput, ConfigError, ManifestError, SourceError, StorageError, TooManyBad
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.index import index_from_bytes
from shardset.format.manifest import Manifest
from shardset.read.indexes import read_index
from shardset.storage.open import open_storage
from tests.makers import odd_images, planned
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.folders import write_class_folders, write_csv, write_images, write_jsonl
from tests.makers.images import image_bytes
from tests.makers.stored import files_of, samples_of
from tests.makers.tars import plain, tar_bytes

HERE = ["--direct_running_mode=in_memory"]
RUNNERS = {
    "one worker process": ["--direct_running_mode=multi_processing", "--direct_num_workers=1"],
    "two worker processes": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
    "the runner that retries": ["--runner=BundleBasedDirectRunner"],
    "the portable runner": ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"],
}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "raw", ["cat", "dog", "owl"], 20, splits=["train", "test"])


def config_of(raw: Path, output: Path | str, **options: object) -> BuildConfig:
    return BuildConfig(
        **{"source": "folder", "input": str(raw), "output": str(output), "num_shards": {"": 3}, **options}
    )


def built(config: BuildConfig) -> Manifest:
    """Builds a set and reads its manifest."""
    published = build(config, HERE).published
    manifest = manifests.load(config.output)[0]
    assert published is not None
    assert published.digest == manifest.digest
    return manifest


def test_every_file_is_stored_byte_for_byte_with_its_label(raw, tmp_path):
    manifest = built(config_of(raw, tmp_path / "out"))
    assert [info.name for info in manifest.classes] == ["cat", "dog", "owl"]
    for split in ("train", "test"):
        stored = samples_of(tmp_path / "out", manifest, split)
        assert len(stored) == manifest.split(split).num_samples == 60
        for key, fields in stored.items():
            assert fields["png"] == (raw / f"{key}.png").read_bytes()
            assert fields["cls"] == str(["cat", "dog", "owl"].index(key.split("/")[1])).encode()
        assert [shard.num_samples for shard in manifest.split(split).shards] == [20, 20, 20]
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_long_metadata_is_stored_too_and_does_not_stand_in_the_rows_that_are_held_in_memory(tmp_path):
    images = write_images(tmp_path / "raw", [f"{number}.png" for number in range(6)])
    notes = ["n" * 10 ** (number % 5) for number in range(6)]
    rows = [{"path": f"{number}.png", "label": 0, "note": note} for number, note in enumerate(notes)]
    listing = write_jsonl(images / "all.jsonl", rows)
    output = tmp_path / "out"
    manifest = built(BuildConfig(source="listing", input=str(listing), output=str(output)))
    stored = samples_of(output, manifest, "train")
    assert {key: json.loads(fields["json"]) for key, fields in stored.items()} == {
        str(number): {"note": note} for number, note in enumerate(notes)
    }
    assert verify(str(output), deep=True).problems == ()
    assert (output / paths.spool_path(0)).stat().st_size == len('{"note":""}') + 10**4
    assert all(path.stat().st_size < 5000 for path in (output / "plan" / "shards").iterdir())


def test_a_data_set_of_hugging_face_is_stored_byte_for_byte(tmp_path):
    images = [image_bytes(number, "jpg") for number in range(12)]
    rows = [
        {"image": {"bytes": data, "path": f"{n}.jpg"}, "label": n % 2, "who": "Ada"} for n, data in enumerate(images)
    ]
    rows[5]["image"]["bytes"] = images[5][:100]
    schema = pa.schema(
        [
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("label", pa.int64()),
            ("who", pa.string()),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "train.parquet", row_group_size=5)
    output = tmp_path / "out"
    manifest = built(BuildConfig(source="hf", input=str(tmp_path / "train.parquet"), output=str(output)))
    assert {key: fields["jpg"] for key, fields in samples_of(output, manifest, "train").items()} == {
        f"train/{number}": data for number, data in enumerate(images) if number != 5
    }
    assert json.loads((output / "quarantine.jsonl").read_text())["name"] == "train.parquet/5/5.jpg"
    assert [info.name for info in manifest.classes] == ["0", "1"]
    assert verify(str(output), deep=True).problems == ()


def test_many_classes_do_not_travel_with_the_plan(tmp_path):
    images = write_images(tmp_path / "raw", ["a.png"])
    listing = write_jsonl(images / "all.jsonl", [{"path": "a.png", "label": 9_999}])
    config = BuildConfig(source="listing", input=str(listing), output=str(tmp_path / "out"))
    manifest = built(config)
    assert [info.name for info in manifest.classes] == [str(label) for label in range(10_000)]
    assert manifest.split("train").class_totals == [0] * 9_999 + [1]
    prepared = builds.prepare(config, open_storage(config.output))
    plan, *_ = MakePlan(prepared.files, config, prepared.file).process(None, prepared.units.num_units)
    assert len(pickle.dumps(plan)) < 2000


def test_the_output_has_the_files_that_the_design_names(raw, tmp_path):
    build(config_of(raw, tmp_path / "out", num_shards={"": 1}), HERE)
    assert sorted(files_of(tmp_path / "out")) == [
        "manifest.json",
        "quarantine.jsonl",
        "test/shards.npy",
        "test/test-000000.idx.npy",
        "test/test-000000.tar",
        "train/shards.npy",
        "train/train-000000.idx.npy",
        "train/train-000000.tar",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_runner_writes_the_same_bytes(raw, tmp_path, runner):
    build(config_of(raw, tmp_path / "expected"), HERE)
    build(config_of(raw, tmp_path / "found"), RUNNERS[runner])
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")


@pytest.mark.parametrize(("committed", "attempted", "expected"), [(6, 7, 6), (None, 6, 6), (None, 0, 0), (0, 0, 0)])
def test_counters_are_ours_and_known_on_a_runner_that_commits_none(committed, attempted, expected):
    def counter(namespace: str, name: str) -> MetricResult:
        return MetricResult(MetricKey("a step", MetricName(namespace, name)), committed, attempted)

    found = [counter("shardset", "shards_written"), counter("beam", "element_count")]
    assert builds.counters_of(found) == {"shards_written": expected}


@pytest.mark.slow
def test_all_cores_by_default_give_the_same_bytes(raw, tmp_path):
    build(config_of(raw, tmp_path / "expected"), HERE)
    build(config_of(raw, tmp_path / "found"))
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")


@pytest.mark.parametrize(
    ("flags", "mode", "workers"),
    [
        (["--direct_num_workers=3"], "multi_processing", 3),
        (["--direct_num_workers", "3"], "multi_processing", 3),
        (["--direct_num_workers=1"], "in_memory", 1),
        (["--direct_running_mode=in_memory"], "in_memory", 1),
    ],
)
def test_workers_that_are_asked_for_are_processes(flags, mode, workers, tmp_path):
    found = options.beam_options(flags, open_storage(str(tmp_path))).get_all_options()
    assert (found["direct_running_mode"], found["direct_num_workers"]) == (mode, workers)


def test_memory_and_disk_hold_the_same_bytes(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    build(config_of(raw, f"memory://{tmp_path.name}/set"), HERE)
    assert files_of(f"memory://{tmp_path.name}/set") == files_of(tmp_path / "out")


@pytest.mark.gcs
def test_a_set_is_built_from_and_to_gs_and_verifies(raw, tmp_path, gcs_root):
    source, output = open_storage(f"{gcs_root}/raw"), f"{gcs_root}/set"
    for path in sorted(raw.rglob("*.png")):
        with source.writer(str(path.relative_to(raw))) as out:
            out.write(path.read_bytes())
    build(BuildConfig(source="folder", input=source.url, output=output, num_shards={"": 3}), HERE)
    build(config_of(raw, tmp_path / "local"), HERE)
    assert files_of(output) == files_of(tmp_path / "local")
    assert verify(output, deep=True).problems == ()


def test_a_rerun_finds_everything_finished_and_changes_nothing(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tar")}
    again = build(config_of(raw, tmp_path / "out"), HERE)
    assert again.counters["shards_skipped"] == 6
    assert "shards_written" not in again.counters
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tar")} == before


def test_another_file_beside_the_images_changes_nothing_of_a_finished_set(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    expected = built(config)
    add(raw, "README.txt", b"hi")
    again = build(config, HERE)
    assert again.counters["shards_skipped"] == 6
    assert manifests.load(config.output)[0] == expected


def test_a_finished_set_whose_classes_have_other_names_now_is_another_set(raw, tmp_path):
    def config_with(name: str) -> BuildConfig:
        rows = [(f"train/{folder}/000.png", label) for folder, label in (("cat", name), ("dog", "dog"))]
        listing = write_csv(raw / "list.csv", ["path", "label"], rows)
        return config_of(listing, tmp_path / "out", source="listing", num_shards={"": 1})

    built(config_with("cat"))
    with pytest.raises(ConfigError, match=r"already holds another shard set \(class 0 was 'cat' and is 'cot'\)"):
        build(config_with("cot"), HERE)
    manifest = built(replace(config_with("cot"), overwrite=True))
    assert [info.name for info in manifest.classes] == ["cot", "dog"]


def test_a_rerun_mends_a_damaged_shard_and_only_that(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    expected = files_of(tmp_path / "out")
    tar, index = (tmp_path / "out/train" / f"train-000001.{kind}" for kind in ("tar", "idx.npy"))
    whole = tar.read_bytes()
    flipped = whole[:700] + bytes([whole[700] ^ 1]) + whole[701:]
    for damage in (tar.unlink, index.unlink, lambda: tar.write_bytes(flipped), lambda: tar.write_bytes(whole[:-512])):
        damage()
        again = build(config_of(raw, tmp_path / "out"), HERE)
        assert again.counters["shards_written"] == 1
        assert files_of(tmp_path / "out") == expected


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_manifest_is_named_and_what_the_message_says_helps(raw, tmp_path, overwrite):
    config = config_of(raw, tmp_path / "out", overwrite=overwrite)
    expected = built(config)
    manifest = tmp_path / "out" / naming.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-100])
    with pytest.raises(
        ManifestError, match=r"manifest\.json: not valid JSON.*remove it, then run the same command again"
    ):
        build(config, HERE)
    manifest.unlink()
    assert built(config) == expected


def test_a_build_that_stopped_before_the_manifest_goes_on_and_redoes_only_what_is_missing(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    expected = files_of(tmp_path / "out")
    for name in ("manifest.json", "plan/done/train-000002.json", "train/train-000002.idx.npy"):
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


def test_a_shard_that_does_not_exist_can_not_be_asked_for(raw, tmp_path):
    with pytest.raises(ConfigError, match=r"--only-shards train:9.*split 'train' has shards 0 to 2"):
        build(config_of(raw, tmp_path / "out", only_shards=frozenset({("train", 9)})), HERE)


def test_another_build_into_the_same_place_is_refused(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    expected = files_of(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"already holds another shard set \(seed was 0 and is 1\)"):
        build(config_of(raw, tmp_path / "out", seed=1), HERE)
    assert files_of(tmp_path / "out") == expected


def test_a_file_that_looks_like_a_shard_of_somebody_else_is_not_overwritten(raw, tmp_path):
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "train-000000.tar").write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"holds train/train-000000\.tar without a manifest"):
        build(config_of(raw, tmp_path / "out"), HERE)
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


def test_while_a_set_is_replaced_the_old_one_stays_whole(raw, tmp_path):
    build(config_of(raw, tmp_path / "out"), HERE)
    old = manifests.load(str(tmp_path / "out"))[0]
    partly = config_of(raw, tmp_path / "out", seed=1, overwrite=True, only_shards=frozenset({("train", 0)}))
    build(partly, HERE)
    assert manifests.load(str(tmp_path / "out"))[0] == old
    storage = open_storage(str(tmp_path / "out"))
    for shard in old.split("train").shards:
        assert len(storage.read(shard.path)) == shard.num_bytes
    new = built(replace(partly, only_shards=frozenset()))
    assert {p.parent.name for p in (tmp_path / "out").rglob("*.tar")} == {
        Path(s.path).parent.name for s in new.split("train").shards
    } | {Path(s.path).parent.name for s in new.split("test").shards}


def test_overwrite_leaves_what_the_replaced_set_does_not_list(raw, tmp_path):
    out = tmp_path / "out"
    built(config_of(raw, out))
    foreign = ["laion/part-000000.tar", "train/train-000099.tar", "quarantine-ab.jsonl", "plan/cat/1.png"]
    for name in foreign:
        add(out, name, b"precious")
    new = built(config_of(raw, out, seed=5, overwrite=True))
    ours = {shard.path for split in new.splits.values() for shard in split.shards}
    assert {str(path.relative_to(out)) for path in out.rglob("*.tar")} == ours | {*foreign[:2]}
    assert all((out / name).read_bytes() == b"precious" for name in foreign)


def test_overwrite_leaves_tars_that_stand_without_a_manifest_or_plan(raw, tmp_path):
    add(tmp_path / "out", "train/train-000000.tar", b"precious")
    with pytest.raises(ConfigError, match=r"holds train/train-000000\.tar without a manifest or plan"):
        build(config_of(raw, tmp_path / "out", overwrite=True), HERE)
    assert (tmp_path / "out" / "train" / "train-000000.tar").read_bytes() == b"precious"


def test_overwrite_leaves_a_manifest_that_is_not_ours(raw, tmp_path):
    add(tmp_path / "out", "manifest.json", b'{"name": "an app"}')
    with pytest.raises(ManifestError, match="not a shardset manifest"):
        build(config_of(raw, tmp_path / "out", overwrite=True), HERE)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == b'{"name": "an app"}'


@pytest.mark.parametrize("place", ["out", "out/train", ".", "link"])
def test_a_set_that_is_the_input_is_not_overwritten(raw, tmp_path, place):
    out = tmp_path / "sets" / "out"
    built(config_of(raw, out))
    (tmp_path / "sets" / "link").symlink_to(out)
    if place == ".":
        (tmp_path / "sets" / "link").unlink()
    before = files_of(out)
    config = config_of(tmp_path / "sets" / place, out, source="webdataset", overwrite=True)
    with pytest.raises(ConfigError, match=r"-000000\.tar is read by this build.*another --output"):
        build(config, HERE)
    assert files_of(out) == before


@pytest.mark.parametrize("place", ["tars/new", "tars", "link/new"])
def test_an_output_among_the_tars_that_are_read_is_refused_before_a_rerun_takes_its_shards_for_input(tmp_path, place):
    add(tmp_path, "tars/train-0.tar", tar_bytes({"a.png": odd_images.png(1), "b.png": odd_images.png(2)}))
    (tmp_path / "link").symlink_to("tars")
    before = files_of(tmp_path / "tars")
    with pytest.raises(ConfigError, match=r"is in the input .*tars, whose tars are the input.*outside of it"):
        build(config_of(tmp_path / "tars", tmp_path / place, source="webdataset", num_shards={"": 1}), HERE)
    assert files_of(tmp_path / "tars") == before
    named = config_of(tmp_path / "tars" / "train-0.tar", tmp_path / place, source="webdataset", num_shards={"": 1})
    assert built(named) == built(named)


def test_the_closing_table_shows_the_size_of_the_stored_shards(tmp_path, capfd):
    raw = tmp_path / "raw"
    for number in range(8):
        add(raw, f"a/{number}.png", odd_images.encoded(odd_images.picture(number, (500, 400)), "PNG"))
    words = ["build", "--source", "folder", "--input", str(raw), "--num-shards", "2", "--direct_running_mode=in_memory"]
    words += ["--no-report", "--resize", "shorter=16", "--image-format", "jpg", "--output"]

    def shown(*more: str) -> tuple[str, float]:
        capfd.readouterr()
        assert command.main([*words, *more]) == 0
        head, row = (line for line in capfd.readouterr().out.splitlines() if re.search(r"MB each|train ", line))
        return re.findall(r"\S+ ?\S* each", head)[-1].strip(), float(row.split()[-1])

    out = tmp_path / "out"
    assert shown(str(out)) == ("MB each", 0.0)
    assert shown(str(tmp_path / "dry"), "--dry-run")[0] == "input MB each"
    assert shown(str(tmp_path / "part"), "--only-shards", "train:0")[0] == "input MB each"
    assert shown(str(out), "--overwrite", "--seed", "1", "--image-format", "png", "--resize", "shorter=400")[
        1
    ] == round(sum(path.stat().st_size for path in out.rglob("*.tar")) / 2 / 1e6, 1)


@pytest.mark.parametrize("place", ["photos", "photos/shards", "photos/./a/../b", "link/shards"])
def test_an_output_in_the_folder_of_raw_images_is_refused_before_anything_is_written(tmp_path, place):
    photos = write_class_folders(tmp_path / "photos", ["a", "b"], 2)
    (tmp_path / "link").symlink_to("photos")
    before = files_of(photos)
    for run in (build, builds.dry_run):
        with pytest.raises(ConfigError, match=r"is in the input .*photos, so the tars would be among.* outside of it$"):
            run(config_of(photos, tmp_path / place), HERE)
    assert files_of(photos) == before


def test_an_output_in_the_bucket_folder_of_raw_images_is_refused(storage):
    for url in (storage.url, f"{storage.url}/", f"{storage.url}/shards"):
        with pytest.raises(ConfigError, match="is in the input"):
            build(config_of(f"{storage.url}/", url), HERE)
    with pytest.raises(SourceError, match="no files there"):
        build(config_of(storage.url, f"{storage.url}-shards"), HERE)


@pytest.mark.slow
def test_an_output_beside_or_around_the_raw_input_is_fine(tmp_path):
    photos = write_class_folders(tmp_path / "in/photos", ["a", "b"], 2)
    for place in ("in", "in/photos-shards", "out"):
        assert build(config_of(photos, tmp_path / place, num_shards={"": 1}), HERE).published
    (tmp_path / "cifar").mkdir()
    archive = write_archive(tmp_path / "cifar/cifar-10-python.tar.gz", python_files(cifar10(1)), "x")
    for place in ("cifar", "cifar/shards"):
        config = config_of(archive, tmp_path / place, source="cifar10", num_shards={"": 1}, overwrite=True)
        assert build(config, HERE).published
    listing = write_csv(photos / "list.csv", ["path", "label"], [["a/000.png", 0], ["b/001.png", 1]])
    listed = config_of(listing, photos / "shards", source="listing", num_shards={"": 1})
    assert build(listed, HERE).published
    again = config_of(photos / "shards", tmp_path / "again", source="webdataset", num_shards={"": 2})
    assert build(again, HERE).published


def test_what_an_unfinished_replacement_left_goes_when_another_is_begun(raw, tmp_path):
    out = tmp_path / "out"
    built(config_of(raw, out))
    partly = config_of(raw, out, seed=1, overwrite=True, only_shards=frozenset({("train", 0)}))
    build(partly, HERE)
    new = built(config_of(raw, out, seed=2, overwrite=True))
    ours = {shard.path for split in new.splits.values() for shard in split.shards}
    assert {str(path.relative_to(out)) for path in out.rglob("*.tar")} == ours
    assert not (out / paths.REPLACED).exists()


def test_a_shard_that_another_build_wrote_meanwhile_ends_the_commit_with_one_sentence(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    build(config, HERE)
    output, name = open_storage(config.output), paths.record_path("train", 1)
    planned.rewrite(output, name, planned.record_of(output, name) | {"plan_digest": "0" * 64})
    committer = Committer(builds.prepare(config, output).files, config, suffix="")
    plan = files.find_record(output, paths.PLAN, PlanFile)
    with pytest.raises(ManifestError, match=r"done/train-000001\.json: another build began there meanwhile; choose"):
        committer.commit(plan, 6, {name: np.zeros(3, np.int64) for name in plan.splits})


def test_a_table_of_the_plan_that_is_missing_where_a_shard_is_to_be_mended_is_named_with_what_helps(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    build(config, HERE)
    (tmp_path / "out" / paths.unit_path(0)).unlink()
    (tmp_path / "out" / naming.shard_path("train", "train", 1)).unlink()
    with pytest.raises(ConfigError, match=r"0000000\.arrow.*remove plan/ at the output.*then build again with --over"):
        build(config, HERE)


def test_a_spool_that_is_gone_where_a_shard_is_to_be_mended_is_named_with_what_helps(tmp_path):
    (tmp_path / "raw").mkdir()
    write_archive(tmp_path / "raw/cifar-10-python.tar.gz", python_files(cifar10(20)), "cifar-10-batches-py")
    config = BuildConfig(
        source="cifar10", input=str(tmp_path / "raw"), output=str(tmp_path / "out"), num_shards={"": 2}
    )
    manifest = built(config)
    for path in (paths.spool_path(0), manifest.split("train").shards[0].path):
        (tmp_path / "out" / path).unlink()
    with pytest.raises(ChangedInput, match=r"restore it, or remove plan/ at the output"):
        build(config, HERE)
    shutil.rmtree(tmp_path / "out" / naming.PLAN_FOLDER)
    again = built(replace(config, overwrite=True))
    assert [shard.sha256 for shard in again.split("train").shards] == [s.sha256 for s in manifest.split("train").shards]


def test_a_replaced_set_can_be_built_anew_after_its_plan_was_removed(raw, tmp_path):
    out = tmp_path / "out"
    built(config_of(raw, out))
    config = config_of(raw, out, seed=1, overwrite=True)
    old = built(config)
    shutil.rmtree(out / naming.PLAN_FOLDER)
    (out / old.split("train").shards[1].path).write_bytes(b"damage")
    built(config)
    assert verify(str(out), deep=True).problems == ()


def unfinished(raw: Path, output: Path, tool: str | None = None) -> BuildConfig:
    """A build of which one shard is missing, as if `tool` had begun it."""
    config = config_of(raw, output)
    build(config, HERE)
    for name in (naming.MANIFEST, paths.record_path("train", 2)):
        (output / name).unlink()
    if tool:
        begun = planned.record_of(output, paths.BUILD)
        planned.rewrite(output, paths.BUILD, begun | {"tool": tool})
    return config


def test_a_build_that_another_version_began_is_refused_and_starts_over_when_told_to(raw, tmp_path):
    config = unfinished(raw, tmp_path / "out", tool="shardset 0.1.0, plan 1")
    with pytest.raises(
        ConfigError, match=r"already holds an unfinished build \(it was begun by shardset 0\.1\.0, plan 1"
    ):
        build(config, HERE)
    again = build(replace(config, overwrite=True), HERE)
    assert again.counters.get("shards_skipped", 0) == 0
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_a_damaged_plan_is_named_and_what_the_message_says_helps(raw, tmp_path):
    config = unfinished(raw, tmp_path / "out")
    unit = tmp_path / "out" / paths.unit_path(0)
    unit.write_bytes(unit.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"remove plan/ at the output.*then build again with --overwrite"):
        build(config, HERE)
    shutil.rmtree(tmp_path / "out" / naming.PLAN_FOLDER)
    with pytest.raises(ConfigError, match=r"holds .* without a manifest or plan"):
        build(replace(config, overwrite=True), HERE)
    for split in ("train", "test"):
        shutil.rmtree(tmp_path / "out" / split)
    build(replace(config, overwrite=True), HERE)
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_upsampling_stores_each_sample_the_same_number_of_times_with_its_source(raw, tmp_path):
    config = config_of(raw, tmp_path / "out", samples_per_shard={"": 30}, num_shards={}, target_samples={"train": 150})
    split = built(config).split("train")
    assert (split.num_samples, split.num_shards, split.num_repeats) == (150, 5, 90)
    storage = open_storage(str(tmp_path / "out"))
    rows = [row for s in split.shards for row in index_from_bytes(storage.read(s.index.path), s.path)]
    assert len({row["key"] for row in rows}) == 150
    assert sorted({row["source"] for row in rows}) == list(range(60))
    assert {row["copy"] for row in rows} == {0, 1, 2}


@pytest.mark.parametrize(
    ("remainder", "sizes"), [("spread", [9, 9, 9, 9, 8, 8, 8]), ("drop", [8] * 7), ("pad", [9] * 7)]
)
def test_what_does_not_divide_goes_by_its_policy(raw, tmp_path, remainder, sizes):
    split = built(config_of(raw, tmp_path / "out", num_shards={"": 7}, remainder=remainder)).split("train")
    assert [shard.num_samples for shard in split.shards] == sizes
    assert (split.num_dropped, split.num_repeats) == {"spread": (0, 0), "drop": (4, 0), "pad": (0, 3)}[remainder]
    if remainder == "drop":
        lists = (tmp_path / "out" / "plan" / "dropped").iterdir()
        dropped = [json.loads(line) for one in lists for line in one.read_text().splitlines()]
        assert len({entry["name"] for entry in dropped if entry["split"] == "train"}) == 4


def test_stratified_shards_have_the_same_class_mix(raw, tmp_path):
    split = built(config_of(raw, tmp_path / "out", balance="stratified", num_shards={"": 4})).split("train")
    indexes = [read_index(open_storage(str(tmp_path / "out")), shard) for shard in split.shards]
    assert [np.bincount(index["label"]).tolist() for index in indexes] == [[5, 5, 5]] * 4
    assert split.class_totals == [20, 20, 20]


def test_a_dry_run_tells_the_arithmetic_and_writes_nothing(raw, tmp_path):
    result = builds.dry_run(config_of(raw, tmp_path / "out"), HERE)
    assert result.plan.splits["train"].num_stored == 60
    assert result.published is None
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_what_a_build_would_leave_out_and_speaks_of_no_shards_written(tmp_path, capfd):
    raw = write_class_folders(tmp_path / "photos", ["cat"], 20)
    for number in range(7):
        add(raw, f"cat/x{number}.png", b"")
    words = ["build", "--source", "folder", "--input", str(raw), "--output", str(tmp_path / "out"), "--dry-run"]
    assert command.main([*words, "--direct_running_mode=in_memory"]) == 0
    printed = capfd.readouterr()
    expected = ["quarantined: 7 raw samples", *(f"  cat/x{number}.png: empty" for number in range(5)), "  and 2 more"]
    assert "\n".join(expected) in printed.out
    assert "plan: 1 unit of input" in printed.out
    assert "written" not in printed.err


# Bad input


def add(raw: Path, name: str, data: bytes) -> None:
    (raw / name).parent.mkdir(parents=True, exist_ok=True)
    (raw / name).write_bytes(data)


def quarantined(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "quarantine.jsonl").read_text().splitlines()]


def add_odd(raw: Path, images: Mapping[str, Sequence]) -> dict[str, str]:
    """Adds each of these images to the split train; the name of each by its file's."""
    found = {}
    for number, (name, (extension, maker, *_)) in enumerate(sorted(images.items())):
        path = f"train/cat/odd{number}.{extension}"
        found[path] = name
        add(raw, path, maker())
    return found


def test_bad_images_are_quarantined_with_their_reasons_and_the_rest_is_kept(raw, tmp_path):
    bad = add_odd(raw, odd_images.BAD)
    manifest = built(config_of(raw, tmp_path / "out", max_bad_fraction=0.5))
    entries = {entry["name"]: entry for entry in quarantined(tmp_path / "out")}
    assert entries.keys() == bad.keys()
    for name, entry in entries.items():
        assert odd_images.BAD[bad[name]][2] in entry["reason"], bad[name]
        assert len(entry["sha256"]) == 64
    assert manifest.quarantine.count == len(bad)
    assert manifest.split("train").num_samples == 60
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_unusual_but_good_images_are_kept_byte_for_byte(raw, tmp_path):
    good = add_odd(raw, odd_images.GOOD)
    manifest = built(config_of(raw, tmp_path / "out"))
    stored = samples_of(tmp_path / "out", manifest, "train")
    for path, name in good.items():
        assert (raw / path).read_bytes() in stored[path.partition(".")[0]].values(), name
    assert manifest.quarantine.count == 0


def test_images_that_can_be_mended_are_mended_and_counted(raw, tmp_path):
    add_odd(raw, odd_images.FIXED)
    manifest = built(config_of(raw, tmp_path / "out"))
    assert manifest.fixes == Counter(fix for _, _, fix in odd_images.FIXED.values())
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_an_image_that_is_too_large_for_the_wanted_format_is_quarantined(raw, tmp_path):
    add(raw, "train/cat/wide.png", image_bytes(0, width=16384))
    built(config_of(raw, tmp_path / "out", max_bad_fraction=0.05, image=ImageOptions(image_format="webp")))
    (entry,) = quarantined(tmp_path / "out")
    assert entry["reason"] == "too large for webp: 16384 x 8, at most 16383 a side"


@pytest.mark.parametrize("options", [ImageOptions(image_format="png"), ImageOptions(resize_shorter=4)])
def test_without_verification_an_image_under_another_name_is_encoded_all_the_same(raw, tmp_path, options):
    (raw / "train/cat/000.png").rename(raw / "train/cat/000.jpg")
    manifest = built(config_of(raw, tmp_path / "out", verify="none", image=options))
    assert manifest.quarantine.count == 0
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_without_verification_an_image_that_can_not_be_encoded_is_named_with_what_to_do(raw, tmp_path):
    add(raw, "train/cat/bad.png", b"<html>404</html>")
    config = config_of(raw, tmp_path / "out", verify="none", image=ImageOptions(image_format="png"))
    expected = r"train/cat/bad\.png: can't be stored as png: HTML or XML .*; build again with --verify decode, "
    with pytest.raises(SourceError, match=expected):
        build(config, HERE)
    whole = built(replace(config, verify="decode", max_bad_fraction=0.05, overwrite=True))
    assert whole.quarantine.count == 1


def built_of_tar(tmp_path: Path, files: dict[str, bytes], **options: object) -> tuple[Manifest, list[dict]]:
    """The set of one tar with these members, whatever part of it is bad, and its quarantine list."""
    (tmp_path / "train.tar").write_bytes(tar_bytes(files))
    output = tmp_path / "out"
    config = BuildConfig(source="webdataset", input=str(tmp_path / "train.tar"), output=str(output), **options)
    manifest = built(replace(config, max_bad_fraction=1.0))
    assert verify(str(output), deep=True).problems == ()
    return manifest, quarantined(output)


@pytest.mark.parametrize(
    ("files", "options", "stored"),
    [
        ({"jpg": odd_images.jpeg(), "png": odd_images.png()}, {"image": ImageOptions(image_format="png")}, "png"),
        ({"jpg": odd_images.png(), "png": odd_images.png()}, {}, "png"),
        ({"jpeg": odd_images.jpeg(), "jpg": odd_images.jpeg()}, {}, "jpg"),
        ({"jpeg": odd_images.jpeg(), "jpg": odd_images.jpeg()}, {"verify": "none"}, "jpg"),
    ],
)
def test_a_sample_whose_image_would_take_the_name_of_another_field_is_quarantined(tmp_path, files, options, stored):
    twins = {f"s.{field}": data for field, data in files.items()}
    manifest, [entry] = built_of_tar(tmp_path, {"a.png": odd_images.png(1), **twins}, **options)
    assert manifest.split("train").num_samples == 1
    assert (entry["name"], entry["reason"]) == (
        "train.tar/s",
        f"its image would be stored as {stored}, which it has already",
    )


@pytest.mark.parametrize("options", [{}, {"image": ImageOptions(resize_shorter=8)}])
@pytest.mark.parametrize(
    ("field", "whole"), [("mask.png", odd_images.png()), ("mask.jpeg", odd_images.jpeg()), ("jpeg", odd_images.jpeg())]
)
def test_a_sample_is_quarantined_for_any_of_its_images(tmp_path, field, whole, options):
    cut = whole[: len(whole) // 2]
    files = {"a.jpg": odd_images.jpeg(), f"a.{field}": whole, "b.jpg": odd_images.jpeg(), f"b.{field}": cut}
    manifest, [entry] = built_of_tar(tmp_path, files, **options)
    assert samples_of(tmp_path / "out", manifest, "train")["a"][field] == whole
    assert (entry["name"], entry["reason"]) == ("train.tar/b", f"its {field}: truncated")
    assert (entry["num_bytes"], entry["sha256"]) == (len(cut), hashlib.sha256(cut).hexdigest())


def test_names_with_so_many_dots_that_no_index_lists_their_fields_are_refused_before_a_shard_is_written(tmp_path):
    png = odd_images.png()
    with pytest.raises(SourceError, match=r"split 'train': 1,300 kinds of fields \(0000.png, 0001.png, "):
        built_of_tar(tmp_path, {f"run{n}.{n:04}.png": png for n in range(1300)})
    assert not (tmp_path / "out" / "train").exists()


@pytest.mark.slow
def test_a_sample_with_a_field_too_large_for_a_tar_is_quarantined_unread(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("a.png", "b.png"):
            tar.addfile(plain(name, odd_images.png()), io.BytesIO(odd_images.png()))
        huge = tarfile.TarInfo("b.npy")
        huge.size = 8 * 2**30
        tar.addfile(huge)
        tar.fileobj.seek(huge.size, io.SEEK_CUR)
    config = BuildConfig(source="webdataset", input=str(tmp_path / "train.tar"), output=str(tmp_path / "out"))
    manifest = built(replace(config, max_bad_fraction=0.5))
    assert manifest.split("train").num_samples == 1
    entry = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert entry["reason"] == "its npy has 8589934592 bytes, a member of a tar at most 8589934591"


def test_too_many_bad_images_fail_before_a_shard_is_written(raw, tmp_path):
    for number in range(11):
        add(raw, f"train/cat/bad{number}.jpg", b"<html>404</html>")
    with pytest.raises(TooManyBad, match=r"11 of 71 raw samples are bad, allowed are 10 \(1\.00%, or 10 in a small"):
        build(config_of(raw, tmp_path / "out"), HERE)
    assert list((tmp_path / "out").rglob("*.tar")) == []
    with pytest.raises(TooManyBad):
        build(config_of(raw, tmp_path / "out", on_bad="fail", max_bad_fraction=1.0), HERE)


def test_names_that_can_not_be_keys_get_short_ones_and_are_kept(raw, tmp_path):
    names = ["a.b.c", "with space", "zażółć", "x" * 180, "émoji-🙂"]
    for name in names:
        shutil.copy(raw / "train/cat/000.png", raw / "train/cat" / f"{name}.png")
    stored = samples_of(tmp_path / "out", built(config_of(raw, tmp_path / "out")), "train")
    keys = [key for key in stored if key.startswith("k")]
    assert len(keys) == len(names)
    assert all(map(naming.is_key, keys))
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_a_class_may_be_called_as_the_plan_calls_a_spool(tmp_path):
    raw = write_class_folders(tmp_path / "raw", ["spool:x"], 4)
    manifest = built(config_of(raw, tmp_path / "out", num_shards={"": 1}))
    assert len(samples_of(tmp_path / "out", manifest, "train")) == 4


def test_two_files_that_want_the_same_key_get_different_ones(raw, tmp_path):
    for extension in ("jpg", "png"):
        data = odd_images.jpeg() if extension == "jpg" else odd_images.png()
        add(raw, f"train/cat/twin.{extension}", data)
    manifest = built(config_of(raw, tmp_path / "out"))
    assert manifest.split("train").num_samples == 62
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_one_image_listed_several_times_is_stored_under_a_key_each_time(tmp_path):
    images = write_images(tmp_path / "raw", ["a.png"])
    keys = ["crop0.0", "crop0.1", "x", "x", "y", "y"]
    listing = write_jsonl(images / "all.jsonl", [{"path": "a.png", "label": 0, "key": key} for key in keys])
    manifest = built(BuildConfig(source="listing", input=str(listing), output=str(tmp_path / "out")))
    stored = samples_of(tmp_path / "out", manifest, "train")
    assert len(stored) == len(keys)
    assert {"x", "y"} < set(stored)
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_an_input_that_changes_between_plan_and_write_fails_the_build(raw, tmp_path):
    build(config_of(raw, tmp_path / "out", only_shards=frozenset({("train", 0)})), HERE)
    job_ready = tmp_path / "out" / "plan" / "units" / "0000000.arrow"
    assert job_ready.exists()
    victim = raw / "test" / "cat" / "000.png"
    victim.write_bytes(odd_images.png(99))
    with pytest.raises(ConfigError, match="the input is not the same"):
        build(config_of(raw, tmp_path / "out"), HERE)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_input_that_changes_while_it_is_written_fails_the_build(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    prepared = builds.prepare(config, open_storage(config.output))
    (raw / "test" / "cat" / "000.png").write_bytes(odd_images.png(99))
    with pytest.raises(ChangedInput, match=r"test/cat/000\.png: not the object that was planned"):
        builds.run(prepared, options.beam_options(HERE, prepared.files.output))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_input_that_changes_behind_its_time_stamp_is_named_and_what_the_message_says_helps(tmp_path):
    for number in range(4):
        add(tmp_path / "raw", f"train/cat/{number}.bmp", odd_images.encoded(odd_images.picture(number), "BMP"))
    config = config_of(tmp_path / "raw", tmp_path / "out", num_shards={"": 2}, overwrite=True)
    build(replace(config, only_shards=frozenset({("train", 0)})), HERE)
    for path in (tmp_path / "raw").rglob("*.bmp"):
        facts, data = path.stat(), path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    for _ in range(2):  # --overwrite sees the same names, sizes and times, so it goes on with the same plan
        with pytest.raises(ChangedInput, match=r"its bytes changed.*remove plan/ at the output.*with --overwrite"):
            build(config, HERE)
    shutil.rmtree(tmp_path / "out" / naming.PLAN_FOLDER)
    shutil.rmtree(tmp_path / "out" / "train")
    build(config, HERE)
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_a_missing_input_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises((SourceError, StorageError), match="nowhere"):
        build(config_of(tmp_path / "nowhere", tmp_path / "out"), HERE)
    assert not (tmp_path / "out").exists()


def test_an_output_that_can_not_be_written_is_an_error(raw, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        build(config_of(raw, tmp_path / "file" / "out"), HERE)


def test_the_mode_that_loses_elements_is_refused(raw, tmp_path):
    with pytest.raises(ConfigError, match="multi_threading loses elements"):
        build(config_of(raw, tmp_path / "out"), ["--direct_running_mode=multi_threading"])


def test_a_job_server_that_is_not_there_is_said_before_anything_is_written(raw, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"--job_endpoint {endpoint}: no server answers there"):
        build(config_of(raw, tmp_path / "out"), ["--runner=PortableRunner", f"--job_endpoint={endpoint}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--runner=DataflowRunner", "--job_name=build_train"], "Invalid job_name .build_train."),
        (["--runner=PortableRunner", "--environment_type=EXTERNAL"], "external_service_address is required"),
    ],
)
def test_flags_that_beam_refuses_are_refused_before_anything_is_written(raw, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.setattr(dataflow, "check", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=rf"a flag of Apache Beam: .*{sentence}"):
        build(config_of(raw, tmp_path / "out"), flags)
    assert not (tmp_path / "out").exists()


def test_resizing_stores_smaller_images_and_says_with_which_libraries(tmp_path):
    raw = tmp_path / "raw"
    for number in range(8):
        add(raw, f"train/cat/{number}.jpg", odd_images.jpeg(number))
    config = config_of(
        raw, tmp_path / "out", num_shards={"": 1}, image=ImageOptions(resize_shorter=16, image_format="png")
    )
    manifest = built(config)
    assert manifest.split("train").fields == ["png", "cls"]
    assert "pillow" in manifest.provenance.libraries
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def begun_with_pillow(output: Path, version: str) -> None:
    """Makes a build look as if it had been begun with that version of Pillow."""
    file = planned.record_of(output, paths.BUILD)
    planned.rewrite(output, paths.BUILD, file | {"libraries": file["libraries"] | {"pillow": version}})


@pytest.mark.parametrize("options", [{"image": ImageOptions(image_format="png")}, {}], ids=["re-encoded", "mended"])
@pytest.mark.parametrize("finished", [True, False])
def test_images_that_another_pillow_wrote_are_not_mixed_with_those_of_this_one(tmp_path, options, finished):
    for number in range(4):
        add(tmp_path / "raw", f"train/cat/{number}.jpg", odd_images.cmyk())
    config = config_of(tmp_path / "raw", tmp_path / "out", num_shards={"": 2}, **options)
    build(config if finished else replace(config, only_shards=frozenset({("train", 0)})), HERE)
    begun_with_pillow(tmp_path / "out", "9.9")
    here = PIL.__version__
    with pytest.raises(
        ConfigError, match=rf"already holds an[a-z ]+ \(pillow was 9\.9 and is {re.escape(here)}\).*--overwrite"
    ):
        build(config, HERE)
    assert built(replace(config, overwrite=True)).provenance.libraries["pillow"] == here
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_another_pillow_goes_on_with_a_build_that_copies_all_images(raw, tmp_path):
    config = unfinished(raw, tmp_path / "out")
    begun_with_pillow(tmp_path / "out", "9.9")
    assert build(config, HERE).counters["shards_skipped"] == 5
    assert "9.9" not in (tmp_path / "out" / paths.BUILD).read_text()


def test_a_cifar_archive_becomes_png_shards_with_the_right_pictures(tmp_path):
    import io

    import numpy as np
    from PIL import Image

    batches = cifar10(rows=6)
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_archive(archive, python_files(batches), folder="cifar-10-batches-py")
    config = BuildConfig(source="cifar10", input=str(archive), output=str(tmp_path / "out"), num_shards={"": 2})
    manifest = built(config)
    stored = samples_of(tmp_path / "out", manifest, "test")
    for row in range(6):
        fields = stored[f"test-{row:05d}"]
        assert int(fields["cls"]) == batches[-1].labels[row]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(fields["png"]))), batches[-1].pixels(row))
    assert manifest.split("train").num_samples == 30


# The command line


def pipelines(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_command_builds_verifies_and_inspects(raw, tmp_path):
    done = pipelines(
        "build", "--source", "folder", "--input", raw, "--output", tmp_path / "out", "--num-shards", "train=3,test=2"
    )
    assert done.returncode == 0, done.stderr
    assert "120" in done.stdout or "60" in done.stdout
    assert "Traceback" not in done.stderr
    assert pipelines("verify", tmp_path / "out", "--deep").returncode == 0
    shown = pipelines("inspect", tmp_path / "out", "--name", "train/cat/000.png")
    assert shown.returncode == 0, shown.stderr
    assert "train/cat/000" in shown.stdout
    (tmp_path / "out" / "train" / "train-000000.tar").unlink()
    broken = pipelines("verify", tmp_path / "out", "--json")
    assert broken.returncode == 1
    assert "train/train-000000.tar" in broken.stdout


@pytest.mark.slow
def test_names_are_printed_as_they_are(tmp_path):
    write_images(tmp_path, ["1.png", "2.png"])
    rows = [["1.png", "y[/b]", "train"], ["2.png", "[red]x", "test"]]
    listing = write_csv(tmp_path / "list.csv", ["path", "label", "split"], rows)
    output = tmp_path / "out [bold]"
    done = pipelines("build", "--source", "listing", "--input", listing, "--output", output, "--num-shards", 1)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace("\n", "").replace(" ", "")
    for sentence in ("splittesthasnoimagesof1class:y[/b]", "out[bold]/manifest.json"):
        assert sentence in shown
    planned = pipelines("estimate", output)
    assert planned.returncode == 0
    assert "out [bold]" in planned.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--no-such-flag"], "unknown arguments: --no-such-flag"),
        (["--num-shard", "3"], "unknown arguments: --num-shard 3, did you mean '--num-shards'?"),
        (["--hold-out=test=0.1"], "unknown arguments: --hold-out=test=0.1, did you mean '--holdout'?"),
        (["--num-shards", "0"], "'0' is not a whole number from 1, or SPLIT=NUMBER,SPLIT=NUMBER"),
        (["--holdout", "test=2"], "--holdout test=2.0: expected a fraction"),
        (["--source", "nope"], "no source 'nope'; there are cifar10"),
        (["--only-shards", "train"], "'train' is not SPLIT:NUMBERS"),
        (["--only-shards", "train:3-1"], "'train:3-1' is not SPLIT:NUMBERS"),
        (["--only-shards", "train:0-99999999999"], "'train:0-99999999999' is not SPLIT:NUMBERS"),
        (["--num-shards", "bogus=3"], "sizes were given for split 'bogus', but the input has test, train"),
        (["--resize", "256"], "'256' is not shorter=N"),
        (["--resize", "shorter=0"], "'0' is not a whole number from 1\n"),
        (["--num-shards", "train=3,train=5"], "argument --num-shards: a number for 'train' twice"),
        (["--num-shards", "train=3", "--num-shards", "train=5"], "argument --num-shards: a number for 'train' twice"),
        (["--num-shards", "3,5"], "argument --num-shards: a number for all splits twice"),
        (["--holdout", "test=0.1,test=0.2"], "argument --holdout: a number for 'test' twice"),
        (["--runner", "NoSuchRunner"], "--runner NoSuchRunner: Unexpected pipeline runner"),
        (["--runner", "no.such.Runner"], "--runner no.such.Runner: No module named 'no'"),
        (["--direct_num_workers=-3"], "--direct_num_workers is -3, expected"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2_and_one_sentence(raw, tmp_path, capsys, words, sentence):
    with pytest.raises(SystemExit) as ended:
        sys.exit(command.main(["build", "--source=folder", f"--input={raw}", f"--output={tmp_path / 'out'}", *words]))
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert "Traceback" not in errors


def test_what_a_flag_says_of_several_splits_may_be_given_one_at_a_time(tmp_path):
    words = ["build", "--source", "folder", "--input", "in", "--output", "out", "--num-shards", "train=3"]
    words += ["--num-shards", "test=2", "--holdout", "test=0.1", "--holdout", "val=0.2"]
    words += ["--class-depth", "2", "--image-column", "photo", "--label-column", ""]
    args = command.parser().parse_args([*words, "--only-shards", "train:0", "--only-shards", "test:1"])
    assert args.num_shards == {"train": 3, "test": 2}
    assert args.holdout == {"test": 0.1, "val": 0.2}
    assert (args.class_depth, args.path_column, args.label_column) == (2, "photo", "")
    assert args.only_shards == {("train", 0), ("test", 1)}
    assert args.repeat == command.parser().parse_args(words).repeat == {}
    assert command.parser().parse_args(["export", "out", "--to", "wids", "--to", "timm,hf"]).to == [
        "wids",
        "timm",
        "hf",
    ]


def test_a_failure_in_a_worker_is_one_sentence_without_a_traceback(raw, tmp_path):
    add(raw, "train/cat/bad.jpg", b"")
    words = ["--source", "folder", "--input", raw, "--output", tmp_path / "out", "--max-bad-fraction", "0"]
    done = pipelines("build", *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") <= 3
    assert "TooManyBad: split 'train': 1 of 61 raw samples are bad" in done.stderr


def test_beam_flags_pass_through(raw, tmp_path):
    run: Callable = pipelines
    done = run(
        "build", "--source", "folder", "--input", raw, "--output", tmp_path / "out", "--json", *HERE, "--job_name=x"
    )
    assert json.loads(done.stdout)["splits"]["train"]["num_samples"] == 60


# The format


def test_the_bytes_of_a_whole_set_are_frozen(tmp_path):
    # Every shard set in the world depends on these. To change them, raise ORDER_VERSION and say so in the changelog.
    for number in range(12):
        add(tmp_path / "raw", f"train/class-{number % 3}/{number:02d}.png", bytes([number]) * (100 + number))
    config = config_of(tmp_path / "raw", tmp_path / "out", num_shards={"": 2}, seed=7, verify="none", repeat={"": 2})
    split = built(config).split("train")
    assert [shard.sha256[:16] for shard in split.shards] == ["486e6cca45579c4c", "aa195ade2c29d3f5"]
    assert [shard.index.crc32c for shard in split.shards] == ["5B0tBg==", "cjqMfA=="]
