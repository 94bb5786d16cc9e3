"""Where experts go: every one has a place, no rank has two copies of one, and skewed loads become even."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.models.expert_placement import Placement, evenly, moves, place, rebalance

VISITS = st.lists(st.integers(0, 1000), min_size=1, max_size=24)


def zipf(experts: int, exponent: float = 1.0) -> list[float]:
    return [1e6 / (1 + rank) ** exponent for rank in range(experts)]


@pytest.mark.parametrize("experts", [64, 128, 256])
@pytest.mark.parametrize("ranks", [4, 8])
def test_zipf_loads_become_even(experts, ranks):
    visits = zipf(experts)
    even = evenly(experts, ranks).loads(visits)
    found = place(visits, ranks, experts // ranks + 4)
    loads = found.loads(visits)
    assert max(loads) <= 1.1 * sum(loads) / ranks
    assert max(even) > 2 * sum(even) / ranks  # what it is better than
    assert sum(loads) == pytest.approx(sum(visits))


@settings(max_examples=40, deadline=None)
@given(VISITS, st.integers(1, 6), st.integers(0, 3))
def test_every_expert_has_a_place_and_every_token_one_slot(visits, ranks, spare):
    slots = -(-len(visits) // ranks) + spare
    found = place(visits, ranks, slots)
    assert all(len(set(rank)) == len(rank) <= slots for rank in found.ranks)
    for expert in range(len(visits)):
        for token in range(5):
            at = [found.slot(rank, expert, token) for rank in range(ranks)]
            (rank,) = [r for r, slot in enumerate(at) if slot >= 0]
            assert found.ranks[rank][at[rank]] == expert
    assert max(found.loads(visits)) <= sum(visits)


@settings(max_examples=40, deadline=None)
@given(VISITS, st.integers(1, 4), st.integers(0, 3), st.randoms())
def test_moves_lead_from_one_placement_to_the_other(visits, ranks, spare, random):
    slots = -(-len(visits) // ranks) + spare
    old = place([random.random() for _ in visits], ranks, slots)
    new, steps = rebalance(old, visits)
    if new is old:
        assert not steps
        return
    assert max(new.loads(visits)) < max(old.loads(visits))
    held = [dict(enumerate(rank)) for rank in old.ranks]
    for move in steps:
        assert move.expert in old.ranks[move.rank if move.source is None else move.source]
        held[move.rank][move.slot] = move.expert
    for rank, experts in enumerate(new.ranks):
        assert tuple(held[rank][slot] for slot in range(len(experts))) == experts
    assert moves(old, new) == steps


def test_an_even_load_moves_nothing():
    old = evenly(8, 4)
    assert rebalance(old, [5.0] * 8) == (old, [])
    assert rebalance(old, [0.0] * 8) == (old, [])


@pytest.mark.parametrize(
    "make",
    [lambda: evenly(6, 4), lambda: place([1.0] * 9, 2, 4), lambda: Placement(3, ((0,), (2,)))],
)
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(ConfigError):
        make()
