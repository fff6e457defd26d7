"""The FLOPs of a model against numbers by hand and published ones."""

import pytest
from torch import nn

from tests.makers.training import tiny_config
from trainer.config import ImageConfig, ModelConfig
from trainer.model import flops


def two_layers(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10), nn.ReLU(), nn.Linear(10, num_classes))


def test_flops_are_those_of_each_product_forward_and_backward() -> None:
    config = tiny_config(None, "run", model=ModelConfig(name=f"{__name__}:two_layers"))
    first, second = 2 * 192 * 10, 2 * 10 * 5
    # Backward: for the weights as many as forward, and again for the inputs, which the first layer does not need.
    assert flops.flops_per_sample(config, 5) == (first + second) + (first + second) + second


def test_resnet_50_takes_what_is_published() -> None:
    # 4.09e9 products forward (timm's table of models), three times in training but for the first layer's inputs.
    image, model = ImageConfig(), ModelConfig(name="resnet50")
    found = flops.flops_per_sample(tiny_config(None, "run", image=image, model=model), 1000)
    stem = 2 * 112 * 112 * 64 * 3 * 49
    assert found == pytest.approx(3 * 2 * 4.09e9 - stem, rel=0.01)
    again = ModelConfig(name="resnet50", checkpoint_activations=True)
    assert flops.flops_per_sample(tiny_config(None, "run", image=image, model=again), 1000) == found


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
    ],
)
def test_a_peak_is_known_by_name_or_not_shown(name: str, peak: float | None) -> None:
    assert flops.peak_of(name) == peak
