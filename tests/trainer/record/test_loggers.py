import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest

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


@pytest.mark.slow
def test_wandb_gets_every_number_offline(
    manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(manifest, tmp_path, epochs=1, logger="wandb")
    loop.train(Single("fp32"), config)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    texts = [json.dumps(one["loss"]).encode() for one in read_records(tmp_path, "step")]
    # its service writes in another process
    while not all(text in path.read_bytes() for text in texts):
        time.sleep(0.05)
    assert len(texts) == STEPS
    assert path.name == f"run-{loggers.run_id(config)}.wandb"


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
    history = sorted(
        client.get_metric_history(run.info.run_id, "step/loss"), key=lambda one: one.step
    )
    assert [one.value for one in history] == [one["loss"] for one in read_records(tmp_path, "step")]


def test_a_logger_that_can_not_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://x")
    with pytest.raises(ConfigError, match=r"--logger mlflow: .*MLFLOW_TRACKING_URI"):
        loggers.open_logger(tiny_config(None, tmp_path, logger="mlflow"), tmp_path)


def test_a_logger_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardset\[wandb\]'"):
        loggers.open_logger(tiny_config(None, tmp_path, logger="wandb"), tmp_path)
