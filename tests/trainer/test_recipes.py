"""Recipes take two steps at a tiny size, with the settings that make them."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.makers.training import read_records, shard_set
from trainer import recipes
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.model import build
from trainer.runtime.base import Single


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"), size=32)


def tiny(config: TrainConfig, manifest: str, run_dir: Path) -> TrainConfig:
    """A recipe on pictures of 32 pixels with a small model of its kind:
    two steps of eight samples.
    """
    model = config.model
    if model.name.startswith("resnet"):
        model = replace(model, name="resnet10t" if model.stem == "imagenet" else "resnet18")
    size = 16 if model.stem == "cifar" else 32
    return replace(
        config,
        manifest=manifest,
        run_dir=str(run_dir),
        model=model,
        image=replace(config.image, size=size, eval_resize=32, eval_size=None),
        global_batch_size=8,
        max_steps=2,
        precision="fp32",
        epochs=1,
        log_every_steps=1,
        strategy="single",
    )


@pytest.mark.parametrize(
    "name",
    [
        "digits_smoke",
        "cifar10_resnet50",
        "imagenet_resnet50",
    ],
)
def test_a_recipe_takes_its_steps(name: str, manifest: str, tmp_path: Path) -> None:
    config = tiny(recipes.recipe(name), manifest, tmp_path)
    train(Single(config.precision), config)
    assert [one["global_step"] for one in read_records(tmp_path, "step")] == [0, 1]


def test_the_settings_of_imagenet_are_those_of_the_paper() -> None:
    plain = recipes.imagenet_resnet50()
    assert plain.optimizer.learning_rate / plain.global_batch_size * 256 == pytest.approx(0.1)
    assert plain.global_batch_size // 32 == 128  # for each core of a v3-32
    assert all(
        group["nesterov"]
        for group in build.optimizer(plain.optimizer, nn.Linear(2, 2)).param_groups
    )
