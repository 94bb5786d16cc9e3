"""Weight-only products on a GPU: exact on whole numbers in every form, near the truth on others, and inside a graph."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.weight_only import FORMS, OTHERS, random_rows
from cairn.kernels.matmul.weight_only import (
    dequantize_rows,
    rows_reference,
    weight_only_matmul,
    weight_only_parts,
)

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize("form", [*FORMS, *OTHERS], ids=lambda form: form.name)
@pytest.mark.parametrize(("n", "k"), [(1000, 512), (4096, 4096), (33024, 256)])
@pytest.mark.parametrize("m", [1, 16, 33, 128])
def test_whole_numbers_are_exact(form, m, n, k):
    x = torch.randint(-1, 2, (m, k), device="cuda").to(BF16)
    w = random_rows(form, n, k, whole=True)
    exact = x.double() @ rows_reference(w).double().T
    assert torch.equal(weight_only_matmul(x, w, impl="triton"), exact.to(BF16))
    parts = weight_only_parts(x, w)
    assert parts is None or torch.equal(parts.double().sum(0), exact)
    assert torch.equal(dequantize_rows(w, BF16, impl="triton"), rows_reference(w, BF16))


@pytest.mark.parametrize("form", [*FORMS, *OTHERS], ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_products_in_a_graph_are_near_the_truth(form, dtype):
    x, w = torch.randn(5, 4096, device="cuda", dtype=dtype), random_rows(form, 6144, 4096)
    bias = torch.randn(6144, device="cuda", dtype=dtype)
    exact = x.double() @ rows_reference(w).double().T + bias.double()
    weight_only_matmul(x, w, bias_N=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight_only_matmul(x, w, bias_N=bias)
    for _ in range(2):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(y, exact) < 1e-2
