import json
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from wandb.proto import wandb_internal_pb2

from shardset.errors import ConfigError
from tests.makers.training import BATCH, NUM_EVAL, NUM_TRAIN, STEPS, read_records, shard_set, tiny_config
from trainer import loop
from trainer.config import OptimizerConfig, TrainConfig
from trainer.errors import NotFinite
from trainer.record import loggers
from trainer.runtime.single import Single


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


def mlperf_lines(folder: Path) -> list[dict[str, Any]]:
    """As mlperf_logging.compliance_checker reads them: the token, then JSON with these fields."""
    token = ":::MLLOG "
    texts = (folder / "mlperf.log").read_text().splitlines()
    assert all(text.startswith(token) for text in texts)
    lines = [json.loads(text.removeprefix(token)) for text in texts]
    fields = ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
    assert all(list(line) == fields and isinstance(line["time_ms"], int) for line in lines)
    assert [line["time_ms"] for line in lines] == sorted(line["time_ms"] for line in lines)
    return lines


def test_mlperf_lines_say_what_its_compliance_checker_asks_for(manifest: str, tmp_path: Path) -> None:
    loop.train(Single("fp32"), tiny_config(manifest, tmp_path, logger="mlperf"))
    lines = mlperf_lines(tmp_path)
    keys = [line["key"] for line in lines]
    epoch = ["epoch_start", "epoch_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[0] == "init_start"
    assert keys[keys.index("init_stop") :] == ["init_stop", "run_start", *epoch, *epoch, "run_stop"]
    facts = {line["key"]: line["value"] for line in lines if line["event_type"] == "POINT_IN_TIME"}
    expected = {"global_batch_size": BATCH, "train_samples": NUM_TRAIN, "eval_samples": NUM_EVAL, "opt_name": "sgd"}
    assert facts.items() >= expected.items()
    assert [line["metadata"].get("epoch_num") for line in lines if line["key"] in epoch] == [1] * 5 + [2] * 5
    accuracies = [line["value"] for line in lines if line["key"] == "eval_accuracy"]
    assert accuracies == [one["top1"] for one in read_records(tmp_path, "eval")]
    assert lines[-1]["metadata"] == {"status": "success"}
    for event, suffix in (("INTERVAL_START", "_start"), ("INTERVAL_END", "_stop")):
        assert all(line["key"].endswith(suffix) == (line["event_type"] == event) for line in lines)


def test_mlperf_lines_end_as_aborted_without_the_target_and_where_a_run_fails(manifest: str, tmp_path: Path) -> None:
    for name, changes in (("missed", {"target_accuracy": 1.0, "epochs": 1}), ("failed", {})):
        learning_rate = 1e30 if name == "failed" else 0.05
        config = tiny_config(
            manifest,
            tmp_path / name,
            logger="mlperf",
            optimizer=OptimizerConfig(learning_rate=learning_rate),
            **changes,
        )
        with pytest.raises(NotFinite) if name == "failed" else nullcontext():
            loop.train(Single("fp32"), config)
        lines = mlperf_lines(tmp_path / name)
        assert [line["metadata"] for line in lines if line["key"] == "run_stop"] == [{"status": "aborted"}]


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
