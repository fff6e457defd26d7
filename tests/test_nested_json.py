"""JSON from outside that is nested beyond Python's limit is damage like any other: named, never a
traceback.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.check.problems import quarantine_entry
from pipelines.plan import files, paths
from pipelines.plan.records import BuildFile
from shardset.errors import ConfigError, ManifestError, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.order.state import states_from_json
from shardset.storage import gcs_http
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import put
from trainer import cli as program
from trainer import config as configs
from trainer.errors import CheckpointError
from trainer.run_folder import checkpoint, lock
from trainer.tools import explain, report

LEVELS = 1100
"""Above Python's limit of 1,000. At 100,000 another reader of JSON ended the process."""

DEEP = LEVELS * b"["
COMMIT = "checkpoints/step-000000000001/commit.json"
EITHER = pytest.mark.parametrize(
    "data", [DEEP, b'{"x": ' + DEEP + LEVELS * b"]" + b"}"], ids=["brackets", "inside"]
)


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@EITHER
@pytest.mark.parametrize(
    ("name", "read", "error", "message"),
    [
        (naming.MANIFEST, manifests.read_head, ManifestError, r"manifest\.json"),
        (
            paths.BUILD,
            lambda s: files.find_record(s, paths.BUILD, BuildFile),
            ConfigError,
            "not readable",
        ),
        (configs.RECORD, lambda s: program.recorded_config(s.url), ConfigError, configs.RECORD),
        (configs.RECORD, lambda s: explain.opened(s.url), ConfigError, configs.RECORD),
        (
            COMMIT,
            lambda s: checkpoint._read_commit(s, COMMIT),
            CheckpointError,
            "not a commit mark",
        ),
    ],
)
def test_a_file_that_must_be_read_is_named(
    folder: Storage,
    data: bytes,
    name: str,
    read: Callable,
    error: type[ShardsetError],
    message: str,
):
    put(folder, "train-000000.tar", b"tar")
    put(folder, name, data)
    with pytest.raises(error, match=message):
        read(folder)


@EITHER
def test_what_may_be_damaged_is_left_out(folder: Storage, data: bytes):
    assert [quarantine_entry(data), report._record_of(data), lock._read(data)] == [
        None,
        None,
        None,
    ]
    assert gcs_http._said(data.decode())[:1] in "[{"


def test_an_order_state_is_named():
    for data in (b'{"x": ' + LEVELS * b"[", DEEP):
        with pytest.raises(ConfigError, match="the order state"):
            states_from_json(data)
