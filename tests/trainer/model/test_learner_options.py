"""Options of a step against loops written down in plain torch: only the batches and first weights
are the trainer's.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy

from shardset.errors import ConfigError
from tests.makers.models import FLAT, batch_of
from tests.makers.plain_loop import plain_run
from tests.makers.training import read_records, tiny_config
from trainer import loop
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, RegularizeConfig
from trainer.data.splits import open_data
from trainer.model import batch_transforms
from trainer.model.learner import Learner
from trainer.model.losses import Partners, losses_of
from trainer.runtime.base import Single
from trainer.runtime.torchtpu import TorchTpu

CLASSES = 5
STEPS = 8
TOLERANCE = 1e-6
"""Of losses over 8 steps on one device: a few roundings of float32, of sums in another order."""
RESNET = ModelConfig(name="trainer.model:tiny_resnet")
VIT = ModelConfig(
    name="vit_tiny_patch16_224",
    kwargs={"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2},
)


def config_of(**changes: Any):
    changes = {
        "model": RESNET,
        "image": ImageConfig(size=16, train_crop="pad", eval_resize=16),
        **changes,
    }
    return tiny_config(None, "run", **changes)


def batches(config):
    found = []
    for step in range(STEPS):
        batch = batch_of(8, size=16, classes=CLASSES, seed=step)
        whole = batch_transforms.with_mix(config, batch, 0, step)
        found.append({name: torch.as_tensor(value) for name, value in whole.items()})
    return found


def rate_at(step):
    return 0.002 * (step + 1)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_bce_is_timms(threshold):
    draw = torch.Generator().manual_seed(2)
    logits, labels = (
        torch.randn(6, CLASSES, generator=draw),
        torch.randint(0, CLASSES, (6,), generator=draw),
    )
    config = RegularizeConfig(loss="bce", label_smoothing=0.1, bce_threshold=threshold)
    timm_loss: Any = BinaryCrossEntropy(smoothing=0.1, target_threshold=threshold)
    expected = timm_loss(logits, labels)
    torch.testing.assert_close(losses_of(config, logits, labels, None).mean(), expected)
    targets: Any = mixup_target(labels, CLASSES, lam=0.7, smoothing=0.1)
    found = losses_of(
        config, logits, labels, Partners(torch.full((6,), 0.7), labels.flip(0))
    ).mean()
    torch.testing.assert_close(found, timm_loss(logits, targets))


def test_a_step_whose_gradients_overflow_in_float16_is_left_out_and_the_scale_halved():
    config = config_of(precision="fp16", regularize=RegularizeConfig(clip_norm=0.1))
    before = Learner(Single("fp16"), config, CLASSES, None).state()
    scaler = {**before["scaler"], "scale": 2.0**120}
    learner = Learner(Single("fp16"), config, CLASSES, {**before, "scaler": scaler})
    row = learner.train_step(batches(config)[0], 1.0, key=0, weight=config.global_batch_size)
    assert row.isfinite().all()
    after = learner.state()
    assert all(
        torch.equal(after["model"][name], before["model"][name])
        for name, _ in learner.net.named_parameters()
    )
    assert after["scaler"]["scale"] == 2.0**119


def test_float16_is_refused_where_gradients_are_not_scaled(monkeypatch):
    monkeypatch.setattr(TorchTpu, "_find_device", lambda self: torch.device("xla"))
    with pytest.raises(
        ConfigError,
        match=r"strategy single on .* xla does not scale gradients.* use --precision bf16",
    ):
        TorchTpu("fp16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": ModelConfig(name="resnet18", kwargs={"no_such": 1})},
            "'resnet18': .*no_such.*model.kwargs",
        ),
        (
            {"model": ModelConfig(name="trainer.model:tiny_resnet", kwargs={"depth": 1})},
            "depth.*model.kwargs",
        ),
        ({"optimizer": OptimizerConfig(kwargs={"no_such": 1})}, "optimizer 'sgd': .*no_such"),
        ({"optimizer": OptimizerConfig(name="adahessian")}, "needs second derivatives"),
    ],
)
def test_an_argument_that_is_not_taken_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        Learner(Single("fp32"), config_of(**changes), CLASSES, None)


# --- whole runs -----------------------------------------------------------------------------------


PIXELS = ImageConfig(
    size=8, train_crop="pad", eval_resize=8, auto_augment="rand-m9-mstd0.5-inc1", erase=0.5
)
SMALL_VIT = ModelConfig(
    name=VIT.name,
    kwargs={
        **(VIT.kwargs or {}),
        "img_size": 8,
        "patch_size": 4,
        "drop_path_rate": 0.5,
        "proj_drop_rate": 0.2,
    },
)
FLATTENED = ModelConfig(name=FLAT)
WAYS: dict[str, dict[str, Any]] = {
    "augmented, repeated": {
        "image": replace(PIXELS, augment_repeats=3),
        "model": FLATTENED,
        "global_batch_size": 12,
    },
    "trivially augmented, repeated, mixed": {
        "image": replace(PIXELS, auto_augment="trivial", augment_repeats=2),
        "model": FLATTENED,
        "regularize": RegularizeConfig(mixup=0.4, cutmix=1.0, label_smoothing=0.1),
    },
    "mixup or cutmix": {"regularize": RegularizeConfig(mixup=0.4, cutmix=1.0)},
    "clipped": {"regularize": RegularizeConfig(clip_norm=0.5, label_smoothing=0.1)},
    "units and paths dropped": {"model": SMALL_VIT, "precision": "bf16"},
    "in passes, averaged": {
        "model": ModelConfig(name="resnet10t", norm="group"),
        "accumulate": 2,
        "regularize": RegularizeConfig(ema_decay=0.9),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_the_steps_of_a_run_are_those_of_a_plain_loop(manifest, tmp_path, way):
    model, optimizer = (
        replace(RESNET, norm="group"),
        OptimizerConfig(learning_rate=1e-3, weight_decay=0.0),
    )
    changes: dict[str, Any] = {"model": model, "optimizer": optimizer, "epochs": 1, **WAYS[way]}
    config = tiny_config(manifest, tmp_path, **changes)
    loop.train(Single(config.precision), config)
    records = read_records(tmp_path, "step")
    expected = plain_run(config, [record["learning_rate"] for record in records], sgd)
    assert [record["loss"] for record in records] == pytest.approx(expected, abs=TOLERANCE)
    assert len(records) == len(open_data(config, 0, 1).train)
