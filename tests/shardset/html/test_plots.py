"""The geometry of plots: everything stands inside the frame, and says what it shows."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.html import plots

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))
POINTS = st.lists(st.tuples(st.integers(0, 10_000), NUMBERS), min_size=1, max_size=40)


@given(NUMBERS, NUMBERS)
def test_ticks_are_evenly_spaced_and_span_the_values(one, other):
    low, high = sorted((one, other))
    found = plots.ticks(low, high)
    assert 2 <= len(found) <= 12
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@given(st.integers(0, 10**7))
def test_counts_have_whole_ticks(most):
    assert all(mark == int(mark) for mark in plots.ticks(0, most, whole=True))


@given(POINTS)
def test_curves_stay_inside_their_frame(points):
    plot = plots.curves("curve", {"a": sorted(points)}, x_label="step")
    for x, y in ([*map(float, pair.split(","))] for pair in plot.lines[0].points.split()):
        assert plot.left - 1 <= x <= plot.right + 1
        assert plot.top - 1 <= y <= plot.bottom + 1


def test_a_value_that_is_no_number_is_left_out_of_a_curve():
    plot = plots.curves("curve", {"a": [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)]}, x_label="step")
    assert len(plot.lines[0].points.split()) == 2


def test_a_curve_without_values_says_so():
    assert plots.curves("curve", {"a": []}, x_label="step").description == "No values."


@given(st.lists(st.tuples(st.integers(0, 99), NUMBERS), min_size=2, max_size=200), st.integers(2, 50))
def test_thinned_points_are_few_and_end_where_the_points_do(points, most):
    found = plots.thinned(points, most)
    assert len(found) <= most or len(found) == len(points) <= most
    assert found[-1] == points[-1]


def test_thinned_points_are_means_of_their_neighbours():
    assert plots.thinned([(0, 0.0), (1, 2.0), (2, 4.0), (3, 6.0), (4, 9.0)], 3) == [(0.5, 1.0), (2.5, 5.0), (4, 9.0)]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=100))
def test_every_value_is_in_one_bin(values):
    edges = plots.spread(values)
    assert edges == sorted(set(edges))
    counts = [sum(low <= value < high for value in values) for low, high in itertools.pairwise(edges)]
    assert sum(counts) == len(values)


def test_a_histogram_stacks_its_series():
    plot = plots.histogram("sizes", [0, 10, 20], {"train": [4, 0], "test": [1, 2]}, x_label="bytes")
    assert [bar.title for bar in plot.bars] == ["0 to 10, train: 4", "0 to 10, test: 1", "10 to 20, test: 2"]
    below, above = plot.bars[:2]
    assert above.y + above.height == pytest.approx(below.y, abs=0.1)
    assert below.height == pytest.approx(4 * above.height, rel=0.01)
    assert "most are between 0 and 10" in plot.description


def test_rows_stack_their_series_and_name_the_extremes():
    plot = plots.rows("classes", ["cat", "dog"], {"train": [3, 1], "test": [1, 0]}, x_label="samples")
    assert [bar.title for bar in plot.bars] == ["cat, train: 3", "cat, test: 1", "dog, train: 1"]
    assert plot.bars[1].x == pytest.approx(plot.bars[0].x + plot.bars[0].width, abs=0.1)
    assert plot.description == "Most: cat with 4; fewest: dog with 1."


def test_rows_of_nothing_are_a_plot():
    assert plots.rows("classes", [], {"train": []}, x_label="samples").bars == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (1200, "1,200"), (20_000, "20k"), (1.5e6, "1.5M"), (3e9, "3G"), (-5, "-5")],
)
def test_numbers_of_an_axis_are_short(value, text):
    assert plots.short(value) == text
