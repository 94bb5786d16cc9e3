"""What is remembered, kept up to date and skipped changes nothing: the fast policies decide as their plain forms."""

import random
from collections import Counter

import plain_policies
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_policies import plain, profile

from cairn.cluster.simulate import backfill, elastic, policies
from cairn.cluster.simulate.backfill import LOOK
from cairn.cluster.simulate.elastic import _room_with
from cairn.cluster.simulate.free_gpus import Free, tightest
from cairn.cluster.simulate.jobs import MILLI, Running, SimulatedCluster, SimulatedJob
from cairn.cluster.simulate.offers import Offers, upper_half
from cairn.cluster.simulate.policies import POLICIES, by_arrival
from cairn.cluster.simulate.replay import ReplaySettings, _Replay, replay
from cairn.cluster.simulate.traces import made_to_measure, synthetic
from cairn.cluster.simulate.waiting_queue import UserQueue


@st.composite
def traces(draw):
    """Few nodes, many ties: sizes around whole nodes, shared GPUs, elastic jobs, deadlines, three users."""
    gpus = draw(st.sampled_from([2, 4]))
    cluster = SimulatedCluster(nodes=draw(st.integers(1, 4)), gpus=gpus, rack=2)
    jobs = []
    for number in range(draw(st.integers(1, 14))):
        size = draw(st.integers(1, min(cluster.total, 2 * gpus + 1)))
        duration = draw(st.integers(1, 9)) * 500.0
        submit = draw(st.integers(0, 12)) * 250.0
        limit = duration * draw(st.integers(1, 3))
        late = draw(st.sampled_from([None, 1.0, 2.0, 5.0]))
        jobs.append(
            SimulatedJob(
                id=number,
                submit=submit,
                duration=duration,
                gpus=size,
                limit=limit,
                milli=draw(st.sampled_from([MILLI, 300, 500])) if size == 1 else MILLI,
                user=draw(st.sampled_from("abc")),
                least=draw(st.integers(0, size)),
                deadline=None if late is None else submit + limit * late,
            )
        )
    return cluster, jobs


def told(history):
    """All that happened, without the words."""
    return [
        (s.job.id, s.state, s.first_start, s.end, s.resized, s.lost, s.spread)
        for s in history.stories.values()
    ] + [(stint.job, stint.start, stint.pieces) for stint in history.stints]


NAMES = ("easy", "topology", "fgd", "fair", "drf", "elastic", "deadline")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(case=traces())
def test_the_fast_form_decides_as_the_plain_one(name, case):
    cluster, jobs = case
    fast = replay(cluster, jobs, POLICIES[name], keep_stints=True)
    assert told(fast) == told(replay(cluster, jobs, plain(name), keep_stints=True))


@pytest.mark.parametrize("name", NAMES)
def test_and_on_a_trace_of_some_length(name):
    jobs = synthetic(300, 5).jobs
    cluster, _ = made_to_measure(jobs, 8, 4)
    fast = replay(cluster, jobs, POLICIES[name], keep_stints=True)
    assert told(fast) == told(replay(cluster, jobs, plain(name), keep_stints=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("look", [3, LOOK])
def test_and_where_many_come_and_go_at_once(name, look):
    """Times are multiples of 100 s: many ties, more who wait than backfill looks at, users whose turn changes."""
    draw, jobs = random.Random(3), []
    for number in range(220):
        gpus = draw.choice([1, 1, 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17])
        duration, submit = draw.randint(1, 40) * 100.0, draw.randint(0, 120) * 100.0
        limit = duration * draw.choice([0.5, 1, 1, 2, 3])
        jobs.append(
            SimulatedJob(
                id=number,
                submit=submit,
                duration=duration,
                gpus=gpus,
                limit=limit,
                milli=draw.choice([MILLI, 300, 500]) if gpus == 1 else MILLI,
                user=draw.choice("abcdef"),
                least=draw.randint(0, gpus),
                deadline=draw.choice([None, submit + 1.1 * limit, submit + 4 * limit]),
            )
        )
    cluster = SimulatedCluster(nodes=8, gpus=8, rack=2)
    with pytest.MonkeyPatch.context() as patch:
        for module in (backfill, elastic, policies, plain_policies):
            patch.setattr(module, "LOOK", look)
        fast = replay(cluster, jobs, POLICIES[name], keep_stints=True)
        assert told(fast) == told(replay(cluster, jobs, plain(name), keep_stints=True))


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.booleans())))
def test_the_line_is_kept_in_order(entries):
    """Against a list that is sorted anew each time; whoever leaves says where it stood."""
    line, waiting = UserQueue(by_arrival, by_user=True), []
    for number, (submit, user, leaves) in enumerate(entries):
        job = SimulatedJob(
            id=number, submit=submit, duration=1, limit=1, gpus=1 + submit, user=user
        )
        line.join(job)
        waiting = sorted([*waiting, job], key=by_arrival)
        if leaves:
            gone = waiting[submit % len(waiting)]
            assert line.leave(gone) == waiting.index(gone)
            waiting.remove(gone)
        assert line.jobs == waiting
        users = {job.user for job in waiting}
        assert line.users == {u: [job for job in waiting if job.user == u] for u in users}
        assert line.sizes == Counter(job.gpus for job in waiting)


@settings(max_examples=20)
@given(case=traces())
def test_the_timeline_is_the_sum_of_what_runs_and_what_was_promised(case):
    cluster, jobs = case

    class Watched(_Replay):
        def _decide(self):
            super()._decide()
            kept = list(self.view.timeline.levels(self.view.free.idle, self.view.now))
            wanted = profile(self.view)
            times = sorted({at for at, _ in kept} | {at for at, _ in wanted})
            assert [level(kept, at) for at in times] == [level(wanted, at) for at in times]

    def level(steps, at):
        return [free for begin, free in steps if begin <= at][-1]

    Watched(cluster, jobs, POLICIES["deadline"], ReplaySettings(), None, False).run(
        lambda done: None
    )


@given(st.data())
def test_room_is_counted_as_it_is_found(data):
    """`too_many` and `_room_with` against a search on the map itself."""
    gpus = data.draw(st.sampled_from([2, 4, 8]))
    free = Free(SimulatedCluster(nodes=data.draw(st.integers(1, 5)), gpus=gpus, rack=2))
    running = []
    for number in range(data.draw(st.integers(0, 8))):
        size = data.draw(st.integers(1, 2 * gpus))
        milli = data.draw(st.sampled_from([MILLI, MILLI, 400])) if size == 1 else MILLI
        pieces = free.find(size, milli, tightest)
        if pieces is not None:
            free.take(pieces)
            job = SimulatedJob(
                id=number, submit=0, duration=1, gpus=size, limit=1, milli=milli, least=1
            )
            running.append(Running(job, pieces, size, 0, 1, 1, 0))
    for wanted in range(1, gpus * 5 + 1):
        if wanted >= free.too_many():
            assert free.find(wanted, MILLI, tightest) is None
    avoid = data.draw(st.integers(0, 31))
    for wanted in range(free.too_many_off(avoid), gpus * 5 + 1):
        assert free.find(wanted, MILLI, tightest, avoid=avoid) is None
    halved = [run for run in running if run.gpus % 2 == 0]
    offers = Offers()
    for run in running:
        offers.add(run, gpus)
    emptied, before = offers.emptied(free), free.idle_nodes()
    for run in halved:
        free.give(upper_half(run))
    assert emptied == free.idle_nodes() - before
    for run in halved:
        free.take(upper_half(run))
    assert set(offers.halvable) == {run.job.id for run in halved}
    for run in running:
        offers.drop(run, gpus)
    assert (offers.emptied(free), offers.halvable) == (0, {})
    wanted = data.draw(st.integers(1, 3 * gpus))
    head = SimulatedJob(id=99, submit=0, duration=1, gpus=wanted, limit=1)
    if free.find(wanted, MILLI, tightest) is None and halved:
        counted = _room_with(free, head, wanted, halved)
        for run in halved:
            free.give(run.half)
        assert counted == (free.find(wanted, MILLI, tightest) is not None)
