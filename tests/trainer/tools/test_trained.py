"""From a run to files and predictions: every way gives the same numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss

from shardset.errors import ConfigError
from shardset.program import FAILED, OK, USAGE
from shardset.storage.open import open_storage
from tests.makers.shardset import encode, pixels
from tests.makers.training import NUM_EVAL, read_records, shard_set, tiny_config
from trainer import cli as command
from trainer import config as configs
from trainer import loop
from trainer.config import ImageConfig, ModelConfig, RegularizeConfig
from trainer.data.splits import open_data
from trainer.errors import CheckpointError
from trainer.model import networks
from trainer.run_folder import checkpoint
from trainer.runtime.base import Single
from trainer.tools import export, trained
from trainer.tools.predict import probabilities

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one epoch, with averaged weights."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(
        shard_set(folder / "set"),
        folder / "run",
        epochs=1,
        image=ImageConfig(
            size=8,
            train_crop="pad",
            eval_resize=9,
            eval_interpolation="bicubic",
            background="black",
            upright=False,
            mean=MEAN,
            std=STD,
        ),
        regularize=RegularizeConfig(ema_decay=0.5),
    )
    loop.train(Single("fp32"), config)
    return str(folder / "run")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for serial in range(3):
        (folder / f"{serial}.png").write_bytes(encode(pixels(serial, 8, 8), "png"))
    return folder


def test_a_run_gives_the_model_that_its_evaluation_measured_to_the_last_sample(run):
    model = trained.opened(run)
    data = open_data(configs.recorded(open_storage(run)), 0, 1)
    correct, loss = 0, 0.0
    for _, _, batch in data.evaluation.run(iter([(0, range(len(data.evaluation)))])):
        found, labels = probabilities(model, batch["image"]), torch.from_numpy(batch["label"])
        real = torch.from_numpy(batch["weight"] > 0)
        correct += int((found.argmax(1) == labels)[real].sum())
        loss += nll_loss(found.log()[real], labels[real], reduction="sum").item()
    [record] = read_records(run, "eval")
    assert correct / NUM_EVAL == model.facts.accuracy == record["top1"]
    assert loss / NUM_EVAL == pytest.approx(record["loss"], abs=1e-5)
    assert model.facts.classes == [f"class {label}" for label in range(10)]


def test_an_export_is_the_model_of_the_run_with_its_facts(run, tmp_path):
    assert command.main(["export", run, "--output", str(tmp_path), "--onnx"]) == OK
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "model.json", "model.onnx", "model.safetensors",
    ]  # fmt: skip
    model, again = trained.opened(run), trained.opened(str(tmp_path))
    assert again.facts == model.facts
    assert (model.facts.image.size, model.facts.image.eval_resize) == (8, 9)
    assert (model.facts.image.mean, model.facts.image.std) == (MEAN, STD)
    images = np.random.default_rng(0).random((5, 3, 8, 8), dtype=np.float32)
    expected = model.net(torch.from_numpy(images))
    assert torch.equal(again.net(torch.from_numpy(images)), expected)
    graph = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    np.testing.assert_allclose(
        graph.run(None, {"image": images})[0], expected, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3"])
def test_attention_of_timm_becomes_a_graph(run, name, tmp_path):
    small: Any = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 32, "num_heads": 2}
    net = networks.build(ModelConfig(name=name, kwargs=small), 10, 0).eval()
    export.write(trained.opened(run)._replace(net=net), str(tmp_path), onnx=True)
    images = np.random.default_rng(0).random((5, 3, 8, 8), dtype=np.float32)
    graph = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    [found] = graph.run(None, {"image": images})
    np.testing.assert_allclose(found, net(torch.from_numpy(images)).detach(), rtol=1e-3, atol=1e-5)


def test_a_model_without_a_graph_leaves_its_weights_and_says_why_in_a_sentence(
    run, tmp_path, capfd
):
    # As in VGG on small images: 8 pixels are no multiple of 5.
    net = nn.Sequential(nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(75, 10))
    with pytest.raises(
        ConfigError, match=r"model.json are written, but .*not factor of input size"
    ):
        export.write(trained.opened(run)._replace(net=net), str(tmp_path), onnx=True)
    assert {one.name for one in tmp_path.iterdir()} == {"model.json", "model.safetensors"}
    assert "graph" not in capfd.readouterr().out


def test_predictions_are_the_most_probable_classes_of_each_image(run, images, capsys):
    words = ["predict", "--from", run, str(images), "--top", "2", "--json"]
    assert command.main(words) == OK
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["image"] == str(images / "0.png")
    best, second = (one["probability"] for one in first["classes"])
    assert best >= second > 0


def narrow_net(num_classes, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width), nn.Linear(width, num_classes))


def test_an_export_keeps_the_arguments_of_the_model(tmp_path):
    config = tiny_config(
        shard_set(tmp_path / "set"), tmp_path / "run", epochs=1,
        model=ModelConfig(name=f"{__name__}:narrow_net", kwargs={"width": 5}),
    )  # fmt: skip
    loop.train(Single("fp32"), config)
    export.write(trained.opened(str(tmp_path / "run")), str(tmp_path / "model"))
    net = trained.opened(str(tmp_path / "model")).net
    assert net(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    assert net.get_submodule("1").out_features == 5


def test_a_file_that_is_no_image_is_named_and_the_others_are_predicted(
    run, images, tmp_path, capsys
):
    (tmp_path / "no.png").write_bytes(b"no image")
    names = [tmp_path / "no.png", images / "1.png", tmp_path / "nothing.png"]
    assert command.main(["predict", "--from", run, *map(str, names)]) == FAILED
    lines = capsys.readouterr()
    assert lines.out.splitlines()[0].endswith("text instead of an image")
    assert "%" in lines.out.splitlines()[1]
    assert "2 images could not be read; the lines above give the reasons" in lines.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "--from", "/no/such", "x.png"], "no config.json there"),
        (["predict", "--from", "RUN", "x.png", "--top", "0"], "--top 0"),
        (["export", "EMPTY", "--output", "OUT"], "no config.json there"),
        (["predict", "--from", "RUN", "EMPTY"], "no images in this folder"),
    ],
)
def test_wrong_words_are_refused(words, message, run, tmp_path, capsys):
    places = {"RUN": run, "OUT": str(tmp_path / "out"), "EMPTY": str(tmp_path)}
    assert command.main([places.get(word, word) for word in words]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
@pytest.mark.parametrize("content", [b"short", b"{}"])
def test_a_damaged_export_is_refused(run, tmp_path, name, content):
    export.write(trained.opened(run), str(tmp_path))
    (tmp_path / name).write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match="export the model again"):
        trained.opened(str(tmp_path))


def test_exported_weights_start_another_run(run, tmp_path):
    export.write(trained.opened(run), str(tmp_path / "model"))
    words = f"""train --manifest {Path(run).parent}/set --run-dir {tmp_path}/run --strategy single
        --pretrained {tmp_path}/model/model.safetensors --freeze --epochs 1"""
    assert command.main([*words.split(), "--model", "trainer.model:tiny_resnet"]) == OK
    state = checkpoint.at(open_storage(str(tmp_path / "run")), print)[1]
    source = trained.opened(run).net.state_dict()
    assert torch.equal(state["model"]["conv1.weight"], source["conv1.weight"])
    assert not torch.equal(state["model"]["fc.weight"], source["fc.weight"])
    image = state["config"]["image"]
    assert (tuple(image["mean"]), image["eval_interpolation"]) == (MEAN, "bicubic")
    assert (image["background"], image["upright"]) == ("black", False)
