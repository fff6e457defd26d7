"""Builds of shards with large indexes: the checksums of their pages are written, checked, replaced and removed."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import files, paths
from pipelines.write import replace
from shardset.format import manifest as manifests
from shardset.format.index_pages import LARGE_BYTES, ROWS_PER_PAGE, entries_of, file_bytes, file_names
from shardset.read.indexes import ShardTable
from shardset.storage.open import open_storage
from tests.makers.folders import write_class_folders
from tests.makers.shardset import put
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]
SIZE = 990
NAMED = "a" * 66
"""A long name of a class makes long keys, so that few samples make a large index."""


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class_folders(tmp_path_factory.mktemp("raw"), [NAMED], 2 * SIZE, extension="ppm")


@pytest.fixture(scope="module")
def finished(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of two large shards."""
    output = tmp_path_factory.mktemp("finished")
    build(config_of(raw, output), HERE)
    return output


def config_of(raw: Path, output: Path, **options: Any) -> BuildConfig:
    sizes = {"num_shards": {"": 2}, "verify": "none"}
    return BuildConfig(**{"source": "folder", "input": str(raw), "output": str(output), **sizes, **options})


FILE = "train/train-00000.idx-pages.npy"


def test_a_build_writes_the_checksums_of_large_indexes_and_verify_finds_them_right(finished):
    indexes = [(finished / f"train/train-00000{number}.idx.npy").read_bytes() for number in range(2)]
    assert min(map(len, indexes)) > LARGE_BYTES
    assert (finished / FILE).read_bytes() == file_bytes([entries_of(index) for index in indexes])
    assert len(np.load(finished / FILE, allow_pickle=False)) == 2 * (2 + -(-SIZE // ROWS_PER_PAGE))
    assert verify(str(finished), deep=False).problems == ()
    assert verify(str(finished), deep=True).problems == ()


def test_pages_of_the_manifest_change_nothing_about_those_of_indexes(raw, finished, tmp_path):
    build(config_of(raw, tmp_path, max_listed_shards=1), HERE)
    manifest, storage = manifests.load(str(tmp_path))
    assert manifest.version == 2
    assert (tmp_path / FILE).read_bytes() == (finished / FILE).read_bytes()
    assert verify(str(tmp_path), deep=True).problems == ()
    remote = open_storage("memory://index-pages-of-version-2/set")
    for name in (FILE, "train/train-000001.idx.npy"):
        put(remote, name, storage.read(name))
    table = ShardTable(remote, manifest.split("train"))
    assert table.addresses(np.array([1]), np.array([SIZE - 1])).labels.tolist() == [0]
    assert table.num_bytes_read < LARGE_BYTES / 10


def test_a_set_that_is_replaced_or_unfinished_leaves_no_checksums(raw, finished, tmp_path):
    few = write_class_folders(tmp_path / "few", ["cat"], 2)
    for name in ("replaced", "unfinished"):
        output = tmp_path / name
        shutil.copytree(finished, output)
        if name == "unfinished":
            (output / "manifest.json").unlink()
        build(config_of(few, output, overwrite=True), HERE)
        assert not [path for path in files_of(output) if "idx-pages" in path]
        assert verify(str(output), deep=True).problems == ()


def test_a_finished_build_whose_records_have_no_checksums_is_published_without_them(raw, finished, tmp_path):
    # Records of an earlier version, whose build this one finishes.
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    (output / "manifest.json").unlink()
    (output / FILE).unlink()
    storage, name = open_storage(str(output)), paths.record_path("train", 1)
    file = files.find(storage, name)
    record = msgspec.json.decode(file.content)
    assert record.pop("index_pages")
    files.write(storage, name, file.build, msgspec.json.encode(record), if_generation=storage.stat(name).generation)
    build(config_of(raw, output), HERE)
    assert FILE not in files_of(output)
    assert verify(str(output), deep=False).problems == ()


def test_the_names_of_all_files_follow_from_the_manifest(finished):
    manifest, _ = manifests.load(str(finished))
    assert file_names("train", manifest.split("train")) == [FILE]
    assert FILE in replace.files_of(manifest)
