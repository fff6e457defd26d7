import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainer.config import RegularizeConfig, TrainConfig
from trainer.model import augment
from trainer.model.augment import Normalize, mix_row, mixed, partners


def images(num: int = 4, size: int = 6) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    )


def test_only_images_that_say_so_are_mirrored() -> None:
    plain = Normalize()(images())
    found = Normalize()(images(), torch.tensor([True, False, False, True]))
    assert torch.equal(found[1:3], plain[1:3])
    assert torch.equal(found[[0, 3]], plain[[0, 3]].flip(3))


def test_mixup_is_a_weighted_sum_with_the_partner() -> None:
    pictures = Normalize()(images())
    row = torch.from_numpy(mix_row(0.4, 0.0, 6, key=5))
    found, share = mixed(pictures, pictures.flip(0), row.repeat(4, 1))
    torch.testing.assert_close(found, row[0] * pictures + (1 - row[0]) * pictures.flip(0))
    torch.testing.assert_close(share, row[0].repeat(4))


def test_cutmix_shows_the_partner_in_a_box_and_counts_its_pixels() -> None:
    pictures = Normalize()(images(size=16))
    found, share = mixed(
        pictures, pictures.flip(0), torch.tensor([[1.0, 2, 6, 4, 12]]).repeat(4, 1)
    )
    expected = pictures.clone()
    expected[:, :, 2:6, 4:12] = pictures.flip(0)[:, :, 2:6, 4:12]
    assert torch.equal(found, expected)
    torch.testing.assert_close(share, torch.full((4,), 1 - 32 / 256))


@pytest.mark.parametrize(
    ("rows", "repeats", "expected"),
    [
        (5, 1, [1, 0, 3, 2, 4]),
        (1, 1, [0]),
        (9, 3, [5, 4, 3, 2, 1, 0, 8, 7, 6]),
        (2, 3, [1, 0]),
    ],
)
def test_partners_are_neighbours_of_another_sample(
    rows: int, repeats: int, expected: list[int]
) -> None:
    assert partners(torch.arange(rows), repeats).tolist() == expected


def test_a_partner_is_never_a_repeat_of_the_same_sample() -> None:
    for repeats, passes in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        samples = torch.arange(2 * repeats * passes * 3) // repeats
        for start in range(passes):
            part = samples[start::passes]
            assert (partners(part, repeats) != part).all()


def test_a_cutmix_box_stays_inside_the_image() -> None:
    for key in range(20):
        own, top, bottom, left, right = mix_row(0.0, 1.0, 10, key).tolist()
        assert own == 1
        assert 0 <= top <= bottom <= 10
        assert 0 <= left <= right <= 10


def test_mixing_depends_on_the_step_and_not_on_the_replica_and_is_only_done_if_asked_for() -> None:
    small, large = ({"label": np.zeros(size)} for size in (2, 4))
    mix = augment.mix_of(
        replace(TrainConfig(seed=3), regularize=RegularizeConfig(mixup=0.2, cutmix=1.0))
    )
    assert np.array_equal(mix(small, 1, 5)["mix"][0], mix(large, 1, 5)["mix"][3])
    assert not np.array_equal(mix(small, 1, 5)["mix"], mix(small, 1, 6)["mix"])
    assert augment.mix_of(TrainConfig())(small, 0, 0) is small
