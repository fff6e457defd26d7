"""JSON from outside that is nested beyond Python's limit is damage like any other: named, never a traceback."""

from pathlib import Path

import pytest

from pipelines.check.problems import quarantine_entry
from pipelines.plan import files, paths
from pipelines.plan.records import BuildFile
from pipelines.sources.webdataset import WebDataset
from shardset.errors import ConfigError, ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.order.state import state_from_json
from shardset.storage import gcs_http
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import put
from trainer import cli as program
from trainer import config as configs
from trainer.errors import CheckpointError
from trainer.record import checkpoint
from trainer.supervise import run_lock
from trainer.tools import explain, report

DEEP = 100_000 * b"["
INSIDE = b'{"x": ' + DEEP + 100_000 * b"]" + b"}"
EITHER = pytest.mark.parametrize("data", [DEEP, INSIDE], ids=["brackets", "in an object"])


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@EITHER
def test_a_manifest_beside_tars(folder: Storage, data: bytes):
    put(folder, "train-000000.tar", b"tar")
    put(folder, naming.MANIFEST, data)
    with pytest.raises(ManifestError, match=r"manifest\.json: .*nested too deeply"):
        WebDataset(folder).survey()


@EITHER
def test_the_head_of_a_manifest(folder: Storage, data: bytes):
    put(folder, naming.MANIFEST, data)
    with pytest.raises(ManifestError):
        manifests.read_head(folder)
    put(folder, naming.MANIFEST, b'{"x": ' + DEEP + b',\n "splits": {}}')
    with pytest.raises(ManifestError):
        manifests.read_head(folder)


@EITHER
def test_a_record_of_the_plan(folder: Storage, data: bytes):
    put(folder, paths.BUILD, data)
    with pytest.raises(ConfigError, match=r"plan/build\.json: not readable"):
        files.find_record(folder, paths.BUILD, BuildFile)


@EITHER
def test_a_line_of_the_quarantine_list(data: bytes):
    assert quarantine_entry(data) is None


def test_an_order_state():
    with pytest.raises(ConfigError, match="the order state"):
        state_from_json(b'{"x": ' + 4000 * b"[")
    with pytest.raises(ConfigError, match="the order state"):
        state_from_json(DEEP)


@EITHER
def test_what_a_run_records(folder: Storage, tmp_path: Path, data: bytes):
    put(folder, configs.RECORD, data)
    for read in (program.recorded_config, explain.recorded_run):
        with pytest.raises(ConfigError, match=configs.RECORD):
            read(str(tmp_path))
    config, problem = report._config(folder)
    assert config == {}
    assert configs.RECORD in problem


@EITHER
def test_a_line_of_a_runs_metrics(data: bytes):
    assert report._record_of(data) is None


@EITHER
def test_the_mark_of_who_holds_a_run_folder(data: bytes):
    assert run_lock._read(data) is None


@EITHER
def test_the_commit_mark_of_a_checkpoint(folder: Storage, data: bytes):
    put(folder, "checkpoints/step-000000000001/commit.json", data)
    with pytest.raises(CheckpointError, match="not a commit mark"):
        checkpoint._read_commit(folder, "checkpoints/step-000000000001/commit.json")


@EITHER
def test_what_a_bucket_says_with_a_refusal(data: bytes):
    assert gcs_http._said(data.decode())[:1] in "[{"
