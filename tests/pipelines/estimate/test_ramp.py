"""What a bucket's slow beginning costs in time, against figures made by hand."""

import pytest

from pipelines import cli
from pipelines.estimate.ramp import FIRST_READS_PER_S, FIRST_WRITES_PER_S, build_s, lost_s, ramp_s


@pytest.mark.parametrize(
    ("num_writes", "seconds"),
    [(0, 0), (745_000, 745), (1_200_000, 1200), (2_980_000, 1200 + 890), (3_600_000, 2400), (8_400_000, 3600)],
)
def test_new_names_begin_at_a_thousand_a_second_and_double_every_twenty_minutes(num_writes, seconds):
    assert ramp_s(num_writes, FIRST_WRITES_PER_S) == seconds


def test_what_the_workers_ask_for_is_the_most():
    assert ramp_s(1_000_000, FIRST_WRITES_PER_S, 100) == 10_000
    assert lost_s(1_000_000, FIRST_WRITES_PER_S, 100) == 0
    # Four doublings from 5,000 to 80,000: 90 of the 384 million reads of these 80 minutes are served.
    assert lost_s(2e9, FIRST_READS_PER_S, 80_000) == pytest.approx((384 - 90) * 1e6 / 80_000)


def test_the_slower_of_reads_and_writes_decides():
    assert build_s(class_a=1_000_000, class_b=1_000_000) == 1000
    assert build_s(class_a=1_000, class_b=6_000_000) == 1200


@pytest.mark.parametrize(
    ("samples", "sentence"), [("1000000000", "at least 2.8 hours while the bucket scales up"), ("10000", None)]
)
def test_plan_says_it_where_it_is_more_than_minutes(capsys, samples, sentence):
    words = ["plan", "--samples", samples, "--mean-bytes", "100000", "--global-batch-size", "256"]
    cli.main(words)
    printed = " ".join(capsys.readouterr().out.split())
    assert (sentence in printed) if sentence else ("scales up" not in printed)
