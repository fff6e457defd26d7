"""Every recipe takes two steps at a tiny size, with the settings that make it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardset.settings import values_of
from tests.makers.training import read_records, shard_set
from trainer import recipes
from trainer.config import ModelConfig, TrainConfig
from trainer.loop import train
from trainer.model import build
from trainer.runtime.single import Single

TINY_VIT = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 24, "num_heads": 2}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"), size=32)


def tiny(config: TrainConfig, manifest: str, run_dir: Path) -> TrainConfig:
    """A recipe on pictures of 32 pixels with a small model of its kind: two steps of eight samples."""
    model = config.model
    if model.name.startswith("vit"):
        model = replace(model, kwargs={**(model.kwargs or {}), **TINY_VIT})
    elif model.name.startswith("resnet"):
        model = ModelConfig(
            name="resnet10t" if model.stem == "imagenet" else "resnet18",
            stem=model.stem,
            norm=model.norm,
            kwargs=model.kwargs,
        )
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


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_takes_its_steps(name: str, manifest: str, tmp_path: Path) -> None:
    config = tiny(recipes.recipe(name), manifest, tmp_path)
    train(Single(config.precision), config)
    assert [one["global_step"] for one in read_records(tmp_path, "step")] == [0, 1]


SGD = {"optimizer.name": "sgd", "optimizer.momentum": 0.9}
RSB = {
    "optimizer.name": "lamb",
    "optimizer.weight_decay": 0.02,
    "schedule.decay": "cosine",
    "regularize.loss": "bce",
    "regularize.bce_threshold": 0.2,
    "regularize.label_smoothing": 0.0,
    "regularize.mixup": 0.1,
    "regularize.cutmix": 1.0,
    "image.eval_resize": 236,
    "image.eval_interpolation": "bicubic",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    # Goyal et al., arXiv:1706.02677, section 5.1.
    "imagenet_resnet50": {**SGD, "epochs": 90, "optimizer.weight_decay": 1e-4, "schedule.warmup_epochs": 5.0},
    # configs/resnet/resnet50_8xb256-rsb-a3-*_in1k.py of mmpretrain, and their _base_ files.
    "imagenet_resnet50_a3": {
        **RSB,
        "epochs": 100,
        "global_batch_size": 2048,
        "optimizer.learning_rate": 8e-3,
        "image.size": 160,
        "image.eval_size": 224,
        "image.auto_augment": "rand-m6-mstd0.5-inc1",
    },
    # big_vision/configs/vit_s16_i1k.py.
    "imagenet_vit_s16": {
        "model.kwargs": {"class_token": False, "global_pool": "avg", "fc_norm": False, "weight_init": "jax"},
        "epochs": 90,
        "global_batch_size": 1024,
        "optimizer.learning_rate": 1e-3,
        "regularize.mixup": 0.2,
        "regularize.clip_norm": 1.0,
        "image.eval_resize": 256,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_values(name: str) -> None:
    values = values_of(recipes.recipe(name))
    assert {key: values[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_rates_and_decays_that_are_published_for_other_batches_or_units() -> None:
    plain, vit = recipes.imagenet_resnet50(), recipes.imagenet_vit_s16()
    assert plain.optimizer.learning_rate / plain.global_batch_size * 256 == pytest.approx(0.1)
    assert vit.optimizer.learning_rate * vit.optimizer.weight_decay == pytest.approx(1e-4)
    assert vit.schedule.warmup_epochs * -(-1_281_167 // vit.global_batch_size) == pytest.approx(10_000, rel=0.01)


def test_momentum_of_the_sgd_recipes_is_nesterovs() -> None:
    optimizer = build.optimizer(recipes.imagenet_resnet50().optimizer, nn.Linear(2, 2))
    assert {group["nesterov"] for group in optimizer.param_groups} == {True}
