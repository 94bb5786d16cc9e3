"""A plot is well-formed, holds all its data, and has round numbers on its axes."""

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.report.plot import HEIGHT, WIDTH, Series, chart, log_ticks, thin, ticks

values = st.floats(-1e9, 1e9).map(lambda value: 0.0 if abs(value) < 1e-6 else value)


@given(values, values)
def test_ticks_enclose_what_they_measure(one, other):
    low, high = min(one, other), max(one, other)
    marks = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-3)
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack
    assert 2 <= len(marks) <= 9
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert all(step == pytest.approx(steps[0], rel=1e-6) for step in steps)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_logarithmic_ticks_enclose_what_they_measure(one, other):
    low, high = min(one, other), max(one, other)
    marks = log_ticks(low, high)
    assert marks[0] <= low * (1 + 1e-6)
    assert marks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(marks) <= 9
    assert all(a < b for a, b in itertools.pairwise(marks))
    assert all(f"{mark:.3e}"[0] in "125" for mark in marks)


@pytest.mark.parametrize("limit", [None, ("l", 50.0), ("l", 0.0)])
def test_a_logarithmic_axis_gives_each_tenfold_the_same_room(limit):
    points = [(1.0, 1.0), (10.0, 10.0), (100.0, 100.0), (0.0, 5.0), (5.0, -1.0)]
    svg = chart("t", [Series("s", points)], x="x", y="y", log_x=True, log_y=True, limit=limit)
    circles = list(ET.fromstring(svg).iter("circle"))
    assert len(circles) == 3  # zero and below have no place
    for axis in ("cx", "cy"):
        places = [float(circle.get(axis)) for circle in circles]
        assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)


def test_values_that_are_nearly_one():
    marks = ticks(1e9, 1e9 + 2e-7)
    assert len(set(marks)) == len(marks) >= 2


@given(
    st.lists(st.tuples(values, values), max_size=20),
    st.sampled_from(["line", "steps", "dots"]),
    st.none() | st.tuples(st.text(st.characters(categories=["L", "P"])), st.floats(0, 1e6)),
)
def test_every_mark_is_on_the_paper(points, kind, limit):
    figure = ET.fromstring(chart("a & b", [Series("<s>", points, kind)], x="x", y="y", limit=limit))
    for circle in figure.iter("circle"):
        assert -1 <= float(circle.get("cx")) <= WIDTH + 1
        assert -1 <= float(circle.get("cy")) <= HEIGHT + 1
    if kind == "dots":
        assert len(list(figure.iter("circle"))) == len(points)


def test_it_says_what_it_shows():
    svg = chart("TTFT", [Series("p50", [(1, 2)]), Series("p99", [(1, 9)])], x="req/s", y="ms")
    figure = ET.fromstring(svg)
    assert figure.find("svg").get("aria-label") == "TTFT: p50, p99 (ms) over req/s"
    assert "p99: 1, 9" in [title.text for title in figure.iter("title")]


def test_what_is_no_number_is_left_out():
    points = [(1.0, math.nan), (math.inf, 1.0), (2.0, 3.0)]
    figure = ET.fromstring(chart("t", [Series("s", points, "dots")], x="x", y="y"))
    assert len(list(figure.iter("circle"))) == 1


@given(st.integers(0, 5000), st.integers(2, 300))
def test_thinned_it_keeps_both_ends(count, most):
    points = [(float(number), 0.0) for number in range(count)]
    kept = thin(points, most)
    assert len(kept) <= max(most, 2)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
