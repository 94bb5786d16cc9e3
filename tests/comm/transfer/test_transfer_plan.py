"""Any layout to any layout: the planned bytes are those that brute force moves, once each, in the fewest runs."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_oracle import garbage, store, whole_cache

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.cast import LANDING, convert, from_float32, landed, to_float32
from cairn.comm.transfer.copies import copy_one_by_one, copy_runs
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.kv import KVContents, KVLayout, kv_shards, plan_kv
from cairn.comm.transfer.plan import TransferPlan, make_plan
from cairn.comm.transfer.shard import TensorShard
from cairn.core.errors import ConfigError


def carry_out(plan: TransferPlan, sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    for leg in plan.legs:
        copy_one_by_one(sources[leg.source_rank], targets[leg.target_rank], leg.runs)


@st.composite
def contents(draw) -> KVContents:
    latent = draw(st.booleans())
    return KVContents(
        model="m",
        layers=draw(st.integers(1, 5)),
        kv_heads=1 if latent else draw(st.sampled_from([1, 2, 4, 6])),
        width=draw(st.integers(1, 5)),
        latent=latent,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "uint8"])),
    )


@st.composite
def layouts(draw, of: KVContents, tokens: int) -> tuple[KVLayout, list[int]]:
    heads = of.kv_heads
    tps = [n for n in range(1, 9) if of.latent or heads % n == 0 or n % heads == 0]
    size = draw(st.integers(1, 9))
    needed = -(-tokens // size)
    layout = KVLayout(
        contents=of,
        page_size=size,
        pages=needed + draw(st.integers(0, 4)),
        tp=draw(st.sampled_from(tps)),
        pp=draw(st.integers(1, of.layers)),
        heads_first=draw(st.booleans()),
        page_outermost=draw(st.booleans()),
        page_gap_bytes=draw(st.sampled_from([0, 0, 8])),
    )
    return layout, draw(st.permutations(range(layout.pages)))[:needed]


@st.composite
def handovers(draw):
    of = draw(contents())
    length = draw(st.integers(1, 20))
    start = draw(st.integers(0, length))
    source, target = draw(layouts(of, length)), draw(layouts(of, length))
    first = draw(st.integers(0, of.layers - 1))
    layers = draw(st.sampled_from([None, (first, of.layers), (first, first + 1)]))
    return source, target, (start, length), layers


@given(handovers())
def test_the_planned_bytes_are_those_that_brute_force_moves(handover):
    (source, table), (target, other), tokens, layers = handover
    whole = whole_cache(source.contents, tokens[1])
    sources, targets = garbage(source, 1), garbage(target, 2)
    store(source, sources, table, whole, (0, tokens[1]))
    expected = [memory.copy() for memory in targets]
    store(target, expected, other, whole, tokens, layers)
    plan = plan_kv(source, table, target, other, tokens, layers)
    carry_out(plan, sources, targets)
    for rank, (got, wanted) in enumerate(zip(targets, expected, strict=True)):
        assert np.array_equal(got, wanted), rank


@given(handovers())
def test_every_byte_comes_once_and_no_run_could_be_longer(handover):
    (source, table), (target, other), tokens, layers = handover
    plan = plan_kv(source, table, target, other, tokens, layers)
    written: Counter[tuple[int, int]] = Counter()
    for leg in plan.legs:
        rows = list(zip(*(column.tolist() for column in leg.runs), strict=True))
        for origin, goal, size in rows:
            assert size > 0
            assert origin + size <= source.region_bytes(leg.source_rank)
            written.update((leg.target_rank, byte) for byte in range(goal, goal + size))
        ends = {(origin + size, goal + size) for origin, goal, size in rows}
        assert not ends & {(origin, goal) for origin, goal, _ in rows}
    assert set(written.values()) <= {1}
    wanted = kv_shards(target, other, tokens, layers)
    assert len(written) == sum(shard.nbytes for shard in wanted)


@given(handovers())
def test_replicas_are_equally_busy_up_to_one_slice(handover):
    """Against the bound that no assignment can beat: for every set of ranks, what only they hold, shared among them."""
    (source, table), (target, other), tokens, layers = handover
    plan = plan_kv(source, table, target, other, tokens, layers)
    held, wanted = (kv_shards(*side, tokens, layers) for side in ((source, table), (target, other)))
    bound = least_busiest(held, wanted)
    # Each piece may be rounded by one slice; slices are of layers, planes, tokens or heads.
    slack = sum(max(_slice_bytes(shard), 1) for shard in wanted)
    assert max(plan.sent().values(), default=0) <= bound + slack


def _slice_bytes(shard: TensorShard) -> int:
    return (
        shard.nbytes // max(1, max(len(axis.offsets) for axis in shard.axes[:3]))
        if shard.nbytes
        else 0
    )


def least_busiest(held: list[TensorShard], wanted: list[TensorShard]) -> float:
    """Holder sets, by brute force over (layer, head); the bound by brute force over unions of those sets."""
    only: Counter[frozenset[int]] = Counter()
    for shard in wanted:
        (l0, l1), (p0, p1), (t0, t1), (h0, h1), (c0, c1) = shard.box
        cell = (p1 - p0) * (t1 - t0) * (c1 - c0) * shard.itemsize
        for layer, head in itertools.product(range(l0, l1), range(h0, h1)):
            holders = frozenset(
                one.rank
                for one in held
                if one.box[0][0] <= layer < one.box[0][1] and one.box[3][0] <= head < one.box[3][1]
            )
            only[holders] += cell
    return max((total / len(ranks) for ranks, total in only.items()), default=0.0)


def test_equal_numbers_of_replicas_pair_up_and_fewer_targets_share_them():
    of = KVContents(model="m", layers=8, kv_heads=1, width=4, latent=True)
    four = KVLayout(contents=of, page_size=4, pages=4, tp=4)
    one, two = (KVLayout(contents=of, page_size=4, pages=4, tp=tp) for tp in (1, 2))
    paired = plan_kv(four, range(4), four, range(4), (0, 16))
    assert [(leg.source_rank, leg.target_rank) for leg in paired.legs] == [(r, r) for r in range(4)]
    for target in (one, two):
        sent = plan_kv(four, range(4), target, range(4), (0, 16)).sent()
        assert len(sent) == 4
        assert len(set(sent.values())) == 1


def test_equal_layouts_move_whole_pages():
    of = KVContents(model="m", layers=3, kv_heads=4, width=8)
    layout = KVLayout(contents=of, page_size=16, pages=8, tp=2)
    plan = plan_kv(layout, [3, 1], layout, [0, 7], (0, 32))
    assert [leg.runs.copies for leg in plan.legs] == [3 * 2 * 2] * 2
    assert {int(size) for leg in plan.legs for size in leg.runs.sizes} == {layout.plane_bytes}


def test_same_ranks_take_what_they_hold_from_themselves():
    of = KVContents(model="m", layers=4, kv_heads=4, width=2)
    four, replicated = (KVLayout(contents=of, page_size=4, pages=2, tp=tp) for tp in (2, 2))
    held = kv_shards(four, [0], (0, 4))
    plan = make_plan(held, kv_shards(replicated, [1], (0, 4)), same_ranks=True)
    assert all(leg.source_rank == leg.target_rank for leg in plan.legs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(model="other"), "model 'm' / 'other'"),
        (dict(layers=3), "layers 2 / 3"),
        (dict(kv_heads=2), "kv_heads 4 / 2"),
        (dict(dtype="float16"), "dtype 'bfloat16' / 'float16'"),
    ],
)
def test_other_contents_are_refused_with_both_values(change, words):
    base = dict(model="m", layers=2, kv_heads=4, width=8)
    ours = KVLayout(contents=KVContents(**base), page_size=4, pages=4)
    theirs = KVLayout(contents=KVContents(**base | change), page_size=4, pages=4)
    with pytest.raises(TransferError, match=words):
        plan_kv(ours, [0], theirs, [0], (0, 4))


def test_bad_tables_and_shapes_are_refused():
    of = KVContents(model="m", layers=2, kv_heads=6, width=8)
    layout = KVLayout(contents=of, page_size=4, pages=4)
    with pytest.raises(TransferError, match="page 9 is not one of the 4"):
        plan_kv(layout, [9], layout, [0], (0, 4))
    with pytest.raises(TransferError, match=r"tokens 0\.\.9 in 2 pages of 4"):
        plan_kv(layout, [0, 1], layout, [0, 1, 2], (0, 9))
    with pytest.raises(TransferError, match="written twice"):
        plan_kv(layout, [0, 1], layout, [2, 2], (0, 8))
    with pytest.raises(ConfigError, match="tensor parallel 4 neither divides 6 KV heads"):
        KVLayout(contents=of, page_size=4, pages=4, tp=4)
    with pytest.raises(TransferError, match="no rank holds kv"):
        make_plan(kv_shards(layout, [0], (0, 2)), kv_shards(layout, [0], (0, 4)))


@given(
    read=st.sampled_from(["float32", "float16", "bfloat16"]),
    write=st.sampled_from(["float32", "float16", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_other_number_types_are_converted_on_arrival(read, write, seed):
    import torch

    base = dict(model="m", layers=2, kv_heads=2, width=4)
    source = KVLayout(contents=KVContents(**base, dtype=read), page_size=3, pages=3, tp=2)
    target = KVLayout(
        contents=KVContents(**base, dtype=write), page_size=4, pages=2, heads_first=True
    )
    whole = torch.randn(2, 2, 7, 2, 4, generator=torch.Generator().manual_seed(seed)).to(
        getattr(torch, read)
    )
    as_bits = lambda x: x.view({4: torch.uint32, 2: torch.uint16}[x.itemsize]).numpy()  # noqa: E731
    sources, targets = garbage(source, 1), garbage(target, 2)
    store(source, sources, [2, 0, 1], as_bits(whole), (0, 7))
    expected = [memory.copy() for memory in targets]
    store(target, expected, [1, 0], as_bits(whole.to(getattr(torch, write))), (0, 7))
    for leg in plan_kv(source, [2, 0, 1], target, [1, 0], (0, 7), cast=True).legs:
        way = landed(leg)
        assert way.leg.target_region == LANDING
        landing = np.zeros(leg.runs.nbytes, np.uint8)
        copy_runs(sources[leg.source_rank], landing, way.leg.runs)
        convert(landing, targets[leg.target_rank], way.onwards, (read, write))
    assert all(map(np.array_equal, targets, expected))


def test_bfloat16_rounds_as_torch_does():
    import torch

    bits = np.random.default_rng(0).integers(0, 1 << 32, 50_000, dtype=np.uint32)
    numbers = bits.view(np.float32)
    ours = from_float32(numbers, "bfloat16")
    theirs = torch.from_numpy(numbers).to(torch.bfloat16)
    back, right = to_float32(ours, "bfloat16"), theirs.float().numpy()
    assert np.array_equal(back, right, equal_nan=True)


def test_eight_bit_types_are_not_converted():
    base = dict(model="m", layers=1, kv_heads=1, width=4)
    sides = [
        KVLayout(contents=KVContents(**base, dtype=dtype), page_size=4, pages=1)
        for dtype in ("float8_e4m3fn", "bfloat16")
    ]
    with pytest.raises(TransferError, match="float8_e4m3fn cannot become bfloat16"):
        plan_kv(sides[0], [0], sides[1], [0], (0, 4), cast=True)


@given(
    size=st.integers(1, 3000),
    unit=st.sampled_from([1, 4, 64, 256]),
    count=st.integers(0, 40),
    mixed=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 9),
)
def test_both_ways_of_copying_agree(size, unit, count, mixed, seed):
    rng = np.random.default_rng(seed)
    size = max(1, size // unit) * unit
    places = [rng.permutation(50)[:count] * size for _ in range(2)]
    halves = np.where(rng.random(count) < mixed, size // 2, size)  # some are shorter, some empty
    runs = ByteRuns(places[0], places[1], halves)
    source, plain = (rng.integers(0, 256, 50 * size, dtype=np.uint8) for _ in range(2))
    fast = plain.copy()
    copy_one_by_one(source, plain, runs)
    copy_runs(source, fast, runs)
    assert np.array_equal(plain, fast)
