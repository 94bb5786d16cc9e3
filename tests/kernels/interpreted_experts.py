"""Routing, sorting, grouped products and their sum in the interpreter, against float64 and a sort in Python."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cairn.kernels.experts.sort_pairs as sorting
from cairn.kernels.accuracy import relative_error
from cairn.kernels.experts.combine import combine, combine_reference
from cairn.kernels.experts.combine_norm import (
    Choices,
    combine_add_rmsnorm,
    combine_add_rmsnorm_fp8,
)
from cairn.kernels.experts.gate_backward import gate_backward, gate_backward_reference
from cairn.kernels.experts.grouped_large import LargeTiles, grouped_large
from cairn.kernels.experts.grouped_matmul import (
    SWIGLU,
    Gating,
    _key,
    grouped_matmul,
    grouped_matmul_reference,
    grouped_parts,
    grouped_parts_reference,
)
from cairn.kernels.experts.matrices import quantize_experts, round_mxfp4
from cairn.kernels.experts.route import Routing, route, route_reference
from cairn.kernels.experts.sort_pairs import FewPairs, sort_pairs
from cairn.kernels.norm.rmsnorm import add_rmsnorm
from cairn.kernels.quantize.quantize import quantize
from cairn.kernels.tuned import trying

TALL = dict(block_m=16, block_n=32, block_k=32, warps=4, stages=2)
WIDE = dict(block_m=64, block_n=32, block_k=32, warps=4, stages=2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "count", "per_token"), [(1, 1, 1), (5, 12, 3), (3, 128, 8)])
def test_route(score, biased, tokens, count, per_token):
    routing = Routing(per_token, score, renormalize=biased, scale=1.5)
    logits, bias = torch.randn(tokens, count), torch.randn(count) if biased else None
    slots = 5 - 9 * (torch.arange(tokens) == 1).long()
    chosen, weights = route(logits, routing, bias, slots, impl="triton")
    exact = route_reference(logits.double(), routing, bias, slots)
    assert torch.equal(chosen, exact[0])
    assert torch.allclose(weights.double(), exact[1], atol=1e-6)
    assert (chosen[slots < 0] == -1).all()


def test_of_equal_scores_the_lower_expert_wins():
    chosen, _ = route(torch.zeros(2, 6), Routing(3), impl="triton")
    assert chosen.tolist() == [[0, 1, 2]] * 2


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(0, 40), st.integers(0, 1000), st.booleans()
)
def test_sorted_as_python_sorts(count, per_token, tokens, seed, chunked):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, count, (tokens, per_token), generator=generator).int()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "CHUNK", 16 if chunked else 8192)
        patch.setattr(sorting, "MOST_CHUNKS", 4)
        found = sort_pairs(chosen, count, impl="triton")
    flat = chosen.flatten().tolist()
    wanted = sorted((e, p) for p, e in enumerate(flat) if e >= 0)
    assert found.order_P.tolist()[: len(wanted)] == [p for _, p in wanted]
    assert found.ends_E.tolist() == [sum(0 <= e <= x for e in flat) for x in range(count)]
    assert all(found.places_P[p] == place for place, (_, p) in enumerate(wanted))


def routed(tokens, count, per_token, hot=False):
    if hot:  # one expert has all tokens, the others none
        return sort_pairs(torch.full((tokens, 1), count - 1, dtype=torch.int32), count)
    chosen = torch.rand(tokens, count).topk(per_token).indices.int()
    chosen[0] = -1
    return sort_pairs(chosen, count)


@pytest.mark.parametrize("tiles", [TALL, WIDE], ids=["tall", "wide"])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("hot", [False, True])
def test_grouped(tiles, swiglu, hot):
    tokens, count, n, k = 37, 5, 80, 72
    pairs = routed(tokens, count, 2, hot)
    x = torch.randn(tokens, k).bfloat16()
    w = (torch.randn(count, n, k) * k**-0.5).bfloat16()
    with trying("grouped_matmul", _key(len(pairs.order_P), w, swiglu), tiles):
        y = grouped_matmul(
            x, w, pairs, gather=True, gating=SWIGLU if swiglu else None, impl="triton"
        )
    exact = grouped_matmul_reference(
        x.double(), w, pairs, gather=True, gating=SWIGLU if swiglu else None
    )
    real = int(pairs.ends_E[-1])
    assert relative_error(y[:real], exact[:real]) < 1e-2


def test_parts_and_their_sum():
    tokens, count, n, k = 9, 4, 48, 64
    pairs = routed(tokens, count, 3)
    x = torch.randn(tokens * 3, k).bfloat16()
    w, weights = (torch.randn(count, n, k) * k**-0.5).bfloat16(), torch.rand(tokens, 3)
    weights[0] = 0.0
    with trying("grouped_matmul", _key(len(pairs.order_P), w, False), TALL):
        parts = grouped_parts(x, w, pairs, weights, impl="triton")
        results = grouped_matmul(x, w, pairs, impl="triton")
    exact = grouped_parts_reference(x.double(), w, pairs, weights)
    assert relative_error(parts[:, 1:], exact[:, 1:]) < 1e-2
    summed = combine(results, pairs.places_P, weights, impl="triton")
    assert relative_error(summed[1:], exact.sum(0)[1:]) < 1e-2
    assert (summed[0] == 0).all()
    assert torch.equal(summed, combine_reference(results, pairs.places_P, weights))


@pytest.mark.parametrize("plus_one", [False, True])
def test_sum_residual_and_norm_in_one_pass(plus_one):
    tokens, columns = 6, 100
    pairs = routed(tokens, 5, 3)
    weights, weight = torch.rand(tokens, 3), torch.randn(columns).bfloat16()
    weights[0] = 0.0
    choices = Choices(torch.randn(tokens * 3, columns).bfloat16(), pairs.places_P, weights)
    before = torch.randn(tokens, columns).bfloat16()
    summed = combine(*choices, impl="triton")
    y, added = add_rmsnorm(summed, before, weight, plus_one=plus_one, impl="triton")
    how = dict(plus_one=plus_one, impl="triton")
    found, total = combine_add_rmsnorm(choices, before, weight, **how)
    assert torch.equal(total, added)
    assert relative_error(found, y) < 1e-2
    rows, total = combine_add_rmsnorm_fp8(choices, before.clone(), weight, **how)
    assert torch.equal(total, added)
    assert relative_error(rows, quantize(found)) == 0


def test_backward_through_the_gate():
    pairs, columns = 10, 24
    grad, inner = torch.randn(pairs, columns), torch.randn(pairs, 2 * columns)
    order, weights = torch.randperm(pairs).int(), torch.rand(5, 2)
    found = gate_backward(grad, inner, order, weights, impl="triton")
    exact = gate_backward_reference(grad.double(), inner.double(), order, weights.double())
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, exact, strict=True))


def test_few_pairs_need_no_order():
    count, n, k = 4, 48, 64
    x, w = torch.randn(3, k).bfloat16(), (torch.randn(count, n, k) * k**-0.5).bfloat16()
    chosen = torch.tensor([[0, 2], [-1, -1], [2, 3]], dtype=torch.int32)
    few, pairs = FewPairs(chosen.flatten(), 2), sort_pairs(chosen, count)
    with trying("grouped_matmul", _key(6, w, False), TALL):
        y = grouped_matmul(x, w, few, gather=True, impl="triton")
        ordered = grouped_matmul(x, w, pairs, gather=True, impl="triton")
    real = chosen.flatten() >= 0
    assert torch.equal(y[real], ordered[pairs.places_P[real].long()])
    exact = grouped_matmul_reference(x.double(), w, few, gather=True)
    assert relative_error(y[real], exact[real]) < 1e-2


def test_a_row_is_the_same_in_any_company():
    count, n, k = 4, 32, 64
    w = torch.randn(count, n, k).bfloat16()
    x = torch.randn(20, k).bfloat16()
    chosen = torch.rand(20, count).topk(2).indices.int()
    together, alone = sort_pairs(chosen, count), sort_pairs(chosen[7:8].contiguous(), count)
    many = grouped_matmul(x, w, together, gather=True, one_tile=True, impl="triton")
    one = grouped_matmul(x[7:8].contiguous(), w, alone, gather=True, one_tile=True, impl="triton")
    assert torch.equal(many[together.places_P[14:16].long()], one[alone.places_P.long()])


def forms(w):
    return {"float": w, "fp8": quantize_experts(w), "mxfp4": round_mxfp4(w)}


@pytest.mark.parametrize(
    ("kind", "few"),
    [("float", True), ("fp8", False), ("mxfp4", False), ("mxfp4", True)],
)
def test_forms_biases_and_the_clamped_gate(kind, few):
    tokens, count, n, k = 3, 3, 96, 144  # neither whole tiles of rows nor of columns
    chosen = torch.tensor([[0, 2], [-1, -1], [2, 1]], dtype=torch.int32)
    pairs = FewPairs(chosen.flatten(), 2) if few else sort_pairs(chosen, count)
    floats = (torch.randn(count, n, k) * k**-0.5).bfloat16()
    w, bias = forms(floats)[kind], torch.randn(count, n).bfloat16()
    x = torch.randn(tokens, k).bfloat16()
    x = quantize(x) if kind == "fp8" else x
    how = dict(gather=True, gating=Gating(1.5), bias_EN=bias)
    tiles = TALL if kind != "mxfp4" else TALL | dict(block_k=128)
    with trying("grouped_matmul", _key(tokens * 2, w, True), tiles):
        y = grouped_matmul(x, w, pairs, **how, impl="triton")
    exact = grouped_matmul_reference(x, w, pairs, **how)
    real = chosen.flatten() >= 0 if few else slice(int(pairs.ends_E[-1]))
    assert relative_error(y[real], exact[real]) < 1e-2
    down = forms((torch.randn(count, 24, n // 2) * 0.2).bfloat16())[kind]
    y = exact.nan_to_num()
    rows, added = quantize(y) if kind == "fp8" else y, torch.randn(count, 24).bfloat16()
    weights = torch.rand(tokens, 2) * (chosen >= 0)
    with trying("grouped_matmul", _key(tokens * 2, down, False), tiles):
        parts = grouped_parts(rows, down, pairs, weights, bias_EN=added, impl="triton")
    wanted = grouped_parts_reference(rows, down, pairs, weights, added)
    visited = chosen[:, 0] >= 0
    assert relative_error(parts[:, visited], wanted[:, visited]) < 1e-2


@pytest.mark.parametrize("hot", [False, True])
def test_the_persistent_form(hot):
    tokens, count, n, k = 45, 5, 80, 72
    pairs = routed(tokens, count, 2, hot)
    x = torch.randn(pairs.total, k).bfloat16()
    w = (torch.randn(count, n, k) * k**-0.5).bfloat16()
    y = grouped_large(x, w, pairs.ends_E, LargeTiles(16, 32, 32, 4, 2))
    exact = grouped_matmul_reference(x.double(), w, pairs)
    real = int(pairs.ends_E[-1])
    assert relative_error(y[:real], exact[:real]) < 1e-2


@pytest.mark.parametrize("wrong", ["x", "w_ENK", "order_P", "ends_E", "weights_TK"])
def test_what_does_not_fit_is_named(wrong):
    pairs = sort_pairs(torch.zeros(3, 2, dtype=torch.int32), 2)
    x, w, weights = torch.zeros(6, 8), torch.zeros(2, 4, 8), torch.zeros(3, 2)
    match wrong:
        case "x":
            x = x[:, :7]
        case "w_ENK":
            w = w[0]
        case "weights_TK":
            weights = weights.double()
        case name:
            pairs = pairs._replace(**{name: getattr(pairs, name).long()})
    with pytest.raises(ValueError, match=wrong):
        grouped_parts(x, w, pairs, weights)
