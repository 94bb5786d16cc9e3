"""The failures of many GPUs: the published figures, the closed form against a Monte Carlo, and the formulas' limits."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cluster.reliability import (
    RATES,
    SCHEMES,
    RecoveryScheme,
    best_interval,
    daly,
    ettr,
    linear_ettr,
    mttf,
    outlook,
    peer_recovery,
    young,
)
from cairn.cluster.reliability_monte_carlo import live
from cairn.cluster.reliability_published import LLAMA3_UNEXPECTED, checks, expected_interruptions
from cairn.core.errors import ConfigError


def test_metas_mean_times_to_failure():
    assert mttf(16_384, RATES["rsc-1"]) / 3600 == pytest.approx(1.8, rel=0.01)
    assert mttf(131_072, RATES["rsc-1"]) / 3600 == pytest.approx(0.23, rel=0.03)


def test_llama_3_interruptions():
    assert sum(LLAMA3_UNEXPECTED.values()) == 419
    assert sum(expected_interruptions(16_384, 54).values()) == pytest.approx(419)
    assert mttf(16_384, RATES["llama-3"]) / 3600 == pytest.approx(3.09, abs=0.01)
    rows = {row.what: row for row in checks()}
    assert abs(rows["Llama 3, unexpected interruptions in 54 days"].error) < 1e-9


def test_metas_ettr_figures():
    """16,000 GPUs, 5 minutes to restart: 0.7 with hourly checkpoints, 0.93 with one every 5 minutes."""
    mean = mttf(16_000, RATES["rsc-1"])
    assert linear_ettr(3600, 0, 300, mean) == pytest.approx(0.68, abs=0.01)
    assert linear_ettr(300, 0, 300, mean) == pytest.approx(0.93, abs=0.01)


# w, u0, GPUs, rate -> ETTR, computed apart from this code (research notes of the project)
@pytest.mark.parametrize(
    ("gpus", "rate", "expected"),
    [
        (8_192, "rsc-1", (0.866, 0.950, 0.983, 0.994)),
        (16_384, "llama-3", (0.853, 0.945, 0.981, 0.993)),
        (65_536, "rsc-1", (0.520, 0.768, 0.930, 0.978)),
        (100_000, "rsc-1", (0.398, 0.683, 0.905, 0.972)),
        (100_000, "rsc-2", (0.663, 0.852, 0.955, 0.985)),
    ],
)
def test_ettr_by_scheme(gpus, rate, expected):
    found = [outlook(gpus, scheme, RATES[rate]).ettr for scheme in SCHEMES.values()]
    assert found == pytest.approx(expected, abs=0.0015)


@pytest.mark.parametrize("gpus", [1_024, 16_384, 100_000, 131_072])
@pytest.mark.parametrize("name", list(SCHEMES))
def test_closed_form_is_the_monte_carlo(gpus, name):
    scheme = SCHEMES[name]
    found = outlook(gpus, scheme, RATES["rsc-1"])
    lived = live(found.mttf, scheme, found.interval, failures=400_000)
    assert lived.ettr == pytest.approx(found.ettr, rel=0.01)
    for cause, share in found.lost.items():
        assert lived.shares[cause] == pytest.approx(share, abs=0.004)


@pytest.mark.parametrize(("write", "interval"), [(0.0, 0.0), (0.0, 600.0), (60.0, 1e9)])
def test_and_so_are_its_limits(write, interval):
    """Checkpoints that cost nothing, and none at all."""
    scheme = RecoveryScheme(name="x", about="", write=write, detect=300, restart=300)
    found = outlook(16_384, scheme, RATES["rsc-1"], interval=interval or None)
    lived = live(found.mttf, scheme, found.interval)
    assert lived.ettr == pytest.approx(found.ettr, abs=0.004)
    for cause, share in found.lost.items():
        assert lived.shares[cause] == pytest.approx(share, abs=0.004)


@settings(max_examples=100, deadline=None)
@given(
    st.just(0.0) | st.floats(0.1, 300),
    st.floats(0, 900),
    st.floats(0, 900),
    st.integers(8, 200_000),
)
def test_shares_add_up_and_no_interval_is_better_than_the_best(write, detect, restart, gpus):
    scheme = RecoveryScheme(name="x", about="", write=write, detect=detect, restart=restart)
    found = outlook(gpus, scheme, 0.0065)
    assert found.ettr + sum(found.lost.values()) == pytest.approx(1.0, abs=1e-6)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert ettr(found.interval * factor, write, scheme.outage, found.mttf) <= found.ettr + 1e-12


def test_young_and_daly_are_its_limits():
    mean = 1e6
    assert young(10, mean) == pytest.approx(best_interval(10, mean), rel=0.01)
    assert daly(10, mean) == pytest.approx(best_interval(10, mean), rel=1e-4)
    assert daly(10, 4.0) == 4.0


def test_bursts_of_failures_cost_less_than_the_same_number_spread_out():
    scheme = SCHEMES["sync"]
    even, bursts = (live(6000.0, scheme, 800.0, shape=shape).ettr for shape in (1.0, 0.6))
    assert bursts > even + 0.02


def test_peer_memory_by_brute_force():
    nodes, replicas = 8, 2
    for lost in range(5):
        alive = sum(
            not any(set(range(g, g + replicas)) <= set(gone) for g in range(0, nodes, replicas))
            for gone in itertools.combinations(range(nodes), lost)
        )
        assert peer_recovery(nodes, replicas, lost) == pytest.approx(alive / math.comb(nodes, lost))
    assert peer_recovery(16, 2, 2) == pytest.approx(0.933, abs=0.001)  # Gemini's own example


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": 0}, "0 GPUs"),
        ({"per_node_day": 0.0}, "failures of a node"),
        ({"per_node_day": math.inf}, "failures of a node"),
        ({"interval": 0.0}, "every 0.0 s"),
        (
            {"scheme": RecoveryScheme(name="x", about="", write=-1, detect=0, restart=0)},
            "write is -1",
        ),
    ],
)
def test_nonsense_is_refused(change, says):
    given_ = {"gpus": 8, "scheme": SCHEMES["sync"], "per_node_day": 0.01} | change
    with pytest.raises(ConfigError, match=says):
        outlook(**given_)
