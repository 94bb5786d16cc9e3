"""Confidence intervals against known values and against the coverage that they promise."""

import math
import random

import numpy as np
import pytest

from cairn.eval.intervals import exponential, ratio, share, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),  # from the published tables of the method
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_gives_the_published_values(right, n, low, high):
    assert wilson(right / n, n) == pytest.approx((low, high), abs=1e-4)


def test_a_share_has_the_standard_error_of_lm_eval():
    outcomes = [1.0, 0.0, 0.0, 1.0, 1.0]
    metric = share(outcomes)
    assert metric.value == 0.6
    assert metric.stderr == pytest.approx(np.std(outcomes, ddof=1) / math.sqrt(5))
    assert metric.low < 0.6 < metric.high


def test_what_is_shown_says_no_more_than_is_known():
    assert share([1, 0, 1, 1]).interval().endswith("(wilson)")
    alone = ratio([80.0], [2.0])
    assert (alone.shown(), alone.interval()) == ("40.0000", "")
    assert exponential(alone).shown() == f"{math.exp(40):.4g}"


def test_wilson_covers_the_truth_as_often_as_it_says():
    dice, held = random.Random(0), 0
    for _ in range(2000):
        outcomes = [float(dice.random() < 0.1) for _ in range(30)]
        metric = share(outcomes)
        held += metric.low <= 0.1 <= metric.high
    assert 0.92 < held / 2000 < 0.99


def test_a_ratio_is_that_of_the_sums_and_its_interval_covers_it():
    generator = np.random.default_rng(1)
    held = 0
    for draw in range(200):
        below = generator.integers(5, 50, 40).astype(float)
        above = below * generator.normal(2.0, 0.5, 40)
        metric = ratio(above, below, seed=draw)
        assert metric.value == pytest.approx(above.sum() / below.sum())
        held += metric.low <= 2.0 <= metric.high
    assert 0.85 < held / 200 <= 0.99
    assert ratio(above, below, seed=3) == ratio(above, below, seed=3)


def test_an_empty_document_changes_nothing():
    assert ratio([6.0, 0.0, 8.0], [2.0, 0.0, 2.0]) == ratio([6.0, 8.0], [2.0, 2.0])


def test_one_value_has_no_interval_and_a_perplexity_may_be_infinite():
    single = ratio([6.0], [2.0])
    assert (single.low, single.value, single.high, single.method) == (3.0, 3.0, 3.0, "none")
    assert exponential(single).value == pytest.approx(math.e**3)
    assert exponential(ratio([8000.0], [2.0])).value == math.inf
