"""Builds of more shards than `manifest.json` lists: the pages hold the same set, and come and go with it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelines import build as builds
from pipelines import cli
from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import files, paths
from pipelines.plan.records import PlanFile
from pipelines.write.commit import Committer
from pipelines.write.pages import PageWriter
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.open import open_storage
from tests.makers.folders import write_class_folders
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]
PAGES = {f"manifest/{split}-00000.{kind}.npy" for split in ("test", "train") for kind in ("shards", "counts")}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "raw", ["cat", "dog", "owl"], 4, splits=["train", "test"])


def config_of(raw: Path, output: Path, **options: Any) -> BuildConfig:
    """By default of six shards in pages."""
    sizes = {"num_shards": {"": 3}, "max_listed_shards": 5}
    return BuildConfig(**{"source": "folder", "input": str(raw), "output": str(output), **sizes, **options})


def built(config: BuildConfig) -> Manifest:
    published, manifest = build(config, HERE).published, manifests.load(config.output).manifest
    assert published is not None
    assert published.digest == manifest.digest
    return manifest


def listed_in(split: manifests.Split) -> list[manifests.Shard]:
    return [msgspec.structs.replace(shard, class_counts=[*shard.class_counts]) for shard in split.shards]


@pytest.mark.slow
@pytest.mark.parametrize("runner", [HERE, ["--runner=BundleBasedDirectRunner"]])
def test_above_the_limit_a_build_writes_pages_and_up_to_it_a_list_of_the_same_shards(raw, tmp_path, runner):
    build(config_of(raw, tmp_path / "paged"), runner)
    paged = manifests.load(str(tmp_path / "paged")).manifest
    listed = built(config_of(raw, tmp_path / "listed", max_listed_shards=6))
    assert (listed.version, paged.version) == (1, 2)
    for name, split in listed.splits.items():
        assert listed_in(paged.split(name)) == split.shards
        assert paged.split(name).class_totals == split.class_totals == [4, 4, 4]
        assert paged.split(name).num_content_bytes == split.num_content_bytes
        assert paged.split(name).fields == split.fields
    differing = {naming.MANIFEST, *PAGES}
    ours, theirs = (
        {name: data for name, data in files_of(tmp_path / folder).items() if name not in differing}
        for folder in ("paged", "listed")
    )
    assert {name: data for name, data in ours.items() if not name.startswith("report")} == {
        name: data for name, data in theirs.items() if not name.startswith("report")
    }
    assert verify(str(tmp_path / "paged"), deep=True).problems == ()


def test_pages_are_written_in_parts_that_make_one_set(raw, tmp_path):
    config = config_of(raw, tmp_path / "out", num_shards={"train": 7, "test": 2})
    whole = built(config)
    shards = {name: listed_in(split) for name, split in whole.splits.items()}  # before their pages go
    output = open_storage(config.output)
    committer = Committer(builds.prepare(config, output).files, config, suffix="")
    plan = files.find_record(output, paths.PLAN, PlanFile)
    output.delete(naming.MANIFEST)
    writer = PageWriter(committer.files, "", shards_per_page=4, shards_per_count_page=2)
    numbers = [*writer.numbers(plan)]
    assert sorted(numbers) == [("test", 0), ("train", 0), ("train", 1)]
    committer.write_head(plan, [writer.write(plan, *each) for each in sorted(numbers)], writer)
    parts = manifests.load(config.output).manifest
    pages = parts.split("train").shards.pages
    assert (len(pages.pages), len(pages.count_pages)) == (2, 4)
    for name, split in whole.splits.items():
        assert listed_in(parts.split(name)) == shards[name]
        assert parts.split(name).class_totals == split.class_totals
    assert verify(config.output, deep=True).problems == ()


def test_a_rerun_changes_nothing_and_mends_a_damaged_page(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    built(config)
    before = files_of(tmp_path / "out")
    built(config)
    assert files_of(tmp_path / "out") == before
    for page in PAGES:
        (tmp_path / "out" / page).write_bytes(b"")
    built(config)
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("limits", [(5, 5), (5, 6), (6, 5)])
def test_a_set_in_pages_replaces_and_is_replaced_without_a_file_left(raw, tmp_path, limits):
    out = tmp_path / "out"
    built(config_of(raw, out, max_listed_shards=limits[0]))
    new = built(config_of(raw, out, seed=1, overwrite=True, max_listed_shards=limits[1]))
    own = {*manifests.files_of(new), naming.MANIFEST}
    assert {name for name in files_of(out) if not name.startswith("plan/")} == own
    assert verify(str(out), deep=True).problems == ()


def test_pages_of_an_unfinished_build_go_with_it(raw, tmp_path):
    config = config_of(raw, tmp_path / "out")
    built(config)
    (tmp_path / "out" / naming.MANIFEST).unlink()
    new = built(config_of(raw, tmp_path / "out", seed=1, overwrite=True, max_listed_shards=6))
    assert new.version == 1
    assert PAGES.isdisjoint(files_of(tmp_path / "out"))


@pytest.mark.parametrize("deep", [False, True])
def test_verify_names_a_damaged_count_page_and_goes_on(raw, tmp_path, deep):
    config = config_of(raw, tmp_path / "out")
    built(config)
    page = tmp_path / "out" / "manifest/train-00000.counts.npy"
    page.write_bytes(page.read_bytes()[:-1] + b"\xff")
    report = verify(config.output, deep=deep)
    (problem,) = report.problems
    assert problem.where == "manifest/train-00000.counts.npy"
    assert "expected" in problem.sentence
    assert report.num_samples == 24


def test_a_set_in_pages_is_inspected_exported_reported_and_read_as_raw_input(raw, tmp_path, capsys):
    config = config_of(raw, tmp_path / "out")
    built(config)
    url = config.output
    assert cli.main(["inspect", url, "--class", "dog"]) == 0
    assert cli.main(["inspect", url, "--split", "train", "--shard", "1"]) == 0
    assert cli.main(["estimate", url, "--global-batch-size", "4"]) == 0
    assert cli.main(["report", url]) == 0
    assert cli.main(["export", url, "--to", "wids,energon,timm,hf"]) == 0
    again = built(config_of(tmp_path / "out", tmp_path / "again", source="webdataset", max_listed_shards=6))
    assert [split.num_samples for split in again.splits.values()] == [12, 12]
    assert "dog" in capsys.readouterr().out


def test_a_limit_below_0_is_refused(raw, tmp_path, capsys):
    words = ["build", "--source", "folder", "--input", str(raw), "--output", str(tmp_path / "out")]
    assert cli.main([*words, "--max-listed-shards", "-1"]) == 2
    assert "--max-listed-shards is -1, expected a whole number from 0" in capsys.readouterr().err
