"""The fp8 product in the interpreter, against float64 over the same quantised operands."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.matmul.matmul_fp8 import _key, matmul_fp8, matmul_fp8_reference
from cairn.kernels.quantize.quantize import by_largest
from cairn.kernels.tuned import trying

TINY = dict(block_m=64, block_n=64, block_k=64, group=2, warps=4, stages=2, per_sm=1)


def quantised(rows, columns, per_row):
    x = torch.randn(rows, columns) * torch.rand(rows, 1)
    largest = x.abs().amax(-1, keepdim=True)
    return by_largest(x, largest if per_row else x.abs().amax(), torch.float8_e4m3fn)


@pytest.mark.parametrize("per_row", [(False, False), (True, True), (True, False), (False, True)])
def test_scales(per_row):
    m, n, k = 70, 136, 208
    a, b = quantised(m, k, per_row[0]), quantised(n, k, per_row[1])
    y = torch.empty(m, n, dtype=torch.bfloat16)
    poison(y)
    with trying("matmul_fp8", _key(m, n, k, any(per_row)), TINY):
        matmul_fp8(a.values, b.values, a.scale, b.scale, out=y, impl="triton")
    wide = torch.float64
    exact = matmul_fp8_reference(a.values, b.values, a.scale, b.scale, wide, wide)
    assert relative_error(y, exact) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_three_quarters_of_a_power_of_two(dtype):
    m, n, k = 70, 136, 80
    a, b = quantised(m, k, True), quantised(n, k, True)
    y = torch.empty(m, n, dtype=dtype)
    poison(y)
    with trying("matmul_fp8", _key(m, n, k, True), TINY | dict(block_n=96)):
        matmul_fp8(a.values, b.values, a.scale, b.scale, out=y, out_dtype=dtype, impl="triton")
    wide = torch.float64
    exact = matmul_fp8_reference(a.values, b.values, a.scale, b.scale, wide, wide)
    assert relative_error(y, exact) < 1e-2


@pytest.mark.parametrize("shape", [(1, 8, 16), (65, 264, 48), (129, 520, 144)])
def test_default_tiles_and_odd_sizes(shape):
    m, n, k = shape
    a, b = quantised(m, k, True), quantised(n, k, True)
    y = matmul_fp8(a.values, b.values, a.scale, b.scale, out_dtype=torch.float32, impl="triton")
    wide = torch.float64
    exact = matmul_fp8_reference(a.values, b.values, a.scale, b.scale, wide, wide)
    assert relative_error(y, exact) < 1e-5


def test_small_integers_are_exact():
    a = torch.randint(-8, 9, (66, 256)).to(torch.float8_e4m3fn)
    b = torch.randint(-8, 9, (72, 256)).to(torch.float8_e4m3fn)
    one = torch.ones(())
    y = matmul_fp8(a, b, one, one, out_dtype=torch.float32, impl="triton")
    assert torch.equal(y, a.float() @ b.float().T)


def test_no_rows():
    a, b = quantised(0, 32, True), quantised(64, 32, True)
    y = matmul_fp8(a.values, b.values, a.scale, b.scale, impl="triton")
    assert y.shape == (0, 64)
