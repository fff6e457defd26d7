"""A whole number is a label, however it is written;
a sentence counts the samples that have none.
"""

import numpy as np
import pytest

from shardset.errors import SourceError
from shardset.format.labels import (
    MAX_LABEL,
    MAX_UNUSED,
    NO_LABEL,
    notes_on,
    plain_label,
    why_sparse,
)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        *((value, 7) for value in (7, 7.0, np.float64(7), "7", "7.0", "7.", " 07\n", b"+7 ")),
        *((value, -1) for value in (-1, "-1", -1.0)),
        *(
            (value, None)
            for value in (
                True,
                None,
                7.5,
                "7.5",
                "",
                "cat",
                "٣",
                b"\xff",
                float("nan"),
                float("inf"),
                [7],
            )
        ),
        *((value, None) for value in ("1e3", "0x7", "7 8", {})),
    ],
)
def test_a_label_is_a_whole_number_as_int_text_or_float(value, label):
    assert plain_label(value) == label


@pytest.mark.parametrize("value", [5 * 10**6, "9" * 5000, 1e300])
def test_a_number_that_is_too_large_stays_one_and_is_never_cut_to_a_label(value):
    assert (plain_label(value) or 0) > MAX_LABEL


def test_the_sentence_on_samples_without_a_label_says_what_was_looked_for():
    assert notes_on("t", {0: 9}, looked_for="cls") == []
    [note] = notes_on("t", {0: 1000, NO_LABEL: 1000}, looked_for="cls")
    assert note == "1,000 of 2,000 samples have no label; looked for cls"
    assert notes_on("t", {0: 7, NO_LABEL: 2}) == ["2 of 9 samples have no label"]


@pytest.mark.parametrize(
    ("largest", "num_used"), [(-1, 0), (21_840, 21_841), (MAX_LABEL, MAX_LABEL + 1 - MAX_UNUSED)]
)
def test_labels_that_are_nearly_dense_number_classes(largest, num_used):
    assert why_sparse(largest, num_used) == ""
    assert "at most 100,000 may be: are they ids?" in why_sparse(largest + MAX_UNUSED + 1, num_used)


def test_holes_are_told_and_too_many_are_refused():
    assert notes_on("t", {0: 1, 2: 1}, 2) == ["labels are 0 to 2, 1 of them unused"]
    assert notes_on("t", {0: 1, 1: 1}, 1) == []
    with pytest.raises(
        SourceError,
        match=r"^t: labels are 0 to 900000, 899,999 of them unused, at most 100,000 may",
    ):
        notes_on("t", {0: 1, 900_000: 1}, 900_000)
