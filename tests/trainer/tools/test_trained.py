"""From a run to files and predictions: every way gives the same numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from shardset.errors import ConfigError
from shardset.program import FAILED, OK, USAGE
from shardset.storage.open import open_storage
from tests.makers.shardset import encode, pixels
from tests.makers.training import shard_set, tiny_config
from trainer import cli as command
from trainer import loop
from trainer.config import ImageConfig, ModelConfig, RegularizeConfig
from trainer.data.splits import open_data
from trainer.record import checkpoint
from trainer.runtime.base import Single
from trainer.tools import export, trained
from trainer.tools.predict import probabilities

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)

NO_FORMAT = "text instead of an image"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
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
            mean=MEAN,
            std=STD,
        ),
        regularize=RegularizeConfig(ema_decay=0.5),
    )
    loop.train(Single("fp32"), config)
    return str(folder / "run")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for serial in range(3):
        (folder / f"{serial}.png").write_bytes(encode(pixels(serial, 8, 8), "png"))
    return folder


def rows(count: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def normalised(images_NHWC: np.ndarray) -> np.ndarray:
    scaled = (images_NHWC / 255 - np.array(MEAN)) / np.array(STD)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2), dtype=np.float32)


def test_a_run_gives_the_model_that_its_evaluation_measured(run: str) -> None:
    model = trained.of_run(run)
    data = open_data(model.config, 0, 1)
    correct = 0
    for _, _, batch in data.evaluation.run(iter([(0, range(len(data.evaluation)))])):
        best = probabilities(model, batch["image"]).argmax(1).numpy()
        correct += int(((best == batch["label"]) * batch["weight"]).sum())
    assert correct / data.num_eval_samples == model.accuracy
    assert model.classes == [f"class {label}" for label in range(10)]


@pytest.mark.parametrize("name", ["torchscript", "torch.export", "onnx", "safetensors"])
def test_every_format_computes_what_the_model_computes(name: str, run: str, tmp_path: Path) -> None:
    model = trained.of_run(run)
    files = export.write(model, str(tmp_path), [name])
    graphs: dict[str, Any] = {
        "torchscript": lambda: torch.jit.load(tmp_path / "model.pt"),
        "torch.export": lambda: torch.export.load(tmp_path / "model.pt2").module(),
        "safetensors": lambda: trained.of_export(str(tmp_path)).net,
    }
    given = normalised(rows())
    if name == "onnx":
        found = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"image": given})[0]
    else:
        found = graphs[name]()(torch.from_numpy(given)).detach().numpy()
    expected = model.net(torch.from_numpy(given)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert sorted(files) == sorted(one.name for one in tmp_path.iterdir())


def test_classes_and_preprocessing_stand_beside_the_weights(run: str, tmp_path: Path) -> None:
    assert (
        command.main(["export", run, "--output", str(tmp_path), "--format", "safetensors,onnx"])
        == OK
    )
    assert {one.name for one in tmp_path.iterdir()} == {
        "model.safetensors",
        "model.onnx",
        "model.json",
    }
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["classes"][3] == "class 3"
    assert (facts["input"]["size"], facts["input"]["mean"]) == (8, list(MEAN))
    assert facts["model"]["name"] == "trainer.model:tiny_resnet"


def test_a_run_and_its_export_predict_the_same(
    run: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.write(trained.of_run(run), str(tmp_path), ["safetensors"])
    printed = []
    for folder in (run, str(tmp_path)):
        assert (
            command.main(["predict", "--from", folder, str(images), "--top", "2", "--json"]) == OK
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    first = json.loads(printed[0].splitlines()[0])
    assert first["image"] == str(images / "0.png")
    assert len(first["classes"]) == 2
    assert first["classes"][0]["probability"] >= first["classes"][1]["probability"] > 0


def narrow_net(num_classes: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width), nn.Linear(width, num_classes))


def test_an_export_keeps_the_arguments_of_the_model(images: Path, tmp_path: Path) -> None:
    config = tiny_config(
        shard_set(tmp_path / "set"),
        tmp_path / "run",
        epochs=1,
        model=ModelConfig(name=f"{__name__}:narrow_net", kwargs={"width": 5}),
    )
    loop.train(Single("fp32"), config)
    model = trained.of_run(str(tmp_path / "run"))
    export.write(model, str(tmp_path / "model"), ["safetensors"])
    again = trained.of_export(str(tmp_path / "model"))
    given = torch.from_numpy(normalised(rows()))
    assert torch.equal(again.net(given), model.net(given))


def test_a_file_that_is_no_image_is_named_and_the_others_are_predicted(
    run: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.png").write_bytes(b"no image")
    (tmp_path / "empty.png").write_bytes(b"")
    names = [
        tmp_path / "no.png",
        images / "1.png",
        tmp_path / "nothing.png",
        tmp_path / "empty.png",
    ]
    assert command.main(["predict", "--from", run, *map(str, names)]) == FAILED
    lines = capsys.readouterr()
    assert lines.out.splitlines()[0].endswith(NO_FORMAT)
    assert "%" in lines.out.splitlines()[1]
    assert lines.out.splitlines()[3].endswith("empty")
    assert "3 images could not be read; the lines above give the reasons" in lines.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "--from", "/no/such", "x.png"], "no such run folder"),
        (["predict", "--from", "RUN", "x.png", "--top", "0"], "--top 0"),
        (
            ["export", "RUN", "--output", "OUT", "--format", "onx"],
            "there are safetensors, torchscript",
        ),
        (["predict", "--from", "EMPTY", "x.png"], "no config.json there"),
        (["predict", "--from", "RUN", "EMPTY"], "no pictures in this folder"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": run, "OUT": str(tmp_path / "out"), "EMPTY": str(tmp_path)}
    assert command.main([places.get(word, word) for word in words]) == USAGE
    assert message in capsys.readouterr().err


def test_a_damaged_export_is_refused(run: str, tmp_path: Path) -> None:
    export.write(trained.of_run(run), str(tmp_path), ["safetensors"])
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(Exception, match="export the model again"):
        trained.of_export(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"expected model\.json and model\.safetensors"):
        trained.of_export(str(tmp_path))


def test_exported_weights_start_another_run(run: str, tmp_path: Path) -> None:
    export.write(trained.of_run(run), str(tmp_path / "model"), ["safetensors"])
    words = [
        "train",
        "--manifest",
        str(Path(run).parent / "set"),
        "--run-dir",
        str(tmp_path / "run"),
        "--strategy",
    ]
    words += [
        "single",
        "--pretrained",
        str(tmp_path / "model/model.safetensors"),
        "--freeze",
        "--epochs",
        "1",
    ]
    assert command.main([*words, "--model", "trainer.model:tiny_resnet"]) == OK
    state = checkpoint.at(open_storage(str(tmp_path / "run")), print)[1]
    source = trained.of_run(run).net.state_dict()
    assert torch.equal(state["model"]["conv1.weight"], source["conv1.weight"])
    assert not torch.equal(state["model"]["fc.weight"], source["fc.weight"])
    assert tuple(state["config"]["image"]["mean"]) == MEAN
