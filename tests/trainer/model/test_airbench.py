"""The whitening against NumPy, what the network begins as, and a run that goes on with the weights that it has."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from tests.makers.shardset import pixels
from tests.makers.training import NUM_TRAIN, losses, shard_set, tiny_config
from trainer import loop
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, TrainConfig
from trainer.model.airbench import MIN_VARIANCE, NUM_IMAGES, Airbench, Shift
from trainer.runtime.single import Single

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 16
IMAGE = ImageConfig(size=SIZE, train_crop="pad", eval_resize=SIZE, pad=2, flip="alternating")


def photographs(num: int, size: int = 12) -> torch.Tensor:
    """Images whose neighbouring pixels and colours are alike: float32 [n, 3, size, size]."""
    draw = np.random.default_rng(0)
    rough = draw.normal(size=(num, 3, size + 2, size + 2))
    smooth = rough[:, :, 1:-1, 1:-1] + 0.8 * rough[:, :, :-2, 1:-1] + 0.6 * rough[:, :, 1:-1, 2:] + 0.2
    return torch.from_numpy((smooth + 0.5 * smooth.mean(1, keepdims=True)).astype(np.float32))


def patches_of(images: np.ndarray) -> np.ndarray:
    """All patches of 2x2 pixels, by hand: [patches, 3 * 2 * 2]."""
    corners = [
        images[:, :, down : -1 + down or None, right : -1 + right or None] for down in (0, 1) for right in (0, 1)
    ]
    return np.stack(corners, axis=2).transpose(0, 3, 4, 1, 2).reshape(-1, 12).astype(np.float64)


def test_the_first_layer_whitens_the_patches_of_the_images() -> None:
    images, net = photographs(40), Airbench(10)
    net.initialize_from(images.split(16))
    patches = patches_of(images.numpy())
    variances, directions = np.linalg.eigh(patches.T @ patches / len(patches))

    outputs = net.whitening(images).permute(0, 2, 3, 1).reshape(-1, 24).double().detach().numpy()
    found = outputs.T @ outputs / len(outputs)
    expected = np.diag((variances / (variances + MIN_VARIANCE))[::-1])
    np.testing.assert_allclose(found, np.block([[expected, -expected], [-expected, expected]]), atol=1e-5)
    np.testing.assert_allclose(np.diag(expected), 1, atol=0.02)

    rows = net.whitening.weight.detach().reshape(24, 12).numpy()
    by_hand = (directions / np.sqrt(variances + MIN_VARIANCE)).T[::-1]
    np.testing.assert_allclose(np.abs((rows[:12] * by_hand).sum(1)), (by_hand**2).sum(1), rtol=1e-5)
    assert np.array_equal(rows[12:], -rows[:12])


def test_the_first_5000_images_say_how_to_whiten_and_no_more_are_read() -> None:
    images = photographs(NUM_IMAGES + 1000, size=4)

    def batches() -> Iterator[torch.Tensor]:
        yield from images.split(2000)
        pytest.fail("a batch after the 5,000th image was read")

    found, expected = Airbench(10), Airbench(10)
    found.initialize_from(batches())
    expected.initialize_from([images[:NUM_IMAGES]])
    torch.testing.assert_close(found.whitening.weight, expected.whitening.weight)


def test_the_first_layer_is_frozen_but_its_bias() -> None:
    frozen = [name for name, weight in Airbench(10).named_parameters() if not weight.requires_grad]
    assert frozen == ["whitening.weight"]


def test_convolutions_pass_their_inputs_on_at_first() -> None:
    images = torch.randn(2, 24, 8, 8)
    features = Airbench(10).get_submodule("features.1.0")(images)
    torch.testing.assert_close(features[:, :24], images)


def test_the_bias_of_a_norm_moves_64_times_as_far() -> None:
    shift, plain = Shift(3), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([shift.bias, plain], lr=0.1, momentum=0.85, nesterov=True)
    features = torch.randn(4, 3, 5, 5)
    for _ in range(3):
        optimizer.zero_grad()
        (shift(torch.zeros_like(features)) * features + plain.view(1, -1, 1, 1) * features).sum().backward()
        optimizer.step()
    torch.testing.assert_close(shift(torch.zeros(1, 3, 1, 1)).flatten(), 64 * plain)


# --- in a run --------------------------------------------------------------------------------------------------------


class Asking(nn.Module):
    """A model that keeps the images that it begins from."""

    calls: ClassVar[list[list[torch.Tensor]]] = []

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIZE * SIZE, num_classes)

    def initialize_from(self, batches: Iterator[torch.Tensor]) -> None:
        self.calls.append(list(batches))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(images_NCHW.flatten(1))


def asking(num_classes: int) -> nn.Module:
    return Asking(num_classes)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"), size=SIZE)


def config_of(manifest: str, folder: Path, model: str) -> TrainConfig:
    calm = OptimizerConfig(learning_rate=0.01)
    return tiny_config(manifest, folder, model=ModelConfig(name=model), image=IMAGE, optimizer=calm)


def test_a_model_may_begin_from_the_training_images_and_does_so_once(manifest: str, tmp_path: Path) -> None:
    Asking.calls.clear()
    config = config_of(manifest, tmp_path / "run", f"{__name__}:asking")
    loop.train(Single("fp32"), replace(config, max_steps=3))
    loop.train(Single("fp32"), config)
    (batches,) = Asking.calls
    mean, std = (np.array(numbers).reshape(3, 1, 1) for numbers in (IMAGE.mean, IMAGE.std))
    stored = [(pixels(id_, SIZE, SIZE).transpose(2, 0, 1) / 255 - mean) / std for id_ in range(NUM_TRAIN)]
    np.testing.assert_allclose(torch.cat(batches).numpy(), np.stack(stored), rtol=1e-4, atol=1e-4)

    weights = tmp_path / "weights.pt"
    torch.save(Asking(10).state_dict(), weights)
    fine_tuned = replace(config, run_dir=str(tmp_path / "other"), max_steps=1)
    loop.train(Single("fp32"), replace(fine_tuned, model=replace(config.model, pretrained=str(weights))))
    assert len(Asking.calls) == 1


def test_a_run_that_stops_in_mid_epoch_goes_on_whitened_and_flipped_alike(manifest: str, tmp_path: Path) -> None:
    whole, halves = (config_of(manifest, tmp_path / name, "trainer.model:airbench") for name in ("whole", "halves"))
    loop.train(Single("fp32"), whole)
    for last in (3, 10, None):
        loop.train(Single("fp32"), replace(halves, max_steps=last))
    assert losses(halves.run_dir) == losses(whole.run_dir)
