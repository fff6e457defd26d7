"""The build, on real files: every runner gives the same bytes, and each policy its sizes."""

import hashlib
import io
import json
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.metrics.execution import MetricKey, MetricResult
from apache_beam.metrics.metricbase import MetricName
from PIL import Image

from pipelines import build as builds
from pipelines import cli as command
from pipelines.begin import prepare
from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.pipeline import construct, plan_step
from pipelines.plan import paths
from pipelines.runners import options
from shardset.errors import SourceError
from shardset.read.indexes import read_index
from shardset.storage.open import open_storage
from tests.makers.built import HERE, add, built, config_of
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.folders import write_class_folders, write_images, write_jsonl
from tests.makers.images import image_bytes
from tests.makers.stored import files_of, samples_of

PRISM = Path(".tools/bin/prism").absolute()
RUNNERS = {
    "one worker process": ["--direct_running_mode=multi_processing", "--direct_num_workers=1"],
    "two worker processes": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
    "the runner that chooses": ["--runner=DirectRunner", "--direct_running_mode=in_memory"],
    "the runner that retries": ["--runner=BundleBasedDirectRunner"],
    "the portable runner": [
        "--runner=PortableRunner",
        "--job_endpoint=embed",
        "--environment_type=LOOPBACK",
    ],
}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_class_folders(
        tmp_path / "raw", ["cat", "dog", "owl"], 20, splits=["train", "test"]
    )


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


def test_long_metadata_is_stored_too_and_does_not_stand_in_the_rows_that_are_held_in_memory(
    tmp_path,
):
    images = write_images(tmp_path / "raw", [f"{number}.png" for number in range(6)])
    notes = ["n" * 10 ** (number % 5) for number in range(6)]
    rows = [
        {"path": f"{number}.png", "label": 0, "note": note} for number, note in enumerate(notes)
    ]
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


def test_an_archive_of_cifar_becomes_png_shards_with_the_right_pictures(tmp_path):
    batches = cifar10(rows=6)
    archive = write_archive(
        tmp_path / "cifar-10-python.tar.gz", python_files(batches), folder="cifar-10-batches-py"
    )
    manifest = built(config_of(archive, tmp_path / "out", source="cifar10", num_shards={"": 2}))
    stored = samples_of(tmp_path / "out", manifest, "test")
    for row in range(6):
        fields = stored[f"test-{row:05d}"]
        assert int(fields["cls"]) == batches[-1].labels[row]
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(fields["png"]))), batches[-1].pixels(row)
        )
    assert manifest.split("train").num_samples == 30


def test_a_parquet_of_hugging_face_is_stored_byte_for_byte_without_its_bad_image(tmp_path):
    images = [image_bytes(number, "jpg") for number in range(12)]
    rows: list[dict] = [
        {"image": {"bytes": data, "path": f"{n}.jpg"}, "label": n % 2}
        for n, data in enumerate(images)
    ]
    rows[5]["image"]["bytes"] = images[5][:100]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=5)
    manifest = built(config_of(tmp_path / "train.parquet", tmp_path / "out", source="hf"))
    stored = samples_of(tmp_path / "out", manifest, "train")
    kept = {f"train/{number}": data for number, data in enumerate(images) if number != 5}
    assert {key: fields["jpg"] for key, fields in stored.items()} == kept
    assert (
        json.loads((tmp_path / "out/quarantine.jsonl").read_text())["name"]
        == "train.parquet/5/5.jpg"
    )


def test_many_classes_do_not_travel_with_the_plan(tmp_path):
    images = write_images(tmp_path / "raw", ["a.png"])
    listing = write_jsonl(images / "all.jsonl", [{"path": "a.png", "label": 9_999}])
    config = config_of(listing, tmp_path / "out", source="listing", num_shards={"": 1})
    assert len(built(config).classes) == 10_000
    prepared = prepare(config, open_storage(config.output))
    plan, *_ = plan_step(
        prepared.files, config, prepared.file, None, range(prepared.units.num_units)
    )
    assert len(pickle.dumps(plan)) < 2000
    pipeline = beam.Pipeline()
    construct(pipeline, prepared)
    assert len(pipeline.to_runner_api().SerializeToString()) < 200_000


def ids_in_a_listing(folder, labels):
    rows = [{"path": "a.png", "label": label} for label in labels]
    return {"source": "listing", "input": str(write_jsonl(folder / "all.jsonl", rows))}


def ids_in_parquet(folder, labels):
    rows = [{"image": image_bytes(0), "label": label} for label in labels]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return {"source": "hf", "input": str(folder)}


def ids_in_a_tar(folder, labels):
    with tarfile.open(folder / "train-0.tar", "w") as tar:
        for number, label in enumerate(labels):
            for name, data in ((f"{number}.png", image_bytes(0)), (f"{number}.cls", b"%d" % label)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return {"source": "webdataset", "input": str(folder)}


@pytest.mark.parametrize("make", [ids_in_a_listing, ids_in_parquet, ids_in_a_tar])
def test_labels_that_are_ids_are_refused_and_holes_are_told(tmp_path, make):
    raw = write_images(tmp_path / "raw", ["a.png"])
    output = tmp_path / "out"
    config = BuildConfig(output=str(output), num_shards={"": 1}, **make(raw, [0, 900_000, 1]))
    with pytest.raises(
        SourceError, match="labels are 0 to 900000, 899,998 of them unused, at most 100,000 may be"
    ):
        build(config, HERE)
    assert not (output / "manifest.json").exists()
    config = BuildConfig(output=str(tmp_path / "other"), num_shards={"": 1}, **make(raw, [0, 5, 1]))
    assert "labels are 0 to 5, 3 of them unused" in built(config).provenance.notes
    more = replace(config, append="store", **make(raw, [2, 900_000]))
    with pytest.raises(SourceError, match="labels are 0 to 900000, "):
        build(more, HERE)


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_runner_writes_the_same_bytes(raw, tmp_path, runner):
    build(config_of(raw, tmp_path / "expected"), HERE)
    build(config_of(raw, tmp_path / "found"), RUNNERS[runner])
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")


@pytest.mark.nightly
@pytest.mark.skipif(not PRISM.exists(), reason=f"no binary of Prism at {PRISM}")
def test_prism_writes_the_same_bytes(raw, tmp_path):
    build(config_of(raw, tmp_path / "expected"), HERE)
    build(config_of(raw, tmp_path / "found"), ["--runner=PrismRunner", f"--prism_location={PRISM}"])
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")


@pytest.mark.parametrize(("committed", "attempted", "expected"), [(6, 7, 6), (None, 6, 6)])
def test_counters_are_ours_and_known_on_a_runner_that_commits_none(committed, attempted, expected):
    def counter(namespace: str, name: str) -> MetricResult:
        return MetricResult(MetricKey("a step", MetricName(namespace, name)), committed, attempted)

    found = [counter("shardset", "shards_written"), counter("beam", "element_count")]
    assert builds.counters_of(found) == {"shards_written": expected}


def test_a_counter_that_two_steps_report_is_their_sum():
    name = MetricName("shardset", "images_resized")
    found = [
        MetricResult(MetricKey(step, name), number, None)
        for step, number in (("Index", 2), ("Write", 40))
    ]
    assert builds.counters_of(found) == {"images_resized": 42}


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


def test_upsampling_stores_each_sample_the_same_number_of_times_with_its_source(raw, tmp_path):
    config = config_of(
        raw,
        tmp_path / "out",
        samples_per_shard={"": 30},
        num_shards={},
        target_samples={"train": 150},
    )
    split = built(config).split("train")
    assert (split.num_samples, split.num_shards, split.num_repeats) == (150, 5, 90)
    storage = open_storage(str(tmp_path / "out"))
    rows = [row for shard in split.shards for row in read_index(storage, shard).to_pylist()]
    assert len({row["key"] for row in rows}) == 150
    assert sorted({row["serial"] for row in rows}) == list(range(60))
    assert {row["copy"] for row in rows} == {0, 1, 2}


@pytest.mark.parametrize(
    ("remainder", "sizes"), [("spread", [9, 9, 9, 9, 8, 8, 8]), ("drop", [8] * 7), ("pad", [9] * 7)]
)
def test_what_does_not_divide_goes_by_its_policy(raw, tmp_path, remainder, sizes):
    split = built(config_of(raw, tmp_path / "out", num_shards={"": 7}, remainder=remainder)).split(
        "train"
    )
    assert [shard.num_samples for shard in split.shards] == sizes
    assert (split.num_dropped, split.num_repeats) == {
        "spread": (0, 0),
        "drop": (4, 0),
        "pad": (0, 3),
    }[remainder]
    if remainder == "drop":
        lists = (tmp_path / "out" / "plan" / "dropped").iterdir()
        dropped = [json.loads(line) for one in lists for line in one.read_text().splitlines()]
        assert len({entry["name"] for entry in dropped if entry["split"] == "train"}) == 4


def test_stratified_shards_have_the_same_class_mix(raw, tmp_path):
    split = built(config_of(raw, tmp_path / "out", balance="stratified", num_shards={"": 4})).split(
        "train"
    )
    indexes = [read_index(open_storage(str(tmp_path / "out")), shard) for shard in split.shards]
    assert [np.bincount(index["label"]).tolist() for index in indexes] == [[5, 5, 5]] * 4
    assert split.class_totals == [20, 20, 20]


def test_a_dry_run_tells_the_arithmetic_and_writes_nothing(raw, tmp_path):
    result = builds.dry_run(config_of(raw, tmp_path / "out"), HERE)
    assert result.plan.splits["train"].num_stored == 60
    assert result.published is None
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_what_a_build_would_leave_out_and_speaks_of_no_shards_written(
    tmp_path, capfd
):
    raw = write_class_folders(tmp_path / "photos", ["cat"], 20)
    for number in range(7):
        add(raw, f"cat/x{number}.png", b"")
    words = [
        "build",
        "--source",
        "folder",
        "--input",
        str(raw),
        "--output",
        str(tmp_path / "out"),
        "--dry-run",
    ]
    assert command.main([*words, "--direct_running_mode=in_memory"]) == 0
    printed = capfd.readouterr()
    expected = [
        "quarantined: 7 raw samples",
        *(f"  cat/x{number}.png: empty" for number in range(5)),
        "  and 2 more",
    ]
    assert "\n".join(expected) in printed.out
    assert "written" not in printed.err


def test_the_bytes_of_a_whole_set_are_frozen(tmp_path):
    # Every shard set in the world depends on these. To change them, raise ORDER_VERSION and say so
    # in the changelog.
    for number in range(12):
        add(
            tmp_path / "raw",
            f"train/class-{number % 3}/{number:02d}.png",
            bytes([number]) * (100 + number),
        )
    config = config_of(
        tmp_path / "raw",
        tmp_path / "out",
        num_shards={"": 2},
        seed=7,
        verify="none",
        repeat={"": 2},
    )
    split = built(config).split("train")
    assert [shard.sha256[:16] for shard in split.shards] == ["486e6cca45579c4c", "aa195ade2c29d3f5"]
    storage = open_storage(str(tmp_path / "out"))
    # of the indexes what they say: other versions of Arrow write other bytes
    rows = [read_index(storage, s).drop_columns("generation").to_pylist() for s in split.shards]
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "c2a9eb34d9bf3071"
