"""What is refused before anything starts, and where each rank stands."""

import functools

import msgspec
import pytest
from forked import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild
from cairn.models.presets import PRESETS, preset
from cairn.models.shards import Alone
from cairn.models.transformer import Transformer
from cairn.train.parallel import mesh as mesh_module
from cairn.train.parallel.layout import SHARED_SCALE, Layout, StepDemand, Strategy, check
from cairn.train.parallel.mesh import JOINED, ORDER, Mesh, group_size, members, place, world_rank

TINY = preset("tiny-qwen3")  # 4 heads, 2 key/value heads, 3 layers
MOE = preset("tiny-moe")  # 6 experts
sizes = st.integers(1, 3)


@pytest.mark.parametrize(
    ("layout", "world", "work", "words"),
    [
        (Layout(dp=2, tp=2), 8, StepDemand(), r"dp 2 \* fsdp 1 \* pp 1 \* cp 1 \* tp 2 = 4 ranks, but there are 8"),
        (Layout(dp=2, tp=2), 8, StepDemand(), "use dp 4, or start 4 ranks"),
        (Layout(dp=0), 0, StepDemand(), "dp is 0"),
        (Layout(tp=3), 3, StepDemand(), "tp 3 does not divide 4 attention heads: 4 % 3 = 1"),
        (Layout(tp=4), 4, StepDemand(), "tp 4 does not divide 2 key/value heads: 2 % 4 = 2"),
        (Layout(pp=4), 4, StepDemand(), r"pp 4 \* 1 stages per rank = 4 stages for 3 layers"),
        (Layout(pp=2), 2, StepDemand(strategy=Strategy(order="zbv")), r"pp 2 \* 2 stages per rank = 4 stages"),
        (Layout(ep=2, dp=2), 2, StepDemand(), "ep 2 for a qwen3 model without experts"),
        (Layout(ep=3, dp=2), 2, StepDemand(), r"dp 2 \* fsdp 1 = 2 ranks cannot be cut into groups of ep 3"),
        (Layout(cp=2), 2, StepDemand(tokens=30), r"30 tokens of a microbatch % \(2 \* cp 2 \* tp 1\) = 2"),
        (Layout(cp=4), 4, StepDemand(strategy=Strategy(attention="ulysses")), "cp 4 does not divide 2 key/value"),
        (Layout(fsdp=2), 2, StepDemand(strategy=Strategy(zero=1)), "zero 1 with fsdp 2"),
        (Layout(dp=2), 2, StepDemand(strategy=Strategy(zero=3)), "zero is 3"),
        (Layout(dp=2), 2, StepDemand(strategy=Strategy(sequence_parallel=True)), "sequence_parallel with tp 1"),
        (Layout(fsdp=2, pp=2), 4, StepDemand(strategy=Strategy(order="zb-h1")), "computes weight gradients later"),
        (Layout(pp=2), 2, StepDemand(microbatches=3, strategy=Strategy(order="interleaved", chunks=1)),
         "3 microbatches % 2 ranks = 1"),
        (Layout(tp=2), 2, StepDemand(int8_states=True),
         r"columns of the attention's output / 2 % 256 that share a scale = "),
    ],
)  # fmt: skip
def test_refused_with_the_equation(layout, world, work, words):
    with pytest.raises(ConfigError) as caught:
        check(layout, world, TINY, work)
    assert caught.match(words)


def test_states_of_8_bits_go_with_ranks_that_have_whole_blocks():
    for name, tp in (("qwen3-8b", 8), ("qwen3-1.7b", 4), ("llama-3.1-8b", 8)):
        check(Layout(tp=tp), tp, preset(name), StepDemand(int8_states=True))
    with pytest.raises(ConfigError, match="3072 columns of the feed-forward / 8 % 256"):
        check(Layout(tp=8), 8, preset("qwen3-0.6b"), StepDemand(int8_states=True))


def test_experts_have_to_divide():
    with pytest.raises(ConfigError, match="ep 4 does not divide 6 experts"):
        check(Layout(dp=4, ep=4), 4, MOE)
    check(Layout(dp=4, ep=2), 4, MOE)


class Place(Alone):
    """The last of some ranks of tp, with nobody to talk to."""

    def __init__(self, size):
        self.rank, self.size = size - 1, size


def _is_refused(work, *arguments, **named):
    try:
        work(*arguments, **named)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", PRESETS)
def test_a_layout_is_refused_exactly_where_a_model_cannot_be_cut(name):
    """Heads, columns and states of 8 bits: held against the model that is built."""
    whole = preset(name)
    layers = min(whole.layers, 6)
    spec = msgspec.structs.replace(
        whole,
        layers=layers,
        vocab=64,
        windows=whole.windows[:layers],
        mixers=whole.mixers[:layers],
    )
    for tp in (2, 3, 8):
        make = functools.partial(Transformer, spec, ModelBuild("meta", shards=Place(tp)))
        refused = _is_refused(check, Layout(tp=tp), tp, spec)
        assert refused == _is_refused(make), tp
        if refused:
            continue
        cut = {slot.cut[2] - slot.cut[1] for slot in make().slots() if _by_columns(slot)}
        torn = any(width % SHARED_SCALE for width in cut)
        assert torn == _is_refused(check, Layout(tp=tp), tp, spec, StepDemand(int8_states=True)), tp


def _by_columns(slot):
    return slot.cut is not None and slot.cut[0] == len(slot.shape) - 1 > 0


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("tiny-gpt-oss", Layout(dp=2, ep=2), "whose experts have biases"),
        ("tiny-qwen3-next", Layout(cp=2), "carry a state along the sequence"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_it_is_built(name, layout, words):
    with pytest.raises(ConfigError, match=words):
        check(layout, 2, preset(name))


def test_an_unknown_axis_is_a_typo():
    with pytest.raises(msgspec.ValidationError, match="ddp"):
        msgspec.convert({"ddp": 2}, Layout)


layouts = st.builds(Layout, sizes, sizes, sizes, sizes, sizes)


@given(layouts, st.data())
def test_ranks_and_places_are_the_same_thing(layout, data):
    rank = data.draw(st.integers(0, layout.world() - 1))
    assert world_rank(layout, place(layout, rank)) == rank


@given(layouts, st.sampled_from([*ORDER, "data", "replica"]))
def test_groups_cut_the_world_into_equal_parts(layout, axis):
    groups = {tuple(members(layout, axis, rank)) for rank in range(layout.world())}
    assert sorted(r for group in groups for r in group) == list(range(layout.world()))
    assert {len(group) for group in groups} == {group_size(layout, axis)}


AXES = (*ORDER, *JOINED, "ep", "expert_replica")


def members_by_definition(layout, axis, rank):
    """The ranks whose coordinates differ only along `axis`, found by comparing all of them."""

    def others(r):
        at = place(layout, r)
        data = at["dp"] * layout.fsdp + at["fsdp"]
        if axis == "ep":
            return at["pp"], at["cp"], at["tp"], data // layout.ep
        if axis == "expert_replica":
            return at["pp"], at["tp"], data % layout.ep
        return tuple(at[a] for a in ORDER if a not in JOINED.get(axis, (axis,)))

    return [r for r in range(layout.world()) if others(r) == others(rank)]


@settings(max_examples=25)
@given(layouts, st.data())
def test_groups_are_those_of_the_definition(layout, data):
    divisors = [n for n in range(1, 10) if layout.data_ranks() % n == 0]
    layout = msgspec.structs.replace(layout, ep=data.draw(st.sampled_from(divisors)))
    rank = data.draw(st.integers(0, layout.world() - 1))
    for axis in AXES:
        found = members_by_definition(layout, axis, rank)
        assert members(layout, axis, rank) == found
        assert Mesh(layout, rank, {}, "cpu").rank(axis) == found.index(rank)


def test_a_mesh_of_thousands_of_ranks_is_cut_into_groups_in_linear_time(monkeypatch):
    """Comparing every rank with every other took hours here; one pass for each axis takes half a second."""
    layout, rank = Layout(dp=8, fsdp=16, pp=4, cp=2, tp=8, ep=8), 8000
    opened, looked_at = [], 0

    def counted(*arguments):
        nonlocal looked_at
        looked_at += 1
        assert looked_at <= (len(AXES) + 1) * layout.world()
        return place(*arguments)

    monkeypatch.setattr(mesh_module, "place", counted)
    monkeypatch.setattr(mesh_module.dist, "new_group", lambda ranks: opened.append(ranks) or ranks)
    groups = mesh_module._open_groups(layout, rank)
    sizes = {axis: group_size(layout, axis) for axis in AXES}
    assert {axis: len(ranks) for axis, ranks in groups.items()} == sizes | {"pp_ends": 2}
    assert all(rank in ranks for ranks in groups.values())
    assert len(opened) == len({tuple(ranks) for ranks in opened})


def test_expert_groups_join_ranks_with_the_same_rest():
    layout = Layout(dp=4, cp=2, ep=2)
    assert members(layout, "ep", 0) == [0, 2]  # neighbours in dp, the same tokens' share
    assert members(layout, "expert_replica", 0) == [0, 1, 4, 5]
    assert group_size(layout, "expert_replica") == 4


def test_alone_there_is_nobody_to_talk_to():
    mesh = Mesh.alone()
    assert (mesh.data_rank, mesh.data_ranks, mesh.group("tp"), mesh.device_mesh) == (
        0,
        1,
        None,
        None,
    )
    with pytest.raises(ConfigError, match="a layout of 2 ranks"):
        Mesh.join(Layout(tp=2))


def where(rank, world, layout):
    mesh = Mesh.join(layout)
    return mesh.data_rank, [mesh.rank(axis) for axis in ORDER], mesh.peer("tp", 0)


def test_each_rank_knows_its_place():
    layout = Layout(dp=2, pp=2, tp=2)
    found = run_ranks(8, where, layout)
    assert found[5] == (0, [1, 0, 0, 0, 1], 4)  # pp 1, dp 0, tp 1
    assert [data for data, _, _ in found] == [0, 0, 1, 1, 0, 0, 1, 1]


def wrong_world(rank, world):
    Mesh.join(Layout(tp=4))


def test_a_layout_of_another_size_is_refused_on_every_rank():
    from forked import RankFailed

    with pytest.raises(RankFailed, match="= 4 ranks, but there are 2"):
        run_ranks(2, wrong_world)
