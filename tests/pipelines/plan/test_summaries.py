"""What the plan needs to know of the units."""

import pytest

from pipelines.plan.summaries import SplitCount, UnitSummary, merge, refuse_too_many_bad
from shardset.errors import TooManyBad


def test_too_many_bad_samples_stop_the_build_and_too_few_do_not():
    def summary(bad: int) -> UnitSummary:
        count = SplitCount(num_samples=100 - bad, num_rejected=bad, num_bytes=1, strata={0: 100 - bad})
        return UnitSummary(
            unit=0, splits={"train": count}, fields={"train": ["jpg"]}, fixes={}, reasons=["a.jpg: empty"],
            max_label=0, digest="",
        )  # fmt: skip

    refuse_too_many_bad(merge([summary(1)]), 0.01)
    with pytest.raises(TooManyBad, match=r"split 'train': 2 of 100 raw samples are bad.*a\.jpg: empty"):
        refuse_too_many_bad(merge([summary(2)]), 0.01)
    assert merge([summary(1), summary(0)]).fields["train"] == ["jpg"]
