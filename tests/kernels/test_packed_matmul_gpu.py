"""Packed weights as a register operand on a GPU: exact on whole numbers at every stage count, and inside a graph."""

import time

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.packed_matmul import (
    BYTES,
    INT4,
    MORE_BYTES,
    SMALL,
    plans,
    random_packed,
    random_weights,
    usual_plan,
)
from cairn.kernels.matmul.packed_matmul import (
    WARP_ROWS,
    packed_matmul,
    packed_parts,
    packed_plan,
    tuning_key,
)
from cairn.kernels.matmul.packed_weights import BITS, counted, dequantize_packed, packed_reference
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


SHIFTED = INT4._replace(shifts=True)
FORMS = (*SMALL, *BYTES, *MORE_BYTES)


@pytest.mark.parametrize(
    ("n", "k", "form"),
    [
        *((1024, 3072, form) for form in (INT4, SHIFTED, *FORMS)),
        *((1088, 640, form._replace(group=64)) for form in (INT4, SHIFTED)),
        *((512, 2048, form._replace(group=2048)) for form in (INT4, SHIFTED)),
        *((1088, 576, form) for form in FORMS if form.group <= 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [5, 16, 100])
def test_every_stage_count_is_exact(m, n, k, form):
    w = random_weights(form, n, k, whole=True)
    joining = counted(w)
    x = torch.randint(-1, 2, (m, k), device="cuda").to(BF16)
    exact = (x.double() @ packed_reference(w).double().T).to(BF16)
    usual = usual_plan(form, m, n, k)
    tried = [usual._replace(stages=stages) for stages in range(2, usual.stages + 1)]
    tried += [usual._replace(split=split) for split in (1, 2)]
    tried += [usual._replace(warps=8, stages=stages) for stages in (2, 3)]
    if m <= WARP_ROWS:
        tried += [plan._replace(kernel="packed warps") for plan in tried]
    key = tuning_key(m, n, k, w.group, BITS[form.kind])
    for plan in tried:
        with trying("packed_matmul", key, plan._asdict()):
            for one in (w, joining, joining):
                assert torch.equal(packed_matmul(x, one, prefetch=True, impl="gluon"), exact), plan
    assert joining.arrived is not None
    assert not joining.arrived.any()


@pytest.mark.parametrize("m", [1, 16])
def test_plans_for_large_matrices_are_near_the_truth(m):
    x, w = torch.randn(m, 4096, device="cuda", dtype=BF16), random_packed(4096, 4096)
    exact = x.double() @ packed_reference(w).double().T
    for plan in plans(m, 4096, 4096)[:8]:
        with trying("packed_matmul", tuning_key(m, 4096, 4096, 128), plan._asdict()):
            assert relative_error(packed_matmul(x, w, impl="gluon"), exact) < 1e-2, plan
    sums = packed_parts(x, w, prefetch=True)
    assert sums is not None
    assert relative_error(sums.sum(0), exact) < 1e-3


@pytest.mark.parametrize("m", [1, 9])
def test_bias_and_swiglu(m):
    x, w = torch.randn(m, 1024, device="cuda", dtype=BF16), random_packed(1024, 1024, shifts=True)
    w = counted(w)  # gate and up of cut sums are joined, too
    bias = torch.randn(1024, device="cuda", dtype=BF16)
    for activation in (None, "swiglu"):
        given = dict(bias_N=bias, activation=activation)
        found = packed_matmul(x, w, **given, impl="gluon")
        assert relative_error(found, packed_matmul(x, w, **given, impl="reference").double()) < 1e-2


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("shifts", [False, True])
def test_dequantised_for_many_rows(shifts, paired):
    w = random_packed(256, 384, 64, shifts)
    exact = dequantize_packed(w, paired=paired, impl="reference")
    assert torch.equal(dequantize_packed(w, paired=paired, impl="triton"), exact)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_every_form_is_near_the_truth(form, m):
    x, w = torch.randn(m, 4096, device="cuda", dtype=BF16), random_weights(form, 4096, 4096)
    exact = x.double() @ packed_reference(w).double().T
    assert relative_error(packed_matmul(x, w, impl="gluon"), exact) < 1e-2
    assert torch.equal(dequantize_packed(w, impl="triton"), dequantize_packed(w, impl="reference"))


def test_a_chain_in_a_graph():
    weights = [
        *(random_packed(2048, 2048) for _ in range(4)),
        *(random_weights(form, 2048, 2048) for form in FORMS),
    ]
    first = torch.randn(4, 2048, device="cuda", dtype=BF16)

    def chain(prefetch):
        y = first
        for w in weights:
            y = packed_matmul(y, w, prefetch=prefetch, impl="gluon")
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


@pytest.mark.parametrize("kernel", ["packed", "packed warps"])
@pytest.mark.parametrize("m", [2, 16])
def test_products_in_a_graph_come_to_an_end(m, kernel):
    """In one of some thousand launches the copying warp had got a wrong count, and never ended."""
    x = torch.randn(m, 4096, device="cuda", dtype=BF16)
    w = counted(random_packed(6144, 4096))
    plan = packed_plan(m, 6144, 4096, 128)._replace(kernel=kernel, block_k=128)
    with trying("packed_matmul", tuning_key(m, 6144, 4096, 128), plan._asdict()):
        once = packed_matmul(x, w, prefetch=True, impl="gluon")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                y = packed_matmul(x, w, prefetch=True, impl="gluon")
    for _ in range(100):
        graph.replay()
    ended, deadline = torch.cuda.Event(), time.monotonic() + 10
    ended.record()
    while not ended.query():
        assert time.monotonic() < deadline, "the products stand still"
    assert torch.equal(y, once)
