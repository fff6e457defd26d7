from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardset.errors import ConfigError
from tests.makers.training import tiny_config
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, RegularizeConfig, TrainConfig
from trainer.model import memory
from trainer.model.memory import MemoryNeed, check, need_of

GIB = 1 << 30


def config_of(**changes: Any) -> TrainConfig:
    return replace(tiny_config(None, "run"), **changes)


def need(**changes: Any) -> MemoryNeed:
    found = need_of(config_of(**changes), 10, 1)
    assert found is not None
    return found


def linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes, bias=False))


class Reading(nn.Linear):
    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return super().forward(images_NCHW) * images_NCHW.sum().item()


def reading(num_classes: int) -> nn.Module:
    return Reading(3, num_classes)


def test_the_parts_of_a_plain_model_are_those_that_it_has() -> None:
    found = need(model=ModelConfig(name=f"{__name__}:linear"), optimizer=OptimizerConfig(name="adamw"))
    assert found.weights == found.gradients == 4 * 192 * 10
    assert found.optimizer == pytest.approx(2 * found.weights, rel=1e-3)
    # The images that the layer multiplies, and the log-probabilities.
    assert found.activations == 8 * (192 + 10) * 4


def test_activations_grow_with_the_batch_and_shrink_with_passes() -> None:
    single, double = need(global_batch_size=8), need(global_batch_size=16)
    assert double.activations == pytest.approx(2 * single.activations, rel=0.01)  # less a few of each layer
    assert need(global_batch_size=16, accumulate=2).activations == single.activations
    assert need_of(config_of(global_batch_size=16), 10, 2) == single


def test_half_precision_halves_activations_and_averages_double_weights() -> None:
    assert need(precision="bf16").activations == pytest.approx(need().activations / 2, rel=0.1)
    assert need(regularize=RegularizeConfig(ema_decay=0.9)).average == need().weights


def test_sharded_processes_keep_a_part_of_everything_that_grows_with_the_model_and_gather_a_block() -> None:
    changes = {
        "model": ModelConfig(name="vit_tiny_patch16_224"), "image": ImageConfig(size=224, eval_resize=224),
        "optimizer": OptimizerConfig(name="adamw"), "regularize": RegularizeConfig(ema_decay=0.9),
    }  # fmt: skip
    whole, parts = (need_of(config_of(strategy=strategy, **changes), 10, 4) for strategy in ("ddp", "fsdp"))
    assert whole is not None
    assert parts is not None
    for name in ("weights", "gradients", "optimizer", "average"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name) / 4, rel=0.001)
    assert parts.activations == whole.activations
    # One of twelve blocks, the next one, and its gradients.
    assert parts.gathered == pytest.approx(3 * whole.weights / 12.5, rel=0.1)
    assert parts.total < whole.total
    assert need_of(config_of(strategy="fsdp", **changes), 10, 1) == need_of(config_of(**changes), 10, 1)


def test_a_frozen_backbone_keeps_nothing_for_a_backward_pass() -> None:
    frozen, free = need(model=ModelConfig(name="resnet18", freeze=True)), need(model=ModelConfig(name="resnet18"))
    assert frozen.activations < free.activations / 10
    assert frozen.gradients == 4 * (512 * 10 + 10)


def test_a_model_that_reads_numbers_has_no_estimate() -> None:
    assert need_of(config_of(model=ModelConfig(name=f"{__name__}:reading")), 10, 1) is None


def test_a_step_that_does_not_fit_is_refused_with_the_flags_that_shrink_it() -> None:
    config = config_of(accumulate=2)
    one = MemoryNeed(
        weights=GIB, gradients=GIB, optimizer=2 * GIB, average=0, activations=10 * GIB, largest=0, batch=0, evaluation=0
    )
    assert check(one, config, None, besides=0, is_sure=True) is None
    assert check(one, config, 20 * GIB, besides=0, is_sure=True) is None
    assert "memory may run out" in (check(one, config, 14 * GIB, besides=0, is_sure=True) or "")
    with pytest.raises(ConfigError, match=r"14.1 GiB .* 10.0 GiB are free: --set accumulate=4 .*--batch-size"):
        check(one, config, 10 * GIB, besides=0, is_sure=True)
    assert check(one, config, 10 * GIB, besides=0, is_sure=False)
    with pytest.raises(ConfigError, match=r"its streams 4\.0 GiB"):
        check(one, config, 15 * GIB, besides=4 * GIB, is_sure=True)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "convnext_atto", "vit_tiny_patch16_224"])
def test_models_of_timm_have_an_estimate(name: str) -> None:
    image = ImageConfig(size=224, eval_resize=224)
    assert need(model=ModelConfig(name=name), image=image).total > memory.LIBRARIES
