"""fp8 and int8 in the interpreter: every bit as the reference has it."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.norm.rows import key
from cairn.kernels.quantize.nf4 import dequantize_nf4, dequantize_nf4_reference, quantize_nf4
from cairn.kernels.quantize.quantize import Quantized, dequantize, quantize, quantize_reference
from cairn.kernels.quantize.quantize_tensor import quantize_tensor, quantize_tensor_reference
from cairn.kernels.tuned import trying

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LAYOUTS = [
    dict(rows=1, warps=1, stages=1, per_sm=0),
    dict(rows=4, warps=2, stages=2, per_sm=1),
]


def same(found: Quantized, wanted: Quantized) -> bool:
    return relative_error(found, wanted) == 0 and found.values.dtype == wanted.values.dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [FP8, INT8])
@pytest.mark.parametrize(("shape", "dtype"), [
    ((9, 200), torch.bfloat16), ((2, 3, 64), torch.float32), ((1, 1), torch.float16), ((0, 16), torch.float32),
    ((9, 192), torch.bfloat16),
])  # fmt: skip
def test_rows(shape, dtype, stored, layout):
    x = (torch.randn(shape) * torch.rand(*shape[:-1], 1) * 100).to(dtype)
    out = Quantized(torch.empty(shape, dtype=stored), torch.empty(*shape[:-1], 1))
    poison(*out)
    with trying("quantize", key("rows", shape[-1], dtype), layout):
        assert quantize(x, stored, out, impl="triton").values is out.values
    assert same(out, quantize_reference(x, stored))
    assert relative_error(dequantize(out, dtype, impl="triton"), x) < 0.05


def test_rows_with_strides_and_zeros():
    wide = torch.randn(6, 96)
    x = wide[:, 16:80]
    x[2] = 0
    found = quantize(x, impl="triton")
    assert same(found, quantize_reference(x))
    assert not found.values[2].float().any()
    assert found.scale[2] > 0


def test_int8_rounds_ties_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 3.49]])
    found = quantize(x, INT8, impl="triton")
    assert found.values.tolist() == [[127, 0, 2, 2, 0, -2, -127, 3]]


def test_nan_stays_nan():
    x = torch.ones(2, 8)
    x[1, 3] = float("nan")
    found = quantize(x, impl="triton").values.float()
    assert found.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize(("shape", "dtype"), [((70, 33), torch.bfloat16), ((1,), torch.float32)])
def test_tensor(shape, dtype):
    x = torch.randn(shape).to(dtype)
    config = dict(block=256, warps=1, stages=2, per_sm=2)
    with trying("quantize_tensor", str(dtype).removeprefix("torch."), config):
        found = quantize_tensor(x, impl="triton")
        given = quantize_tensor(x * 3, found.scale, impl="triton")
    assert same(found, quantize_tensor_reference(x))
    assert same(given, quantize_tensor_reference(x * 3, found.scale))
    assert given.values.float().abs().max() == 448  # saturated, not NaN
    assert relative_error(dequantize(found, dtype, impl="triton"), x) < 0.05


def test_tensor_of_zeros_and_of_nothing():
    zeros = quantize_tensor(torch.zeros(100), impl="triton")
    assert not zeros.values.float().any()
    assert zeros.scale > 0
    for impl in ("triton", "reference"):
        nothing = quantize_tensor(torch.zeros(0), impl=impl)
        assert nothing.values.shape == (0,)
        assert nothing.scale == zeros.scale


def test_dequantize_int8_with_one_scale():
    values = torch.randint(-127, 128, (5, 40), dtype=INT8)
    scale = torch.tensor(0.25)
    found = dequantize(Quantized(values, scale), torch.float32, impl="triton")
    assert torch.equal(found, values * 0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(70, 96), (5, 13)])
def test_nf4_to_the_bit(shape, dtype):
    packed = quantize_nf4(torch.randn(shape) * 3)
    found = dequantize_nf4(packed, dtype, impl="triton")
    assert torch.equal(found, dequantize_nf4_reference(packed, dtype))
