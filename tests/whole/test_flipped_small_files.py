"""Damage of a small file: a flipped bit is healed if it comes once, and an error of ours or plain
other values if it stays; JSON that is nested beyond Python's limit is an error of ours.
"""

import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipelines.check.problems import quarantine_entry
from pipelines.plan import files, paths
from pipelines.plan.plan_records import BuildFile
from pipelines.sets import version_history
from shardset.errors import ManifestError, ShardsetError
from shardset.format import columns, naming, versions, view
from shardset.format import manifest as manifests
from shardset.format.shards import StoredShards
from shardset.format.view import ViewHead, ViewRows
from shardset.order.state import states_from_json
from shardset.storage import gcs_http
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.doors import changing
from tests.makers.golden import FOLDER
from tests.makers.shardset import put
from trainer import cli as program
from trainer import config as configs
from trainer.errors import CheckpointError
from trainer.run_folder import checkpoint, lock
from trainer.run_folder.checkpoint import CommitMark
from trainer.telemetry import sample_losses
from trainer.telemetry.evaluation import WORST
from trainer.tools import report

STATE = checkpoint.state_to_bytes({"model": {"weight": torch.ones(2)}, "optimizer": {}, "step": 3})
MARK = CommitMark(
    format=checkpoint.FORMAT, step=3, epoch=0, top1=None, identity={}, state="state-0.pt",
    num_bytes=len(STATE), crc32c="AAAAAA==",
)  # fmt: skip
OUTCOMES = np.zeros(50, [("id", "<i8"), ("loss", "<f4"), ("label", "<i8"), ("predicted", "<i8")])
LOSSES = sample_losses.losses_name(0)

READS: dict[str, Callable[[Storage], Any]] = {
    versions.tag_path("paper"): versions.tags,
    naming.MANIFEST: lambda s: manifests.read_head(s).digest,
    "v.parquet": lambda s: [
        rows.ids.tolist() for rows in view.read_view(s, "v.parquet")[1].values()
    ],
    LOSSES: lambda s: [
        [column.tolist() for column in epoch] for epoch in sample_losses.read_losses(s)
    ],
    "commit.json": lambda s: checkpoint._read_commit(s, "commit.json"),
    configs.CLASSES: lambda s: configs.read_json(s, configs.CLASSES),
    configs.ORDER: lambda s: s.read(configs.ORDER),
    WORST: report._worst,
}
HAVE_CHECKS = {naming.MANIFEST, "v.parquet"}
LEVELS = 1100
"""Above Python's limit of 1,000. At 100,000 another reader of JSON ended the process."""
DEEP = LEVELS * b"["
NEEDED: dict[str, tuple[str, Callable[[Storage], Any]]] = {
    naming.MANIFEST: (r"manifest\.json", manifests.read_head),
    paths.BUILD: ("not readable", lambda s: files.find_record(s, paths.BUILD, BuildFile)),
    configs.RECORD: (configs.RECORD, lambda s: program.recorded_config(s.url)),
    "commit.json": ("not a commit mark", READS["commit.json"]),
}
EITHER = pytest.mark.parametrize(
    "data", [DEEP, b'{"x": ' + DEEP + LEVELS * b"]" + b"}"], ids=["brackets", "inside"]
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """A set with a tag, and beside it the small files of a view and a run."""
    folder = tmp_path_factory.mktemp("small") / "set"
    shutil.copytree(FOLDER, folder)
    version_history.tag(str(folder), "paper")
    storage = open_storage(str(folder))
    digest, rows = manifests.load(str(folder)).digest, {"train": ViewRows(np.arange(3))}
    head = ViewHead(
        parent=".", parent_digest=digest, split="train", digest=view.view_digest(digest, rows)
    )
    put(storage, "v.parquet", view.view_to_bytes(head, rows))
    put(storage, LOSSES, sample_losses.losses_file(OUTCOMES, is_mixture=False))
    put(storage, "commit.json", msgspec.json.encode(MARK))
    put(storage, configs.CLASSES, b'["cat", "dog"]')
    put(storage, configs.ORDER, b"{}\n")
    put(storage, WORST, b"[]")
    return storage


@pytest.mark.parametrize("name", [naming.MANIFEST])
def test_a_bit_that_is_flipped_once_changes_nothing(stored: Storage, name: str):
    wanted, data = READS[name](stored), stored.read(name)
    for place in range(0, len(data), max(1, len(data) // 100)):
        seen: list[str] = []

        def once(call: str, data: bytes, place: int = place, seen: list[str] = seen) -> bytes:
            if not call.startswith(f"{name} ") or seen:
                return data
            seen.append(call)
            return flipped(data, place, 0x80)

        assert READS[name](changing(stored, uuid.uuid4().hex, once)) == wanted
        assert seen


@pytest.mark.parametrize("name", READS)
def test_a_bit_that_stays_flipped_gives_an_error_of_ours_or_other_values(
    stored: Storage, name: str
):
    wanted, data, draw = READS[name](stored), stored.read(name), random.Random(name)
    for _ in range(400):
        place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)

        def always(call: str, data: bytes, place: int = place, bit: int = bit) -> bytes:
            return flipped(data, place, bit) if call.startswith(f"{name} ") else data

        try:
            found = READS[name](changing(stored, uuid.uuid4().hex, always))
        except ShardsetError:
            continue
        assert found == wanted or name not in HAVE_CHECKS


def flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def test_a_state_whose_bits_are_flipped_is_refused_or_read():
    draw = random.Random(7)
    for _ in range(400):
        try:
            checkpoint.state_from_bytes(
                flipped(STATE, draw.randrange(len(STATE)), 1 << draw.randrange(8)), "x"
            )
        except CheckpointError:
            continue


@EITHER
@pytest.mark.parametrize("name", NEEDED)
def test_deep_json_in_a_file_that_must_be_read_is_named(tmp_path: Path, data: bytes, name: str):
    storage = open_storage(str(tmp_path))
    put(storage, "train-000000.tar", b"tar")
    put(storage, name, data)
    message, read = NEEDED[name]
    with pytest.raises(ShardsetError, match=message):
        read(storage)


@EITHER
def test_deep_json_that_may_be_damaged_is_left_out(data: bytes):
    read = quarantine_entry, report._record_of, lock._read
    assert [parse(data) for parse in read] == [None] * 3
    assert gcs_http._said(data.decode())[:1] in "[{"
    with pytest.raises(ShardsetError, match="the order state"):
        states_from_json(data)


@pytest.mark.parametrize("shape", [["x"], None, [1.5], [-1], [2**40], "3", [True]])
def test_a_column_whose_shape_is_forged_is_refused(tmp_path: Path, shape: object):
    here = tmp_path / "set"
    shutil.copytree(FOLDER, here)
    shutil.copytree(FOLDER, here / "columns/x")
    parent = manifests.load(str(here))
    options = {"dtype": "<f4", "shape": shape}
    made = msgspec.structs.replace(
        parent.manifest.provenance,
        source=columns.SOURCE,
        source_digest=parent.digest,
        options=options,
    )
    train = parent.manifest.split("train")
    groups = [msgspec.structs.replace(each, plan_digest=each.tars_sha256) for each in train.groups]
    shards = StoredShards(groups, parent.storage)
    splits = {"train": msgspec.structs.replace(train, fields=train.fields[:1], shards=shards)}
    forged = msgspec.structs.replace(parent.manifest, provenance=made, splits=splits)
    (here / "columns/x/manifest.json").write_bytes(manifests.to_json(manifests.seal(forged)))
    with pytest.raises(ManifestError, match=r"shape .* don't fit"):
        columns.open_column(parent, "train", "x")


def test_a_view_that_names_itself_is_refused(tmp_path: Path):
    head = ViewHead(parent="v.parquet", parent_digest="0" * 64, split="train")
    (tmp_path / "v.parquet").write_bytes(
        view.view_to_bytes(head, {"train": ViewRows(np.arange(2))})
    )
    with pytest.raises(ShardsetError, match="a view, as its set"):
        manifests.load(str(tmp_path / "v.parquet"))
