from dataclasses import replace
from typing import Any

import pytest

from trainer.config import OptimizerConfig, ScheduleConfig, TrainConfig
from trainer.plan import schedule_of

CONFIG = TrainConfig(
    epochs=9,
    optimizer=OptimizerConfig(learning_rate=2.0),
    schedule=ScheduleConfig(decay="step", warmup_epochs=1),
)


def rate_of(steps_per_epoch, **changes: Any):
    return schedule_of(replace(CONFIG, **changes), steps_per_epoch)


def test_the_rate_climbs_to_its_peak_in_equal_steps_whatever_max_steps_is():
    rate = rate_of(4)
    assert [rate(step) for step in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rate_of(4, max_steps=3) == rate


def test_step_decay_divides_by_ten_where_it_says():
    rate = rate_of(100)
    assert [rate(step) for step in (299, 300, 599, 600, 799, 800)] == pytest.approx(
        [2, 0.2, 0.2, 0.02, 0.02, 0.002]
    )


def test_cosine_decay_ends_near_zero_and_never_rises():
    rate = rate_of(50, schedule=ScheduleConfig(decay="cosine", warmup_epochs=0))
    rates = [rate(step) for step in range(450)]
    assert rates[0] == 2.0
    assert 0 < rates[-1] < 1e-4
    assert rates == sorted(rates, reverse=True)


def test_linear_decay_falls_by_the_same_amount_in_every_step_to_zero():
    rate = rate_of(10, schedule=ScheduleConfig(decay="linear", warmup_epochs=1))
    rates = [rate(step) for step in range(10, 91)]
    assert rates == pytest.approx([left / 40 for left in range(80, -1, -1)])
