"""The closed forms are what the proofs count; fits find the constants; the choice is the cheapest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.comm.cost import CLOSED, LinkCost, choose, fit, shape_of
from cairn.comm.nccl_tests import SweepPoint
from cairn.comm.published import ALL_REDUCE
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import verify_all
from cairn.core.errors import ConfigError

PAIRS = [(collective, name) for collective, table in CLOSED.items() for name in table]
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 40]
NVLINK, NETWORK = LinkCost(alpha_us=2.0, gb_per_s=360.0), LinkCost(alpha_us=10.0, gb_per_s=40.0)


@pytest.mark.parametrize(("collective", "name"), PAIRS)
def test_the_closed_form_is_what_the_proof_counts(collective, name):
    for n, proof in zip(SIZES, verify_all([make(collective, name, n) for n in SIZES]), strict=True):
        shape = shape_of(collective, name, n)
        assert (n, shape.steps, shape.traffic) == (n, proof.steps, pytest.approx(proof.traffic))


def test_small_messages_take_few_steps_and_large_ones_few_bytes():
    together = [row.name for row in choose("all_reduce", 8, 1 << 10, NVLINK, "together")]
    assert together[0] == "one_shot"
    assert choose("all_reduce", 8, 64 << 20, NVLINK, "together")[0].name == "two_shot"
    assert choose("all_reduce", 1024, 1 << 10, NETWORK)[0].steps == 20  # logarithmic, not 2046
    assert choose("all_to_all", 64, 1 << 10, NETWORK)[0].name == "bruck"
    assert choose("all_to_all", 64, 1 << 30, NETWORK)[0].name == "pairwise"


@given(
    ranks=st.integers(2, 100_000),
    size=st.integers(1, 1 << 34),
    alpha=st.floats(0, 100),
    rate=st.floats(0.1, 1000),
)
def test_no_estimate_is_below_the_physical_bound(ranks, size, alpha, rate):
    link = LinkCost(alpha_us=alpha, gb_per_s=rate)
    rows = choose("all_reduce", ranks, size, link)
    assert [row.us for row in rows] == sorted(row.us for row in rows)
    floor = 2 * (ranks - 1) / ranks * size / (1e3 * rate)
    assert rows[0].us >= floor * (1 - 1e-9)
    assert f"{rows[0].steps:g} waits" in rows[0].why


@given(
    latency=st.floats(1, 500),
    ramp=st.floats(0, 30),
    rate=st.floats(0.1, 900),
)
def test_a_fit_finds_the_constants_that_made_the_points(latency, ramp, rate):
    sizes = [1 << power for power in range(10, 35, 2)]
    points = [
        SweepPoint(s, latency + ramp * np.sqrt(s / (1 << 20)) + s / (1e3 * rate)) for s in sizes
    ]
    found = fit(points)
    assert found.max_error < 1e-3
    assert found.gb_per_s == pytest.approx(rate, rel=0.02)
    assert found.half_bytes == pytest.approx(found.latency_us * 1e3 * found.gb_per_s)


@pytest.mark.parametrize("sweep", ALL_REDUCE, ids=lambda sweep: sweep.name)
def test_three_constants_describe_every_published_sweep(sweep):
    """Each point is predicted from the others."""
    held = [
        abs(fit([p for p in sweep.points if p is not point]).us(point.bytes) / point.us - 1)
        for point in sweep.points
    ]
    assert np.median(held) <= 0.10


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([SweepPoint(1, 1.0), SweepPoint(2, 1.0)], "cannot fix three constants"),
        ([SweepPoint(1, 1.0), SweepPoint(2, 0.0), SweepPoint(3, 1.0)], "not positive"),
        (
            [SweepPoint(1 << 10, 9.0), SweepPoint(1 << 20, 9.0), SweepPoint(1 << 30, 1e-9)],
            "do not grow|median",
        ),
    ],
)
def test_measurements_that_say_nothing_are_refused(points, message):
    if points[-1].us < 1e-6:
        assert fit(points).max_error > 0.5  # it can be fitted, badly, and says so
        return
    with pytest.raises(ConfigError, match=message):
        fit(points)


def test_what_has_no_closed_form_is_named():
    with pytest.raises(ConfigError, match="no closed form for all_reduce/tree"):
        shape_of("all_reduce", "tree", 8)
    with pytest.raises(ConfigError, match="-1 bytes"):
        choose("all_reduce", 8, -1, NVLINK)
