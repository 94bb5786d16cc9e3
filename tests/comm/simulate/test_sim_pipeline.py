"""The vectorised pipelines are what a loop over chunks and nodes says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.comm.cost import LinkCost, estimate
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.tree import TOP, double_tree_parents
from cairn.comm.simulate.fabrics import CHUNKS, two_stages_us
from cairn.comm.simulate.pipeline import around_ring, down_tree, through, up_tree
from cairn.comm.simulate.schedule_run import run_schedule
from cairn.comm.simulate.topology import topology
from cairn.core.errors import ConfigError

TIMES = st.floats(0, 50, allow_nan=False)


def one_by_one(ready: list[float], service: float) -> list[float]:
    done, free = [], -np.inf
    for time in ready:
        free = max(time, free) + service
        done.append(free)
    return done


@given(st.lists(TIMES, min_size=1, max_size=30), st.floats(0.01, 9))
def test_a_link_sends_one_chunk_after_another(ready, service):
    assert through(np.array(ready), service) == pytest.approx(one_by_one(ready, service))


@settings(max_examples=40)
@given(nodes=st.integers(1, 40), chunks=st.integers(1, 5), seed=st.integers(0, 999))
def test_trees_are_what_recursion_says(nodes, chunks, seed):
    dice = np.random.default_rng(seed)
    for parents in double_tree_parents(nodes):
        ready = dice.random((nodes, chunks)) * 10
        service, delay = dice.random(nodes) + 0.1, dice.random(nodes)

        def up(node, parents=parents, ready=ready, service=service, delay=delay):
            have = list(ready[node])
            for child in np.flatnonzero(parents == node):
                sent = one_by_one(up(child), service[child])
                have = [max(a, b + delay[child]) for a, b in zip(have, sent, strict=True)]
            return have

        root = int(np.flatnonzero(parents == TOP)[0])
        assert up_tree(parents, ready, service, delay)[root] == pytest.approx(up(root))

        def down(node, parents=parents, ready=ready, service=service, delay=delay, root=root):
            if node == root:
                return list(ready[root])
            sent = one_by_one(down(parents[node]), service[node])
            return [time + delay[node] for time in sent]

        found = down_tree(parents, ready[root], service, delay)
        assert found[nodes - 1] == pytest.approx(down(nodes - 1))


@settings(max_examples=40)
@given(nodes=st.integers(2, 12), steps=st.integers(0, 20), seed=st.integers(0, 999))
def test_a_ring_is_what_a_loop_says(nodes, steps, seed):
    dice = np.random.default_rng(seed)
    ready, service, delay = (dice.random(nodes) for _ in range(3))
    have, free = list(ready), list(ready)
    for _ in range(steps):
        free = [max(h, f) + s for h, f, s in zip(have, free, service, strict=True)]
        have = [free[(n - 1) % nodes] + delay[(n - 1) % nodes] for n in range(nodes)]
    assert around_ring(ready, steps, service, delay) == pytest.approx(have)


@given(st.floats(0.1, 1e6), st.floats(0.1, 50))
def test_two_stages_in_closed_form_are_chunks_through_two_links(wire, cost):
    times = []
    for count in CHUNKS:
        each = cost + wire / count
        times.append(through(through(np.zeros(count), each), each)[-1])
    assert two_stages_us(wire, cost) == pytest.approx(min(times) - cost)


@pytest.mark.parametrize("name", ["ring", "pat", "two_shot"])
def test_a_proved_schedule_takes_what_its_closed_form_says(name):
    top, size = topology("nvlink", 8, nvlink_gb_per_s=100.0), 8 << 20
    found = run_schedule(make("all_reduce", name, 8), top, size).us
    link = LinkCost(alpha_us=top.nvlink_us, gb_per_s=100.0)
    bytes_only = estimate(
        "all_reduce", "ring", 8, size, LinkCost(alpha_us=0, gb_per_s=100.0), "together"
    )
    assert (
        bytes_only.us
        <= found
        <= estimate("all_reduce", "ring", 8, size, link, "together").us + 1e-6
    )


def test_a_ring_of_equal_links_is_exact():
    top, size = topology("rail-1tier", 6, domain=1, nic_gb_per_s=25.0), 6 << 20
    found = run_schedule(make("all_reduce", "ring", 6), top, size).us
    each = size / 6 / 25e3 + float(top.host_us + 0.6)
    assert found == pytest.approx(10 * each)


def test_two_levels_beat_a_flat_ring_where_the_network_is_slow():
    top = topology("rail-1tier", 16, domain=4, nic_gb_per_s=10.0)
    times = {
        name: run_schedule(make("all_reduce", name, 16, gpus=4), top, 64 << 20).us
        for name in ("ring", "two_level")
    }
    assert times["two_level"] < 0.5 * times["ring"]


def test_a_schedule_for_other_ranks_is_refused():
    with pytest.raises(ConfigError, match="is for 4 ranks, the cluster has 8"):
        run_schedule(make("all_reduce", "ring", 4), topology("nvlink", 8), 1 << 20)
