"""Limits that any right simulation obeys, faults that hurt, and a hundred thousand GPUs."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.comm.schedule.ops import COLLECTIVES
from cairn.comm.simulate.collective import bus_factor, simulate
from cairn.comm.simulate.faults import Faults, describe, nic_shares, touched
from cairn.comm.simulate.topology import topology
from cairn.core.errors import ConfigError

GIB = 1 << 30
SMALL = topology("rail-2tier", 1024, radix=16, domain=8)


@settings(max_examples=25)
@given(
    op=st.sampled_from(COLLECTIVES),
    power=st.integers(14, 32),
    nodes=st.sampled_from([2, 3, 16, 40]),
    over=st.sampled_from([1.0, 4.0]),
    balance=st.sampled_from(["ecmp", "spread"]),
)
def test_nothing_is_faster_than_its_bytes_and_larger_takes_longer(op, power, nodes, over, balance):
    top = topology(
        "rail-2tier", nodes * 4, domain=4, radix=16, oversubscription=over, balance=balance
    )
    small, large = (simulate(top, op, size).result for size in (1 << power, 2 << power))
    for result in (small, large):
        assert result.us >= result.ideal_us * (1 - 1e-9)
        assert result.busbw_gb_per_s == pytest.approx(
            result.bytes / (1e3 * result.us) * bus_factor(op, top.gpus)
        )
    assert large.us >= small.us


def test_a_ring_without_congestion_is_its_closed_form():
    top = topology("rail-1tier", 64, domain=8, nvlink_gb_per_s=1e6)
    result = simulate(top, "all_reduce", GIB, algorithm="ring").result
    each = GIB / 8 / 8 / 50e3 + top.host_us + 0.6
    assert result.us == pytest.approx(14 * each, rel=0.01)


def test_a_long_pipeline_through_a_tree_reaches_half_of_the_wire():
    """Two bytes leave a NIC for each byte of the vector, whatever the depth."""
    top = topology("rail-2tier", 2048, domain=8, balance="spread", nvlink_gb_per_s=1e6)
    result = simulate(top, "all_reduce", 16 * GIB, algorithm="tree", chunks=1024).result
    assert result.us == pytest.approx(2 * 16 * GIB / 8 / 50e3, rel=0.1)


@pytest.mark.parametrize("algorithm", ["tree", "ring", "pat"])
def test_faults_hurt_and_are_named(algorithm):
    top = msgspec.structs.replace(SMALL, balance="spread")
    healthy = simulate(top, "all_reduce", GIB, algorithm=algorithm).result
    for faults, words in (
        (Faults(slow_nics=1), "slow NIC"),
        (Faults(dead_nics=1), "dead NIC"),
        (Faults(stragglers=1, late_us=1e5), "late by 100 ms"),
    ):
        result = simulate(top, "all_reduce", GIB, algorithm=algorithm, faults=faults).result
        assert result.us > 1.2 * healthy.us
        if words:
            assert words in result.faults[0]
            again = simulate(top, "all_reduce", GIB, algorithm=algorithm, faults=faults).result
            assert again == result


@pytest.mark.parametrize("kind", ["rail-2tier", "fat-tree"])
@settings(max_examples=30, deadline=None)
@given(slow=st.integers(0, 30), dead=st.integers(0, 30), seed=st.integers(0, 99))
def test_every_byte_of_a_dead_nic_goes_over_one_that_lives(kind, slow, dead, seed):
    """The next of its node, which shares its rate among those that it carries."""
    top = topology(kind, 64, domain=4)
    faults = Faults(slow_nics=slow, dead_nics=dead, slow_factor=0.5, seed=seed)
    names = describe(faults, top)
    gone = {tuple(map(int, name.split()[2::3])) for name in names if name.startswith("dead")}
    weak = {tuple(map(int, name.split()[2::3])) for name in names if name.startswith("slow")}
    assert len(gone) == dead
    if any(all((rail, node) in gone for rail in range(4)) for node in range(16)):
        with pytest.raises(ConfigError, match="all 4 NICs of node"):
            nic_shares(faults, top)
        return
    shares = nic_shares(faults, top)
    for node in range(16):
        lives = [rail for rail in range(4) if (rail, node) not in gone]
        over = {
            rail: next(one % 4 for one in range(rail, rail + 4) if one % 4 in lives)
            for rail in range(4)
        }
        for rail in range(4):
            load = sum(other == over[rail] for other in over.values())
            rate = 0.5 if (over[rail], node) in weak else 1.0
            assert shares.get((node, rail), 1.0) == rate / load
    assert touched(faults, top) == {rail if top.planes > 1 else 0 for _, rail in shares}


def test_dead_links_and_oversubscription_cost_bandwidth_and_spreading_gives_it_back():
    def us(**changes):
        faults = Faults(dead_links=changes.pop("dead_links", 0.0))
        top = msgspec.structs.replace(SMALL, **changes)
        return simulate(top, "all_gather", GIB, algorithm="pat", faults=faults).result.us

    assert us(oversubscription=4.0) > us()
    assert us(dead_links=0.3) > us()
    assert us(balance="spread") < us(paths=1)


def test_one_link_carries_more_flows_when_a_hash_decides():
    hashed = simulate(SMALL, "all_to_all", GIB).result
    assert hashed.largest_sharing > SMALL.paths


def test_a_fat_tree_has_one_plane_and_no_advantage():
    size = dict(balance="spread", domain=8, radix=16)
    tree, rail = (
        simulate(topology(name, 256, **size), "all_reduce", GIB, algorithm="tree").result
        for name in ("fat-tree", "rail-2tier")
    )
    assert tree.rails == 1
    assert tree.us >= rail.us * (1 - 1e-9)


def test_a_hundred_thousand_gpus():
    top = topology("rail-3tier", 98304)
    outcome = simulate(top, "all_reduce", GIB)
    assert outcome.result.algorithm == "tree"  # a ring would wait 24,574 times
    assert outcome.finish.shape == (2, 12288)
    assert outcome.result.chunks == 128
    slow = simulate(top, "all_reduce", GIB, algorithm="tree", faults=Faults(slow_nics=1), rails=1)
    assert slow.result.us > outcome.result.us


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (dict(collective="all_shuffle"), "unknown collective"),
        (dict(size=5), "5 bytes for 1024 GPUs"),
        (dict(algorithm="butterfly"), "no 'butterfly'"),
        (dict(collective="broadcast", algorithm="ring"), "no 'ring'"),
        (dict(chunks=0), "0 chunks"),
        (dict(faults=Faults(slow_nics=2000)), "2000 slow NICs of 1024"),
        (dict(faults=Faults(slow_nics=1, slow_factor=0)), "at 0 of its rate"),
        (dict(faults=Faults(dead_links=1.0)), "of the links are down"),
        (dict(faults=Faults(dead_nics=1024)), "all 8 NICs of node"),
        (dict(faults=Faults(stragglers=1, late_us=-1)), "-1"),
    ],
)
def test_impossible_parameters_are_refused(asked, words):
    asked = {"collective": "all_reduce", "size": GIB, **asked}
    with pytest.raises(ConfigError, match=words):
        simulate(SMALL, asked.pop("collective"), asked.pop("size"), **asked)
