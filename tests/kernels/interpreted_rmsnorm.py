"""rmsnorm with all that is fused to it, forward and backward, in the interpreter."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.norm.rmsnorm import (
    add_rmsnorm,
    add_rmsnorm_both,
    add_rmsnorm_fp8,
    rmsnorm,
    rmsnorm_fp8,
    rmsnorm_reference,
    rmsnorm_with_rstd,
)
from cairn.kernels.norm.rmsnorm_backward import rmsnorm_backward, rmsnorm_backward_reference
from cairn.kernels.norm.rows import key
from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.kernels.tuned import trying

BF16, F32 = torch.bfloat16, torch.float32
STAY = dict(rows=4, warps=2, stages=2, per_sm=1)
TOLERANCE = {BF16: 1e-2, torch.float16: 2e-3, F32: 1e-5}


def tensors(*shapes, dtype):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def truth(x, weight, eps, plus_one):
    return rmsnorm_reference(x.double(), weight.double(), eps, plus_one)


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(7, 130), (2, 3, 64), (1, 1), (0, 8)])
def test_forward(shape, plus_one, dtype):
    x, weight = tensors(shape, shape[-1:], dtype=dtype)
    out = torch.empty_like(x)
    poison(out)
    assert rmsnorm(x, weight, 1e-5, plus_one=plus_one, out=out, prefetch=True, impl="triton") is out
    assert relative_error(out, truth(x, weight, 1e-5, plus_one)) < TOLERANCE[dtype]
    # The compiled form and the plain one round at the same places.
    assert relative_error(out, rmsnorm_reference(x, weight, 1e-5, plus_one)) < TOLERANCE[dtype] / 4


def test_every_layout_gives_the_same_row():
    x, weight = tensors((11, 96), (96,), dtype=BF16)
    once = rmsnorm(x, weight, impl="triton")
    with trying("rmsnorm", key("plain", 96, BF16), STAY):
        assert torch.equal(rmsnorm(x, weight, impl="triton"), once)
    assert torch.equal(rmsnorm(x[4:5], weight, impl="triton"), once[4:5])


def test_as_torch_has_it():
    x, weight = tensors((5, 64), (64,), dtype=F32)
    assert (
        relative_error(rmsnorm(x, weight, 1e-6, impl="triton"), F.rms_norm(x, (64,), weight, 1e-6))
        < 1e-6
    )


def test_rows_at_a_distance():
    qkv, weight = tensors((6, 5 * 32), (32,), dtype=BF16)
    x = qkv[:, 32:64]
    assert relative_error(rmsnorm(x, weight, impl="triton"), truth(x, weight, 1e-6, False)) < 1e-2


@pytest.mark.parametrize("residual_dtype", [BF16, F32])
@pytest.mark.parametrize("plus_one", [False, True])
def test_fused_forms_equal_their_parts(plus_one, residual_dtype):
    x, weight = tensors((6, 100), (100,), dtype=BF16)
    residual = torch.randn(6, 100).to(residual_dtype)
    total = (x + residual).to(residual_dtype)
    y, found = add_rmsnorm(x, residual, weight, plus_one=plus_one, impl="triton")
    assert torch.equal(found, total)
    assert y.dtype == BF16
    assert relative_error(y, truth(total, weight, 1e-6, plus_one)) < 1e-2
    if residual_dtype == BF16:
        assert torch.equal(y, rmsnorm(total, weight, plus_one=plus_one, impl="triton"))
    stored, found = add_rmsnorm_fp8(x, residual, weight, plus_one=plus_one, impl="triton")
    assert torch.equal(found, total)
    assert relative_error(stored, quantize(y, impl="triton")) == 0
    same, beside, found = add_rmsnorm_both(x, residual, weight, plus_one=plus_one, impl="triton")
    assert torch.equal(same, y)
    assert torch.equal(found, total)
    assert relative_error(beside, stored) == 0
    plain = rmsnorm_fp8(x, weight, plus_one=plus_one, impl="triton")
    parts = quantize(rmsnorm(x, weight, plus_one=plus_one, impl="triton"), impl="triton")
    assert relative_error(plain, parts) == 0


def test_the_outputs_may_be_the_inputs():
    x, residual, weight = tensors((4, 48), (4, 48), (48,), dtype=BF16)
    wanted = add_rmsnorm(x.clone(), residual.clone(), weight, impl="triton")
    add_rmsnorm(x, residual, weight, out=x, residual_out=residual, prefetch=True, impl="triton")
    assert torch.equal(x, wanted[0])
    assert torch.equal(residual, wanted[1])


def test_fp8_into_given_buffers():
    x, weight = tensors((3, 64), (64,), dtype=BF16)
    out = Quantized(torch.empty(3, 64, dtype=torch.float8_e4m3fn), torch.empty(3, 1))
    poison(*out)
    assert rmsnorm_fp8(x, weight, out=out, impl="triton").values is out.values
    assert relative_error(out, rmsnorm_fp8(x, weight, impl="reference")) < 1e-2


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_gradients(added, plus_one, dtype):
    shape = (3, 7, 72)
    x, residual, weight = (t.requires_grad_() for t in tensors(shape, shape, (72,), dtype=dtype))
    g, g_total = tensors(shape, shape, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    if added:
        outputs = add_rmsnorm(x, residual, weight, plus_one=plus_one, impl="triton")
        total = wide[0] + wide[1]
        exact, grads = (rmsnorm_reference(total, wide[2], 1e-6, plus_one), total), (g, g_total)
    else:
        outputs = (rmsnorm(x, weight, plus_one=plus_one, impl="triton"),)
        exact, grads = (rmsnorm_reference(wide[0], wide[2], 1e-6, plus_one),), (g,)
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(exact, [one.double() for one in grads])
    for found, wanted in zip((x, residual, weight), wide, strict=True):
        assert (found.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            assert relative_error(found.grad, wanted.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", [dict(rows=1, warps=1, stages=1, per_sm=1), STAY])
def test_backward_layouts(layout):
    x, grad, extra, weight = tensors((23, 40), (23, 40), (23, 40), (40,), dtype=F32)
    rstd = torch.rsqrt(x.square().mean(-1) + 1e-6)
    with trying("rmsnorm_backward", key("rows", 40, F32), layout):
        found = rmsnorm_backward(grad, x, rstd, weight, grad_residual=extra, impl="triton")
    wanted = rmsnorm_backward_reference(grad, x, rstd, weight, False, extra)
    assert relative_error(found, wanted) < 1e-5


def test_a_frozen_weight_costs_no_sum():
    x, grad, weight = tensors((5, 40), (5, 40), (40,), dtype=F32)
    rstd = torch.rsqrt(x.square().mean(-1) + 1e-6)
    dx, dw = rmsnorm_backward(grad, x, rstd, weight, weight_grad=False, impl="triton")
    assert dw is None
    assert relative_error(dx, rmsnorm_backward_reference(grad, x, rstd, weight)[0]) < 1e-5


def test_no_rows_have_no_gradient():
    x = torch.empty(0, 16, requires_grad=True)
    weight = torch.ones(16, requires_grad=True)
    rmsnorm(x, weight, impl="triton").sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("plus_one", [False, True])
def test_backward_gives_the_same_result_again(plus_one, dtype):
    x, residual, grad = torch.randn(3, 7, 40).to(dtype)
    weight = torch.randn(40).to(dtype)
    y, total, rstd = rmsnorm_with_rstd(x, residual, weight, plus_one=plus_one, impl="triton")
    again = torch.empty_like(y)
    poison(again)
    with_y = rmsnorm_backward(grad, total, rstd, weight, plus_one=plus_one, y=again, impl="triton")
    without = rmsnorm_backward(grad, total, rstd, weight, plus_one=plus_one, impl="triton")
    assert torch.equal(again, y)
    assert all(torch.equal(one, other) for one, other in zip(with_y, without, strict=True))
