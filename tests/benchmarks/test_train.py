"""The benchmark of training: its table from turns made by hand, and a run with a tiny model."""

import argparse
import re

from benchmarks import train
from benchmarks.train import Turn

REAL = [Turn(10.0, 12.0, 20), Turn(5.0, 10.0, 20), Turn(4.0, 11.0, 20)]
FAKE = [Turn(2.0, 9.0, 20), Turn(5.0, 8.8, 20), Turn(40.0, 8.6, 20)]


def test_ratios_are_those_of_medians_and_of_each_pair():
    lines = train.ratio_lines(REAL, FAKE).splitlines()
    assert lines[2:] == [
        "| real, samples/s | 4.00 | 2.00, 4.00, 5.00 |",
        "| fake, samples/s | 4.00 | 10.00, 4.00, 0.50 |",
        "| real / fake | 1.000 | 0.200, 1.000, 10.000 |",
        "| real, CPU ms a sample | 550.0 | 600.0, 500.0, 550.0 |",
        "| fake, CPU ms a sample | 440.0 | 450.0, 440.0, 430.0 |",
        "| fake / real | 0.800 | 0.750, 0.880, 0.782 |",
    ]


def test_real_and_fake_data_train_in_turns_and_the_first_turns_do_not_count(tmp_path):
    options = argparse.Namespace(
        strategy="single", precision="fp32", batch=4, steps=2, model="trainer.model:tiny_resnet", size=8
    )
    rows = train.ratio_table(train.config_of(options, tmp_path), tmp_path, 2).splitlines()[2:]
    assert [row.count(",", row.rindex("|", 0, -1)) for row in rows] == [1] * 6
    assert all(float(figure) > 0 for row in rows for figure in re.findall(r"\d+\.\d+", row))
