import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from trainer.config import RegularizeConfig, TrainConfig
from trainer.model import batch_transforms
from trainer.model.batch_transforms import mix_row, partners


@pytest.mark.parametrize(
    ("rows", "repeats", "expected"),
    [
        (5, 1, [1, 0, 3, 2, 4]),
        (1, 1, [0]),
        (9, 3, [5, 4, 3, 2, 1, 0, 8, 7, 6]),
        (2, 3, [1, 0]),
    ],
)
def test_partners_are_neighbours_of_another_sample(rows, repeats, expected):
    assert partners(torch.arange(rows), repeats).tolist() == expected


def test_a_partner_is_never_a_repeat_of_the_same_sample():
    for repeats, passes in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        samples = torch.arange(2 * repeats * passes * 3) // repeats
        for start in range(passes):
            part = samples[start::passes]
            assert (partners(part, repeats) != part).all()


def test_a_cutmix_box_stays_inside_the_image():
    for key in range(20):
        own, top, bottom, left, right = mix_row(0.0, 1.0, 10, key).tolist()
        assert own == 1
        assert 0 <= top <= bottom <= 10
        assert 0 <= left <= right <= 10


def test_mixing_depends_on_the_step_and_not_on_the_replica_and_is_only_done_if_asked_for():
    small, large = ({"label": np.zeros(size)} for size in (2, 4))
    regularize = RegularizeConfig(mixup=0.2, cutmix=1.0)
    mix = partial(batch_transforms.with_mix, replace(TrainConfig(seed=3), regularize=regularize))
    assert np.array_equal(mix(small, 1, 5)["mix"][0], mix(large, 1, 5)["mix"][3])
    assert not np.array_equal(mix(small, 1, 5)["mix"], mix(small, 1, 6)["mix"])
    assert batch_transforms.with_mix(TrainConfig(), small, 0, 0) is small
