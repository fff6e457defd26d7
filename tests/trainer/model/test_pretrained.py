import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardset.errors import ConfigError
from tests.makers.models import FLAT, batch_of
from tests.makers.training import tiny_config
from trainer.config import ModelConfig, OptimizerConfig
from trainer.model import networks, pretrained
from trainer.model.learner import Learner
from trainer.runtime.base import Single

TINY = "trainer.model:tiny_resnet"


def built(classes, seed=0, **changes: Any):
    return networks.build(ModelConfig(name=TINY, **changes), classes, seed)


def write(folder, kind, weights):
    path = folder / {"safetensors": "w.safetensors", "Lightning": "w.ckpt"}.get(kind, "w.pt")
    if kind == "safetensors":
        save_file(weights, path)
        return str(path)
    others = {name: torch.zeros_like(value) for name, value in weights.items()}
    averaged = {f"module.{name}": value for name, value in weights.items()}
    in_module = {f"net.{name}": value for name, value in weights.items()}
    saved: dict[str, Any] = {
        "state dict": weights,
        "a run": {"model": weights, "ema": None, "step": 3},
        "a run with averages": {"model": others, "ema": weights, "step": 3},
        "torchvision": {
            "model": others,
            "model_ema": {"n_averaged": torch.tensor(9), **averaged},
            "args": argparse.Namespace(lr=0.1),
        },
        "Lightning": {
            "pytorch-lightning_version": "2.6.1",
            "state_dict": {"loss.weight": torch.ones(2), **in_module},
            "hyper_parameters": {"lr": 0.1},
        },
    }
    torch.save(saved[kind], path)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("safetensors", ""),
        ("state dict", ""),
        ("a run", "'model'"),
        ("a run with averages", "'ema'"),
        ("torchvision", "'model_ema'"),
        ("Lightning", "'state_dict'"),
    ],
)
def test_weights_of_a_file_are_loaded_and_the_head_is_new_for_other_classes(
    kind, says, tmp_path, capsys
):
    source = built(7, seed=1)
    path = write(tmp_path, kind, source.state_dict())
    net, fresh, same = (
        built(3, seed=2, pretrained=path),
        built(3, seed=2),
        built(7, seed=2, pretrained=path),
    )
    assert torch.equal(same.state_dict()["fc.weight"], source.state_dict()["fc.weight"])
    assert torch.equal(net.state_dict()["conv1.weight"], source.state_dict()["conv1.weight"])
    assert torch.equal(net.state_dict()["fc.weight"], fresh.state_dict()["fc.weight"])
    assert capsys.readouterr().out.partition(": ")[2].partition("\n")[0] == (
        says and f"starts from its weights {says}"
    )


class Call:
    def __reduce__(self) -> Any:
        return (print, ("code of the file ran",))


def test_a_file_runs_no_code(tmp_path, capsys):
    torch.save({"conv1.weight": Call()}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="no weights can be read there"):
        built(3, pretrained=str(tmp_path / "w.pt"))
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("text", [b"", b"not weights"])
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_file_without_weights_is_refused(name, text, tmp_path):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=name):
        built(3, pretrained=str(tmp_path / name))


def test_weights_of_another_model_and_missing_files_are_refused(tmp_path):
    own = built(3).state_dict()
    other = {name.replace("conv1", "conv9"): value for name, value in own.items()}
    with pytest.raises(ConfigError, match=r"\d+ are missing or of other layers, such as conv1"):
        built(3, pretrained=write(tmp_path, "safetensors", other))
    two = {f"{part}.{name}": value for part in ("a", "b") for name, value in own.items()}
    with pytest.raises(ConfigError, match=r"\d+ are missing or of other layers, such as conv1"):
        built(3, pretrained=write(tmp_path, "state dict", two))
    with pytest.raises(ConfigError, match="no such file"):
        built(3, pretrained=str(tmp_path / "nothing.pt"))
    with pytest.raises(ConfigError, match="is not timm's"):
        built(3, pretrained="timm")
    with pytest.raises(ConfigError, match=r"model\.stem"):
        networks.build(ModelConfig(name="resnet18", stem="cifar", pretrained="timm"), 3, 0)


def test_without_a_network_the_error_names_the_file_way(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="--pretrained FILE"):
        networks.build(ModelConfig(name="resnet18", pretrained="timm"), 3, 0)


def test_a_model_of_timm_says_which_images_it_was_trained_on():
    half = (0.5, 0.5, 0.5)
    assert pretrained.input_of("vit_tiny_patch16_224", "timm") == {
        "image.size": 224,
        "image.eval_resize": 248,
        "image.eval_interpolation": "bicubic",
        "image.mean": half,
        "image.std": half,
    }
    assert pretrained.input_of(TINY, "w.pt") == {}


def test_a_foreign_file_of_facts_is_named(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ConfigError, match="not what `export` writes"):
        pretrained.input_of(TINY, str(tmp_path / "model.safetensors"))


# --- training on from them ------------------------------------------------------------------------


def config_of(**changes: Any):
    return tiny_config(None, "run", **{"model": ModelConfig(name=TINY), **changes})


def moves(learner, rate):
    before = {name: value.clone() for name, value in learner.net.state_dict().items()}
    learner.train_step(batch_of(8), rate, key=1, weight=8)
    after = learner.net.state_dict()
    return {
        name: float((after[name].float() - before[name].float()).abs().sum()) for name in before
    }


def test_a_frozen_backbone_moves_neither_weights_nor_statistics():
    config = config_of(model=ModelConfig(name=TINY, freeze=True))
    moved = moves(Learner(Single("fp32"), config, 5, None), 0.1)
    assert {name for name, distance in moved.items() if distance} == {"fc.weight", "fc.bias"}


def test_a_model_that_does_not_name_its_head_can_not_be_frozen():
    config = config_of(model=ModelConfig(name=FLAT, freeze=True))
    with pytest.raises(ConfigError, match="get_classifier"):
        Learner(Single("fp32"), config, 5, None)


PLAIN = OptimizerConfig(
    name="momentum", learning_rate=0.1, weight_decay=0.0, kwargs={"momentum": 0.0}
)


def test_the_head_learns_at_its_own_rate_and_the_schedule_moves_both():
    both = replace(PLAIN, head_learning_rate=0.5)
    plain, scaled = (
        moves(Learner(Single("fp32"), config_of(optimizer=one), 5, None), 0.05)
        for one in (PLAIN, both)
    )
    assert scaled["fc.weight"] == pytest.approx(5 * plain["fc.weight"], rel=1e-3)
    assert scaled["conv1.weight"] == pytest.approx(plain["conv1.weight"], rel=1e-6)


def test_a_checkpoint_needs_the_file_no_longer(tmp_path):
    path = write(tmp_path, "safetensors", built(5, seed=1).state_dict())
    config = config_of(model=ModelConfig(name=TINY, pretrained=path))
    state = Learner(Single("fp32"), config, 5, None).state()
    Path(path).unlink()
    again = Learner(Single("fp32"), config, 5, state)
    assert torch.equal(again.net.state_dict()["conv1.weight"], state["model"]["conv1.weight"])
