"""Products of few rows on a GPU: both kernels, parts, and a chain of them that overlap inside a graph."""

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.cases.skinny_matmul import _key
from cairn.kernels.matmul.epilogue import Epilogue, matmul_reference
from cairn.kernels.matmul.skinny_matmul import skinny_matmul, skinny_parts
from cairn.kernels.matmul.skinny_plans import candidates, default_plan, stream_plan
from cairn.kernels.norm.join_norm import Parts, join_add_rmsnorm, join_add_rmsnorm_reference
from cairn.kernels.norm.rmsnorm import add_rmsnorm
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def operands(m, n, k, dtype=BF16):
    x = torch.randn(m, k, device="cuda").to(dtype)
    return x, (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)


def truth(x, w, **parts):
    wide = {
        name: part.double() if isinstance(part, torch.Tensor) else part
        for name, part in parts.items()
    }
    return matmul_reference(x.double(), w, Epilogue(**wide), torch.float64)


def by_plan(plan, x, w, **parts):
    with trying("skinny_matmul", _key(x.shape[0], *w.shape, x.dtype), plan._asdict()):
        return skinny_matmul(x, w, **parts, prefetch=True, impl="triton")


@pytest.mark.parametrize("m", [1, 2, 5, 16, 50, 64, 65, 128, 129, 256])
def test_defaults(m):
    for n, k in ((1024, 2048), (1000, 3080), (16960, 520)):
        x, w = operands(m, n, k)
        y = torch.empty(m, n, device="cuda", dtype=BF16)
        poison(y)
        skinny_matmul(x, w, out=y, impl="triton")
        assert relative_error(y, truth(x, w)) < 1e-2


@pytest.mark.parametrize("m", [1, 8, 64, 200])
def test_every_candidate(m):
    x = torch.randint(-2, 3, (m, 3072), device="cuda").to(BF16)
    w = torch.randint(-2, 3, (1024, 3072), device="cuda").to(BF16)
    exact = (x.float() @ w.float().T).to(BF16)
    for plan in candidates(m, 1024, 3072):
        assert torch.equal(by_plan(plan, x, w), exact), plan


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("m", [1, 7, 64, 100, 200])
@pytest.mark.parametrize("n", [1040, 1048])
def test_epilogues(n, m, swiglu):
    k = 2048
    x, w = operands(m, n, k)
    parts = dict(
        bias_N=torch.randn(n, device="cuda", dtype=BF16),
        activation="swiglu" if swiglu else None,
        residual_MN=torch.randn(m, n // 2 if swiglu else n, device="cuda", dtype=BF16),
    )
    plans = [default_plan(m, n, k)]
    if m > 1:  # 1040 rows are pairs of 8, and 1048 are not
        plans += [stream_plan(m, k, pieces=3), stream_plan(m, k, split=3)]
    for plan in plans:
        y = by_plan(plan, x, w, **parts)
        assert relative_error(y, truth(x, w, **parts)) < 1e-2


@pytest.mark.parametrize("m", [1, 8, 64])
def test_the_same_from_run_to_run_and_for_float16(m):
    x, w = operands(m, 1024, 2048, torch.float16)
    first = skinny_matmul(x, w, impl="triton")
    assert relative_error(first, truth(x, w)) < 1e-3
    for _ in range(20):
        assert torch.equal(skinny_matmul(x, w, prefetch=True, impl="triton"), first)


@pytest.mark.parametrize("m", [1, 8, 64, 256])
def test_a_chain_in_a_graph(m):
    """Each product starts before its predecessor has ended, and still sees what that one wrote."""
    weights = [operands(m, 2048, 2048)[1] for _ in range(12)]
    x = torch.randn(m, 2048, device="cuda", dtype=BF16)
    buffers = [torch.empty_like(x) for _ in range(3)]

    def chain(product):
        y = x
        for i, w in enumerate(weights):
            y = product(y, w, buffers[i % 3])
        return y

    expected = chain(lambda y, w, _: skinny_matmul(y, w, impl="triton")).clone()
    torch.cuda.synchronize()

    def run():
        return chain(lambda y, w, out: skinny_matmul(y, w, out=out, prefetch=True, impl="triton"))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for _ in range(20):
        poison(*buffers)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("m", [8, 48, 64, 128, 200])
@pytest.mark.parametrize("k", [2048, 3072])
def test_parts_that_are_joined_with_the_norm(m, k):
    """Bit by bit what the product, the addition and the norm give one after the other."""
    x, w = operands(m, 1024, k)
    residual, weight = (
        torch.randn(m, 1024, device="cuda").to(BF16),
        torch.randn(1024, device="cuda").to(BF16),
    )
    sums = skinny_parts(x, w, prefetch=True)
    assert sums is not None
    assert len(sums) > 1
    y, total = join_add_rmsnorm(Parts(sums), residual, weight, prefetch=True)
    apart, added = add_rmsnorm(skinny_matmul(x, w, impl="triton"), residual, weight)
    assert torch.equal(total, added)
    assert relative_error(y, apart) < 2e-3  # squares are added up in another order
    exact, _ = join_add_rmsnorm_reference(
        Parts(truth(x, w)[None]), residual.double(), weight.double(), 1e-6
    )
    assert relative_error(y, exact) < 1e-2


def test_what_is_not_cut_has_no_parts():
    assert skinny_parts(*operands(64, 24576, 4096)) is None
    assert skinny_parts(*operands(1, 1024, 2048)) is None
