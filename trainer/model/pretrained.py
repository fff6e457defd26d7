"""Weights to start from: timm's own, or a file's;
and the images that they were trained on.
"""

import argparse
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from timm.data.config import resolve_data_config
from timm.models import clean_state_dict
from torch import nn
from torch.serialization import safe_globals

from shardset.decode.crops import INTERPOLATIONS
from shardset.errors import ConfigError, NotFound
from shardset.prepared import JSON_ERRORS, prepared
from shardset.settings import values_of
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from trainer.config import AUGMENTATION, SIDECAR, ImageConfig, ModelConfig
from trainer.errors import UNREADABLE, first_line

TIMM = "timm"
"""`model.pretrained` for the weights that timm publishes for a model."""

KEYS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")
"""Where programs keep weights in their checkpoints: averaged ones go first, as in `export`."""


@prepared
class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A trained model, as `export` writes it next to the weights.

    `preparation` tells people what `image` says: how an evaluation prepares images.
    """

    shardset: str
    model: ModelConfig
    image: ImageConfig
    preparation: str
    classes: list[str]
    step: int
    accuracy: float | None


def input_of(name: str, pretrained: str) -> dict[str, Any]:
    """The settings of the images that the weights were trained on; none for models that are not
    timm's.

    Raises ConfigError.
    """
    if pretrained != TIMM:
        with suppress(NotFound):
            image = values_of(facts_in(open_storage(str(Path(pretrained).parent))).image)
            return {f"image.{key}": image[key] for key in image.keys() - AUGMENTATION}
    if not timm.is_model(name):
        return {}
    cfg: Any = timm.get_pretrained_cfg(name)
    if cfg is None:
        raise ConfigError(
            f"timm has no weights of {name!r}; leave --pretrained out, or give it a file"
        )
    resolve: Any = resolve_data_config  # has no types
    facts: dict[str, Any] = resolve({}, pretrained_cfg=cfg.to_dict())
    size = int(facts["input_size"][-1])
    interpolation = facts["interpolation"]
    return {
        "image.size": size,
        "image.eval_resize": math.floor(size / facts["crop_pct"]),
        "image.eval_interpolation": interpolation if interpolation in INTERPOLATIONS else "area",
        "image.mean": tuple(facts["mean"]),
        "image.std": tuple(facts["std"]),
    }


def check(config: ModelConfig) -> None:
    """Raises ConfigError where timm's weights do not fit a model that the config changes, or do not
    exist.
    """
    if config.pretrained != TIMM:
        return
    if not timm.is_model(config.name):
        raise ConfigError(
            f"model {config.name!r} is not timm's, so timm has no weights; --pretrained FILE takes"
            " yours"
        )
    if config.stem != "imagenet" or config.norm != "batch":
        raise ConfigError(
            f"timm's weights are of {config.name!r} as it is; leave model.stem and model.norm at"
            " their defaults"
        )


def load_file(model: nn.Module, path: str) -> None:
    """Loads the weights of a file, except a last layer for another number of classes.

    Raises ConfigError.
    """
    state = model.state_dict()
    layers = heads_of(model, type(model).__name__) if hasattr(model, "get_classifier") else []
    heads = tuple(f"{name}." for name, module in model.named_modules() if module in layers)
    weights = _without_prefix(
        _weights_in(path), [name for name in state if not name.startswith(heads)]
    )
    wanted = {
        name: value
        for name, value in weights.items()
        if not (name in state and name.startswith(heads) and value.shape != state[name].shape)
    }
    try:
        left = model.load_state_dict(wanted, strict=False)
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: {first_line(error)}; give the --model that these weights are of"
        ) from error
    strays = [
        name for name in (*left.missing_keys, *left.unexpected_keys) if not name.startswith(heads)
    ]
    if strays:
        raise ConfigError(
            f"{path}: not weights of this model: {len(strays)} are missing or of other layers, such"
            f" as {strays[0]}; give the --model that they are of"
        )


def heads_of(model: Any, name: str) -> list[nn.Module]:
    """The last layers of a model, those that depend on the classes.

    Raises ConfigError if it does not name them.
    """
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else ()
    layers = classifier if isinstance(classifier, tuple) else (classifier,)
    heads = [layer for layer in layers if isinstance(layer, nn.Module) and any(layer.state_dict())]
    if not heads:
        raise ConfigError(
            f"model {name!r} does not say which layer is its last; give it a method"
            " get_classifier(), as timm's have"
        )
    return heads


def facts_in(folder: Storage) -> ModelFacts:
    """What `export` wrote next to weights.

    Raises NotFound without it, ConfigError for a file that it can't have written.
    """
    try:
        return msgspec.json.decode(folder.read(SIDECAR), type=ModelFacts)
    except JSON_ERRORS as error:
        raise ConfigError(
            f"{folder.url}/{SIDECAR}: not what `export` writes ({error}); export the model again,"
            " or move a file of another program away"
        ) from error


def _weights_in(path: str) -> dict[str, torch.Tensor]:
    try:
        if path.endswith(".safetensors"):
            content: Any = load_safetensors(path)
        else:
            with safe_globals([argparse.Namespace]):  # the arguments of timm and torchvision
                content = torch.load(path, map_location="cpu", weights_only=True)
        key = next((key for key in KEYS if isinstance(content.get(key), dict)), None)
        clean: Any = clean_state_dict  # knows one type of values only
        weights: dict[str, Any] = clean(content if key is None else content[key])
    except FileNotFoundError as error:
        raise ConfigError(f"--pretrained {path}: no such file, and not `timm`") from error
    except (*UNREADABLE, SafetensorError) as error:
        raise ConfigError(
            f"{path}: no weights can be read there ({first_line(error)}); expected safetensors or a"
            " state dict"
        ) from error
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ConfigError(f"{path}: no tensors there, expected safetensors or a state dict")
    if key is not None and os.environ.get("RANK", "0") == "0":
        print(f"{path}: starts from its weights {key!r}", flush=True)
    tensors.pop("n_averaged", None)  # torch's count of averaged steps
    return tensors


def _without_prefix(weights: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Those of the one attribute of a larger module that has all these names, such as the model in
    a LightningModule; else all weights.
    """
    ends = [name.removesuffix(names[0]) for name in weights if name.endswith(f".{names[0]}")]
    prefixes = [end for end in ends if all(end + name in weights for name in names)]
    if len(prefixes) != 1:
        return weights
    [prefix] = prefixes
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
