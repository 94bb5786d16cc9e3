"""Products of few rows: one row and the joining of parts in the interpreter, the streaming kernel emulated."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401
import gluon_emulator  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.cases.packed_matmul import (
    BYTES,
    MORE_BYTES,
    SMALL,
    random_packed,
    random_weights,
)
from cairn.kernels.cases.packed_matmul import INT4 as IN_128
from cairn.kernels.matmul.epilogue import Epilogue, matmul_reference
from cairn.kernels.matmul.packed_matmul import launch as launch_packed
from cairn.kernels.matmul.packed_weights import counted, dequantize_packed, packed_reference
from cairn.kernels.matmul.skinny_fp8 import launch as launch_fp8
from cairn.kernels.matmul.skinny_fp8 import plan_of, row_scales, skinny_fp8
from cairn.kernels.matmul.skinny_matmul import launch, skinny_matmul
from cairn.kernels.matmul.skinny_plans import (
    LARGE_RING,
    Plan,
    candidates,
    default_plan,
    row_block,
    row_plan,
    stream_plan,
)
from cairn.kernels.quantize.quantize import Quantized, quantize_reference

ROW = Plan("row", 4, 256, 1, 1, 1)
STREAM = Plan("stream", 64, 32, 1, 4, 3)
PACKED = Plan("packed", 64, 256, 1, 4, 2)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def operands(m, n, k, dtype=torch.bfloat16):
    return torch.randn(m, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)


def truth(x, w, epilogue=Epilogue()):  # noqa: B008
    wide = (part.double() if isinstance(part, torch.Tensor) else part for part in epilogue)
    return matmul_reference(x.double(), w, Epilogue(*wide), torch.float64)


def by_plan(plan, x, w, epilogue=Epilogue()):  # noqa: B008
    y = torch.empty(len(x), epilogue.columns(len(w)), dtype=x.dtype)
    poison(y)
    launch(x, w, y, epilogue, plan)
    return y


@pytest.mark.parametrize(("n", "k"), [(37, 264), (8, 1000), (3, 64)])
@pytest.mark.parametrize("block_n", [2, 4])
def test_one_row(n, k, block_n):
    x, w = operands(1, n, k)
    assert relative_error(by_plan(ROW._replace(block_n=block_n), x, w), truth(x, w)) < 1e-2


@pytest.mark.parametrize(
    ("m", "n", "k"), [(2, 37, 264), (9, 130, 96), (32, 64, 32), (64, 200, 300), (141, 72, 96)]
)
@pytest.mark.parametrize(
    "change",
    [{}, dict(stages=1), dict(block_n=192, stages=2), dict(split=3), dict(split=99)],
    ids=str,
)
def test_more_rows(m, n, k, change):
    x, w = operands(m, n, k)
    assert relative_error(by_plan(STREAM._replace(**change), x, w), truth(x, w)) < 1e-2


@pytest.mark.parametrize("plan", [ROW, STREAM, STREAM._replace(block_n=128, split=2)], ids=str)
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("n", [160, 88])  # 88: not in pairs of 8 rows
def test_epilogues(plan, swiglu, n):
    m, k = 1 if plan is ROW else 5, 128
    x, w = operands(m, n, k)
    wide = torch.randn(m, 2 * n).bfloat16()
    epilogue = Epilogue(
        torch.randn(n).bfloat16(),
        "swiglu" if swiglu else None,
        wide[:, : n // 2 if swiglu else n],  # rows at another distance
    )
    assert relative_error(by_plan(plan, x, w, epilogue), truth(x, w, epilogue)) < 1e-2


@pytest.mark.parametrize("k", [512, 4096])  # less than a chunk of columns; two whole ones
@pytest.mark.parametrize("swiglu", [False, True])
def test_one_row_of_float8_weights(swiglu, k):
    x, w = operands(1, 40, k)
    w = quantize_reference(w)
    epilogue = Epilogue(torch.randn(40).bfloat16(), "swiglu" if swiglu else None)
    y = skinny_fp8(x, w, bias_N=epilogue.bias_N, activation=epilogue.activation, impl="triton")
    exact = truth(x, w.values.double() * w.scale.double(), epilogue)
    assert relative_error(y, exact) < 1e-2


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("change", [{}, dict(stages=1), dict(split=3)], ids=str)
def test_more_rows_of_float8(change, swiglu):
    x, w = (quantize_reference(rows) for rows in operands(9, 144, 300))
    epilogue = Epilogue(torch.randn(144).bfloat16(), "swiglu" if swiglu else None)
    y = torch.empty(9, epilogue.columns(144), dtype=torch.bfloat16)
    poison(y)
    launch_fp8(x, w, y, epilogue, STREAM._replace(**change))
    exact = truth(*(rows.values.double() * rows.scale.double() for rows in (x, w)), epilogue)
    assert relative_error(y, exact) < 1e-2


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("swiglu", [False, True])
def test_scales_for_blocks_of_float8(m, swiglu):
    """Whole numbers and powers of two: sums of few products are exact in any order."""
    n, k = 208, 640  # the last block of rows is short
    values = torch.randint(-2, 3, (n, k)).to(torch.float8_e4m3fn)
    w = Quantized(values, 2.0 ** torch.randint(-1, 2, (2, 5)))
    x = torch.randint(-1, 2, (m, k)).bfloat16()
    epilogue = Epilogue(None, "swiglu" if swiglu else None)
    given = x if m == 1 else Quantized(x.to(torch.float8_e4m3fn), torch.full((m, 1), 2.0))
    y = torch.empty(m, epilogue.columns(n), dtype=torch.bfloat16)
    poison(y)
    launch_fp8(given, w, y, epilogue, plan_of(given, w))
    exact = truth(x * (1 if m == 1 else 2), values.double() * row_scales(w).double(), epilogue)
    assert torch.equal(y, exact.bfloat16()) or (swiglu and relative_error(y, exact) < 1e-2)


WARPS = dict(kernel="packed warps")


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("form", "change"),
    [
        (IN_128, {}),
        (IN_128, dict(warps=8, block_k=128)),
        (IN_128._replace(group=64, shifts=True), dict(split=2, warps=8)),
        (IN_128._replace(group=256, shifts=True), dict(block_k=128, **WARPS)),
        (IN_128, dict(split=2, warps=8, block_k=128, **WARPS)),
        *((form, dict(split=2)) for form in SMALL),
        (SMALL[-1], dict(block_k=64, **WARPS)),
        *((form, dict(split=2)) for form in (*BYTES, *MORE_BYTES)),
        (BYTES[0], dict(block_k=128, **WARPS)),
        (BYTES[1], WARPS),
        (MORE_BYTES[1], dict(warps=8, **WARPS)),
    ],
    ids=str,
)
def test_packed_weights_are_exact_at_every_stage_count(stages, form, change):
    """Scales that are powers of two, and whole shifts: sums of few products are exact in any order."""
    m = 70 if form.shifts and stages == 2 else 9  # two blocks of rows, or one
    w, x = random_weights(form, 128, 512, "cpu", whole=True), torch.randint(-1, 2, (m, 512))
    y = torch.empty(m, 128, dtype=torch.bfloat16)
    poison(y)
    w = counted(w) if stages == 2 else w  # the last program joins parts, or another kernel
    launch_packed(x.bfloat16(), w, y, Epilogue(), PACKED._replace(stages=stages, **change))
    assert torch.equal(y, (x.double() @ packed_reference(w).double().T).bfloat16())
    assert w.arrived is None or not w.arrived.any()


@pytest.mark.parametrize("form", [*SMALL, *BYTES, *MORE_BYTES], ids=lambda form: form.name)
def test_the_packed_matrix_that_is_meant(form):
    w = random_weights(form, 128, 192, "cpu")
    found = dequantize_packed(w, impl="triton")
    assert torch.equal(found, dequantize_packed(w, impl="reference"))


@pytest.mark.parametrize("split", [1, 2])
def test_4_bit_weights_with_swiglu_and_dequantised(split):
    w, x = counted(random_packed(128, 256, 128, True, "cpu")), torch.randn(3, 256).bfloat16()
    epilogue = Epilogue(torch.randn(128).bfloat16(), "swiglu")
    y = torch.empty(3, 64, dtype=torch.bfloat16)
    poison(y)
    launch_packed(x, w, y, epilogue, PACKED._replace(split=split, block_k=128))
    rows = dequantize_packed(w, paired=True, impl="triton")
    assert torch.equal(rows, dequantize_packed(w, paired=True, impl="reference"))
    assert relative_error(y, truth(x, rows.double(), epilogue)) < 2e-2


def test_the_public_function():
    x, w = operands(1, 40, 512)
    assert relative_error(skinny_matmul(x, w, impl="triton"), truth(x, w)) < 1e-2
    assert skinny_matmul(x[:0], w).shape == (0, 40)
    x, w = operands(6, 24, 64)
    y = skinny_matmul(x.unflatten(0, (2, 3)), w)  # by torch: there is no Hopper here
    assert relative_error(y.flatten(0, 1), truth(x, w)) < 1e-2


def test_plans_fit():
    for m in (1, 8, 33, 64):
        for n, k in ((1024, 3072), (6144, 4096), (24576, 1000), (40, 64), (4096, 40000)):
            for plan in (default_plan(m, n, k), *candidates(m, n, k)):
                columns = 2 * plan.block_k * (plan.block_n + row_block(m))
                assert (
                    plan.kernel == "row" or plan.stages * columns <= LARGE_RING or plan.stages == 1
                )
                assert 1 <= plan.parts(k) <= max(plan.split, 1)
    assert row_plan(1024) in candidates(1, 4096, 1024)
    assert stream_plan(8, 4096, split=2) in candidates(8, 4096, 4096)
    assert default_plan(8, 1024, 2048).split == 4
