"""Attention over pages on a real GPU: every configuration right, the same twice, and inside a CUDA graph."""

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention.merge_state import State, merge_state, merge_state_reference
from cairn.kernels.cases.paged_attention import Shape, random_call, run
from cairn.kernels.dispatch import Impl, capability
from cairn.kernels.paged import paged_decode, paged_decode_gluon, paged_prefill
from cairn.kernels.paged.cascade import cascade_attention, split_tables
from cairn.kernels.paged.paged_attention import FP8, paged_attention, paged_attention_reference
from cairn.kernels.paged.paged_parts import lasting_workspace
from cairn.kernels.paged.paged_tiles import Paged
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu

RAGGED = [1, 0, 4097, 33, 700, 0, 16, 12345, 64]


def check(call: Paged, tolerance: float = 1e-2, impl: Impl = "triton") -> None:
    lse_TH = torch.empty(call.q_THC.shape[:2], device="cuda")
    poison(call.out_THC, lse_TH)
    attend(call, lse_TH, impl)
    out_THC, exact_lse_TH = paged_attention_reference(call)
    assert relative_error(call.out_THC, out_THC) < tolerance
    saw = exact_lse_TH.isfinite()
    assert torch.equal(lse_TH.isfinite(), saw)
    assert relative_error(lse_TH[saw], exact_lse_TH[saw]) < max(1e-4, tolerance / 10)


def attend(call: Paged, lse_TH: torch.Tensor | None = None, impl: Impl = "triton") -> torch.Tensor:
    return paged_attention(
        *call[:6], max_query=call.max_query, scale=call.scale, window=call.window, softcap=call.softcap,
        sinks_H=call.sinks_H, k_scale=call.k_scale, v_scale=call.v_scale, out=call.out_THC, lse=lse_TH, impl=impl,
    )  # fmt: skip


BY_GLUON = [
    {"heads": 32},
    {"heads": 16, "by_head": True},
    {"heads": 8, "page": 256},
    {"heads": 16, "page": 16},
    {"heads": 32, "page": 32, "by_head": True},
    {"heads": 16, "columns": 64, "page": 16},
    {"heads": 16, "kv_heads": 1, "columns": 64, "page": 128},
    {"heads": 32, "columns": 64, "by_head": True},
]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("rest", BY_GLUON, ids=str)
def test_decode_without_a_pause(rest, prefetch):
    """Lengths around the borders of tiles and pages, empty ones, and one that many programs share."""
    lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129, 9000, 0, 1000, 16, 17, 0] * 20
    call = random_call(Shape([1] * len(lengths), lengths, **({"page": 64} | rest)))
    workspace = lasting_workspace(call.q_THC.device)
    assert paged_decode_gluon.obstacle(call, workspace) is None

    def attended() -> torch.Tensor:
        poison(call.out_THC)
        given = dict(out=call.out_THC, workspace=workspace, prefetch=prefetch)
        return paged_attention(*call[:6], max_query=1, **given, impl="gluon").clone()

    first = attended()
    assert relative_error(first, paged_attention_reference(call)[0]) < 1e-2
    assert torch.equal(first, attended())
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("shares_chip", [False, True])
@pytest.mark.parametrize(("page", "heads"), [(64, 16), (16, 16), (64, 128)])
def test_decode_of_float8_without_a_pause(page, heads, shares_chip):
    """With the whole chip and beside another stream's work: plans of other tiles."""
    lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129, 9000, 0, 1000, 16, 17, 0] * 20
    call = random_call(Shape([1] * len(lengths), lengths, heads=heads, page=page, fp8=True))
    workspace = lasting_workspace(call.q_THC.device)
    plan = paged_decode_gluon.plan_of(call, shares_chip)
    exact = paged_attention_reference(call)[0]
    for _ in range(2):
        poison(call.out_THC)
        paged_decode_gluon.decode(call, workspace, True, plan)
        assert relative_error(call.out_THC, exact) < 1e-2
        assert not workspace.arrivals.any()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_few_queries_without_a_pause(heads, prefetch, fp8):
    """New tokens on both sides of a border of tiles, sequences without queries, and padding without keys."""
    lengths = [0, 3, 63, 64, 65, 66, 128, 129, 2500, 0, 1000, 130, 700] * 20
    queries = [2, 3, 1, 2, 3, 3, 1, 3, 2, 0, 1, 3, 0] * 20
    call = random_call(Shape(queries, lengths, heads=heads, page=64, fp8=fp8))
    call = call._replace(max_query=16 // (heads // call.kv_heads))
    workspace = lasting_workspace(call.q_THC.device)
    assert paged_decode_gluon.obstacle(call, workspace) is None
    exact = paged_attention_reference(call)[0]
    for _ in range(2):
        poison(call.out_THC)
        paged_decode_gluon.decode(call, workspace, prefetch)
        assert relative_error(call.out_THC, exact) < 1e-2
        assert not workspace.arrivals.any()


@pytest.mark.parametrize("fp8", [False, True])
def test_single_queries_among_others(fp8):
    """The decode kernel takes sequences with one query and touches no row of the others."""
    lengths = [0, 1, 63, 64, 65, 300, 128, 129, 2500, 0, 1000, 130, 700] * 10
    queries = [1, 1, 1, 40, 1, 300, 1, 129, 1, 0, 1, 3, 0] * 10
    call = random_call(Shape(queries, lengths, heads=16, page=64, fp8=fp8))
    workspace = lasting_workspace(call.q_THC.device)
    assert paged_decode_gluon.obstacle(call, workspace, singles=True) is None
    exact = paged_attention_reference(call)[0]
    single_T = torch.tensor([q == 1 for q in queries for _ in range(q)], device="cuda")
    for _ in range(2):
        call.out_THC.fill_(7.0)
        paged_decode_gluon.decode(call, workspace, True, singles=True)
        rows = len(single_T)
        assert relative_error(call.out_THC[:rows][single_T], exact[:rows][single_T]) < 1e-2
        assert (call.out_THC[:rows][~single_T] == 7.0).all()
        assert not workspace.arrivals.any()
    given = dict(max_query=300, k_scale=call.k_scale, v_scale=call.v_scale, workspace=workspace)
    whole = paged_attention(*call[:6], **given, prefetch=True)
    assert relative_error(whole[:rows], exact[:rows]) < 1e-2


def decode_shape(**rest) -> Shape:
    return Shape([1] * len(RAGGED), RAGGED, **rest)


@pytest.mark.parametrize("plan", paged_decode.CANDIDATES, ids=lambda plan: "x".join(map(str, plan)))
def test_decode_in_every_configuration(plan):
    key = paged_decode.key(128, 16, torch.bfloat16, 16)
    with trying("paged_attention", key, plan._asdict()):
        check(random_call(decode_shape()))


@pytest.mark.parametrize(
    "rest",
    [
        {"heads": 8},
        {"heads": 16, "by_head": True, "page": 64},
        {"heads": 24, "columns": 64, "page": 32},
        {"columns": 96},
        {"columns": 256, "kv_heads": 2, "heads": 8},
        {"heads": 64, "kv_heads": 1},
        {"fp8": True},
        {"fp8": True, "page": 128},
    ],
    ids=str,
)
def test_decode_of_other_shapes(rest):
    check(random_call(decode_shape(**rest)))


def test_decode_in_float32():
    check(random_call(decode_shape(heads=4, kv_heads=2, columns=64), dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("queries", [[1] * 9, [3, 1, 4, 0, 2, 1, 4, 4, 1]])
def test_decode_with_window_softcap_and_sinks(queries):
    call = random_call(Shape(queries, [max(n, q) for n, q in zip(RAGGED, queries, strict=True)]))
    check(call._replace(window=100, softcap=20.0, sinks_H=torch.randn(32, device="cuda")))
    check(call._replace(window=1))


@pytest.mark.parametrize(
    "plan", paged_prefill.CANDIDATES, ids=lambda plan: "x".join(map(str, plan))
)
def test_prefill_in_every_configuration(plan):
    page = 128 if plan.tma else 16
    key = paged_prefill.key(128, page, torch.bfloat16)
    with trying("paged_attention", key, plan._asdict()):
        check(random_call(Shape([300, 1, 77, 0, 513], [300, 900, 1200, 5, 515], page=page)))


@pytest.mark.parametrize(
    "rest",
    [
        {"heads": 24},
        {"columns": 64, "by_head": True, "page": 64},
        {"columns": 96},
        {"columns": 256},
        {"fp8": True},
    ],
    ids=str,
)
def test_prefill_of_other_shapes(rest):
    call = random_call(Shape([130, 1, 300], [777, 300, 300], **rest))
    check(call)
    check(
        call._replace(
            window=100, softcap=20.0, sinks_H=torch.randn(call.q_THC.shape[1], device="cuda")
        )
    )


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or capability(torch.device("cuda")) != (9, 0),
    reason="Gluon is for sm_90",
)


@needs_hopper
@pytest.mark.parametrize("ping_pong", [True, False])
@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"page": 64},
        {"page": 128, "heads": 8},
        {"page": 256, "by_head": True, "heads": 64},
        {"heads": 16, "page": 32},
        {"columns": 64, "heads": 16, "page": 32},
        {"columns": 64, "heads": 8, "page": 16},
    ],
    ids=str,
)
def test_prefill_in_gluon(rest, ping_pong):
    shape = Shape([300, 1, 77, 0, 513, 2, 130], [300, 900, 1200, 5, 515, 2, 4000], **rest)
    key = paged_prefill.key(shape.columns, shape.page, torch.bfloat16)
    with trying("paged_attention", key, {"gluon": True, "ping_pong": ping_pong}):
        call = random_call(shape)
        check(call, impl="gluon")
        check(call._replace(sinks_H=torch.randn(shape.heads, device="cuda")), impl="gluon")
        # Scales whose product with the mask's number rounds up and down: rows that see nothing of their first block.
        for scale in (0.1, 0.125, 128**-0.5):
            check(call._replace(scale=scale), impl="gluon")
        first = attend(call, impl="gluon").clone()
        for _ in range(5):
            poison(call.out_THC)
            assert torch.equal(attend(call, impl="gluon"), first)


def test_unused_pages_do_not_matter():
    """NaN in everything that no sequence owns: other pages, and the rest of a last page."""
    for shape in (decode_shape(), Shape([200, 1, 129], [333, 100, 129], page=128)):
        call = random_call(shape)
        used = torch.zeros(call.cache_k.shape[:2], dtype=torch.bool, device="cuda")
        for table, length in zip(call.block_tables, call.lengths.tolist(), strict=True):
            token = torch.arange(length, device="cuda")
            used[table[token // call.page_size].long(), token % call.page_size] = True
        call.cache_k[~used] = torch.nan
        call.cache_v[~used] = torch.nan
        check(call)


@pytest.mark.parametrize("queries", [[1] * 9, [200, 1, 1, 33, 700, 1, 16, 5, 1]])
def test_the_same_twice(queries):
    call = random_call(Shape(queries, [max(n, q) for n, q in zip(RAGGED, queries, strict=True)]))
    first = attend(call).clone()
    for _ in range(5):
        poison(call.out_THC)
        assert torch.equal(attend(call), first)


@pytest.mark.parametrize("impl", ["triton", pytest.param("gluon", marks=needs_hopper)])
def test_whole_numbers_are_rounded_once(impl):
    """Keys of zero give every key the weight 1: sums of small integers are exact, whatever took part in them."""
    for shape in (
        Shape([1, 1, 1], [2048, 4096, 7]),
        Shape([128, 256, 64], [2048, 4096, 64], page=128),
    ):
        call = random_call(shape)
        call.cache_k.zero_()
        call.cache_v.copy_(
            torch.randint(-8, 9, call.cache_v.shape, device="cuda").to(call.cache_v.dtype)
        )
        exact = paged_attention_reference(call._replace(q_THC=call.q_THC.double()))[0]
        assert (
            relative_error(attend(call, impl=impl if call.max_query > 1 else "triton"), exact)
            < 2e-3
        )


@pytest.mark.parametrize("queries", [[1] * 9, [200, 1, 1, 33, 64, 1, 16, 5, 1]])
def test_a_graph_replays_with_other_lengths(queries):
    longest = [8192] * 9
    call = random_call(Shape(queries, longest))
    call.lengths.fill_(1)
    run(call)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(call)
    for lengths in (
        [max(n % 8192, q) for n, q in zip(RAGGED, queries, strict=True)],
        longest,
        queries,
    ):
        call.lengths.copy_(torch.tensor(lengths))
        poison(call.out_THC)
        graph.replay()
        assert relative_error(call.out_THC, paged_attention_reference(call)[0]) < 1e-2


def test_more_than_a_thousand_sequences():
    call = random_call(Shape([1] * 1500, [(7 * i) % 300 for i in range(1500)], heads=8, kv_heads=2))
    check(call)


def test_merging():
    a, b, joined = (
        State(
            torch.randn(1000, 17, 96, device="cuda").bfloat16(),
            torch.randn(1000, 17, device="cuda"),
        )
        for _ in range(3)
    )
    a.lse_TH[::3] = -torch.inf
    a.out_THC[::3] = torch.nan
    poison(*joined)
    merge_state(a, b, joined, impl="triton")
    exact = merge_state_reference(*(State(s.out_THC.double(), s.lse_TH.double()) for s in (a, b)))
    assert relative_error(joined, exact) < 1e-2


def test_a_shared_prefix_joins_with_the_rest():
    """Cascade: 64 sequences share 4096 tokens and have 100 of their own."""
    shape = Shape([1] * 64, [100] * 64)
    own = random_call(shape)
    prefix = random_call(Shape([64], [4096 + 64], page=16))._replace(q_THC=own.q_THC)
    lse = [torch.empty(64, 32, device="cuda") for _ in range(2)]
    shared_THC = torch.empty_like(own.q_THC)
    # One sequence of 64 queries would be causal; as 64 sequences over the same pages all see the whole prefix.
    tables = prefix.block_tables[:, :256].expand(64, 256).contiguous()
    lengths = torch.full((64,), 4096, dtype=torch.int32, device="cuda")
    paged_attention(
        own.q_THC,
        prefix.cache_k,
        prefix.cache_v,
        tables,
        lengths,
        max_query=1,
        out=shared_THC,
        lse=lse[0],
    )
    paged_attention(*own[:5], max_query=1, out=own.out_THC, lse=lse[1])
    joined = merge_state(State(shared_THC, lse[0]), State(own.out_THC, lse[1]))
    first = prefix._replace(block_tables=tables, lengths=lengths, starts=None)
    parts = [State(*paged_attention_reference(call)) for call in (first, own)]
    assert relative_error(joined, merge_state_reference(*parts)) < 1e-2
    assert own.cache_k.dtype != FP8


@pytest.mark.parametrize(
    "rest", [{"heads": 32}, {"heads": 16, "page": 16}, {"heads": 8, "columns": 64}], ids=str
)
@pytest.mark.parametrize(("shared", "count"), [(0, 8), (2, 1), (2, 8), (28, 1), (28, 2), (28, 8)])
def test_cascade_reads_shared_pages_once_and_gives_the_same(shared, count, rest):
    rest = {"page": 64, "by_head": True} | rest
    page = rest["page"]
    lengths = [shared * page + own for own in (1, 64, 65, 300, 17, 128, 999)] * 20
    call = random_call(Shape([1] * len(lengths), lengths, **rest))
    call.block_tables[:, :shared] = call.block_tables[:1, :shared]
    call.lengths[3] = 0  # padding
    shared_1 = torch.full((1,), shared * page, dtype=torch.int32, device="cuda")
    workspace = lasting_workspace(call.q_THC.device)
    parts = split_tables(call.block_tables, call.lengths, shared_1, page, count)
    out = cascade_attention(call.q_THC, call.cache_k, call.cache_v, parts, workspace=workspace)
    expected, _ = paged_attention_reference(call)
    there = call.lengths > 0
    assert relative_error(out[there], expected[there]) < 1e-2
    assert out.isfinite().all()


@pytest.mark.parametrize("count", [1, 4])
def test_cascade_of_prompts_and_answers(count):
    """Of a step with prompts, too: rows with one query and with hundreds, padding behind them."""
    shared, page, queries = 28, 64, [1] * 30 + [200, 77, 0, 5]
    lengths = [shared * page + count + own for own, count in enumerate(queries)]
    call = random_call(Shape(queries, lengths, heads=32, page=page, by_head=True))
    call.block_tables[:, :shared] = call.block_tables[:1, :shared]
    padding = torch.zeros_like(call.lengths[:1])
    lengths_B = torch.cat([call.lengths, padding])
    tables_BP = torch.cat([call.block_tables, torch.zeros_like(call.block_tables[:1])])
    q_THC = torch.cat([call.q_THC, call.q_THC[:72]])
    starts = torch.cat([call.starts, call.starts[-1:] + 72])
    shared_1 = torch.full_like(padding, shared * page)
    workspace = lasting_workspace(call.q_THC.device)
    parts = split_tables(tables_BP, lengths_B, shared_1, page, count, len(q_THC))
    out = cascade_attention(
        q_THC, call.cache_k, call.cache_v, parts, starts, max_query=4096, workspace=workspace
    )
    expected, _ = paged_attention_reference(call)
    assert relative_error(out[: len(expected)], expected) < 1e-2
    assert out.isfinite().all()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("rest", BY_GLUON, ids=str)
def test_float8_pages_without_a_pause(rest, prefetch):
    """The same for a cache of 8 bits, whose scales are one for all heads or one for each."""
    lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129, 9000, 0, 1000, 16, 17, 0] * 20
    call = random_call(Shape([1] * len(lengths), lengths, **({"page": 64, "fp8": True} | rest)))
    workspace = lasting_workspace(call.q_THC.device)
    exact = paged_attention_reference(call)[0]
    others = (paged_decode_gluon.Plan(), paged_decode_gluon.Plan(buffers=4, per_sm=3))
    for plan in (None, *(others if rest == BY_GLUON[0] else ())):
        poison(call.out_THC)
        paged_decode_gluon.decode(call, workspace, prefetch, plan)
        assert relative_error(call.out_THC, exact) < 1e-2
        first = call.out_THC.clone()
        paged_decode_gluon.decode(call, workspace, prefetch, plan)
        assert torch.equal(first, call.out_THC)
        assert not workspace.arrivals.any()


@pytest.mark.parametrize("window", [0, 100])
def test_float8_pages_behind_a_chunk(window):
    queries, lengths = [70, 1, 200, 1, 129], [700, 33, 200, 500, 4000]
    check(random_call(Shape(queries, lengths, page=64, fp8=True))._replace(window=window))
