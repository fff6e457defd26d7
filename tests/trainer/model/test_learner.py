"""The arithmetic of a step against the same written down plainly."""

import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from shardset.errors import ConfigError
from tests.makers import models as makers
from tests.makers.training import tiny_config
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, RegularizeConfig
from trainer.errors import CheckpointError, TrainingError
from trainer.model import networks
from trainer.model.batch_transforms import Normalize
from trainer.model.learner import Learner
from trainer.run_folder import checkpoint
from trainer.runtime.base import Single

CLASSES = 5
PLAIN = OptimizerConfig(
    name="momentum", learning_rate=1.0, weight_decay=0.0, kwargs={"momentum": 0.0}
)
"""Its step at rate r takes r times the gradient away."""

Batch = dict[str, torch.Tensor]


def linear(num_classes):
    """A model without statistics of the batch."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, num_classes))


def too_few(num_classes):
    return linear(num_classes - 2)


class OneOfTwo(Single):
    """A replica that computes half of each global batch, and must not ask the other one within a
    step.
    """

    num_replicas = 2

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        pytest.fail("a step asked the other replicas")


class NoSync(TorchDispatchMode):
    """Fails where a step would wait for a device: numbers and shapes that depend on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITING, func
        return func(*args, **(kwargs or {}))


class TwoOutputs(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = linear(num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.net(images_NCHW), None


def shared_layers(num_classes):
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, num_classes)
    )
    net[3].weight = net[2].weight
    return net


def config_of(**changes: Any):
    changes = {"model": ModelConfig(name=f"{__name__}:linear"), "optimizer": PLAIN, **changes}
    return tiny_config(None, "run", **changes)


def learner_of(**changes: Any):
    return Learner(Single("fp32"), config_of(**changes), CLASSES, None)


batch_of = partial(makers.batch_of, size=4, classes=CLASSES)


def mixing(size, *, seed=0):
    return {**batch_of(size, seed=seed), "mix": torch.tensor([0.75, 0, 0, 0, 0]).repeat(size, 1)}


def weights(net):
    return torch.cat([parameter.detach().clone().flatten() for parameter in net.parameters()])


def gradient(batch, loss_of):
    """The gradient of a loss of (logits, labels) for fresh weights."""
    net = networks.build(config_of().model, CLASSES, 0)
    loss = loss_of(net(Normalize()(batch["image"])), batch["label"])
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(net.parameters()))])


def moved(batch, rate=0.5, **changes: Any):
    """How far one step at that rate moves the weights, divided by the rate."""
    learner = learner_of(**changes)
    before = weights(learner.net)
    learner.train_step(batch, rate, key=1, weight=int((batch["weight"] > 0).sum()))
    return (before - weights(learner.net)) / rate


@pytest.mark.parametrize("passes", [1, 2])
def test_samples_of_weight_0_count_in_no_gradient_and_no_sum(passes):
    whole = batch_of(8)
    whole["weight"][5:] = 0
    part = {name: tensor[:5] for name, tensor in whole.items()}
    torch.testing.assert_close(moved(whole, accumulate=passes), gradient(part, cross_entropy))
    row = learner_of().train_step(whole, 0.0, key=1, weight=5)
    torch.testing.assert_close(row, learner_of().train_step(part, 0.0, key=1, weight=5))
    assert row[1] == 5


@pytest.mark.parametrize("passes", [1, 2])
def test_a_replica_takes_the_weights_of_the_global_batch_from_the_plan(passes):
    whole = batch_of(8)
    whole["weight"][5:] = 0
    own = {name: tensor[:4] for name, tensor in whole.items()}
    learner = Learner(OneOfTwo("fp32"), config_of(accumulate=passes), CLASSES, None)
    before = weights(learner.net)
    learner.train_step(own, 0.5, key=1, weight=5)
    # Replicas average their gradients, so each must have twice its share: 4 of 5 samples.
    torch.testing.assert_close(
        (before - weights(learner.net)) / 0.5, gradient(own, cross_entropy) * 2 * 4 / 5
    )


def test_a_step_waits_for_no_number_of_the_device():
    learner = learner_of(
        model=ModelConfig(name="trainer.model:tiny_resnet"),
        optimizer=OptimizerConfig(name="sgd"),
        accumulate=2,
        regularize=RegularizeConfig(label_smoothing=0.1, ema_decay=0.9, clip_norm=1.0),
    )
    batch = mixing(8) | {"flip": torch.arange(8) % 2 == 0}
    learner.train_step(batch, 0.1, key=1, weight=8)
    with NoSync():
        learner.train_step(batch, 0.1, key=2, weight=8)
        learner.eval_step(batch)


@pytest.mark.parametrize(("fields", "passes"), [((), 1), (("flip",), 2), (("flip", "mix"), 1)])
def test_images_reach_the_model_in_channels_last_layout(fields, passes):
    learner, seen = learner_of(accumulate=passes), list[torch.Tensor]()
    learner.net.register_forward_pre_hook(lambda net, images: seen.extend(images))
    batch = mixing(8) | {"flip": torch.arange(8) % 2 == 0}
    names = ("image", "label", "weight", *fields)
    learner.train_step({name: batch[name] for name in names}, 0.1, key=1, weight=8)
    assert len(seen) == passes
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen)


def test_a_compiled_model_is_compiled_once_for_training_and_once_for_evaluation():
    counter = CompileCounterWithBackend("aot_eager")

    class Counting(Single):
        compile_backend: Any = counter

    config = config_of(model=ModelConfig(name="trainer.model:tiny_resnet"), compile=True)
    learner = Learner(Counting("fp32"), config, CLASSES, None)
    for step in range(3):
        learner.train_step(batch_of(8, seed=step), 0.1 / (step + 1), key=step, weight=8 - step)
    assert counter.frame_count == 1
    for step in range(2):
        learner.eval_step(batch_of(8, seed=step))
        learner.train_step(batch_of(8, seed=step), 0.1, key=step, weight=8)
    assert counter.frame_count == 2


def test_averaged_weights_are_evaluated_and_shared_ones_are_averaged_once_a_step():
    learner = learner_of(
        model=ModelConfig(name=f"{__name__}:shared_layers"),
        regularize=RegularizeConfig(ema_decay=0.75),
    )
    expected = weights(learner.net)
    for step in range(3):
        learner.train_step(batch_of(6, seed=step), 0.1, key=step, weight=6)
        expected = 0.75 * expected + 0.25 * weights(learner.net)
    averaged = learner.state()["ema"]
    assert torch.equal(averaged["2.weight"], averaged["3.weight"])
    found = [averaged[name].flatten() for name, _ in learner.net.named_parameters()]
    torch.testing.assert_close(torch.cat(found), expected)
    net = shared_layers(CLASSES)
    net.load_state_dict(averaged)
    batch = batch_of(6)
    loss = cross_entropy(net(Normalize()(batch["image"])), batch["label"], reduction="sum")
    torch.testing.assert_close(learner.eval_step(batch)[0], loss.detach())


class Replacing(nn.Module):
    """Replaces its buffer in each step, and counts the steps in another one."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = linear(num_classes)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = self.mean + 1.0
            self.count = self.count + 1
        logits: torch.Tensor = self.net(images_NCHW)
        return logits


def test_a_buffer_that_a_layer_replaces_is_averaged_and_a_counter_is_copied():
    model = ModelConfig(name=f"{__name__}:Replacing")
    learner = learner_of(model=model, regularize=RegularizeConfig(ema_decay=0.5))
    for step in range(3):
        learner.train_step(batch_of(6, seed=step), 0.1, key=step, weight=6)
    averaged = learner.state()["ema"]
    assert (averaged["mean"], averaged["count"]) == (0.5 * (0.5 * 0.5 + 0.5 * 2) + 0.5 * 3, 3)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lookahead_momentum"])
def test_an_optimizer_resumes_as_if_it_had_not_stopped(name):
    optimizer = OptimizerConfig(
        name=name, learning_rate=0.01, head_learning_rate=0.1, weight_decay=0.01
    )
    config = config_of(
        model=ModelConfig(name="trainer.model:tiny_resnet", norm="group"), optimizer=optimizer
    )
    learners = [Learner(Single("fp32"), config, CLASSES, None)]
    for step in range(3):
        learners[0].train_step(batch_of(6, seed=step), 0.01, key=step, weight=6)
    state = torch.load(
        io.BytesIO(checkpoint.state_to_bytes(learners[0].state())), weights_only=True
    )
    learners.append(Learner(Single("fp32"), config, CLASSES, state))
    for step in range(3, 9):
        for learner in learners:
            learner.train_step(batch_of(6, seed=step), 0.01, key=step, weight=6)
    torch.testing.assert_close(*(weights(learner.net) for learner in learners), rtol=0, atol=0)


def test_each_weight_keeps_its_moments_where_weight_decay_begins():
    def learner_with(weight_decay: float, state: dict[str, Any] | None) -> Learner:
        optimizer = OptimizerConfig(name="momentum", learning_rate=0.01, weight_decay=weight_decay)
        config = config_of(
            model=ModelConfig(name="trainer.model:tiny_resnet", norm="group"), optimizer=optimizer
        )
        return Learner(Single("fp32"), config, CLASSES, state)

    def moments_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: moments["momentum_buffer"] for name, moments in state["optimizer"].items()}

    first = learner_with(0.0, None)
    first.train_step(batch_of(6), 0.01, key=1, weight=6)
    second = learner_with(0.1, first.state())
    torch.testing.assert_close(
        moments_of(second.state()), moments_of(first.state()), rtol=0, atol=0
    )


def test_a_state_of_a_model_that_has_changed_is_refused_in_one_sentence():
    state = Learner(Single("fp32"), config_of(), CLASSES + 1, None).state()
    with pytest.raises(
        CheckpointError,
        match=r"^[^\n]*not of this model, .*:linear.: .*size mismatch for 1\.weight",
    ):
        Learner(Single("fp32"), config_of(), CLASSES, state)


def test_a_size_of_images_that_a_model_can_not_take_is_refused():
    name, reason = "vit_tiny_patch16_224", r"Input height \(8\) doesn't match model \(224\)"
    with pytest.raises(ConfigError, match=rf"^model '{name}' can't take images of 8x8.*{reason}"):
        learner_of(model=ModelConfig(name=name), image=ImageConfig(size=8))


@pytest.mark.parametrize(("name", "found"), [("too_few", r"\[2, 3\]"), ("TwoOutputs", "a tuple")])
def test_a_model_that_returns_no_number_for_each_class_is_refused(name, found):
    # On XLA the loss of a label that has no number is that of another one.
    learner = learner_of(model=ModelConfig(name=f"{__name__}:{name}"))
    for step in (
        lambda: learner.train_step(batch_of(2), 0.1, key=1, weight=2),
        lambda: learner.eval_step(batch_of(2)),
    ):
        with pytest.raises(
            ConfigError, match=rf":{name}' returned {found} .*expected a tensor \[images, 5\]"
        ):
            step()


class TooLarge(nn.Linear):
    """Needs more memory than the device has."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(3, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."
        )


def test_a_step_without_enough_memory_names_the_flags_to_change():
    learner = learner_of(model=ModelConfig(name=f"{__name__}:TooLarge"), accumulate=2)
    with pytest.raises(
        TrainingError, match=r"too small .*2\.00 GiB\.\); raise --set accumulate= .*--global-batch"
    ):
        learner.train_step(batch_of(4), 0.1, key=0, weight=4)
