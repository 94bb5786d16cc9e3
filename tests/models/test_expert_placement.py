"""Where experts go: every one has a place, no rank has two copies of one, and skewed loads become even."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.expert_placement import ExpertPlacement, evenly, moves, place, rebalance
from cairn.models.expert_ranks import RankExperts
from cairn.models.export import export
from cairn.models.fused_experts import experts_product
from cairn.models.linear.form import Kernels
from cairn.models.presets import preset
from cairn.models.weights import random_model

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


class OneOfMany:
    """A rank whose sums are made by the test."""

    whole_experts = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def enter(self, x):
        return x

    reduce = whole = enter


@torch.no_grad()
@pytest.mark.parametrize("slots", [0, 3], ids=["once", "with copies"])
def test_ranks_that_share_the_experts_add_up_to_the_layer(slots):
    spec = preset("tiny-moe")
    whole = random_model(spec, ModelBuild("cpu", torch.float32, fused=True))
    layer = whole.layers[0].feed_forward
    experts, ranks = layer.experts, 4
    layer.router.weight.mul_(20)
    placement = place(zipf(experts.count), ranks, slots) if slots else evenly(experts.count, ranks)
    x_TD = torch.randn(13, spec.hidden)
    plain_TD, fused_TD = torch.zeros_like(x_TD), torch.zeros_like(x_TD)
    for rank in range(ranks):
        build = ModelBuild("cpu", torch.float32, OneOfMany(rank, ranks))
        part = RankExperts(build, spec, experts, placement)
        part.router.weight.copy_(layer.router.weight)
        for place_here, expert in enumerate(part.here):
            part.inner_EFD[place_here] = layer.inner_EFD[expert]
            part.down_EDF[place_here] = layer.down_EDF[expert]
        plain_TD += part(x_TD)
        fused_TD += experts_product(part, x_TD, x_TD, Kernels())
    torch.testing.assert_close(plain_TD, layer(x_TD), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused_TD, layer(x_TD), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_rank_reads_its_experts_of_a_checkpoint(tmp_path):
    whole = random_model(preset("tiny-moe"), ModelBuild("cpu", torch.float32))
    export(whole, tmp_path)
    part = open_checkpoint(tmp_path).load("cpu", torch.float32, shards=OneOfMany(1, 2))
    here = part.layers[0].feed_forward
    assert 0 < len(here.here) == len(here.inner_EFD) < here.experts.count
    for place_here, expert in enumerate(here.here):
        theirs = whole.layers[0].feed_forward.inner_EFD[expert]
        assert torch.equal(here.inner_EFD[place_here], theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: evenly(3, 4),
        lambda: place([1.0] * 9, 2, 4),
        lambda: ExpertPlacement(3, ((0,), (2,))),
    ],
)
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(ConfigError):
        make()
