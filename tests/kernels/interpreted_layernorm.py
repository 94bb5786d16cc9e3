"""layernorm forward and backward in the interpreter."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.norm.layernorm import add_layernorm, layernorm, layernorm_reference
from cairn.kernels.norm.rows import key
from cairn.kernels.tuned import trying

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 1e-2, F32: 1e-5}
STAY = dict(rows=4, warps=2, stages=2, per_sm=1)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 130), (2, 3, 64), (1, 1), (0, 8)])
def test_forward(shape, with_bias, dtype):
    x = (torch.randn(shape) + 3).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    bias = torch.randn(shape[-1]).to(dtype) if with_bias else None
    out = torch.empty_like(x)
    poison(out)
    assert layernorm(x, weight, bias, out=out, impl="triton") is out
    wide = bias.double() if bias is not None else None
    exact = F.layer_norm(x.double(), shape[-1:], weight.double(), wide)
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("keeps", [True, False, "in place"])
def test_the_sum_with_a_residual(keeps):
    x, residual = torch.randn(2, 7, 130).to(BF16)
    weight, bias = torch.randn(2, 130).to(BF16)
    total = x + residual
    room, out = residual.clone() if keeps else None, None
    if keeps == "in place":
        room, out = residual, x
    found = add_layernorm(x, residual, weight, bias, out=out, residual_out=room, impl="triton")
    assert out is None or found is out
    exact = F.layer_norm(total.double(), (130,), weight.double(), bias.double())
    assert relative_error(found, exact) < TOLERANCE[BF16]
    assert room is None or torch.equal(room, total)


def test_a_large_mean_costs_no_precision():
    x = torch.randn(4, 64) + 1000
    found = layernorm(x, torch.ones(64), impl="triton")
    assert relative_error(found, F.layer_norm(x.double(), (64,))) < 1e-4


@pytest.mark.parametrize("layout", [None, STAY])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients(with_bias, dtype, layout):
    x, grad = torch.randn(2, 19, 72).to(dtype)
    leaves = [x, *torch.randn(2, 72).to(dtype)][: 3 if with_bias else 2]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with trying("layernorm", key("backward", 72, dtype), layout or {}):
        layernorm(*leaves, impl="triton").backward(grad)
    exact = layernorm_reference(wide[0], wide[1], wide[2] if with_bias else None, 1e-5)
    exact.backward(grad.double())
    for found, wanted in zip(leaves, wide, strict=True):
        assert relative_error(found.grad, wanted.grad) < TOLERANCE[dtype]


def test_no_rows_have_no_gradient():
    x = torch.empty(0, 16, requires_grad=True)
    weight = torch.ones(16, requires_grad=True)
    layernorm(x, weight, impl="triton").sum().backward()
    assert not weight.grad.any()
