"""The benchmark of training: a run with a tiny model."""

import argparse
import re

import pytest

from benchmarks import train


@pytest.mark.slow
def test_real_and_fake_data_train_in_turns_and_the_first_turns_do_not_count(tmp_path):
    options = argparse.Namespace(
        strategy="single",
        precision="fp32",
        batch=4,
        steps=2,
        model="trainer.model:tiny_resnet",
        size=8,
    )
    rows = train.ratio_table(train.config_of(options, tmp_path), tmp_path, 2).splitlines()[2:]
    assert [row.count(",", row.rindex("|", 0, -1)) for row in rows] == [1] * 6
    assert all(float(figure) > 0 for row in rows for figure in re.findall(r"\d+\.\d+", row))
