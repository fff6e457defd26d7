"""The arithmetic of a step against the same written down plainly."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from shardset.errors import ConfigError
from tests.makers.training import tiny_config
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, RegularizeConfig, TrainConfig
from trainer.errors import CheckpointError
from trainer.model import build
from trainer.model.augment import Normalize
from trainer.model.learner import Learner
from trainer.record import checkpoint_state
from trainer.runtime.base import Single

CLASSES = 5
PLAIN = OptimizerConfig(name="momentum", learning_rate=1.0, weight_decay=0.0, momentum=0.0)
"""Its step at rate r takes r times the gradient away."""

Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear(num_classes: int) -> nn.Module:
    """A model without statistics of the batch."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, num_classes))


def too_few(num_classes: int) -> nn.Module:
    return linear(num_classes - 2)


class TwoOutputs(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = linear(num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.net(images_NCHW), None


def shared_layers(num_classes: int) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, num_classes))
    net[3].weight = net[2].weight
    return net


def a_map(num_classes: int) -> nn.Module:
    return nn.Conv2d(3, num_classes, 3)


def config_of(**changes: Any) -> TrainConfig:
    changes = {"model": ModelConfig(name=f"{__name__}:linear"), "optimizer": PLAIN, **changes}
    return tiny_config(None, "run", **changes)


def learner_of(**changes: Any) -> Learner:
    return Learner(Single("fp32"), config_of(**changes), CLASSES, None)


def batch_of(size: int, *, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 256, (size, 4, 4, 3), generator=draw, dtype=torch.uint8),
        "label": torch.randint(0, CLASSES, (size,), generator=draw),
        "weight": torch.ones(size),
    }


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().flatten() for parameter in net.parameters()])


def gradient(batch: Batch, loss_of: Any) -> torch.Tensor:
    """The gradient of a loss of (logits, labels) for fresh weights."""
    net = build.build(config_of().model, CLASSES, 0)
    loss = loss_of(net(Normalize()(batch["image"])), batch["label"])
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(net.parameters()))])


def moved(batch: Batch, rate: float = 0.5, **changes: Any) -> torch.Tensor:
    """How far one step at that rate moves the weights, divided by the rate."""
    learner = learner_of(**changes)
    before = weights(learner.net)
    learner.train_step(batch, rate, key=1)
    return (before - weights(learner.net)) / rate


def test_a_step_takes_the_gradient_of_the_mean_loss_away() -> None:
    batch = batch_of(6)
    torch.testing.assert_close(moved(batch), gradient(batch, cross_entropy))


@pytest.mark.parametrize("passes", [1, 2])
def test_samples_of_weight_0_count_in_no_gradient_and_no_sum(passes: int) -> None:
    whole = batch_of(8)
    whole["weight"][5:] = 0
    part = {name: tensor[:5] for name, tensor in whole.items()}
    torch.testing.assert_close(moved(whole, accumulate=passes), gradient(part, cross_entropy))
    row = learner_of().train_step(whole, 0.0, key=1)
    torch.testing.assert_close(row, learner_of().train_step(part, 0.0, key=1))
    assert row[1] == 5


def test_label_smoothing_gives_all_classes_a_share() -> None:
    def smooth(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        target = 0.8 * one_hot(labels, CLASSES) + 0.2 / CLASSES
        return -(target * log_softmax(logits, 1)).sum(1).mean()

    batch = batch_of(6)
    found = moved(batch, regularize=RegularizeConfig(label_smoothing=0.2))
    torch.testing.assert_close(found, gradient(batch, smooth))


def test_mixed_images_have_the_labels_of_both() -> None:
    batch = batch_of(6)
    share = 0.75
    batch["mix"] = torch.tensor([share, 0, 0, 0, 0]).repeat(6, 1)

    def mixed_loss(net: nn.Module) -> torch.Tensor:
        images = Normalize()(batch["image"])
        logits = net(share * images + (1 - share) * images.flip(0))
        return share * cross_entropy(logits, batch["label"]) + (1 - share) * cross_entropy(
            logits, batch["label"].flip(0)
        )

    net = build.build(config_of().model, CLASSES, 0)
    expected = torch.cat([one.flatten() for one in torch.autograd.grad(mixed_loss(net), list(net.parameters()))])
    torch.testing.assert_close(moved(batch), expected)


def test_a_clipped_gradient_has_the_length_asked_for_and_a_short_one_stays() -> None:
    batch = batch_of(6)
    full = moved(batch)
    clipped = moved(batch, regularize=RegularizeConfig(clip_norm=0.01))
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), full / full.norm(), rtol=1e-3, atol=1e-3)
    for off in (1e6, 0.0):
        torch.testing.assert_close(moved(batch, regularize=RegularizeConfig(clip_norm=off)), full)


def test_clipping_is_of_the_whole_step_and_not_of_each_pass() -> None:
    batch = batch_of(8)
    found = [moved(batch, accumulate=passes, regularize=RegularizeConfig(clip_norm=0.5)) for passes in (1, 2, 4)]
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_averaged_weights_follow_slowly_and_are_what_is_evaluated() -> None:
    learner = learner_of(regularize=RegularizeConfig(ema_decay=0.75))
    expected = weights(learner.net)
    for step in range(3):
        learner.train_step(batch_of(6, seed=step), 0.1, key=step)
        expected = 0.75 * expected + 0.25 * weights(learner.net)
    averaged = learner.state()["ema"]
    torch.testing.assert_close(torch.cat([one.flatten() for one in averaged.values()]), expected)
    net = build.build(config_of().model, CLASSES, 0)
    net.load_state_dict(averaged)
    batch = batch_of(6)
    loss = cross_entropy(net(Normalize()(batch["image"])), batch["label"], reduction="sum")
    torch.testing.assert_close(learner.eval_step(batch)[0], loss.detach())


def test_averaged_weights_that_layers_share_are_averaged_once_a_step() -> None:
    learner = learner_of(
        model=ModelConfig(name=f"{__name__}:shared_layers"), regularize=RegularizeConfig(ema_decay=0.75)
    )
    expected = weights(learner.net)
    for step in range(3):
        learner.train_step(batch_of(6, seed=step), 0.1, key=step)
        expected = 0.75 * expected + 0.25 * weights(learner.net)
    averaged = learner.state()["ema"]
    assert torch.equal(averaged["2.weight"], averaged["3.weight"])
    found = [averaged[name].flatten() for name, _ in learner.net.named_parameters()]
    torch.testing.assert_close(torch.cat(found), expected)


@pytest.mark.parametrize("off", [0.0, None])
def test_without_a_decay_no_averages_are_kept(off: float | None) -> None:
    assert learner_of(regularize=RegularizeConfig(ema_decay=off)).state()["ema"] is None


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lars", "lamb", "rmsprop"])
def test_any_optimizer_of_timm_lowers_the_loss(name: str) -> None:
    learner = learner_of(optimizer=OptimizerConfig(name=name, learning_rate=0.01))
    batch = batch_of(6)
    found = [learner.train_step(batch, 0.01, key=step)[0].item() for step in range(20)]
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lars"])
def test_a_rate_that_is_a_tensor_gives_the_steps_of_one_that_is_a_number(name: str) -> None:
    # What compiled runtimes do, so that a learning rate that changes is no new graph.
    class TensorRates(Single):
        def rate(self, value: float) -> torch.Tensor:
            return torch.tensor(value)

    config = config_of(optimizer=OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.01))
    learners = [Learner(kind("fp32"), config, CLASSES, None) for kind in (Single, TensorRates)]
    for step, rate in enumerate((0.01, 0.1, 0.0, 0.05, 0.002)):
        for learner in learners:
            learner.train_step(batch_of(6, seed=step), rate, key=step)
    torch.testing.assert_close(*(weights(learner.net) for learner in learners), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "adan", "lookahead_momentum"])
def test_an_optimizer_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    optimizer = OptimizerConfig(name=name, learning_rate=0.01, weight_decay=0.01)
    config = config_of(model=ModelConfig(name="trainer.model:tiny_resnet", norm="group"), optimizer=optimizer)
    learners = [Learner(Single("fp32"), config, CLASSES, None)]
    for step in range(7):
        learners[0].train_step(batch_of(6, seed=step), 0.01, key=step)
    state = torch.load(io.BytesIO(checkpoint_state.encode(learners[0].state())), weights_only=True)
    learners.append(Learner(Single("fp32"), config, CLASSES, state))
    for step in range(7, 15):
        for learner in learners:
            learner.train_step(batch_of(6, seed=step), 0.01, key=step)
    torch.testing.assert_close(*(weights(learner.net) for learner in learners), rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.1), (0.1, 0.0)])
def test_each_weight_keeps_its_moments_where_weight_decay_begins_or_ends(before: float, after: float) -> None:
    def learner_with(weight_decay: float, state: dict[str, Any] | None) -> Learner:
        optimizer = OptimizerConfig(name="momentum", learning_rate=0.01, weight_decay=weight_decay)
        config = config_of(model=ModelConfig(name="trainer.model:tiny_resnet", norm="group"), optimizer=optimizer)
        return Learner(Single("fp32"), config, CLASSES, state)

    def moments_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {
            name: state["optimizer"][place]["momentum_buffer"] for place, name in enumerate(state["optimizer_weights"])
        }

    first = learner_with(before, None)
    first.train_step(batch_of(6), 0.01, key=1)
    second = learner_with(after, first.state())
    torch.testing.assert_close(moments_of(second.state()), moments_of(first.state()), rtol=0, atol=0)
    second.train_step(batch_of(6), 0.01, key=2)


def test_a_state_of_a_model_that_has_changed_is_refused_in_one_sentence() -> None:
    state = Learner(Single("fp32"), config_of(), CLASSES + 1, None).state()
    with pytest.raises(CheckpointError, match=r"not of this model, .*:linear.: .*size mismatch for 1\.weight") as error:
        Learner(Single("fp32"), config_of(), CLASSES, state)
    assert "\n" not in str(error.value)


def test_a_moment_of_another_shape_than_its_weight_is_refused_when_it_is_read() -> None:
    config = config_of(optimizer=OptimizerConfig(name="adamw", learning_rate=0.01))
    learner = Learner(Single("fp32"), config, CLASSES, None)
    learner.train_step(batch_of(6), 0.01, key=1)
    state = learner.state()
    state["optimizer"][1]["exp_avg"] = torch.zeros(3, 1)
    with pytest.raises(CheckpointError, match=r"exp_avg of '1\.\w+' has the shape \(3, 1\), expected \("):
        Learner(Single("fp32"), config, CLASSES, state)


def test_a_model_for_another_size_of_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes images of 224x224 only, but image\.size is 8"):
        learner_of(model=ModelConfig(name="vit_tiny_patch16_224"))


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("vgg11", 16, "Output size is too small"),
        ("maxvit_rmlp_pico_rw_256", 100, r"\(25\) must be divisible by window"),
    ],
)
def test_a_size_of_images_that_a_model_can_not_take_is_refused(name: str, size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model '{name}' can't take images of {size}x{size}.*{reason}") as error:
        learner_of(model=ModelConfig(name=name), image=ImageConfig(size=size))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "found"), [("too_few", r"\[2, 3\]"), ("TwoOutputs", "a tuple"), ("a_map", r"\[2, 5, 2, 2\]")]
)
def test_a_model_that_returns_no_number_for_each_class_is_refused(name: str, found: str) -> None:
    # On XLA the loss of a label that has no number is that of another one.
    learner = learner_of(model=ModelConfig(name=f"{__name__}:{name}"))
    for step in (lambda: learner.train_step(batch_of(2), 0.1, key=1), lambda: learner.eval_step(batch_of(2))):
        with pytest.raises(ConfigError, match=rf":{name}' returned {found} .*expected a tensor \[images, 5\]"):
            step()
