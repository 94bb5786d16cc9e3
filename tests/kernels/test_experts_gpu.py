"""Routing, sorting and the grouped products of experts on a GPU: right for every tile and skew."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.grouped_matmul import (
    COUNT,
    DOWN,
    GATE_UP,
    PER_TOKEN,
    candidates,
    choices,
)
from cairn.kernels.experts.combine import combine, combine_reference
from cairn.kernels.experts.grouped_matmul import (
    _key,
    grouped_matmul,
    grouped_matmul_reference,
    grouped_parts,
    grouped_parts_reference,
)
from cairn.kernels.experts.route import Routing, route, route_reference
from cairn.kernels.experts.sort_pairs import sort_pairs, sort_pairs_reference
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
    how = dict(gather=shape.swiglu, swiglu=shape.swiglu)
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
    how = dict(gather=True, swiglu=True, one_tile=True, impl="triton")
    many = grouped_matmul(x, w, pairs, **how)
    one = grouped_matmul(x[7:8].contiguous(), w, alone, **how)
    first = 7 * PER_TOKEN
    places = pairs.places_P[first : first + PER_TOKEN].long()
    assert torch.equal(many[places], one[alone.places_P.long()])
