"""A trained model on the CPU, from the checkpoints of a run or from an export."""

from dataclasses import replace
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from shardset.errors import NotFound
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from shardset.version import __version__
from trainer import config as configs
from trainer.config import CLASSES, SIDECAR, read_json
from trainer.errors import CheckpointError, first_line
from trainer.model import networks
from trainer.model.pretrained import ModelFacts, facts_in
from trainer.run_folder import checkpoint

WEIGHTS = "model.safetensors"


class TrainedModel(NamedTuple):
    """A model in evaluation mode, and what is known about it."""

    net: nn.Module
    facts: ModelFacts


def opened(url: str) -> TrainedModel:
    """The model of a run folder or of an export, whichever it is. Raises ShardsetError."""
    folder = open_storage(url)
    try:
        facts, weights = facts_in(folder), _exported_weights(folder)
    except NotFound:
        facts, weights = _of_run(folder)
    net = networks.build(replace(facts.model, pretrained=None), len(facts.classes), seed=0)
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder.url}: the weights are not of {facts.model.name!r} ({first_line(error)})"
        ) from error
    return TrainedModel(net.requires_grad_(False).eval(), facts)


def _of_run(folder: Storage) -> tuple[ModelFacts, dict[str, torch.Tensor]]:
    """The best checkpoint of a run, else the newest; its averaged weights if there are any."""
    try:
        config = configs.recorded(folder)
    except NotFound as error:
        raise configs.not_a_run(folder, configs.RECORD) from error
    commit, state = checkpoint.chosen(folder)
    size = config.image.size_in_evaluation
    facts = ModelFacts(
        shardset=__version__,
        model=config.model,
        image=replace(config.image, size=size, eval_size=None),
        preparation=(
            f"RGB; the shorter side resized to {config.image.eval_resize}"
            f" ({config.image.eval_interpolation}), of that the centre, {size} x {size};"
            " divided by 255, minus `mean`, divided by `std`: float32 [n, 3, size, size]"
        ),
        classes=read_json(folder, CLASSES),
        step=commit.step,
        accuracy=commit.top1,
    )
    return facts, state["ema"] or state["model"]


def _exported_weights(folder: Storage) -> dict[str, torch.Tensor]:
    try:
        return load(folder.read(WEIGHTS))
    except (NotFound, SafetensorError) as error:
        raise CheckpointError(
            f"{folder.url}: the export is damaged ({error}), expected {SIDECAR} and {WEIGHTS};"
            " export the model again"
        ) from error
