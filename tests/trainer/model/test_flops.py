"""The FLOPs of a model against published ones."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.makers.training import tiny_config
from trainer.config import ImageConfig, ModelConfig
from trainer.model import build, flops


class OnlyShapes(TorchDispatchMode):
    """Fails where a large tensor would have numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        assert all(
            one.is_meta or one.numel() < 1000
            for one in tree_leaves(made)
            if isinstance(one, torch.Tensor)
        )
        return made


def test_resnet_50_takes_the_share_of_a_known_gpu_that_follows_from_published_flops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 4.09e9 products forward (timm's table of models), three times in training but for the first
    # layer's inputs.
    model = ModelConfig(name="resnet50", checkpoint_activations=True)
    config = tiny_config(None, "run", image=ImageConfig(), model=model, precision="bf16")
    expected = 3 * 2 * 4.09e9 - 2 * 112 * 112 * 64 * 3 * 49
    names = ["NVIDIA L4", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names.pop(0))
    with OnlyShapes():
        assert flops.share_of_peak(config, 1000, torch.device("cuda"))
    known, *others = (flops.share_of_peak(config, 1000, torch.device("cuda")) for _ in range(3))
    assert known == pytest.approx(expected / 989.4e12, rel=0.01)
    assert others == [None, None]


def test_the_size_of_images_is_checked_by_shapes_only() -> None:
    with OnlyShapes():
        build.check_size(ModelConfig(name="resnet18"), 10, 224)
