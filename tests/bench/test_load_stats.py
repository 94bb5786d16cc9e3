"""The figures against brute force and against what is known of a distribution; nothing here depends on a clock."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.bench import load_stats
from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_stats import LatencySlo, TimeWindow

numbers = st.floats(-1e6, 1e6)
some = st.lists(numbers, min_size=1, max_size=60)


def record(due=0.0, end=1.0, chunks=(), tokens=None, error=None):
    chunks = list(chunks)
    return RequestRecord(
        due_s=due,
        sent_s=due,
        end_s=end,
        chunk_s=chunks,
        error=error,
        first_s=chunks[0] if chunks else None,
        last_s=chunks[-1] if chunks else None,
        output_tokens=len(chunks) if tokens is None else tokens,
    )


@st.composite
def record_lists(draw):
    made = []
    for _ in range(draw(st.integers(1, 25))):
        due = draw(st.floats(0, 50))
        gaps = draw(st.lists(st.floats(0, 2), max_size=6))
        chunks = np.cumsum([due, *gaps])[1:].tolist()
        end = (chunks[-1] if chunks else due) + draw(st.floats(0.001, 1))
        error = draw(st.sampled_from([None, None, "timeout", "http 503"]))
        made.append(record(due, end, chunks, error=error))
    return made


def percentile_by_hand(values, q):
    """Between the two neighbours, in proportion."""
    ordered = sorted(values)
    place = q / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@given(some)
def test_a_spread_is_what_one_would_count_by_hand(values):
    found = load_stats.spread(values)
    assert found is not None
    assert found.count == len(values)
    near = dict(rel=1e-9, abs=1e-6)
    assert found.mean == pytest.approx(statistics.fmean(values), **near)
    assert found.largest == max(values)
    for q, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(percentile_by_hand(values, q), **near)


@given(some)
def test_intervals_lie_within_the_values_and_are_repeatable(values):
    found = load_stats.spread(values)
    assert found == load_stats.spread(values)
    for low, high in (found.mean_ci, found.p50_ci, found.p90_ci, found.p99_ci):
        assert min(values) - 1e-6 <= low <= high <= max(values) + 1e-6


def test_nothing_has_no_spread():
    assert load_stats.spread([]) is None


def test_the_bootstrap_holds_the_truth_as_often_as_it_says():
    """95% of intervals for the mean of exponential gaps hold it; of 200 such intervals, that is 178 or more."""
    generator = random.Random(3)
    holds = 0
    for seed in range(200):
        sample = np.array([generator.expovariate(1.0) for _ in range(150)])
        means = load_stats.block_bootstrap(sample, lambda rows: rows.mean(axis=1)[None], seed)
        low, high = np.percentile(means, [2.5, 97.5])
        holds += low <= 1.0 <= high
    assert holds >= 178


def test_neighbours_that_resemble_each_other_widen_the_interval():
    """For an autoregressive series the plain bootstrap is far too sure of itself; blocks know better."""
    generator = random.Random(5)
    series, level = [], 0.0
    for _ in range(3000):
        level = 0.9 * level + generator.gauss(0, 1)
        series.append(level)
    values = np.array(series)

    def width(block):
        means = load_stats.block_bootstrap(
            values, lambda rows: rows.mean(axis=1)[None], 0, block=block
        )
        return float(means.std())

    assert width(None) > 2 * width(1)
    assert width(1) == pytest.approx(values.std() / math.sqrt(len(values)), rel=0.15)


@given(st.integers(1, 80), st.integers(1, 20), st.integers(0, 5))
def test_each_resample_is_made_of_runs_of_neighbours(n, block, seed):
    seen = []
    load_stats.block_bootstrap(
        np.arange(n), lambda rows: (seen.append(rows), rows.mean(axis=1)[None])[1], seed, 10, block
    )
    for row in np.concatenate(seen):
        assert len(row) == n
        for begin in range(0, n, block):
            run = row[begin : begin + block]
            assert [int(value) for value in run] == [(int(run[0]) + i) % n for i in range(len(run))]


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (10, 2.262), (31, 2.042), (10_000, 1.96)])
def test_students_t(count, t):
    values = [1.0, 3.0] * (count // 2) + [2.0] * (count % 2)
    low, high = load_stats.t_interval(values)
    assert (low + high) / 2 == pytest.approx(2)
    half = t * statistics.stdev(values) / math.sqrt(count)
    assert (high - low) / 2 == pytest.approx(half, rel=1e-3)
    assert load_stats.t_interval([1.0]) is None


def test_a_warm_up_is_found_and_a_steady_run_keeps_everything():
    generator = random.Random(0)
    slow = [10 - 0.2 * number for number in range(40)]
    calm = [generator.gauss(1, 0.2) for _ in range(200)]
    assert 30 <= load_stats.warmup_length(slow + calm) <= 50
    assert load_stats.warmup_length([1.0] * 200) == 0
    assert load_stats.warmup_length(slow[:15]) == 0  # too few to say


@given(st.lists(st.floats(0, 1e3), max_size=200))
def test_at_most_half_is_taken_for_warm_up(values):
    cut = load_stats.warmup_length(values)
    assert cut % 5 == 0
    assert cut <= len(values) / 2


@given(record_lists())
def test_in_flight_is_what_one_counts_at_each_moment(records):
    for moment, level in load_stats.in_flight(records):
        assert level == sum(r.due_s <= moment < r.end_s for r in records)


@given(record_lists(), st.floats(0.01, 3), st.floats(0.01, 1))
def test_goodput_by_hand(records, ttft_s, tpot_s):
    slo = LatencySlo(ttft_s=ttft_s, tpot_s=tpot_s)
    by_hand = 0
    for one in records:
        if one.error is None:
            first = not one.chunk_s or one.chunk_s[0] - one.due_s <= ttft_s
            gaps = len(one.chunk_s) - 1
            rest = gaps < 1 or (one.chunk_s[-1] - one.chunk_s[0]) / gaps <= tpot_s
            by_hand += first and rest
    assert sum(load_stats.is_good(one, slo) for one in records) == by_hand
    answered = sum(one.error is None for one in records)
    assert sum(load_stats.is_good(one, LatencySlo()) for one in records) == answered


@given(record_lists())
def test_errors_and_tokens_add_up(records):
    assert sum(load_stats.errors(records).values()) == sum(r.error is not None for r in records)
    moments, weights = load_stats.token_times(records)
    assert weights.sum() == pytest.approx(sum(r.output_tokens for r in records if r.chunk_s))
    window = load_stats.whole_window(records)
    rate, _ = load_stats.rate_within(moments, weights, window)
    assert rate * window.seconds == pytest.approx(weights.sum())


@given(record_lists())
def test_the_steady_window_lies_in_the_whole(records):
    whole, steady = load_stats.whole_window(records), load_stats.steady_window(records)
    assert whole.begin_s <= steady.begin_s < steady.end_s <= whole.end_s


def test_an_even_rate_is_known_for_sure():
    moments = np.arange(0.05, 10, 0.1)
    rate, interval = load_stats.rate_within(moments, np.full(100, 2.0), TimeWindow(0, 10))
    assert rate == pytest.approx(20)
    assert interval == pytest.approx((20, 20))
    assert load_stats.rate_within(moments, moments, TimeWindow(3, 3)) == (0.0, None)
