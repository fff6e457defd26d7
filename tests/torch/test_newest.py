"""One run that moves between the oldest and the newest torch, and a reader of checkpoints for each
of them.
"""

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from scripts import venvs
from shardset.program import OK
from tests.makers.documented import REPOSITORY
from tests.makers.training import (
    finish,
    largest_difference,
    losses,
    shard_set,
    tiny_config,
    trainer,
)
from trainer.config import ModelConfig, OptimizerConfig, Strategy

pytestmark = pytest.mark.nightly

TOLERANCE = 1e-5
"""Between versions over 21 steps: their kernels add up in another order."""


@pytest.fixture(scope="module")
def newest():
    """The Python of the environment with the newest torch."""
    assert venvs.is_current(venvs.TORCH, venvs.NEWEST_TORCH), "run `make torch` first"
    return str(venvs.python_of(venvs.TORCH))


def test_a_run_moves_between_the_oldest_and_the_newest_torch_in_mid_epoch(tmp_path, newest):
    config = tiny_config(
        shard_set(tmp_path / "set"),
        tmp_path / "moving",
        epochs=3,
        model=ModelConfig(name="trainer.model:tiny_resnet", norm="group"),
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.001),
    )
    lives: list[tuple[Strategy, dict[str, Any], int | None]] = [
        ("single", {}, 4),
        ("ddp", {"python": newest, "processes": 2}, 9),
        ("spmd", {"devices": 2}, None),
    ]
    for strategy, how, stop in lives:
        code, output = finish(trainer(replace(config, strategy=strategy, max_steps=stop), **how))
        assert code == OK, output
    whole = replace(config, run_dir=str(tmp_path / "whole"))
    code, output = finish(trainer(whole))
    assert code == OK, output
    assert largest_difference(losses(tmp_path / "moving"), losses(tmp_path / "whole")) < TOLERANCE
    code, output = finish(trainer(config, verb="evaluate", python=newest))
    assert code == OK, output


def test_the_newest_torch_chooses_no_torch_xla_of_another_version(tmp_path, newest):
    config = tiny_config(None, tmp_path, fake_data=True, epochs=1, max_steps=2, strategy="auto")
    code, output = finish(trainer(config, python=newest))
    assert code == OK, output
    code, output = finish(trainer(replace(config, strategy="spmd"), python=newest))
    assert "there is no torch_xla for torch 2.15" in output


def test_a_program_that_ends_says_no_more_than_its_own_words(newest):
    command = [newest, "-m", "trainer", "predict", "--from", "nothing", "photo.png"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    expected = "no config.json there, expected the folder of a run; give the --run-dir of"
    assert done.stderr == f"ConfigError: {REPOSITORY}/nothing: {expected} `shardset train`\n"
