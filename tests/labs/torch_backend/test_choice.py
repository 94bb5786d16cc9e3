"""Which schedule is chosen: the same by every rank, by size and hosts, and near the model's best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.comm.cost import LinkCost, shape_of
from cairn.comm.schedule.catalogue import names
from cairn.labs.torch_backend.choice import CANDIDATES, NEAR, Places, choose, load_of, ranked
from cairn.labs.torch_backend.options import Options, piece_bytes

GIGABIT = LinkCost(alpha_us=60, gb_per_s=0.125)
ONE, FOUR, TWO_BY_TWO = Places((0, 0)), Places((0, 1, 2, 3)), Places((0, 0, 1, 1))


def test_small_messages_wait_once_and_large_ones_move_little():
    assert choose("all_reduce", ONE, 1 << 10, GIGABIT).name == "one_shot"
    assert choose("all_reduce", ONE, 64 << 20, GIGABIT).name == "two_shot"
    assert choose("all_reduce", FOUR, 1 << 10, GIGABIT).name in ("one_shot", "two_shot")
    assert choose("all_reduce", FOUR, 32 << 20, GIGABIT).name == "ring"
    assert choose("all_reduce", TWO_BY_TWO, 8 << 20, GIGABIT) == ("two_level", 2, 32, 2)


def test_what_each_host_carries():
    """Two levels: 2 (h-1)/h of the vector through each host's network; a ring over all ranks: 2 (n-1)/n."""
    assert load_of("all_reduce", "two_level", TWO_BY_TWO, 1).wire == 1.0
    assert load_of("all_reduce", "ring", TWO_BY_TWO, 1).wire == 1.5
    for name in ("ring", "two_shot", "halving_doubling"):
        load = load_of("all_reduce", name, FOUR, 1)
        assert load.wire == pytest.approx(shape_of("all_reduce", name, 4).traffic)


@given(
    collective=st.sampled_from(sorted(CANDIDATES)),
    hosts=st.lists(st.integers(0, 3), min_size=2, max_size=6),
    size=st.integers(0, 1 << 28),
    gbit=st.floats(0.1, 400),
    forced=st.sampled_from(["", "ring", "two_level", "chain", "nothing"]),
)
def test_every_choice_exists_and_is_near_the_best(collective, hosts, size, gbit, forced):
    seen = sorted(set(hosts))
    places = Places(tuple(sorted(seen.index(host) for host in hosts)))
    network = LinkCost(alpha_us=60, gb_per_s=gbit / 8)
    chosen = choose(collective, places, size, network, forced=forced)
    assert (collective, chosen.name) in names()
    assert chosen == choose(collective, places, size, network, forced=forced)
    if forced not in CANDIDATES[collective]:
        times = {row.name: row.us for row in ranked(collective, places, size, network)}
        assert times[chosen.name] <= (1 + NEAR) * min(times.values())


@pytest.mark.parametrize("size", [0, 100, 1 << 15, 1 << 16, 1 << 26])
def test_deterministic_adds_in_the_order_of_the_ranks(size):
    for places in (ONE, FOUR, TWO_BY_TWO):
        name = choose("all_reduce", places, size, GIGABIT, deterministic=True).name
        assert name in ("one_shot", "ordered")
        assert choose("reduce_scatter", places, size, GIGABIT, deterministic=True).name == "ordered"


def test_memory_does_not_grow_with_the_square_of_the_ranks():
    for local in (2, 3, 4, 8, 16):
        options = Options()
        piece = piece_bytes(options, local)
        assert piece % 64 == 0
        assert piece * options.places * (local - 1) <= 17 << 20
    assert piece_bytes(Options(piece=4096), 64) == 4096
