"""Samples that want the same key."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.plan.duplicate_keys import KEY, duplicates_among


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 7))
def test_of_rows_that_want_the_same_key_each_knows_how_many_are_before_it(wanted, each):
    keys = np.zeros(len(wanted), KEY)
    keys["hash"], keys["unit"], keys["row"] = (
        wanted,
        np.arange(len(wanted)) // each,
        np.arange(len(wanted)) % each,
    )
    duplicates = duplicates_among(keys[::-1]).tolist()
    numbers = [wanted[:row].count(key) for row, key in enumerate(wanted)]
    assert duplicates == [
        (row // each, row % each, number) for row, number in enumerate(numbers) if number
    ]
