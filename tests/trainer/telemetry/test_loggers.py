"""Weights & Biases gets what TensorBoard gets."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardset.errors import ConfigError
from tests.makers.training import STEPS, read_records, shard_set, tiny_config
from trainer import loop
from trainer.runtime.base import Single
from trainer.telemetry import loggers


@pytest.mark.slow
def test_wandb_gets_every_number_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(shard_set(tmp_path / "set"), tmp_path / "run", epochs=1, wandb=True)
    loop.train(Single("fp32"), replace(config, max_steps=3))
    loop.train(Single("fp32"), config)
    paths = list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert {path.name for path in paths} == {f"run-{loggers.run_id(config)}.wandb"}
    losses = [one["loss"] for one in read_records(tmp_path / "run", "step")]
    texts = [str(np.float32(loss)).encode() for loss in losses]
    # its service writes in another process
    while not all(text in b"".join(map(Path.read_bytes, paths)) for text in texts):
        time.sleep(0.05)
    assert len(texts) == STEPS


def test_without_its_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardset\[wandb\]'"):
        loggers.start_wandb(tiny_config(None, tmp_path), tmp_path)
