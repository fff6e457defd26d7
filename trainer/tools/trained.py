"""A trained model on the CPU, from the checkpoints of a run or from an export."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from shardset.errors import ConfigError, NotFound
from shardset.settings import with_values
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from trainer import config as configs
from trainer.config import CLASSES, DEFAULT_CLASSES, ModelConfig, TrainConfig, read_json
from trainer.errors import CheckpointError
from trainer.model import build
from trainer.model.pretrained import SIDECAR, ModelInput
from trainer.record import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model in evaluation mode, with its settings and the names of its classes."""

    net: nn.Module
    config: TrainConfig
    classes: list[str]
    step: int
    accuracy: float | None

    @property
    def size(self) -> int:
        """Width and height of its images."""
        return self.config.image.size_in_evaluation


def of_run(url: str) -> TrainedModel:
    """The best checkpoint of a run, else the newest; its averaged weights if there are any.

    Raises ShardsetError.
    """
    folder = open_storage(url)
    try:
        config = configs.recorded(folder)
    except NotFound as error:
        raise ConfigError(
            f"{folder.url}: no {configs.RECORD} there, expected the folder of a run"
        ) from error
    commit, state = checkpoint.chosen(folder)
    classes = _classes_of(folder, config)
    return TrainedModel(
        net=_net(config, state["ema"] or state["model"], len(classes), folder.url),
        config=config,
        classes=classes,
        step=commit.step,
        accuracy=commit.top1,
    )


def of_export(url: str) -> TrainedModel:
    """The model that `export` wrote as safetensors. Raises ShardsetError."""
    folder = open_storage(url)
    try:
        facts = read_json(folder, SIDECAR)
        weights = load(folder.read("model.safetensors"))
    except NotFound as error:
        raise ConfigError(
            f"{error}; expected {SIDECAR} and model.safetensors, as `export` writes them"
        ) from error
    except (ConfigError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder.url}: the export is damaged ({error}); export the model again"
        ) from error
    config = _config_of(facts)
    return TrainedModel(
        net=_net(config, weights, len(facts["classes"]), folder.url),
        config=config,
        classes=facts["classes"],
        step=facts["trained"]["step"],
        accuracy=facts["trained"]["accuracy"],
    )


def opened(url: str) -> TrainedModel:
    """The model of a run folder or of an export, whichever it is."""
    return (
        of_export(url)
        if any(stat.name == SIDECAR for stat in open_storage(url).list(SIDECAR))
        else of_run(url)
    )


def _classes_of(folder: Storage, config: TrainConfig) -> list[str]:
    """The names that the run recorded; numbers for classes without a name,
    as those of fake data.
    """
    try:
        names: list[str] = read_json(folder, CLASSES)
    except NotFound:
        names = []
    unnamed = 0 if config.manifest else DEFAULT_CLASSES
    return [*names, *map(str, range(len(names), config.model.num_classes or unnamed))]


def _config_of(facts: dict[str, Any]) -> TrainConfig:
    known = facts["input"]
    others = {f"image.{name}": known[name] for name in ("background", "upright")}
    config = TrainConfig(recipe="export", model=ModelConfig(**facts["model"]))
    return with_values(config, msgspec.convert(known, ModelInput).settings | others)


def _net(
    config: TrainConfig, weights: dict[str, torch.Tensor], num_classes: int, where: str
) -> nn.Module:
    net = build.build(replace(config.model, pretrained=None), num_classes, config.seed)
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        raise CheckpointError(
            f"{where}: the weights are not of {config.model.name!r} ({reason})"
        ) from error
    return net.requires_grad_(False).eval()
