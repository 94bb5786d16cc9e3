"""Products of few rows with float8 weights on a GPU: exact on whole numbers in every plan, and inside a graph."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.skinny_fp8 import plans
from cairn.kernels.few_rows import empty_rows, padded_rows, readable_rows
from cairn.kernels.matmul.epilogue import Epilogue
from cairn.kernels.matmul.skinny_fp8 import (
    _default,
    fp8_plan,
    skinny_fp8,
    skinny_fp8_parts,
    skinny_fp8_reference,
)
from cairn.kernels.norm.join_norm import Parts, join_add_rmsnorm, join_add_rmsnorm_fp8
from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.kernels.tuned import trying
from cairn.models.linear.form import Epilogue as FormEpilogue
from cairn.models.linear.form import Kernels
from cairn.models.linear.fp8_planes import Fp8Blocks
from cairn.models.quantized.planes import Planes, dequantized

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def whole(rows: int, columns: int) -> Quantized:
    """Small whole numbers, and scales that are powers of two: sums are exact in any order."""
    values = torch.randint(-2, 3, (rows, columns), device="cuda").to(E4M3)
    return Quantized(values, 2.0 ** torch.randint(-2, 3, (rows, 1), device="cuda"))


def by_plan(plan, x, w, **parts):
    one_row = isinstance(x, torch.Tensor)
    key = _default(1 if one_row else len(x.values), *w.values.shape, one_row)[0]
    with trying("skinny_fp8", key, plan._asdict()):
        return skinny_fp8(x, w, **parts, prefetch=True, impl="triton")


def blocks(rows: int, columns: int) -> Planes:
    """Whole numbers with a power of two for each block of 128 x 128."""
    values = torch.randint(-2, 3, (rows, columns), device="cuda").to(E4M3)
    scales = 2.0 ** torch.randint(-1, 2, (-(-rows // 128), columns // 128), device="cuda")
    return Planes("fp8", values, scales, None, 128, 128)


@pytest.mark.parametrize("m", [1, 5, 16, 64, 100, 131, 300])
@pytest.mark.parametrize(("n", "k"), [(1040, 1024), (512, 3072)])
def test_blocks_with_a_scale_each_are_exact(m, n, k):
    planes = blocks(n, k)
    assert Fp8Blocks.obstacle(planes) is None
    form = Fp8Blocks(planes)
    x = torch.randint(-1, 2, (m, k), device="cuda").to(BF16)
    given = x if m == 1 else Quantized(x.to(E4M3), torch.full((m, 1), 0.5, device="cuda"))
    exact = x.double() @ dequantized(planes).double().T * (1 if m == 1 else 0.5)
    for onto in (None, x.new_zeros(m, n)):
        found = form.product(given, None, FormEpilogue(None, onto, Kernels()))
        found = found.sums_SMD.sum(0) if isinstance(found, Parts) else found
        assert torch.equal(found.to(BF16), exact.to(BF16))


@pytest.mark.parametrize("m", [1, 2, 16, 50])
@pytest.mark.parametrize(("n", "k"), [(1000, 3088), (17024, 1024)])
def test_every_plan_and_stage_count_is_exact(m, n, k):
    w = whole(n, k)
    x = whole(1, k).values.to(BF16) if m == 1 else whole(m, k)
    exact = skinny_fp8_reference(x, w, Epilogue())
    tried = plans(m, n, k)
    if m > 1:
        usual = fp8_plan(m, n, k, False)
        tried += [usual._replace(stages=stages) for stages in range(1, usual.stages)]
    for plan in tried:
        assert torch.equal(by_plan(plan, x, w), exact), plan


@pytest.mark.parametrize("m", [65, 96, 130, 176, 256])
@pytest.mark.parametrize(("n", "k"), [(6144, 1024), (1024, 4096), (17024, 1024), (28672, 512)])
def test_more_than_64_rows_are_exact_whatever_lies_behind_them(m, n, k):
    x, w = whole(m, k), whole(n, k)
    exact = skinny_fp8_reference(x, w, Epilogue())
    assert torch.equal(skinny_fp8(x, w, impl="triton"), exact)
    roomy = empty_rows((m, k), E4M3, x.values.device)
    behind = roomy.as_strided((padded_rows(m), k), (k, 1))
    behind.view(torch.uint8).fill_(0x7F)  # NaN
    roomy.copy_(x.values)
    assert readable_rows(roomy, 128) % 128 == 0
    assert torch.equal(skinny_fp8(Quantized(roomy, x.scale), w, impl="triton"), exact)


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("m", [1, 7, 64])
@pytest.mark.parametrize("n", [1040, 1048, 17024])
def test_bias_and_swiglu(n, m, activation):
    x = torch.randn(m, 2048, device="cuda", dtype=BF16)
    w = quantize(torch.randn(n, 2048, device="cuda", dtype=BF16) * 2048**-0.5)
    x = x if m == 1 else quantize(x)
    parts = dict(bias_N=torch.randn(n, device="cuda", dtype=BF16), activation=activation)
    found = skinny_fp8(x, w, **parts, impl="triton")
    assert relative_error(found, skinny_fp8_reference(x, w, Epilogue(**parts)).double()) < 1e-2


def test_parts_that_are_joined_with_the_norm_and_quantised():
    x, w = whole(16, 4096), quantize(torch.randn(1024, 4096, device="cuda", dtype=BF16))
    sums = skinny_fp8_parts(x, w, prefetch=True)
    assert sums is not None
    assert len(sums) > 1
    residual = torch.randn(16, 1024, device="cuda", dtype=BF16)
    weight = torch.randn(1024, device="cuda", dtype=BF16)
    y, total = join_add_rmsnorm(Parts(sums), residual, weight)
    found, added = join_add_rmsnorm_fp8(Parts(sums), residual, weight, prefetch=True)
    apart = quantize(y)
    assert torch.equal(added, total)
    assert torch.equal(found.values.view(torch.uint8), apart.values.view(torch.uint8))
    assert torch.equal(found.scale, apart.scale)


@pytest.mark.parametrize("m", [1, 16])
def test_a_chain_in_a_graph(m):
    weights = [quantize(torch.randn(2048, 2048, device="cuda", dtype=BF16)) for _ in range(8)]
    first = torch.randn(m, 2048, device="cuda", dtype=BF16)

    def chain(prefetch):
        y = first
        for w in weights:
            x = y if m == 1 else quantize(y)
            y = skinny_fp8(x, w, prefetch=prefetch, impl="triton") * 0.01
        return y

    expected = chain(False).clone()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(True)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
