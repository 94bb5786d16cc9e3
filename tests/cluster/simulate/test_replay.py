"""What holds for every policy on every trace: no GPU twice, gangs whole, no work lost or made up, everyone answered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
from cairn.cluster.simulate.policies import POLICIES
from cairn.cluster.simulate.replay import ReplaySettings, replay
from cairn.cluster.simulate.traces import synthetic


@st.composite
def traces(draw, shared=True):
    cluster = SimulatedCluster(
        nodes=draw(st.integers(1, 5)), gpus=draw(st.sampled_from([1, 2, 4])), rack=2
    )
    jobs = []
    for number in range(draw(st.integers(1, 14))):
        gpus = draw(st.integers(1, cluster.total + 1))
        milli = draw(st.sampled_from([300, 500, 1000])) if shared and gpus == 1 else 1000
        duration = draw(st.integers(1, 2000))
        submit = draw(st.integers(0, 3000))
        jobs.append(
            SimulatedJob(
                id=number,
                submit=submit,
                duration=duration,
                gpus=gpus,
                milli=milli,
                limit=duration * draw(st.sampled_from([0.5, 1, 3])),
                user=draw(st.sampled_from("abc")),
                priority=draw(st.integers(0, 2)),
                least=draw(st.integers(0, gpus)) if milli == 1000 else 0,
                deadline=draw(st.sampled_from([None, submit + 2 * duration, submit + 9000])),
            )
        )
    return cluster, jobs


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=40, deadline=None)
@given(traced=traces())
def test_what_holds_for_every_policy(name, traced):
    cluster, jobs = traced
    history = replay(
        cluster, jobs, POLICIES[name], ReplaySettings(checkpoint=100, restart=7), keep_stints=True
    )
    stints: dict[int, list] = {}
    for stint in history.stints:
        stints.setdefault(stint.job, []).append(stint)
    _no_gpu_twice(history.stints)
    for story in history.stories.values():
        job = story.job
        mine = stints.get(job.id, [])
        if story.state == "rejected":
            assert story.why
            assert not mine
            continue
        assert story.state == ("timeout" if job.duration > job.limit else "done")
        assert all(
            sum(mask.bit_count() for _, mask, _ in stint.pieces) == stint.gpus for stint in mine
        )
        assert {stint.gpus for stint in mine} == {job.gpus} or name == "elastic"
        assert min(stint.start for stint in mine) >= job.submit
        held = sum((stint.end - stint.start) * stint.gpus * job.milli / 1000 for stint in mine)
        assert held - story.lost == pytest.approx(job.work, rel=1e-9, abs=1e-6)


def _no_gpu_twice(stints):
    """Sweep over time for each GPU: never more than all of it."""
    changes: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for stint in stints:
        for node, mask, milli in stint.pieces:
            for gpu in range(mask.bit_length()):
                if mask >> gpu & 1:
                    changes.setdefault((node, gpu), []).extend(
                        [(stint.start, milli), (stint.end, -milli)]
                    )
    for events in changes.values():
        used = 0
        for _, change in sorted(events):  # ends before starts at the same time
            used += change
            assert used <= 1000


def test_the_same_trace_gives_the_same_history():
    jobs = synthetic(400, seed=3).jobs
    cluster = SimulatedCluster(nodes=16, gpus=8, rack=4)
    ends = [
        {i: story.end for i, story in replay(cluster, jobs, POLICIES["fgd"]).stories.items()}
        for _ in range(2)
    ]
    assert ends[0] == ends[1]


def test_a_job_too_large_is_told_at_once():
    jobs = [SimulatedJob(id=0, submit=5, duration=1, limit=1, gpus=99)]
    story = replay(SimulatedCluster(nodes=2, gpus=8), jobs, POLICIES["fifo"]).stories[0]
    assert story.state == "rejected"
    assert "99 GPUs" in story.why
    assert "16" in story.why


def test_two_jobs_of_one_id_are_refused():
    jobs = [SimulatedJob(id=0, submit=0, duration=1, limit=1, gpus=1)] * 2
    with pytest.raises(ValueError, match="one id"):
        replay(SimulatedCluster(nodes=1), jobs, POLICIES["fifo"])


def test_a_preempted_job_loses_what_its_last_checkpoint_does_not_hold():
    jobs = [
        SimulatedJob(id=0, submit=0, duration=1000, limit=1000, gpus=8),
        SimulatedJob(id=1, submit=250, duration=50, limit=50, gpus=8, priority=1),
    ]
    history = replay(
        SimulatedCluster(nodes=1),
        jobs,
        POLICIES["priority"],
        ReplaySettings(checkpoint=100, restart=7),
    )
    story = history.stories[0]
    assert story.preempted == 1
    assert story.lost == pytest.approx((50 + 7) * 8)  # since second 200, and the restart
    assert story.end == pytest.approx(250 + 50 + 7 + 800)
