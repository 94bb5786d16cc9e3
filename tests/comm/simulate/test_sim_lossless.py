"""Pause frames spread a jam and deadlock where links wait in a circle; deadlines are kept where they can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.comm.simulate.deadlines import POLICIES, Now, TransferJob, run_jobs
from cairn.comm.simulate.lossless import Switching, can_deadlock, circle, incast, run_lossless
from cairn.core.errors import ConfigError


def test_an_incast_stops_a_bystander_that_only_shares_a_link():
    story = incast(8, 4e6)
    alone = 4e6 / 50e3
    assert story.finish_us[:-1] == pytest.approx(8 * alone, rel=0.05)
    assert story.finish_us[-1] > 5 * alone
    assert story.paused_us[0] > 0
    assert story.deadlock == ()
    assert incast(1, 4e6).finish_us[-1] < 2.2 * alone  # no crowd, no jam


@pytest.mark.parametrize(("n", "hops"), [(4, 3), (6, 3)])
def test_links_that_wait_in_a_circle_never_go_on(n, hops):
    paths, story = circle(n, 8e6, hops=hops)
    assert sorted(story.deadlock) == list(range(n))
    assert np.isinf(story.finish_us).all()
    assert sorted(can_deadlock(paths)) == list(range(n))


@settings(max_examples=15, deadline=None)
@given(flows=st.integers(1, 12), seed=st.integers(0, 999))
def test_up_and_down_a_tree_nothing_deadlocks_and_no_link_is_too_fast(flows, seed):
    """Two leaves, one spine: hosts 0..7 up, 8..15 down, leaves up 16 17, down 18 19."""
    dice = np.random.default_rng(seed)
    pairs = [dice.choice(8, 2, replace=False) for _ in range(flows)]
    paths = np.array(
        [
            [a, 16 + a // 4, 18 + b // 4, 8 + b] if a // 4 != b // 4 else [a, -1, -1, 8 + b]
            for a, b in pairs
        ]
    )
    size, rate = np.full(flows, 1e6), np.full(20, 50.0)
    story = run_lossless(paths, size, rate)
    assert story.deadlock == ()
    assert can_deadlock(paths) == ()
    for link in range(20):
        load = sum(1e6 for path in paths if link in path)
        assert story.us >= load / 50e3 * (1 - 1e-6)


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="has no "):
        circle(4, 1e6, switching=Switching(tick_us=50.0))
    with pytest.raises(ConfigError, match="pause at"):
        incast(4, 1e6, switching=Switching(pause=0.2, resume=0.5))
    with pytest.raises(ConfigError, match="0 senders"):
        incast(0, 1e6)


def test_fair_sharing_is_late_where_deadlines_could_be_kept():
    jobs = [
        TransferJob(name="tight", links=(0,), bytes=30e6, compute_us=1000.0, steps=40),
        TransferJob(name="large", links=(0,), bytes=60e6, compute_us=8000.0, steps=5),
        TransferJob(name="small", links=(0,), bytes=10e6, compute_us=4000.0, steps=10),
    ]
    fair, timely = (run_jobs(jobs, np.array([50.0]), policy) for policy in ("fair", "deadline"))
    assert sum(fate.missed for fate in fair) > 0
    assert sum(fate.missed for fate in timely) == 0
    assert [fate.mean_step_us for fate in timely] == pytest.approx([1000, 8000, 4000])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_can_be_in_time_is_in_time(data):
    """On one link: if all needs together fit, none is late."""
    count = data.draw(st.integers(1, 6))
    shares = np.array([data.draw(st.floats(0.05, 1.0)) for _ in range(count)])
    shares = 0.99 * shares / shares.sum()
    jobs = [
        TransferJob(
            name=str(i), links=(0,), bytes=shares[i] * 50e3 * length, compute_us=length, steps=3
        )
        for i in range(count)
        for length in [data.draw(st.floats(100, 5000))]
    ]
    fates = run_jobs(jobs, np.array([50.0]), "deadline")
    assert sum(fate.missed for fate in fates) == 0
    for policy in POLICIES:
        for fate in run_jobs(jobs, np.array([50.0]), policy):
            assert fate.mean_step_us >= fate.ideal_step_us * (1 - 1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 9999), policy=st.sampled_from(list(POLICIES)))
def test_no_policy_gives_more_than_a_link_has(seed, policy):
    dice = np.random.default_rng(seed)
    flows, count = int(dice.integers(1, 8)), int(dice.integers(1, 5))
    paths = np.array([[*dice.choice(count, 1), -1] for _ in range(flows)])
    now = Now(
        paths,
        dice.random(flows) * 1e6 + 1,
        dice.uniform(-100, 1000, flows),
        dice.random(count) * 50 + 1,
    )
    rate = POLICIES[policy](now)
    load = np.bincount(paths[:, 0], weights=rate, minlength=count)
    assert (load <= now.gb_per_s * (1 + 1e-6)).all()
    assert (rate >= 0).all()


def test_jobs_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="unknown policy"):
        run_jobs(
            [TransferJob(name="a", links=(0,), bytes=1, compute_us=1)], np.array([1.0]), "greedy"
        )
    with pytest.raises(ConfigError, match="uses links"):
        run_jobs([TransferJob(name="a", links=(3,), bytes=1, compute_us=1)], np.array([1.0]))
    with pytest.raises(ConfigError, match="job 'a'"):
        run_jobs([TransferJob(name="a", links=(0,), bytes=0, compute_us=1)], np.array([1.0]))
