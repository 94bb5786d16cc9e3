"""The persistent product and its epilogues in the interpreter, against float64."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.matmul.epilogue import Epilogue, matmul_reference
from cairn.kernels.matmul.matmul import _key, matmul
from cairn.kernels.tuned import trying

TINY = dict(block_m=64, block_n=64, block_k=32, group=2, warps=4, stages=2)


def operands(m, n, k, dtype=torch.bfloat16):
    return torch.randn(m, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)


def truth(a, b, **parts):
    wide = {
        name: part.double() if isinstance(part, torch.Tensor) else part
        for name, part in parts.items()
    }
    return matmul_reference(a.double(), b, Epilogue(**wide), torch.float64)


@pytest.mark.parametrize("shape", [(1, 8, 8), (130, 136, 72), (200, 264, 96), (64, 512, 40)])
def test_odd_sizes(shape):
    m, n, k = shape
    a, b = operands(m, n, k)
    y = torch.empty(m, n, dtype=torch.bfloat16)
    poison(y)
    with trying("matmul", _key(m, n, k, a.dtype, Epilogue()), TINY):
        matmul(a, b, out=y, impl="triton")
    assert relative_error(y, truth(a, b)) < 1e-2


def test_default_tiles_and_half_precision():
    a, b = operands(129, 264, 72, torch.float16)
    assert relative_error(matmul(a, b, impl="triton"), truth(a, b)) < 1e-3


def test_float32_results_keep_the_sums():
    a, b = operands(70, 72, 128)
    y = matmul(a, b, out_dtype=torch.float32, impl="triton")
    assert relative_error(y, truth(a, b)) < 1e-5


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_epilogues(swiglu, bias, residual):
    m, n, k = 70, 144, 48
    a, b = operands(m, n, k)
    parts = dict(
        bias_N=torch.randn(n).bfloat16() if bias else None,
        activation="swiglu" if swiglu else None,
        residual_MN=torch.randn(m, n // 2 if swiglu else n).bfloat16() if residual else None,
    )
    with trying("matmul", _key(m, n, k, a.dtype, Epilogue(**parts)), TINY):
        y = matmul(a, b, **parts, impl="triton")
    assert relative_error(y, truth(a, b, **parts)) < 1e-2


def test_gelu():
    a, b = operands(70, 136, 48)
    b[:8] *= 40  # far beyond where a share is 0 or 1
    parts = dict(bias_N=torch.randn(136).bfloat16(), activation="gelu")
    y = matmul(a, b, **parts, out_dtype=torch.float32, impl="triton")
    exact = truth(a, b, **parts)
    assert exact.abs().max() > 60
    assert (y - exact).abs().max() < 1e-4


@pytest.mark.parametrize("swiglu", [False, True])
def test_quantised_results(swiglu):
    a, b = operands(66, 96, 64)
    parts = dict(activation="swiglu" if swiglu else None, out_scale=torch.tensor(0.004))
    y = matmul(a, b, **parts, impl="triton")
    assert y.dtype == torch.float8_e4m3fn
    exact = truth(a, b, **parts)
    assert exact.abs().max() == 448  # the scale is small enough that some saturate
    assert relative_error(y.float(), exact) < 5e-2  # 3 bits of mantissa


def test_leading_dimensions_and_views():
    a, b = operands(60, 64, 32)
    wide = torch.zeros(60, 64).bfloat16()
    wide[:, :32] = a
    y = matmul(wide[:, :32].unflatten(0, (3, 20)), b, impl="triton")
    assert y.shape == (3, 20, 64)
    assert relative_error(y.flatten(0, 1), truth(a, b)) < 1e-2


def test_no_rows():
    a, b = operands(0, 64, 32)
    assert matmul(a, b, impl="triton").shape == (0, 64)
