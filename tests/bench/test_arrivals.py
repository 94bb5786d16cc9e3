"""Arrivals have the rate and the variation that they promise, traces are read as they are written."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared

from cairn.bench import arrivals
from cairn.bench.arrival_traces import parse_azure, parse_mooncake, read_trace
from cairn.core.errors import DataError, UsageError

rates = st.floats(0.01, 1e4)


def gaps(moments):
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


@given(rates, st.integers(1, 200))
def test_constant_is_on_the_beat(rate, count):
    moments = arrivals.times("constant", rate, random.Random(0), count=count)
    assert moments == [number / rate for number in range(count)]


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_has_its_mean_and_its_variation(shape):
    moments = arrivals.times("gamma", 5.0, random.Random(1), shape=shape, count=20_000)
    between = gaps(moments)
    mean = statistics.fmean(between)
    assert mean == pytest.approx(1 / 5, rel=0.05)
    variation = statistics.stdev(between) / mean
    assert variation == pytest.approx(1 / math.sqrt(shape), rel=0.05)


def test_poisson_counts_vary_as_much_as_their_mean():
    moments = arrivals.times("poisson", 20.0, random.Random(2), duration_s=2000)
    counts = [0] * 2000
    for moment in moments:
        counts[int(moment)] += 1
    assert statistics.fmean(counts) == pytest.approx(20, rel=0.02)
    assert statistics.variance(counts) == pytest.approx(20, rel=0.1)


@given(
    st.sampled_from(["poisson", "constant", "gamma"]),
    st.floats(0.1, 50),
    st.integers(0, 50) | st.none(),
    st.floats(0.1, 10),
    st.integers(0, 9),
)
def test_times_are_in_order_within_both_ends_and_repeatable(kind, rate, count, duration_s, seed):
    def draw():
        return arrivals.times(
            kind, rate, random.Random(seed), shape=0.5, count=count, duration_s=duration_s
        )

    moments = draw()
    assert moments == sorted(moments) == draw()
    assert all(0 <= moment < duration_s for moment in moments)
    assert count is None or len(moments) <= count


def test_all_at_once():
    assert arrivals.times("poisson", math.inf, random.Random(0), count=3) == [0, 0, 0]


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_a_rate_that_is_none(rate):
    with pytest.raises(UsageError, match="rate is"):
        arrivals.times("poisson", rate, random.Random(0), count=1)


@pytest.mark.parametrize(
    "wrong", [dict(), dict(rate=math.inf, duration_s=3), dict(kind="gamma", shape=0.0, count=1)]
)
def test_what_has_no_end_or_no_shape(wrong):
    kind, rate = wrong.pop("kind", "poisson"), wrong.pop("rate", 1.0)
    with pytest.raises(UsageError):
        arrivals.times(kind, rate, random.Random(0), **wrong)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50).map(sorted), rates)
def test_at_another_rate_a_pattern_keeps_its_shape(moments, rate):
    fast = arrivals.at_rate(moments, rate)
    assert fast[0] == 0
    if moments[-1] > moments[0]:
        assert fast[-1] == pytest.approx((len(moments) - 1) / rate)
        whole = moments[-1] - moments[0]
        for before, after in zip(gaps(moments), gaps(fast), strict=True):
            assert after / fast[-1] == pytest.approx(before / whole, abs=1e-6)


def test_mooncake():
    lines = (
        '{"timestamp": 3000, "input_length": 513, "output_length": 0, "hash_ids": [7, 9]}\n\n'
        '{"timestamp": 5500, "input_length": 4, "output_length": 20}\n'
    )
    first, second = parse_mooncake(lines)
    assert (first.at_s, first.input_tokens, first.output_tokens, first.blocks) == (
        3,
        513,
        1,
        (7, 9),
    )
    assert (second.at_s, second.input_tokens, second.output_tokens, second.blocks) == (
        5.5,
        4,
        20,
        (),
    )


def test_azure():
    lines = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000000,374,44\n"
        "2023-11-17 00:00:01.2500000,396,109\n"
        "2023-11-17 00:00:02,1,2\n"
        "2023-11-17 00:00:02.500000+00:00,3,4\n"
        "2023-11-17 01:00:03+01:00,5,6\n"
    )
    found = list(parse_azure(lines))
    moments = [request.at_s - found[0].at_s for request in found]
    assert moments == pytest.approx([0, 1.75, 2.5, 3.0, 3.5])
    assert [(request.input_tokens, request.output_tokens) for request in found] == [
        (374, 44),
        (396, 109),
        (1, 2),
        (3, 4),
        (5, 6),
    ]


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"timestamp": 1}\n', "line 1"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\n{oops\n', "line 2"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "0 tokens in"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "1 blocks"),
        ("a,b\n1,2\n", "no column TIMESTAMP"),
        (HEADER + "yesterday,1,2\n", "line 2"),
        (HEADER + "2023-11-16 23:59:59.5,one,2\n", "line 2"),
        (HEADER + "2023-11-16 23:59:59.5\n", "line 2"),
        (HEADER, "no requests"),
        ("", "no column"),
    ],
)
def test_a_trace_that_is_none(tmp_path, text, says):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        read_trace(path)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("azure2023_conv.csv", 19_366),
        ("azure2023_code.csv", 8_819),
        ("mooncake_conversation.jsonl", 12_031),
    ],
)
def test_real_traces_are_read_to_the_last_line(name, requests):
    trace = read_trace(shared("data", "traces", name))
    assert len(trace) == requests
    assert trace[0].at_s == 0
    assert all(before.at_s <= after.at_s for before, after in itertools.pairwise(trace))
    assert 3400 < trace[-1].at_s < 3700  # an hour each
