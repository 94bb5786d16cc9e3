"""The search for the highest rate: right for every threshold, frugal, and honest when there is nothing to find."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.bench.load_search import MOST_STEPS, Tried, bracket, next_rate, verdict
from cairn.core.errors import UsageError


def search(threshold, low, high=None, resolution=0.05):
    """A server that holds everything up to `threshold`."""
    tried = []
    while (rate := next_rate(tried, low, high, resolution)) is not None:
        assert len(tried) < 100
        tried.append(Tried(rate, rate <= threshold))
    return tried


@given(
    low=st.floats(0.1, 100),
    span=st.floats(1.5, 50),
    place=st.floats(0, 1),
    resolution=st.floats(0.02, 0.5),
)
def test_between_two_bounds_it_ends_beside_the_threshold(low, span, place, resolution):
    high = low * span
    threshold = low * span**place
    tried = search(threshold, low, high, resolution)
    best, worst = bracket(tried)
    rates = [one.rate for one in tried]
    assert len(set(rates)) == len(rates)  # nothing is measured twice
    assert all(low <= rate <= high for rate in rates)
    assert best is not None
    assert best <= threshold
    if worst is None:
        assert threshold >= high
        return
    assert threshold < worst
    # Rates are rounded to three digits, which no resolution below that can beat.
    assert worst <= best * (1 + resolution) or worst - best <= 2.1 * 10 ** (
        math.floor(math.log10(worst)) - 2
    )
    assert len(tried) <= 2 + math.ceil(math.log2(math.log(span) / math.log(1 + resolution)) + 1) + 2


@given(start=st.floats(0.5, 50), times=st.floats(0.07, 200))
def test_from_one_guess_it_finds_both_sides(start, times):
    threshold = start * times
    best, worst = bracket(search(threshold, start))
    assert best is not None
    assert worst is not None
    assert best <= threshold < worst <= best * 1.06


def test_nothing_holds():
    assert [one.rate for one in search(0.0, 5.0, 10.0)] == [5.0]  # a bound is a bound
    guesses = [one.rate for one in search(0.0, 16.0)]
    assert guesses == [16.0, 8.0, 4.0, 2.0, 1.0]
    assert verdict(search(0.0, 5.0, 10.0)) == "no rate was found that holds; 5/s is broken"


def test_everything_holds():
    assert [one.rate for one in search(math.inf, 5.0, 10.0)] == [5.0, 10.0]
    assert len(search(math.inf, 1.0)) == MOST_STEPS
    assert "10/s holds, and no rate was found that does not" in verdict(search(1e9, 5.0, 10.0))


def test_of_verdicts_that_contradict_each_other_the_lower_broken_one_counts():
    tried = [Tried(5, True), Tried(8, False), Tried(10, True)]
    assert bracket(tried) == (5, 8)
    assert 5 < next_rate(tried, 5, 10) < 8
    assert verdict(tried) == "the highest rate that holds is 5/s; 8/s is broken"


@pytest.mark.parametrize(
    ("low", "high", "resolution"),
    [
        (0, None, 0.1),
        (5, 5, 0.1),
        (5, 4, 0.1),
        (5, math.inf, 0.1),
        (math.nan, None, 0.1),
        (1, 2, 0),
    ],
)
def test_bounds_that_make_no_sense(low, high, resolution):
    with pytest.raises(UsageError):
        next_rate([], low, high, resolution)
