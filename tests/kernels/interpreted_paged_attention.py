"""Attention over pages, in the interpreter: decode, prefill and mixed batches against float64."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.cases.paged_attention import Shape, random_call, run
from cairn.kernels.paged import paged_decode, paged_prefill
from cairn.kernels.paged.cascade import cascade_attention, split_tables
from cairn.kernels.paged.paged_attention import (
    FP8,
    checked,
    paged_attention,
    paged_attention_reference,
)
from cairn.kernels.paged.paged_parts import Workspace, lasting_workspace
from cairn.kernels.paged.paged_tiles import Paged
from cairn.kernels.tuned import trying


def shape(queries, lengths, **rest) -> Shape:
    return Shape(queries, lengths, **{"heads": 4, "kv_heads": 2, "columns": 64} | rest)


def exact(call: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """What float64 makes of the same numbers."""
    wide = call._replace(q_THC=call.q_THC.double())
    if call.cache_k.dtype != FP8:
        wide = wide._replace(cache_k=call.cache_k.double(), cache_v=call.cache_v.double())
    return paged_attention_reference(wide)


def check(call: Paged, tolerance: float = 1e-5, **more) -> None:
    call = call._replace(**more)
    # What no sequence owns must not matter: another page, the rest of a last page, or what lies behind a window.
    used = torch.zeros(call.cache_k.shape[:2], dtype=torch.bool)
    starts = range(call.sequences + 1) if call.starts is None else call.starts.tolist()
    for b, (table, length) in enumerate(
        zip(call.block_tables.tolist(), call.lengths.tolist(), strict=True)
    ):
        queries = starts[b + 1] - starts[b]
        first = max(0, length - queries + 1 - call.window) if call.window else 0
        for token in range(first, length):
            used[table[token // call.page_size], token % call.page_size] = True
    for cache in (call.cache_k, call.cache_v):
        if cache.dtype != FP8:
            cache[~used] = torch.nan
    lse_TH = torch.empty(call.q_THC.shape[:2])
    poison(call.out_THC, lse_TH)
    paged_attention(
        *call[:6], max_query=call.max_query, scale=call.scale, window=call.window, softcap=call.softcap,
        sinks_H=call.sinks_H, k_scale=call.k_scale, v_scale=call.v_scale, out=call.out_THC, lse=lse_TH, impl="triton",
    )  # fmt: skip
    out_THC, exact_lse_TH = exact(call)
    assert relative_error(call.out_THC, out_THC) < tolerance
    saw = exact_lse_TH.isfinite()
    assert torch.equal(lse_TH.isfinite(), saw)
    assert relative_error(lse_TH[saw], exact_lse_TH[saw]) < max(tolerance, 1e-5)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("lengths", "rest"),
    [
        ([300, 1, 0, 17, 64, 0], {"heads": 8}),  # cut into pieces, empty, one token, whole tiles
        ([130, 77], {"page": 64}),
        ([130, 257], {"page": 256, "by_head": True}),
        ([70, 200], {"heads": 6, "columns": 96}),  # groups of 3, heads that are no power of two
        ([70, 10], {"heads": 18, "kv_heads": 1, "page": 32}),  # more heads in a group than 16 rows
        ([0, 0], {}),
    ],
    ids=str,
)
def test_decode(lengths, rest):
    check(random_call(shape([1] * len(lengths), lengths, **rest), "cpu", torch.float32))


@pytest.mark.parametrize("block", [16, 32])
def test_decode_in_other_tiles(block):
    key = paged_decode.key(64, 16, torch.float32, 16)
    with trying("paged_attention", key, {"block": block, "per_sm": 3}):
        check(random_call(shape([1, 1, 1], [200, 0, 33]), "cpu", torch.float32))


@pytest.mark.parametrize("lengths", [[300, 40, 0, 700], [3, 0, 1, 2]])
def test_whoever_comes_last_adds_up(lengths):
    call = random_call(shape([1] * 4, lengths), "cpu", torch.float32)
    workspace = lasting_workspace(call.q_THC.device, width=64)
    poison(*workspace[:2])
    for _ in range(2):
        poison(call.out_THC)
        run(call, workspace)
        assert relative_error(call.out_THC, exact(call)[0]) < 1e-5
        assert not workspace.arrivals.any()
    with pytest.raises(ValueError, match=r"^workspace: "):
        run(call, Workspace(*(tensor[:2] for tensor in workspace)))


@pytest.mark.parametrize("window", [0, 1, 40])
def test_decode_of_several_queries(window):
    """Some sequences have fewer, one has none: what speculative decoding looks like."""
    check(random_call(shape([3, 1, 0, 2], [100, 5, 7, 2]), "cpu", torch.float32), window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_in_16_bits(dtype):
    check(random_call(shape([1, 1, 1], [150, 0, 33]), "cpu", dtype), 1e-2)


@pytest.mark.parametrize("scales", [1, 2])
@pytest.mark.parametrize("queries", [[1, 1], [20, 1]])
def test_fp8_cache(scales, queries):
    call = random_call(shape(queries, [150, 33], fp8=True), "cpu")
    check(call, 1e-2, k_scale=torch.rand(scales) + 0.5, v_scale=torch.rand(scales) + 0.5)


@pytest.mark.parametrize("queries", [[1, 1, 1], [30, 1, 7]])
def test_window_softcap_and_sinks(queries):
    call = random_call(shape(queries, [120, 0, 50]), "cpu", torch.float32)
    check(call, sinks_H=torch.randn(4), scale=0.3)
    check(call, window=25, softcap=2.0, sinks_H=torch.randn(4))


@pytest.mark.parametrize(
    ("queries", "lengths", "rest"),
    [
        (
            [20, 1, 0, 33],
            [20, 50, 7, 100],
            {},
        ),  # a whole prompt, a decode, none, a chunk behind a prefix
        ([20, 40], [120, 40], {"heads": 6}),
        ([9, 33], [9, 200], {"page": 64, "by_head": True}),
        ([33, 9], [0, 9], {"page": 128}),  # padding with many rows
        ([12], [140], {"columns": 96}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tma", [False, True])
def test_prefill(queries, lengths, rest, tma):
    wanted = shape(queries, lengths, **rest)
    key = paged_prefill.key(wanted.columns, wanted.page, torch.float32)
    plan = {"rows": 32, "block": 32, "tma": tma}
    with trying("paged_attention", key, plan):
        check(random_call(wanted, "cpu", torch.float32))


def test_prefill_in_16_bits():
    check(random_call(shape([40, 1, 9], [160, 30, 9], page=64), "cpu"), 1e-2)


def test_rows_behind_the_last_sequence_are_left_alone():
    call = random_call(shape([9, 1], [30, 30]), "cpu", torch.float32)
    q_THC = torch.cat([call.q_THC, torch.full((3, 4, 64), torch.nan)])
    out_THC = torch.full_like(q_THC, 7.0)
    call = checked(q_THC, *call[1:6], 9, out=out_THC)
    paged_attention(*call[:6], max_query=9, out=out_THC, prefetch=True, impl="triton")
    assert (out_THC[10:] == 7).all()
    assert out_THC[:10].isfinite().all()


@pytest.mark.parametrize("count", [1, 2])
def test_cascade_of_prompts_and_answers(count):
    """Sequences with one query and with several, padding behind them; all stand behind the shared pages."""
    shared, page, queries = 3, 16, [1, 5, 1, 20, 2]
    lengths = [shared * page + own for own in (40, 5, 17, 64, 33)]
    call = random_call(shape(queries, lengths), "cpu", torch.float32)
    call.block_tables[:, :shared] = call.block_tables[:1, :shared]
    lengths_B = torch.cat([call.lengths, torch.zeros(1, dtype=torch.int32)])
    tables_BP = torch.cat([call.block_tables, torch.zeros_like(call.block_tables[:1])])
    q_THC = torch.cat([call.q_THC, torch.ones_like(call.q_THC[:3])])
    starts = torch.cat([call.starts, call.starts[-1:] + 3])
    shared_1 = torch.tensor([shared * page], dtype=torch.int32)
    parts = split_tables(tables_BP, lengths_B, shared_1, page, count, len(q_THC))
    workspace = lasting_workspace(torch.device("cpu"))
    out = cascade_attention(
        q_THC, call.cache_k, call.cache_v, parts, starts, max_query=32, workspace=workspace
    )
    expected, _ = exact(call)
    assert relative_error(out[: len(expected)], expected) < 1e-5
    assert out.isfinite().all()


def test_no_rows():
    call = random_call(shape([1], [5]), "cpu", torch.float32)
    none = (call.block_tables[:0], call.lengths[:0])
    nothing = paged_attention(call.q_THC[:0], *call[1:3], *none, max_query=1, impl="triton")
    assert nothing.shape == (0, 4, 64)


@pytest.mark.parametrize("rest", [{}, {"heads": 6, "page": 32}, {"by_head": True}], ids=str)
@pytest.mark.parametrize(("shared", "count"), [(0, 1), (1, 4), (3, 1), (3, 2)])
def test_cascade(shared, count, rest):
    """Behind pages that all share, a step reads those once, in several parts, and gives the same."""
    page = rest.get("page", 16)
    lengths = [shared * page + own for own in (40, 1, 17, 64, 33)]
    call = random_call(shape([1] * 5, lengths, **rest), "cpu", torch.float32)
    call.block_tables[:, :shared] = call.block_tables[:1, :shared]
    lengths_B = torch.cat([call.lengths, torch.zeros(1, dtype=torch.int32)])  # and one of padding
    tables_BP = torch.cat([call.block_tables, torch.zeros_like(call.block_tables[:1])])
    q_BHC = torch.cat([call.q_THC, torch.ones_like(call.q_THC[:1])])
    parts = split_tables(
        tables_BP, lengths_B, torch.tensor([shared * page], dtype=torch.int32), page, count
    )
    workspace = lasting_workspace(torch.device("cpu"))
    out = cascade_attention(
        q_BHC, call.cache_k, call.cache_v, parts, softcap=9.0, workspace=workspace
    )
    expected, _ = exact(call._replace(softcap=9.0))
    assert relative_error(out[:5], expected) < 1e-5
    assert out.isfinite().all()
