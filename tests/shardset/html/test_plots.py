"""Plots: everything is inside the frame, and says what it shows."""

import itertools
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.html import page, plots

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))
ANY_NUMBERS = NUMBERS | st.floats() | st.sampled_from([5e-324, 1e-310, 1e-13, 1e89, 1e308])
PARTS: Any = page.template_of("shardset.html", "parts.html").module
POINTS = st.lists(st.tuples(st.integers(0, 10_000), ANY_NUMBERS), min_size=1, max_size=40)


def points_of(plot):
    """The points of the curves, in the units of the drawing."""
    found = re.findall(r'<polyline class="s\d" points="([^"]*)"', PARTS.plot(plot, "id"))
    return [tuple(map(float, point.split(","))) for points in found for point in points.split()]


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


@given(POINTS)
def test_curves_stay_inside_their_frame(points):
    found = points_of(plots.curves("curve", {"a": sorted(points)}, x_label="step"))
    assert len(found) == sum(abs(value) < 1e90 for _, value in points)
    for x, y in found:
        assert 52 <= x <= 366
        assert 14 <= y <= 200


def test_the_points_of_a_curve_have_their_places_and_dots_and_what_is_no_number_has_none():
    values = [(0, 10.0), (1, math.nan), (2, math.inf), (4, 30.0)]
    plot = plots.curves("curve", {"a<b": values}, x_label="step")
    assert points_of(plot) == [(52, 200), (366, 14)]
    text = PARTS.plot(plot, "id")
    assert text.count("<circle") == 2
    assert "<title>a&lt;b at 4: 30</title>" in text
    many = plots.curves("curve", {"a": [(x, float(x)) for x in range(40)]}, x_label="step")
    assert PARTS.plot(many, "id").count("<circle") == 1
    assert plots.curves("curve", {"a": []}, x_label="step").description == "No values."


@given(
    st.lists(st.tuples(st.integers(0, 99), NUMBERS), min_size=2, max_size=200), st.integers(2, 50)
)
def test_thinned_points_are_few_and_end_where_the_points_do(points, most):
    found = plots.thinned(points, most)
    assert len(found) <= most or len(found) == len(points) <= most
    assert found[-1] == points[-1]
    means = plots.thinned([(0, 0.0), (1, 2.0), (2, 4.0), (3, 6.0), (4, 9.0)], 3)
    assert means == [(0.5, 1.0), (2.5, 5.0), (4, 9.0)]


def test_numbers_of_an_axis_are_short():
    plot = plots.Plot("", "", "", 0, 1, [0, 0.25, 1200, 1.5e6, 1e-5, -5], [0, 1], {})
    texts = re.findall(r'text-anchor="middle">([^<]+)', PARTS.plot(plot, "id"))
    assert texts == ["0", "0.25", "1,200", "1,500,000", "1e-05", "-5"]
