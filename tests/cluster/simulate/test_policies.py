"""Each policy against a brute-force oracle or the property that it is named for."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cairn.cluster.simulate.deadline import earliest
from cairn.cluster.simulate.fair_share import _decayed
from cairn.cluster.simulate.fgd_placement import fgd_rule, state_fragmentation, typical_sizes
from cairn.cluster.simulate.free_gpus import Free, tightest
from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
from cairn.cluster.simulate.policies import POLICIES
from cairn.cluster.simulate.replay import ReplaySettings, replay


def flat_jobs(draw, gpus):
    """Jobs for a machine of nodes with one GPU each, with whole times so that ties are real ties."""
    return [
        SimulatedJob(
            id=number,
            submit=draw(st.integers(0, 30)),
            gpus=draw(st.integers(1, gpus)),
            duration=(duration := draw(st.integers(1, 20))),
            limit=duration * draw(st.integers(1, 3)),
        )
        for number in range(draw(st.integers(1, 10)))
    ]


@st.composite
def flat(draw):
    gpus = draw(st.integers(1, 6))
    return gpus, flat_jobs(draw, gpus)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12))
def test_tenths_of_a_cpu_that_came_and_went_leave_all_of_them(tenths):
    """Sums of floats are not exact: at last a job asks for every CPU there is, with nobody beside it."""
    cluster = SimulatedCluster(nodes=1, gpus=16, cpus=sum(tenths) / 10)
    few = [
        SimulatedJob(id=n, submit=0, duration=1 + n, limit=20, gpus=1, cpus=cpus / 10)
        for n, cpus in enumerate(tenths)
    ]
    last = SimulatedJob(id=99, submit=50, duration=1, limit=1, gpus=1, cpus=cluster.cpus)
    began = starts(replay(cluster, [*few, last], POLICIES["fifo"]))
    assert began == dict.fromkeys(range(len(few)), 0) | {99: 50}


def starts(history):
    return {story.job.id: story.first_start for story in history.stories.values()}


def in_order_oracle(gpus, jobs, key):
    """Second by second: the first by `key` of those who are there, as long as it fits."""
    running, found, waiting = [], {}, sorted(jobs, key=lambda job: (job.submit, job.id))
    now = 0
    while len(found) < len(jobs):
        running = [(end, size) for end, size in running if end > now]
        while True:
            here = sorted(
                (job for job in waiting if job.submit <= now and job.id not in found), key=key
            )
            free = gpus - sum(size for _, size in running)
            if not here or here[0].gpus > free:
                break
            found[here[0].id] = now
            running.append((now + here[0].duration, here[0].gpus))
        now += 1
    return found


def easy_oracle(gpus, jobs):
    """EASY as in the textbook: shadow time and extra nodes of the first job, recomputed at every decision."""
    running, found, now = [], {}, 0
    while len(found) < len(jobs):
        running = [run for run in running if run[0] > now]
        while True:
            here = [
                job
                for job in sorted(jobs, key=lambda j: (j.submit, j.id))
                if job.submit <= now and job.id not in found
            ]
            free = gpus - sum(run[2] for run in running)
            chosen = None
            if here and here[0].gpus <= free:
                chosen = here[0]
            elif here:
                left, shadow, extra = free, None, 0
                for _, believed, size in sorted(running, key=lambda run: run[1]):
                    left += size
                    if left >= here[0].gpus:
                        shadow, extra = max(believed, now), left - here[0].gpus
                        break
                for job in here[1:]:
                    if job.gpus <= free and (now + job.limit <= shadow or job.gpus <= extra):
                        chosen = job
                        break
            if chosen is None:
                break
            found[chosen.id] = now
            running.append((now + chosen.duration, now + chosen.limit, chosen.gpus))
        now += 1
    return found


@settings(max_examples=120, deadline=None)
@given(flat())
def test_fifo_and_sjf_are_the_oracle(case):
    gpus, jobs = case
    cluster = SimulatedCluster(nodes=gpus, gpus=1, rack=2)
    for name, key in (
        ("fifo", lambda j: (j.submit, j.id)),
        ("sjf", lambda j: (j.limit, j.submit, j.id)),
    ):
        assert starts(replay(cluster, jobs, POLICIES[name])) == in_order_oracle(gpus, jobs, key)


@settings(max_examples=200, deadline=None)
@given(flat())
def test_easy_never_delays_the_first(case):
    """Whenever a job is first and blocked it is promised a time; it starts by then, whoever else passed it."""
    gpus, jobs = case
    promises = []
    easy = POLICIES["easy"]

    def decide(view):
        if view.waiting and view.fits(view.waiting[0]) is None:
            promises.append((view.waiting[0].id, view.reservation(view.waiting[0]).at))
        return easy.decide(view)

    found = starts(
        replay(SimulatedCluster(nodes=gpus, gpus=1, rack=2), jobs, replace(easy, decide=decide))
    )
    assert all(found[identity] <= at for identity, at in promises)


@settings(max_examples=200, deadline=None)
@given(flat())
def test_easy_is_the_textbook(case):
    """On a machine without nodes: the same job at the same second, whatever was believed and whatever came true."""
    gpus, jobs = case
    found = starts(replay(SimulatedCluster(nodes=gpus, gpus=1, rack=2), jobs, POLICIES["easy"]))
    assert found == easy_oracle(gpus, jobs)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_easy_on_nodes_keeps_its_promise_too(data):
    """The same with gangs over nodes of several GPUs, where fragmentation could break a promise by counts."""
    cluster = SimulatedCluster(nodes=data.draw(st.integers(1, 4)), gpus=4, rack=2)
    jobs = flat_jobs(data.draw, cluster.total)
    for name in ("easy", "fgd", "topology"):
        promises, policy = [], POLICIES[name]

        def decide(view, policy=policy, promises=promises):
            if view.waiting and view.fits(view.waiting[0]) is None:
                promises.append((view.waiting[0].id, view.reservation(view.waiting[0]).at))
            return policy.decide(view)

        found = starts(replay(cluster, jobs, replace(policy, decide=decide)))
        assert all(found[identity] <= at for identity, at in promises)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_place_is_found_exactly_when_brute_force_finds_one(data):
    cluster = SimulatedCluster(nodes=data.draw(st.integers(1, 3)), gpus=2, rack=1)
    free = Free(cluster)
    for _ in range(data.draw(st.integers(0, 4))):
        pieces = free.find(data.draw(st.integers(1, cluster.total)), 1000, tightest)
        if pieces is not None:
            free.take(pieces)
    idle = [mask.bit_count() for mask in free.masks]
    for gpus in range(1, cluster.total + 1):
        whole, rest = divmod(gpus, 2)
        shapes = [2] * whole + [rest] * bool(rest)
        possible = (
            any(
                all(idle[node] >= need for node, need in zip(nodes, shapes, strict=True))
                for nodes in itertools.permutations(range(cluster.nodes), len(shapes))
            )
            if len(shapes) <= cluster.nodes
            else False
        )
        assert (free.find(gpus, 1000, tightest) is not None) == possible


def test_topology_keeps_a_gang_in_one_rack():
    cluster = SimulatedCluster(nodes=8, gpus=8, rack=4)
    free = Free(cluster)
    free.take(((0, 255, 1000), (1, 255, 1000)))  # rack 0 has two nodes left
    assert free.racks_of(free.find(32, 1000, tightest) or ()) == 2
    assert free.racks_of(free.find(32, 1000, tightest, packed=True) or ()) == 1
    assert {node for node, _, _ in free.find(16, 1000, tightest, packed=True) or ()} == {2, 3}


def test_topology_spreads_fewer_gangs_than_easy():
    from cairn.cluster.simulate.traces import synthetic

    jobs = synthetic(1500, seed=1).jobs
    spread = {}
    for name in ("easy", "topology"):
        history = replay(SimulatedCluster(nodes=80, gpus=8, rack=8), jobs, POLICIES[name])
        spread[name] = sum(story.spread for story in history.stories.values())
    assert spread["topology"] < 0.7 * spread["easy"]


def test_fgd_leaves_whole_what_others_need():
    jobs = [
        SimulatedJob(id=i, submit=0, duration=1, limit=1, gpus=g)
        for i, g in enumerate([8] * 5 + [2] * 5)
    ]
    rule = fgd_rule(jobs, 8)
    assert rule((2,), 2, 1000) < rule((8,), 2, 1000)  # a whole node is for those who need one
    sizes = typical_sizes(jobs, 8)
    assert state_fragmentation((8,), sizes) == 0
    assert state_fragmentation((6,), sizes) == pytest.approx(
        0.5 * 6000
    )  # half of the jobs cannot use it


def test_priority_takes_whole_gangs_and_no_more_than_needed():
    jobs = [SimulatedJob(id=i, submit=i, duration=100, limit=100, gpus=8) for i in range(4)]
    jobs.append(SimulatedJob(id=9, submit=10, duration=10, limit=10, gpus=16, priority=5))
    history = replay(SimulatedCluster(nodes=4), jobs, POLICIES["priority"], keep_stints=True)
    assert history.stories[9].first_start == 10
    assert {i for i in range(4) if history.stories[i].preempted} == {2, 3}  # the youngest two


def test_equal_priority_is_never_preempted():
    jobs = [SimulatedJob(id=i, submit=i, duration=100, limit=100, gpus=8) for i in range(3)]
    history = replay(SimulatedCluster(nodes=1), jobs, POLICIES["priority"])
    assert [history.stories[i].first_start for i in range(3)] == [0, 100, 200]


def test_fair_share_gives_the_new_user_the_next_place():
    hog = [
        SimulatedJob(id=i, submit=0, duration=100, limit=100, gpus=8, user="hog") for i in range(5)
    ]
    late = SimulatedJob(id=9, submit=50, duration=100, limit=100, gpus=8, user="new")
    for name in ("fair", "drf"):
        history = replay(SimulatedCluster(nodes=1), [*hog, late], POLICIES[name])
        assert history.stories[9].first_start == 100


def test_drf_equalises_dominant_shares():
    """The example of the DRF paper: 9 CPUs and 18 GB, A asks for (1, 4), B for (3, 1): three of A, two of B."""
    jobs = [
        SimulatedJob(
            id=i, submit=0, duration=100, limit=100, gpus=1, milli=1, cpus=1, memory_gib=4, user="A"
        )
        for i in range(9)
    ]
    jobs += [
        SimulatedJob(
            id=100 + i,
            submit=0,
            duration=100,
            limit=100,
            gpus=1,
            milli=1,
            cpus=3,
            memory_gib=1,
            user="B",
        )
        for i in range(9)
    ]
    history = replay(
        SimulatedCluster(nodes=4, gpus=8, cpus=9, memory_gib=18), jobs, POLICIES["drf"]
    )
    first = [story.job.user for story in history.stories.values() if story.first_start == 0]
    assert sorted(first) == ["A", "A", "A", "B", "B"]


def test_half_life_is_the_integral():
    steps, value, half_life = 20_000, 0.0, 50.0
    for _ in range(steps):
        value = value * 0.5 ** (0.01 / half_life) + 3.0 * 0.01
    assert _decayed(0.0, 3.0, 200.0, half_life) == pytest.approx(value, rel=1e-3)
    assert _decayed(8.0, 0.0, half_life, half_life) == pytest.approx(4.0)


def test_elastic_shrinks_for_one_who_waits_and_grows_back():
    jobs = [
        SimulatedJob(id=0, submit=0, duration=4000, limit=4000, gpus=8, least=2),
        SimulatedJob(id=1, submit=1000, duration=1000, limit=1000, gpus=4),
    ]
    history = replay(
        SimulatedCluster(nodes=1),
        jobs,
        POLICIES["elastic"],
        ReplaySettings(restart=10),
        keep_stints=True,
    )
    assert history.stories[1].first_start == 1000
    assert [stint.gpus for stint in history.stints if stint.job == 0] == [8, 4, 8]
    # 1000 s at full size, 990 s at half, then the rest at full size after another restart
    assert history.stories[0].end == pytest.approx(2000 + 10 + 4000 - 1000 - 990 / 2)


@st.composite
def due(draw):
    gpus = draw(st.integers(1, 6))
    jobs = [
        SimulatedJob(
            id=number,
            submit=(submit := draw(st.integers(0, 40))),
            gpus=draw(st.integers(1, gpus)),
            duration=(duration := draw(st.integers(1, 20))),
            limit=duration * draw(st.integers(1, 2)),
            deadline=submit + draw(st.integers(1, 90)),
        )
        for number in range(draw(st.integers(1, 12)))
    ]
    return gpus, jobs


@settings(max_examples=150, deadline=None)
@given(due())
def test_whoever_is_admitted_meets_the_deadline(case):
    gpus, jobs = case
    history = replay(SimulatedCluster(nodes=gpus, gpus=1, rack=2), jobs, POLICIES["deadline"])
    for story in history.stories.values():
        if story.state == "rejected":
            assert "deadline" in story.why
        else:
            assert story.end is not None
            assert story.end <= story.job.deadline


def test_a_deadline_that_an_empty_cluster_meets_is_admitted():
    job = SimulatedJob(id=0, submit=0, duration=10, limit=20, gpus=2, deadline=20.0)
    assert replay(SimulatedCluster(nodes=1), [job], POLICIES["deadline"]).stories[0].state == "done"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 6))
def test_the_earliest_slot_is_the_brute_force_one(levels, gpus, limit):
    levels = [*levels, 9]  # at the end everything is free
    steps = [(float(at), free) for at, free in enumerate(levels)]
    job = SimulatedJob(id=0, submit=0, duration=limit, limit=limit, gpus=gpus)
    brute = next(
        at
        for at in range(len(levels))
        if all(levels[min(t, len(levels) - 1)] >= gpus for t in range(at, at + limit))
    )
    assert earliest(steps, job, 0.0) == brute
