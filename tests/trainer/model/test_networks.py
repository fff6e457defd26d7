from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardset.errors import ConfigError
from trainer.config import ModelConfig, OptimizerConfig
from trainer.model import networks


def count(net, kind):
    return sum(isinstance(module, kind) for module in net.modules())


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    config = ModelConfig(name="trainer.model:tiny_resnet")
    weights = [networks.build(config, 10, seed).state_dict()["conv1.weight"] for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_cifar_stem_keeps_the_resolution():
    net: Any = networks.build(ModelConfig(name="resnet18", stem="cifar"), 10, 0)
    assert net.maxpool(net.conv1(torch.zeros(1, 3, 32, 32))).shape == (1, 64, 32, 32)
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "levit_128s"])
def test_the_group_norm_swap_leaves_no_batch_norm(name):
    before, after = (
        networks.build(ModelConfig(name=name, norm=norm), 10, 0) for norm in ("batch", "group")
    )
    assert count(after, _BatchNorm) == 0
    assert count(after, nn.GroupNorm) == count(before, _BatchNorm) > 0
    assert after(torch.zeros(2, 3, 224, 224)).shape == (2, 10)
    # the last norms of blocks begin at 0
    scales = [
        [one.weight.any() for one in net.modules() if isinstance(one, (_BatchNorm, nn.GroupNorm))]
        for net in (before, after)
    ]
    assert scales[0] == scales[1]
    assert not all(scales[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(name="resnt18"), "near it: .*resnet18"),
        (ModelConfig(name="resnet18.no_such_tag"), "Invalid pretrained tag .*; leave a tag"),
        (ModelConfig(name="no.such.module:function"), "importable"),
        (ModelConfig(name="trainer.model:nothing"), "importable"),
        (ModelConfig(name="trainer.model.networks:set_training"), "num_classes"),
        (ModelConfig(name="builtins:dict"), "returned a dict"),
        (ModelConfig(name="vit_tiny_patch16_224", stem="cifar"), "conv1"),
    ],
)
def test_a_model_that_does_not_exist_or_fit_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        networks.build(config, 10, 0)


def test_norms_and_biases_get_no_weight_decay():
    net = networks.tiny_resnet(10)
    groups = networks.optimizer(OptimizerConfig(weight_decay=0.1), net).param_groups
    decayed = {
        id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]
    }
    assert decayed == {id(parameter) for parameter in net.parameters() if parameter.dim() > 1}


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match="sdg"):
        networks.optimizer(OptimizerConfig(name="sdg"), networks.tiny_resnet(10))


def test_each_layer_learns_slower_than_the_one_above_it():
    net = networks.build(ModelConfig(name="resnet18"), 10, 0)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = networks.optimizer(OptimizerConfig(kwargs={"layer_decay": 0.5}), net).param_groups
    scale = {names[id(one)]: group["lr_scale"] for group in groups for one in group["params"]}
    assert scale["fc.weight"] == 1 > scale["layer4.0.conv1.weight"] > scale["conv1.weight"]
