"""From the published formats to a trained model under every strategy: the same batches, the same
losses.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from shardset.program import OK
from tests.makers import cifar, imagenet
from tests.makers.training import (
    finish,
    largest_difference,
    losses,
    read_records,
    tiny_config,
    trainer,
)
from trainer.config import ImageConfig, ModelConfig, Strategy, TrainConfig

pytestmark = pytest.mark.slow

SIZES = {"cifar10": (60, 12), "imagenet": (40, len(imagenet.TRUTH))}
"""Training and evaluation samples of each made-up data set."""

PROCESSES: dict[Strategy, dict[str, Any]] = {
    "single": {},
    "spmd": {"devices": 4},
    "ddp": {"processes": 2},
}


def raw_cifar10(folder: Path) -> Path:
    folder.mkdir()
    return cifar.write_archive(
        folder / "cifar-10-python.tar.gz",
        cifar.python_files(cifar.cifar10(rows=12)),
        folder="cifar-10-batches-py",
    )


def raw_imagenet(folder: Path) -> Path:
    return imagenet.put(folder, imagenet.archives(imagenet.images(num_train=10)))


@pytest.fixture(
    scope="module", params=["cifar10", pytest.param("imagenet", marks=pytest.mark.nightly)]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run on the shards of a format, trained on one device already."""
    folder = tmp_path_factory.mktemp(request.param)
    raw = {"cifar10": raw_cifar10, "imagenet": raw_imagenet}[request.param](folder / "raw")
    output = str(folder / "set")
    build(
        BuildConfig(source=request.param, input=str(raw), output=output, num_shards={"": 2}),
        ["--direct_running_mode=in_memory"],
    )
    config = tiny_config(
        output,
        folder / "single",
        recipe=request.param,
        model=ModelConfig(name="tests.makers.xla_facts:small"),
        image=ImageConfig(size=8, train_crop="random", eval_resize=10),
    )
    train(config)
    return config


def train(config: TrainConfig) -> None:
    code, output = finish(trainer(config, **PROCESSES[config.strategy]))
    assert code == OK, output


@pytest.mark.parametrize("strategy", [pytest.param("spmd", marks=pytest.mark.nightly), "ddp"])
def test_a_published_format_trains_alike_on_several_devices_and_processes(
    made: TrainConfig, strategy: Strategy, tmp_path: Path
) -> None:
    config = replace(made, strategy=strategy, run_dir=str(tmp_path))
    train(config)
    assert largest_difference(losses(config.run_dir), losses(made.run_dir)) < 1e-5
    num_train, num_eval = SIZES[made.recipe]
    for kind, names, num_samples in (
        ("epoch", ["key_digest"], num_train),
        ("eval", ["top1", "top5"], num_eval),
    ):
        found, expected = (read_records(one.run_dir, kind) for one in (config, made))
        assert [one["samples"] for one in found] == [num_samples] * 2
        assert [[one[name] for name in names] for one in found] == [
            [one[name] for name in names] for one in expected
        ]
