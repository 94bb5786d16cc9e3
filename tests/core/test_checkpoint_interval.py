"""The interval that wastes least: held against a search over all intervals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.checkpoint_interval import between_failures, daly, every_steps, young


def wasted(interval: float, cost: float, between: float) -> float:
    """Expected wall time for one second of work; exponential failures, no restart time (exact renewal)."""
    return between * (math.exp((interval + cost) / between) - 1) / interval


@given(st.floats(0.01, 600), st.floats(60, 1e6))
def test_daly_is_as_good_as_the_best(cost, between):
    """Beside the best of a fine search: never more than 1% worse, wherever a checkpoint costs less than M."""
    if cost > between:
        return
    tried = [daly(cost, between) * 1.02**k for k in range(-150, 150)]
    best = min(wasted(t, cost, between) for t in tried)
    assert wasted(daly(cost, between), cost, between) <= best * 1.01


def test_published_figures():
    """1.80 h between failures: 14.0 min at 60 s, 4.2 at 5 s, 1.9 at 1 s."""
    between = 1.80 * 3600
    found = [daly(w, between) / 60 for w in (60, 5, 1)]
    assert found == pytest.approx([14.0, 4.2, 1.9], abs=0.06)
    assert young(60, between) / 60 == pytest.approx(14.7, abs=0.05)


def test_a_checkpoint_that_costs_more_than_it_saves():
    assert daly(100, 10) == 10
    assert every_steps(0.0, 0.0, 0, 0) == 1
    assert every_steps(1.0, 0.1, 0, 0) > every_steps(1.0, 0.1, 50, 3600)
    assert between_failures(0, 0) == 86_400
