"""Input that is bad: kept apart with its reason, repaired,
or refused before anything is written.
"""

import hashlib
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.images.options import ImageOptions
from pipelines.runners import dataflow
from shardset.errors import ConfigError, SourceError, StorageError, TooManyBad
from shardset.format import naming
from shardset.format.manifest import Manifest
from tests.makers import odd_images
from tests.makers.built import HERE, add, built, config_of
from tests.makers.folders import write_images, write_jsonl
from tests.makers.stored import quarantined, samples_of
from tests.makers.tars import tar_bytes


def add_odd(raw: Path, images: Mapping[str, Sequence]) -> dict[str, str]:
    """Adds each of these images to the split train; the name of each by its file's."""
    found = {}
    for number, (name, (extension, maker, *_)) in enumerate(sorted(images.items())):
        path = f"train/cat/odd{number}.{extension}"
        found[path] = name
        add(raw, path, maker())
    return found


def test_odd_images_are_kept_repaired_or_quarantined_with_their_reasons(raw, tmp_path):
    odd = add_odd(raw, {**odd_images.BAD, **odd_images.FIXED})
    manifest = built(config_of(raw, tmp_path / "out", max_bad_fraction=0.5))
    bad = {path: name for path, name in odd.items() if name in odd_images.BAD}
    entries = {entry["name"]: entry for entry in quarantined(tmp_path / "out")}
    assert entries.keys() == bad.keys()
    for path, entry in entries.items():
        assert odd_images.BAD[bad[path]][2] in entry["reason"], bad[path]
        assert len(entry["sha256"]) == 64
    assert manifest.quarantine.count == len(bad)
    assert manifest.split("train").num_samples == 60 + len(odd) - len(bad)
    assert manifest.fixes == Counter(fix for _, _, fix in odd_images.FIXED.values())
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_without_verification_an_image_under_another_name_is_encoded_all_the_same(raw, tmp_path):
    (raw / "train/cat/000.png").rename(raw / "train/cat/000.jpg")
    manifest = built(
        config_of(raw, tmp_path / "out", verify="none", image=ImageOptions(resize_shorter=4))
    )
    assert manifest.quarantine.count == 0
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_without_verification_an_image_that_can_not_be_encoded_is_named_with_what_to_do(
    raw, tmp_path
):
    add(raw, "train/cat/bad.png", b"<html>404</html>")
    config = config_of(raw, tmp_path / "out", verify="none", image=ImageOptions(image_format="png"))
    expected = (
        r"train/cat/bad\.png: can't be stored as png: HTML or XML .*; build again with --verify"
        r" decode, "
    )
    with pytest.raises(SourceError, match=expected):
        build(config, HERE)
    whole = built(replace(config, verify="decode", max_bad_fraction=0.05, overwrite=True))
    assert whole.quarantine.count == 1


def built_of_tar(tmp_path: Path, files: dict[str, bytes], **options) -> tuple[Manifest, list[dict]]:
    """The set of one tar with these members, whatever part of it is bad,
    and its quarantine list.
    """
    (tmp_path / "train.tar").write_bytes(tar_bytes(files))
    output = tmp_path / "out"
    config = BuildConfig(
        source="webdataset", input=str(tmp_path / "train.tar"), output=str(output), **options
    )
    manifest = built(replace(config, max_bad_fraction=1.0))
    assert verify(str(output), deep=True).problems == ()
    return manifest, quarantined(output)


@pytest.mark.parametrize(
    ("files", "options", "stored"),
    [
        (
            {"jpg": odd_images.jpeg(), "png": odd_images.png()},
            {"image": ImageOptions(image_format="png")},
            "png",
        ),
        ({"jpg": odd_images.png(), "png": odd_images.png()}, {}, "png"),
        ({"jpeg": odd_images.jpeg(), "jpg": odd_images.jpeg()}, {"verify": "none"}, "jpg"),
    ],
)
def test_a_sample_whose_image_would_take_the_name_of_another_field_is_quarantined(
    tmp_path, files, options, stored
):
    twins = {f"s.{field}": data for field, data in files.items()}
    manifest, [entry] = built_of_tar(tmp_path, {"a.png": odd_images.png(1), **twins}, **options)
    assert manifest.split("train").num_samples == 1
    assert (entry["name"], entry["reason"]) == (
        "train.tar/s",
        f"its image would be stored as {stored}, which it has already",
    )


@pytest.mark.parametrize("options", [{}, {"image": ImageOptions(resize_shorter=8)}])
def test_a_sample_is_quarantined_for_any_of_its_images(tmp_path, options):
    field, whole = "depth.png", odd_images.png()
    cut = whole[: len(whole) // 2]
    files = {
        "a.jpg": odd_images.jpeg(),
        f"a.{field}": whole,
        "b.jpg": odd_images.jpeg(),
        f"b.{field}": cut,
    }
    manifest, [entry] = built_of_tar(tmp_path, files, **options)
    assert samples_of(tmp_path / "out", manifest, "train")["a"][field] == whole
    assert (entry["name"], entry["reason"]) == ("train.tar/b", f"its {field}: truncated")
    assert (entry["num_bytes"], entry["sha256"]) == (len(cut), hashlib.sha256(cut).hexdigest())


def test_names_with_more_dots_than_an_index_lists_fields_are_refused_before_a_shard_is_written(
    tmp_path,
):
    png = odd_images.png()
    with pytest.raises(
        SourceError, match=r"split 'train': 1,300 kinds of fields \(0000.png, 0001.png, "
    ):
        built_of_tar(tmp_path, {f"run{n}.{n:04}.png": png for n in range(1300)})
    assert not (tmp_path / "out" / "train").exists()


def test_a_class_whose_images_are_all_bad_fails_the_build(raw, tmp_path):
    for number in range(3):
        add(raw, f"train/cow/{number}.png", b"<html>")
    with pytest.raises(
        SourceError, match=r"all images of class 'cow' are bad \(train/cow/0.png: HTML"
    ):
        built(config_of(raw, tmp_path / "out"))
    assert not (tmp_path / "out/manifest.json").exists()


def test_too_many_bad_images_fail_before_a_shard_is_written(raw, tmp_path):
    for number in range(11):
        add(raw, f"train/cat/bad{number}.jpg", b"<html>404</html>")
    with pytest.raises(
        TooManyBad, match=r"11 of 71 raw samples are bad, allowed are 10 \(1\.00%, or 10 in a small"
    ):
        build(config_of(raw, tmp_path / "out"), HERE)
    assert list((tmp_path / "out").rglob("*.tar")) == []
    with pytest.raises(TooManyBad):
        build(config_of(raw, tmp_path / "out", max_bad_fraction=0.0), HERE)


def test_names_that_can_not_be_keys_get_short_ones_and_are_kept(raw, tmp_path):
    names = ["a.b.c", "with space", "zażółć", "x" * 180, "émoji-🙂"]
    for name in names:
        shutil.copy(raw / "train/cat/000.png", raw / "train/cat" / f"{name}.png")
    stored = samples_of(tmp_path / "out", built(config_of(raw, tmp_path / "out")), "train")
    keys = [key for key in stored if key.startswith("k")]
    assert len(keys) == len(names)
    assert all(map(naming.is_key, keys))
    assert verify(str(tmp_path / "out"), deep=True).problems == ()


def test_one_image_listed_several_times_is_stored_under_a_key_each_time(tmp_path):
    images = write_images(tmp_path / "raw", ["a.png"])
    keys = ["crop0.0", "crop0.1", "x", "x", "y", "y"]
    listing = write_jsonl(
        images / "all.jsonl", [{"path": "a.png", "label": 0, "key": key} for key in keys]
    )
    manifest = built(
        BuildConfig(source="listing", input=str(listing), output=str(tmp_path / "out"))
    )
    stored = samples_of(tmp_path / "out", manifest, "train")
    assert len(stored) == len(keys)
    assert {"x", "y"} < set(stored)
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
        build(
            config_of(raw, tmp_path / "out"),
            ["--runner=SparkRunner", f"--job_endpoint={endpoint}"],
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--runner=DataflowRunner", "--job_name=build_train"], "Invalid job_name .build_train."),
        (
            ["--runner=FlinkRunner", "--environment_type=EXTERNAL"],
            "external_service_address is required",
        ),
    ],
)
def test_flags_that_beam_refuses_are_refused_before_anything_is_written(
    raw, tmp_path, monkeypatch, flags, sentence
):
    monkeypatch.setattr(dataflow, "check", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=rf"a flag of Apache Beam: .*{sentence}"):
        build(config_of(raw, tmp_path / "out"), flags)
    assert not (tmp_path / "out").exists()
