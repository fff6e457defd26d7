"""Models by name: timm's, or any function of yours; a stem for small images and a swap to
GroupNorm.
"""

import importlib
import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.layers.norm_act import BatchNormAct2d, GroupNormAct
from timm.models.resnet import BasicBlock, ResNet
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn

from shardset.errors import ConfigError
from shardset.order.permutation import derive_key
from trainer.config import ModelConfig, OptimizerConfig
from trainer.errors import first_line
from trainer.model import pretrained

MAX_GROUPS = 32
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_building = threading.Lock()
# Weights come from the generator of the process, and replicas can be threads of one process.


def build(config: ModelConfig, num_classes: int, seed: int) -> nn.Module:
    """A model on the CPU in float32, the same weights for the same seed on every host.

    Raises ConfigError for an unknown name, or a stem or weights that do not fit the model.
    """
    pretrained.check(config)
    with _building:
        torch.manual_seed(derive_key(seed, "weights") >> 1)
        try:
            made_by = _of_function if ":" in config.name else _of_timm
            model = made_by(config, num_classes)
        except TypeError as error:
            raise ConfigError(
                f"model {config.name!r}: {error}; expected a function of num_classes and"
                " model.kwargs"
            ) from error
        if config.stem == "cifar":
            _small_stem(model, config.name)
        if config.norm == "group":
            _swap_norms(model)
    if config.pretrained not in (None, pretrained.TIMM):
        pretrained.load_file(model, str(config.pretrained))
    return model


def trainable(
    config: ModelConfig, num_classes: int, seed: int, sizes: Collection[int]
) -> nn.Module:
    """A model as `build` makes it for images of these sizes, with gradients for its last layer only
    if the config says so.

    Raises ConfigError for a size that it can't take, or a last layer that is not known.
    """
    model = build(config, num_classes, seed)
    for size in sorted(sizes):
        check_size(config, num_classes, size)
    if config.freeze:
        model.requires_grad_(False)
        for head in pretrained.heads_of(model, config.name):
            head.requires_grad_(True)
    return model


def set_training(model: nn.Module, config: ModelConfig) -> None:
    """Puts the model in training mode.

    Frozen layers stay as in an evaluation: their statistics do not move.
    """
    model.train()
    if config.freeze:
        model.eval()
        for head in pretrained.heads_of(model, config.name):
            head.train()


def optimizer(
    config: OptimizerConfig, model: nn.Module, of_device: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """timm's optimizer of that name; biases and norms get no weight decay.

    Raises ConfigError for an unknown name.

    `of_device` are the options that suit the device (see `Runtime.optimizer_options`); those of the
    config go first.
    """
    if config.name in list_optimizers() and get_optimizer_info(config.name).second_order:
        raise ConfigError(
            f"optimizer {config.name!r}: it needs second derivatives, which a step here does not"
            " compute; use another"
        )
    try:
        made = create_optimizer_v2(
            model,
            opt=config.name,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            **{**(of_device or {}), **(config.kwargs or {})},
        )
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"optimizer {config.name!r}: {error}; see timm.optim.list_optimizers()"
        ) from error
    if config.head_learning_rate is not None:
        heads = pretrained.heads_of(model, type(model).__name__)
        of_heads = {id(parameter) for head in heads for parameter in head.parameters()}
        for group in list(made.param_groups):
            if head_parameters := [
                parameter for parameter in group["params"] if id(parameter) in of_heads
            ]:
                group["params"] = [
                    parameter for parameter in group["params"] if id(parameter) not in of_heads
                ]
                scale = config.head_learning_rate / config.learning_rate
                made.add_param_group({**group, "params": head_parameters, "lr_scale": scale})
        made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made


@torch.no_grad()
def check_size(config: ModelConfig, num_classes: int, size: int) -> None:
    """Raises ConfigError where timm's model takes no images of that size."""
    if not timm.is_model(config.name):
        return
    try:
        with torch.device("meta"):  # shapes without numbers
            net = build(replace(config, pretrained=None), num_classes, 0).eval()
            net(torch.empty(2, 3, size, size))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model {config.name!r} can't take images of {size}x{size}, as image.size says "
            f"({first_line(error)}); give a larger size, or that which the model was made for"
        ) from error


def check_logits(logits: Any, name: str, num_classes: int) -> None:
    """Raises ConfigError unless a model has returned a number for each class; XLA takes any other
    for one it has.
    """
    is_tensor = isinstance(logits, torch.Tensor)
    if not is_tensor or logits.dim() != 2 or logits.shape[1] < num_classes:
        output = list(logits.shape) if is_tensor else f"a {type(logits).__name__}"
        raise ConfigError(
            f"model {name!r} returned {output} for a batch of images, expected a tensor [images,"
            f" {num_classes}], a number for each class; change its last layer"
        )


def tiny_resnet(num_classes: int) -> nn.Module:
    """A ResNet of three blocks and 78 thousand weights for images of 8 to 32 pixels."""
    block: Any = BasicBlock
    model: Any = ResNet(
        block=block, layers=(1, 1, 1, 1), num_classes=num_classes, channels=(16, 32, 64, 64)
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool, model.layer4 = nn.Identity(), nn.Sequential()
    built: nn.Module = model
    return built


def _of_timm(config: ModelConfig, num_classes: int) -> nn.Module:
    name = config.name
    if not timm.is_model(name):
        nearest = timm.list_models(f"{name[:6]}*") or get_close_matches(
            name, timm.list_models(), n=5
        )
        raise ConfigError(
            f"no model {name!r} in timm {timm.__version__}; near it:"
            f" {', '.join(nearest[:5]) or 'nothing'}"
        )
    kwargs: dict[str, Any] = config.kwargs or {}
    from_timm = config.pretrained == pretrained.TIMM
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=from_timm, num_classes=num_classes, **kwargs
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"model {name!r}: {first_line(error)}; leave a tag of weights such as .a1_in1k out, or"
            " without a network download the weights elsewhere and give --pretrained FILE"
        ) from error
    return model


def _of_function(config: ModelConfig, num_classes: int) -> nn.Module:
    name = config.name
    module, _, function = name.partition(":")
    try:
        build_model = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model {name!r}: {error}; expected importable.module:function"
        ) from error
    model = build_model(num_classes=num_classes, **(config.kwargs or {}))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {name!r}: the function returned a {type(model).__name__}, expected a"
            " torch.nn.Module"
        )
    return model


def _small_stem(model: Any, name: str) -> None:
    if not isinstance(getattr(model, "conv1", None), nn.Conv2d) or not hasattr(model, "maxpool"):
        raise ConfigError(
            f"model.stem=cifar: {name!r} has no plain conv1 and maxpool; use a ResNet or"
            " stem=imagenet"
        )
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _swap_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if not isinstance(child, BATCH_NORMS):
            _swap_norms(child)
            continue
        groups, num_features = math.gcd(MAX_GROUPS, child.num_features), child.num_features
        swapped: Any = nn.GroupNorm(groups, num_features, eps=child.eps)
        if isinstance(child, BatchNormAct2d):
            swapped = GroupNormAct(num_features, num_groups=groups, eps=child.eps)
            swapped.drop, swapped.act = child.drop, child.act
        if child.affine:  # the last norm of a block may begin at 0
            swapped.weight, swapped.bias = child.weight, child.bias
        setattr(module, name, swapped)
