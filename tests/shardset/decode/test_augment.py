"""Random augmentation: Pillow's pixels against torchvision's and timm's, and draws that depend on
the sample alone.
"""

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment as timm_ops
from torchvision.transforms import InterpolationMode
from torchvision.transforms import autoaugment as torchvision_ops

from shardset.decode import operations
from shardset.decode.augment import (
    Chain,
    RandAugment,
    RandomErasing,
    TrivialAugment,
    augmentation_of,
)
from shardset.decode.operations import FILL, Operation
from shardset.errors import ConfigError

LEVELS = (0.0, 0.1, 0.35, 0.5, 0.9, 1.0)
NUM_TRAIN = 50
ALL = Chain(
    (
        RandAugment(magnitude=9, magnitude_std=0.5, increasing=True),
        TrivialAugment(),
        RandomErasing(probability=0.5),
    )
)

TIMM = {
    "auto_contrast": "AutoContrast",
    "solarize_add": "SolarizeAdd",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}
INCREASING = ("posterize", "solarize", "color", "contrast", "brightness", "sharpness")


def picture(size: int = 48) -> Image.Image:
    draw = np.random.default_rng(5)
    smooth = Image.fromarray(draw.integers(20, 230, (6, 6, 3), dtype=np.uint8)).resize((size, size))
    return Image.fromarray(
        np.asarray(smooth) // 8 * 8 + draw.integers(0, 8, (size, size, 3), dtype=np.uint8)
    )


def done(operation: Operation, level: float) -> np.ndarray:
    image = picture()
    return np.asarray(operation.apply(image, operation.value(level, image.width)))


def by_timm(name: str, level: float, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """timm's operation at a level, in the direction of its sign."""
    monkeypatch.setattr(timm_ops, "_randomly_negate", lambda value: math.copysign(value, level))
    hparams: Any = {"img_mean": FILL, "interpolation": Image.Resampling.BILINEAR}
    operation: Any = timm_ops.AugmentOp(name, prob=1.0, magnitude=10 * abs(level), hparams=hparams)
    return np.asarray(operation(picture()))


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("number", range(15))
def test_rand_augment_has_the_operations_and_strengths_of_timm(
    number: int, increasing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = operations.RAND_INCREASING if increasing else operations.RAND
    assert len(table) == len(timm_ops._RAND_TRANSFORMS) == 15
    operation = table[number]
    name = TIMM.get(operation.name, operation.name.capitalize())
    name += "Increasing" if increasing and operation.name in INCREASING else ""
    assert name in (
        timm_ops._RAND_INCREASING_TRANSFORMS if increasing else timm_ops._RAND_TRANSFORMS
    )
    for level in (*LEVELS, *(-one for one in LEVELS if operation.is_signed)):
        if operation.name == "posterize" and operation.value(level, 0) == 0:
            assert not done(operation, level).any()  # Pillow 13 refuses no bits, and so timm does
        else:
            assert np.array_equal(done(operation, level), by_timm(name, level, monkeypatch)), level


@pytest.mark.parametrize("number", range(14))
def test_trivial_augment_has_the_operations_and_strengths_of_torchvision(number: int) -> None:
    operation = operations.TRIVIAL[number]
    policy: Any = torchvision_ops.TrivialAugmentWide()
    space = policy._augmentation_space(31)
    assert len(space) == len(operations.TRIVIAL) == 14
    name = "".join(part.capitalize() for part in operation.name.split("_")).replace(
        "Autocontrast", "AutoContrast"
    )
    magnitudes, is_signed = space[name]
    assert operation.is_signed == is_signed
    for step in range(0, 31, 3):
        # Rounded: its float32 makes 15.999999 of 16 pixels.
        magnitude = round(float(magnitudes[step]), 4) if magnitudes.ndim else 0.0
        # torchvision moves an image by +t where an affine matrix of Pillow takes -t; the sign is
        # drawn anyway.
        sign = -1 if name.startswith("Translate") else 1
        expected: Any = torchvision_ops._apply_op(
            picture(),
            name,
            sign * magnitude,
            InterpolationMode.BILINEAR,
            [float(one) for one in FILL],
        )
        difference = np.abs(
            done(operation, step / 30).astype(int) - np.asarray(expected).astype(int)
        )
        # Shears pass through degrees in torchvision, which moves a linear weight by its last bit.
        assert difference.max() <= (1 if name.startswith("Shear") else 0), step


def test_a_chain_changes_an_image_in_place_and_alike_for_one_key() -> None:
    images = [np.asarray(picture()).copy() for _ in range(3)]
    for image, key in zip(images, (1, 1, 2), strict=True):
        assert (
            ALL({"image": image}, np.random.Generator(np.random.Philox(key=key)))["image"] is image
        )
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])


def drawn(transform: RandAugment | TrivialAugment, key: int) -> list[tuple[str, float, bool]]:
    """The operations that a generator of a key draws: name, level, and whether a signed one is
    negated.
    """
    chosen = transform.draw(np.random.Generator(np.random.Philox(key=key)))
    return [(one.name, round(level, 4), is_negated) for one, level, is_negated in chosen]


def test_the_draws_are_frozen() -> None:
    # Those of every existing run: the first generators' operations, with their levels and signs.
    rand = RandAugment(magnitude=9, magnitude_std=0.5, probability=1.0)
    assert [drawn(rand, key) for key in range(2)] == FROZEN_RAND
    assert [drawn(TrivialAugment(), key) for key in range(3)] == FROZEN_TRIVIAL


def test_operations_are_drawn_alike_often_and_left_out_with_their_probability() -> None:
    rand = RandAugment(magnitude=9, num_ops=2)
    names = [name for key in range(2000) for name, _, _ in drawn(rand, key)]
    assert abs(len(names) / 4000 - rand.probability) < 0.03
    counts = [names.count(operation.name) for operation in operations.RAND]
    assert min(counts) > 2000 / 15 * 0.7


FROZEN_RAND = [
    [("auto_contrast", 0.9602, True), ("auto_contrast", 0.8443, True)],
    [("translate_x", 0.9221, True), ("shear_x", 0.8161, True)],
]
FROZEN_TRIVIAL = [
    [("auto_contrast", 0.0, True)],
    [("translate_x", 0.3, False)],
    [("translate_x", 0.5, True)],
]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_erasing_leaves_noise_in_a_box_of_that_share_of_images(share: float) -> None:
    rng = np.random.Generator(np.random.Philox(key=2))
    erase = RandomErasing(probability=share, mean=(0.5, 0.4, 0.3), std=(0.1, 0.1, 0.1))
    erased, pixels, areas = 0, [], []
    for _ in range(400):
        image = np.zeros((32, 32, 3), np.uint8)
        erase({"image": image}, rng)
        box = image.max(axis=2) > 0
        erased += bool(box.any())
        if box.any():
            rows, columns = np.flatnonzero(box.any(1)), np.flatnonzero(box.any(0))
            inside = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert inside.any(axis=2).mean() > 0.99  # a rectangle
            pixels.append(inside.reshape(-1, 3))
            areas.append(inside.shape[0] * inside.shape[1] / 32**2)
    assert abs(erased / 400 - share) < 0.06
    if share == 1.0:
        np.testing.assert_allclose(np.concatenate(pixels).mean(0), [127.5, 102, 76.5], atol=1)
        np.testing.assert_allclose(np.concatenate(pixels).std(0), 25.5, atol=1)
        assert min(areas) > 0.01
        assert max(areas) < 0.38


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trivial", TrivialAugment()),
        ("rand-m9-mstd0.5-inc1", RandAugment(magnitude=9, magnitude_std=0.5, increasing=True)),
        ("rand-m10-n2-p1", RandAugment(magnitude=10, num_ops=2, probability=1)),
        ("rand", RandAugment()),
    ],
)
def test_an_augmentation_is_written_as_timm_writes_it(
    text: str, expected: RandAugment | TrivialAugment
) -> None:
    assert augmentation_of(text) == expected


@pytest.mark.parametrize(
    "text", ["random", "rand-x3", "trivial-m3", "rand-m11", "rand-n0", "rand-p2", ""]
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        augmentation_of(text)
