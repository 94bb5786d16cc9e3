"""Routing, sorting and the grouped products of experts on a GPU: right for every tile and skew."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases import gate_backward as gate_cases
from cairn.kernels.cases.grouped_matmul import (
    COUNT,
    DOWN,
    GATE_UP,
    PER_TOKEN,
    candidates,
    choices,
)
from cairn.kernels.experts.combine import combine, combine_reference
from cairn.kernels.experts.grouped_large import grouped_large
from cairn.kernels.experts.grouped_matmul import (
    FP8_MANY,
    LARGE_FP8,
    SWIGLU,
    Gating,
    _key,
    _launch,
    grouped_matmul,
    grouped_matmul_reference,
    grouped_parts,
    grouped_parts_reference,
    listed,
)
from cairn.kernels.experts.matrices import quantize_experts, round_mxfp4
from cairn.kernels.experts.route import Routing, route, route_reference
from cairn.kernels.experts.sort_pairs import FewPairs, sort_pairs, sort_pairs_reference
from cairn.kernels.quantize.quantize import quantize
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 77, 5000])
@pytest.mark.parametrize("count", [8, 60, 128, 256])
def test_route(score, tokens, count):
    routing = Routing(8, score, scale=2.5)
    # Distinct logits: of equal ones torch may take either.
    logits = torch.rand(tokens, count, device="cuda").argsort(-1).float() / count
    slots = 5 - 9 * (torch.arange(tokens, device="cuda") % 3 == 1).long()
    bias = torch.rand(count, device="cuda") * 1e-4
    chosen, weights = route(logits, routing, bias, slots, impl="triton")
    exact_chosen, exact = route_reference(logits.double(), routing, bias.double(), slots)
    assert torch.equal(chosen, exact_chosen)
    assert torch.allclose(weights.double(), exact, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 500, 9000])
@pytest.mark.parametrize("zipf", [False, True])
def test_sort(tokens, zipf):
    chosen = choices(tokens, zipf).cuda()
    chosen[tokens // 2 :: 5] = -1
    found, exact = sort_pairs(chosen, COUNT, impl="triton"), sort_pairs_reference(chosen, COUNT)
    real = int(exact.ends_E[-1])
    assert torch.equal(found.ends_E, exact.ends_E)
    assert torch.equal(found.order_P[:real], exact.order_P[:real])
    kept = chosen.flatten() >= 0
    assert torch.equal(found.places_P[kept], exact.places_P[kept])


def operands(shape, tokens, zipf=False):
    pairs = sort_pairs(choices(tokens, zipf).cuda(), COUNT)
    rows = tokens if shape.swiglu else tokens * PER_TOKEN
    x = torch.randn(rows, shape.k, device="cuda").to(BF16)
    w = torch.randn(COUNT, shape.n, shape.k, device="cuda", dtype=BF16) * shape.k**-0.5
    return x, w, pairs


TILES = [
    (shape, t) for shape in (GATE_UP, DOWN) for n in (1, 300, 8192) for t in candidates(shape, n)
]


@pytest.mark.parametrize(("shape", "tiles"), dict.fromkeys(TILES))
def test_every_tile(shape, tiles):
    x, w, pairs = operands(shape, 300, zipf=True)
    how = dict(gather=shape.swiglu, gating=shape.gating)
    with trying("grouped_matmul", _key(len(pairs.order_P), w, shape.swiglu), tiles._asdict()):
        y = grouped_matmul(x, w, pairs, **how, impl="triton")
        again = grouped_matmul(x, w, pairs, **how, impl="triton")
    assert relative_error(y, grouped_matmul_reference(x.float(), w, pairs, **how)) < 1e-2
    assert torch.equal(y, again)


@pytest.mark.parametrize("tokens", [1, 20, 400])
@pytest.mark.parametrize(("n", "k"), [(2048, 768), (2880, 2880), (72, 88)])
def test_parts_and_combine(tokens, n, k):
    pairs = sort_pairs(choices(tokens).cuda(), COUNT)
    x = torch.randn(tokens * PER_TOKEN, k, device="cuda").to(BF16)
    w = torch.randn(COUNT, n, k, device="cuda", dtype=BF16) * k**-0.5
    weights = torch.rand(tokens, PER_TOKEN, device="cuda")
    parts = grouped_parts(x, w, pairs, weights, impl="triton")
    exact = grouped_parts_reference(x.float(), w, pairs, weights)
    assert relative_error(parts, exact) < 1e-3
    results = grouped_matmul(x, w, pairs, impl="triton")
    summed = combine(results, pairs.places_P, weights, impl="triton")
    assert relative_error(summed, exact.sum(0)) < 1e-2
    assert (
        relative_error(summed, combine_reference(results.double(), pairs.places_P, weights)) < 5e-3
    )


def test_a_row_is_the_same_in_any_company():
    x, w, pairs = operands(GATE_UP, 300)
    chosen = choices(300).cuda()
    alone = sort_pairs(chosen[7:8].contiguous(), COUNT)
    how = dict(gather=True, gating=SWIGLU, one_tile=True, impl="triton")
    many = grouped_matmul(x, w, pairs, **how)
    one = grouped_matmul(x[7:8].contiguous(), w, alone, **how)
    first = 7 * PER_TOKEN
    places = pairs.places_P[first : first + PER_TOKEN].long()
    assert torch.equal(many[places], one[alone.places_P.long()])


def forms(w):
    return {"bf16": w, "fp8": quantize_experts(w), "mxfp4": round_mxfp4(w)}


@pytest.mark.parametrize("kind", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("limit", [0.0, 7.0], ids=["swiglu", "clamped"])
def test_forms_and_biases(kind, tokens, limit):
    count, hidden, inner = 32, 2880, 1440
    chosen = choices(tokens)[:, :4].contiguous().cuda() % count
    pairs = FewPairs(chosen.flatten(), 4) if tokens == 3 else sort_pairs(chosen, count)
    w = forms((torch.randn(count, 2 * inner, hidden, device="cuda") * hidden**-0.5).to(BF16))[kind]
    x, bias = torch.randn(tokens, hidden, device="cuda").to(BF16), torch.randn(count, 2 * inner)
    x, bias = quantize(x) if kind == "fp8" else x, bias.cuda().to(BF16)
    how = dict(gather=True, gating=Gating(limit), bias_EN=bias)
    y = grouped_matmul(x, w, pairs, **how, impl="triton")
    assert relative_error(y, grouped_matmul_reference(x, w, pairs, **how)) < 1e-2
    down = forms((torch.randn(count, hidden, inner, device="cuda") * inner**-0.5).to(BF16))[kind]
    rows, weights = quantize(y) if kind == "fp8" else y, torch.rand(tokens, 4, device="cuda")
    added = torch.randn(count, hidden, device="cuda").to(BF16)
    parts = grouped_parts(rows, down, pairs, weights, bias_EN=added, impl="triton")
    exact = grouped_parts_reference(rows, down, pairs, weights, added)
    assert relative_error(parts, exact) < 3e-3


@pytest.mark.parametrize("zipf", [False, True])
@pytest.mark.parametrize("shape", [GATE_UP, DOWN], ids=lambda shape: shape.name)
def test_many_tokens_of_every_expert(shape, zipf):
    x, w, pairs = operands(shape, 8192, zipf)
    y = grouped_matmul(x, w, pairs, gather=shape.swiglu, gating=shape.gating, impl="triton")
    sources = pairs.order_P.long() // PER_TOKEN if shape.swiglu else slice(None)
    exact = torch.nn.functional.grouped_mm(x[sources], w.transpose(1, 2), offs=pairs.ends_E)
    if shape.swiglu:
        gate, up = exact.float().chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    assert relative_error(y, exact.float()) < 1e-2


@pytest.mark.parametrize("zipf", [False, True])
def test_many_float8_rows_of_every_expert(zipf):
    """As the form for any number of rows has them, bit by bit."""
    tokens = 8192
    x, w, pairs = operands(GATE_UP, tokens, zipf)
    x, w = quantize(x), quantize_experts(w)
    how = dict(gather=True, gating=SWIGLU)
    y = grouped_matmul(x, w, pairs, **how, impl="triton")
    plain = torch.empty_like(y)
    _launch(x, w, plain, pairs, None, FP8_MANY, None, **how)
    assert torch.equal(y, plain)
    rows, down = quantize(y), quantize_experts(operands(DOWN, 1)[1])
    shared = listed(pairs, w, SWIGLU)
    assert shared.row_tiles is not None
    found = grouped_matmul(rows, down, shared, impl="triton")
    assert torch.equal(found, grouped_large(rows, down, pairs.ends_E, LARGE_FP8))


def test_backward_through_the_gate():
    prepared = gate_cases._prepare(300)
    assert prepared.error() < 5e-3
