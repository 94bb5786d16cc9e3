"""Schedules as functions: bounds, warm-up, where they end, and that they do not jump."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.train.config import Schedule
from cairn.train.lr_schedule import rate

KINDS = ["cosine", "wsd", "linear", "inverse_sqrt", "constant"]
schedules = st.builds(
    Schedule,
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 50),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)


@given(schedule=schedules, steps=st.integers(1, 500))
def test_a_rate_is_a_share_and_warms_up_evenly(schedule, steps):
    rates = [rate(schedule, step, steps) for step in range(steps)]
    assert all(0 <= value <= 1 for value in rates)
    warm = rates[: min(schedule.warmup, steps)]
    assert all(later > earlier for earlier, later in itertools.pairwise(warm))
    after = rates[schedule.warmup :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))


@given(schedule=schedules, steps=st.integers(60, 500))
def test_where_a_run_ends(schedule, steps):
    last = rate(schedule, steps - 1, steps)
    if schedule.kind in ("cosine", "linear") or (
        schedule.kind == "wsd" and schedule.decay * steps >= 2
    ):
        assert last == pytest.approx(schedule.final, abs=1e-9)
    if schedule.kind == "inverse_sqrt" and schedule.warmup:
        assert last == pytest.approx(math.sqrt(schedule.warmup / (steps - 1)))


@given(steps=st.integers(10, 1000), decay=st.floats(0.05, 0.9))
def test_wsd_is_flat_until_it_falls(steps, decay):
    schedule = Schedule(kind="wsd", decay=decay, final=0.0)
    flat = steps - round(decay * steps)
    assert all(rate(schedule, step, steps) == 1.0 for step in range(flat))
    assert rate(schedule, steps - 1, steps) == pytest.approx(
        0.0 if steps - 1 > flat else 1.0, abs=1e-9
    )


def test_half_way_through_a_cosine():
    assert rate(Schedule(kind="cosine", final=0.2), 50, 101) == pytest.approx(0.6)
