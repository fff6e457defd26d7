"""Sharded weights: what is sharded together, and the same numbers as without."""

import json
import subprocess
import sys
from typing import Any

import pytest
import timm
from torch import nn

from tests.makers.sharded import shared_blocks, transformer
from tests.makers.training import clean_environment
from trainer.model.build import tiny_resnet
from trainer.runtime.fsdp import blocks_of, vector_layers

TOLERANCE = 1e-4
"""Sums over 16 samples and 4 steps, added up in another order."""


def names_of(model: nn.Module, found: list[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is one for one in found)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (transformer(5), ["blocks.0", "blocks.1"]),
        (tiny_resnet(5), ["layer1.0", "layer2.0", "layer3.0"]),
        (shared_blocks(5), ["1.1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []),
    ],
)
def test_a_block_is_what_a_model_repeats_unless_it_shares_its_weights(model: nn.Module, expected: list[str]) -> None:
    assert names_of(model, blocks_of(model)) == expected


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_most_weights_of_a_model_of_timm_lie_in_blocks_and_each_in_one(name: str) -> None:
    model: Any = timm.create_model(name)
    blocks = blocks_of(model)
    weights = [id(weight) for block in blocks for weight in block.parameters()]
    assert len(blocks) > 10
    assert len(weights) == len(set(weights)) > 0.8 * len(list(model.parameters()))


def test_norms_and_scales_of_a_block_keep_their_precision() -> None:
    block = transformer(5).get_submodule("blocks.0")
    assert names_of(block, vector_layers(block)) == ["norm1", "norm2"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_sharded_learners_equal_one_device_and_resume_from_their_state(processes: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.makers.sharded"],
        capture_output=True, text=True, timeout=900, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert {name: far for name, far in facts["differences"].items() if far > TOLERANCE} == {}
    assert facts["kept"] == pytest.approx(1 / processes, abs=0.02)
    # Torch names the first operation that it can't do; the newest can do one more.
    assert any(f"aten.{name}." in facts["refusals"]["optimizer"] for name in ("clamp_min_", "abs_"))
    assert "scalar" in facts["refusals"]["model"]
    for text in facts["refusals"].values():
        assert "use --strategy ddp, or another --model or optimizer.name" in text
