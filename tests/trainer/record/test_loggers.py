import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from wandb.proto import wandb_internal_pb2

from shardset.errors import ConfigError
from tests.makers.training import STEPS, read_records, shard_set, tiny_config
from trainer import loop
from trainer.config import TrainConfig
from trainer.record import loggers
from trainer.runtime.base import Single


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"))


def trained_in_two_parts(config: TrainConfig) -> None:
    loop.train(Single("fp32"), replace(config, max_steps=3))
    loop.train(Single("fp32"), config)


def test_wandb_gets_every_number_offline(manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(manifest, tmp_path, epochs=1, logger="wandb")
    loop.train(Single("fp32"), config)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, float]] = []
    while len(rows) < STEPS:  # its service writes in a process of its own
        rows = [row for row in wandb_rows(path) if "step/loss" in row]
        time.sleep(0.05)
    assert [row["step/loss"] for row in rows] == [one["loss"] for one in read_records(tmp_path, "step")]
    assert path.name == f"run-{loggers.run_id(config)}.wandb"


def wandb_rows(path: Path) -> list[dict[str, float]]:
    """What a client that is offline has kept to send later."""
    rows = []
    for data in entries(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


def entries(data: bytes, block: int = 1 << 15, header: int = 7) -> Iterator[bytes]:
    """The whole entries of a log in LevelDB's format: blocks of 32 KiB, of parts with checksum, length and kind."""
    at, whole = header, b""
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + header + length > len(data):
            return
        whole += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # a whole one, or the last part
            yield whole
            whole = b""


@pytest.mark.slow
def test_mlflow_gets_every_number_and_a_resumed_run_goes_on_in_its_run(
    manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = tiny_config(manifest, tmp_path, epochs=1, logger="mlflow")
    trained_in_two_parts(config)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / loggers.DATABASE}")
    experiment = client.get_experiment_by_name(loggers.PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.learning_rate"] == "0.05"
    history = sorted(client.get_metric_history(run.info.run_id, "step/loss"), key=lambda one: one.step)
    assert [one.value for one in history] == [one["loss"] for one in read_records(tmp_path, "step")]


def test_a_logger_that_can_not_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://x")
    with pytest.raises(ConfigError, match=r"--logger mlflow: .*MLFLOW_TRACKING_URI"):
        loggers.open_logger(tiny_config(None, tmp_path, logger="mlflow"), tmp_path)


def test_a_logger_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardset\[wandb\]'"):
        loggers.open_logger(tiny_config(None, tmp_path, logger="wandb"), tmp_path)
