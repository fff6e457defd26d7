"""What the plan needs to know of the units."""

import re

import pytest

from pipelines.plan.summaries import (
    KnownCount,
    SplitCount,
    UnitSummary,
    merge,
    refuse_too_many_bad,
)
from shardset.errors import TooManyBad


def summary(bad: int, raw: int = 2000) -> UnitSummary:
    count = SplitCount(num_samples=raw - bad, num_rejected=bad, num_bytes=1, strata={0: raw - bad})
    return UnitSummary(
        unit=0,
        splits={"train": count},
        fields={"train": {"jpg": raw - bad}},
        fixes={},
        reasons=["a.jpg: empty"],
        known=KnownCount(),
        digest="",
    )


def test_too_many_bad_samples_stop_the_build_and_too_few_do_not():
    refuse_too_many_bad(merge([summary(20)]), 0.01)
    with pytest.raises(
        TooManyBad, match=r"split 'train': 21 of 2000 raw samples are bad.*a\.jpg: empty"
    ):
        refuse_too_many_bad(merge([summary(21)]), 0.01)
    assert merge([summary(1), summary(0)]).fields["train"] == {"jpg": 3999}


@pytest.mark.parametrize(
    ("raw", "allowed"), [(1, 0), (2, 1), (10, 5), (20, 10), (1000, 10), (1100, 11)]
)
def test_a_small_split_may_have_ten_bad_samples_but_not_most_of_it(raw, allowed):
    refuse_too_many_bad(merge([summary(allowed, raw)]), 0.01)
    with pytest.raises(
        TooManyBad, match=rf"allowed are {allowed} \(1\.00%, or 10 in a small split\)"
    ):
        refuse_too_many_bad(merge([summary(allowed + 1, raw)]), 0.01)


def test_a_fraction_of_0_allows_no_bad_sample():
    with pytest.raises(TooManyBad, match=r"1 of 10 raw samples are bad, allowed are 0 \(none\)"):
        refuse_too_many_bad(merge([summary(1, 10)]), 0)


def test_the_limit_that_the_message_names_is_enough():
    with pytest.raises(TooManyBad) as error:
        refuse_too_many_bad(merge([summary(137)]), 0.01)
    [limit] = re.findall(r"leave them out by --max-bad-fraction ([0-9.]+);", str(error.value))
    refuse_too_many_bad(merge([summary(137)]), float(limit))
    with pytest.raises(TooManyBad, match="nothing is left, so check --source and --input"):
        refuse_too_many_bad(merge([summary(2000)]), 0.01)
