"""4-bit weights as a register operand on a GPU: exact on whole numbers at every stage count, and inside a graph."""

import time

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.int4_matmul import INT4, SMALL, plans, random_int4, random_weights
from cairn.kernels.matmul.int4_matmul import (
    WARP_ROWS,
    int4_matmul,
    int4_parts,
    int4_plan,
    row_block,
)
from cairn.kernels.matmul.int4_weights import counted, dequantize_int4, int4_reference
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


SHIFTED = INT4._replace(shifts=True)


@pytest.mark.parametrize(
    ("n", "k", "form"),
    [
        *((1024, 3072, form) for form in (INT4, SHIFTED, *SMALL)),
        *((1088, 640, form._replace(group=64)) for form in (INT4, SHIFTED)),
        *((512, 2048, form._replace(group=2048)) for form in (INT4, SHIFTED)),
        *((1088, 576, form) for form in SMALL),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [5, 16, 100])
def test_every_stage_count_is_exact(m, n, k, form):
    w, group = random_weights(form, n, k, whole=True), form.group
    joining = counted(w)
    x = torch.randint(-1, 2, (m, k), device="cuda").to(BF16)
    exact = (x.double() @ int4_reference(w).double().T).to(BF16)
    usual = int4_plan(m, n, k, group, form.shifts)
    tried = [usual._replace(stages=stages) for stages in range(2, usual.stages + 1)]
    tried += [usual._replace(split=split) for split in (1, 2)]
    tried += [usual._replace(warps=8, stages=stages) for stages in (2, 3)]
    if m <= WARP_ROWS:
        tried += [plan._replace(kernel="int4 warps") for plan in tried]
    key = f"m={row_block(m)},n={n},k={k},group={w.group}"
    for plan in tried:
        with trying("int4_matmul", key, plan._asdict()):
            for one in (w, joining, joining):
                assert torch.equal(int4_matmul(x, one, prefetch=True, impl="gluon"), exact), plan
    assert joining.arrived is not None
    assert not joining.arrived.any()


@pytest.mark.parametrize("m", [1, 16])
def test_plans_for_large_matrices_are_near_the_truth(m):
    x, w = torch.randn(m, 4096, device="cuda", dtype=BF16), random_int4(4096, 4096)
    exact = x.double() @ int4_reference(w).double().T
    for plan in plans(m, 4096, 4096)[:8]:
        with trying("int4_matmul", f"m={row_block(m)},n=4096,k=4096,group=128", plan._asdict()):
            assert relative_error(int4_matmul(x, w, impl="gluon"), exact) < 1e-2, plan
    sums = int4_parts(x, w, prefetch=True)
    assert sums is not None
    assert relative_error(sums.sum(0), exact) < 1e-3


@pytest.mark.parametrize("m", [1, 9])
def test_bias_and_swiglu(m):
    x, w = torch.randn(m, 1024, device="cuda", dtype=BF16), random_int4(1024, 1024, shifts=True)
    w = counted(w)  # gate and up of cut sums are joined, too
    bias = torch.randn(1024, device="cuda", dtype=BF16)
    for activation in (None, "swiglu"):
        given = dict(bias_N=bias, activation=activation)
        found = int4_matmul(x, w, **given, impl="gluon")
        assert relative_error(found, int4_matmul(x, w, **given, impl="reference").double()) < 1e-2


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("shifts", [False, True])
def test_dequantised_for_many_rows(shifts, paired):
    w = random_int4(256, 384, 64, shifts)
    exact = dequantize_int4(w, paired=paired, impl="reference")
    assert torch.equal(dequantize_int4(w, paired=paired, impl="triton"), exact)


@pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_small_groups_are_near_the_truth(form, m):
    x, w = torch.randn(m, 4096, device="cuda", dtype=BF16), random_weights(form, 4096, 4096)
    exact = x.double() @ int4_reference(w).double().T
    assert relative_error(int4_matmul(x, w, impl="gluon"), exact) < 1e-2
    assert torch.equal(dequantize_int4(w, impl="triton"), dequantize_int4(w, impl="reference"))


def test_a_chain_in_a_graph():
    weights = [
        *(random_int4(2048, 2048) for _ in range(4)),
        *(random_weights(form, 2048, 2048) for form in SMALL),
    ]
    first = torch.randn(4, 2048, device="cuda", dtype=BF16)

    def chain(prefetch):
        y = first
        for w in weights:
            y = int4_matmul(y, w, prefetch=prefetch, impl="gluon")
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


@pytest.mark.parametrize("kernel", ["int4", "int4 warps"])
@pytest.mark.parametrize("m", [2, 16])
def test_products_in_a_graph_come_to_an_end(m, kernel):
    """In one of some thousand launches the copying warp had got a wrong count, and never ended."""
    x = torch.randn(m, 4096, device="cuda", dtype=BF16)
    w = counted(random_int4(6144, 4096))
    plan = int4_plan(m, 6144, 4096, 128)._replace(kernel=kernel, block_k=128)
    with trying("int4_matmul", f"m={row_block(m)},n=6144,k=4096,group=128", plan._asdict()):
        once = int4_matmul(x, w, prefetch=True, impl="gluon")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                y = int4_matmul(x, w, prefetch=True, impl="gluon")
    for _ in range(100):
        graph.replay()
    ended, deadline = torch.cuda.Event(), time.monotonic() + 10
    ended.record()
    while not ended.query():
        assert time.monotonic() < deadline, "the products stand still"
    assert torch.equal(y, once)
