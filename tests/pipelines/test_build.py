"""The build, on real files: every runner gives the same bytes, and each policy its sizes."""

import json
import pickle
from dataclasses import replace

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.metrics.execution import MetricKey, MetricResult
from apache_beam.metrics.metricbase import MetricName

from pipelines import cli as command
from pipelines.begin import prepare
from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.pipeline import MakePlan, construct
from pipelines.plan import paths
from pipelines.runners import beam_options, on_beam
from shardset.errors import SourceError
from shardset.read.indexes import read_index
from shardset.storage.open import open_storage
from tests.makers import runners
from tests.makers.built import HERE, add, built, config_of
from tests.makers.folders import write_class_folders, write_images, write_jsonl
from tests.makers.images import image_bytes
from tests.makers.stored import files_of, samples_of
from tests.makers.tars import tar_bytes

MULTI = "--direct_running_mode=multi_processing"
RUNNERS = [
    *(
        pytest.param(flags, marks=pytest.mark.slow, id=" ".join(flags))
        for flags in (
            (MULTI, "--direct_num_workers=1"),
            (MULTI, "--direct_num_workers=2"),
            ("--runner=DirectRunner", "--direct_running_mode=in_memory"),
            ("--runner=BundleBasedDirectRunner",),
            (
                *("--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"),
                "--any-runner",
            ),
        )
    ),
    *(
        pytest.param(flags, marks=pytest.mark.nightly, id=flags[0])
        for flags in (runners.PRISM, runners.FLINK, runners.SPARK)
    ),
]


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


def test_many_classes_do_not_travel_with_the_plan(tmp_path):
    images = write_images(tmp_path / "raw", ["a.png"])
    listing = write_jsonl(images / "all.jsonl", [{"path": "a.png", "label": 9_999}])
    config = config_of(listing, tmp_path / "out", source="listing", num_shards={"": 1})
    assert len(built(config).classes) == 10_000
    prepared = prepare(config, open_storage(config.output))
    units = prepared.units.num_units
    [plan] = MakePlan(prepared.build).process(None, range(units), units)
    assert len(pickle.dumps(plan)) < 2000
    pipeline = beam.Pipeline()
    construct(pipeline, prepared.build, prepared.units.blocks)
    assert len(pipeline.to_runner_api().SerializeToString()) < 200_000


def ids_in_a_listing(folder, labels):
    rows = [{"path": "a.png", "label": label} for label in labels]
    return {"source": "listing", "input": str(write_jsonl(folder / "all.jsonl", rows))}


def ids_in_parquet(folder, labels):
    rows = [{"image": image_bytes(0), "label": label} for label in labels]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return {"source": "hf", "input": str(folder)}


def ids_in_a_tar(folder, labels):
    pairs = [
        (f"{number}.{field}", data)
        for number, label in enumerate(labels)
        for field, data in (("png", image_bytes(0)), ("cls", b"%d" % label))
    ]
    (folder / "train-0.tar").write_bytes(tar_bytes(pairs))
    return {"source": "webdataset", "input": str(folder)}


@pytest.mark.parametrize("make", [ids_in_a_listing, ids_in_parquet, ids_in_a_tar])
def test_labels_that_are_ids_are_refused_and_holes_are_told(tmp_path, make):
    raw = write_images(tmp_path / "raw", ["a.png"])
    output = tmp_path / "out"
    config = BuildConfig(output=str(output), num_shards={"": 1}, **make(raw, [0, 100_010, 1]))
    with pytest.raises(
        SourceError, match="labels are 0 to 100010, 100,008 of them unused, at most 100,000 may be"
    ):
        build(config, HERE)
    assert not (output / "manifest.json").exists()
    config = BuildConfig(output=str(tmp_path / "other"), num_shards={"": 1}, **make(raw, [0, 5, 1]))
    assert "labels are 0 to 5, 3 of them unused" in built(config).provenance.notes
    more = replace(config, append="store", **make(raw, [2, 100_010]))
    with pytest.raises(SourceError, match="labels are 0 to 100010, "):
        build(more, HERE)


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_runner_writes_the_same_bytes_and_counts_them(raw, tmp_path, runner):
    expected = build(config_of(raw, tmp_path / "expected"), HERE)
    found = build(config_of(raw, tmp_path / "found"), runner)
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")
    assert found.counters == expected.counters
    splits = found.published.splits.values()
    assert found.counters["shards_written"] == sum(split.num_shards for split in splits)
    assert found.counters["samples_written"] == sum(split.num_samples for split in splits)


def test_counters_are_ours_summed_over_steps_and_known_on_a_runner_that_commits_none():
    counts = [
        ("Write", "shardset", "shards_written", 6, 7),
        ("Write", "beam", "element_count", 6, 6),
        ("Index", "shardset", "images_resized", None, 2),
        ("Write", "shardset", "images_resized", None, 40),
    ]
    found = [
        MetricResult(MetricKey(step, MetricName(namespace, name)), committed, attempted)
        for step, namespace, name, committed, attempted in counts
    ]
    assert on_beam.counters_of(found) == {"shards_written": 6, "images_resized": 42}


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
    found = beam_options.beam_options(flags, open_storage(str(tmp_path))).get_all_options()
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


def test_a_dry_run_names_what_a_build_would_leave_out_and_speaks_of_no_shards_written(
    tmp_path, capfd
):
    raw = write_class_folders(tmp_path / "photos", ["cat"], 20)
    for number in range(7):
        add(raw, f"cat/x{number}.png", b"")
    words = f"build --source=folder --input={raw} --output={tmp_path}/out --dry-run"
    assert command.main([*words.split(), *HERE]) == 0
    printed = capfd.readouterr()
    expected = [
        "quarantined: 7 raw samples",
        *(f"  cat/x{number}.png: empty" for number in range(5)),
        "  and 2 more",
    ]
    assert "\n".join(expected) in printed.out
    assert "written" not in printed.err
    assert not (tmp_path / "out").exists()
