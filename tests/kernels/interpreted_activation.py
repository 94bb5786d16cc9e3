"""Gated activations, forward and backward, in the interpreter."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.layer.activation import (
    gated_activation,
    gated_activation_fp8,
    gated_activation_reference,
    geglu,
    swiglu,
)
from cairn.kernels.layer.activation_backward import gated_activation_backward
from cairn.kernels.norm.rows import key
from cairn.kernels.quantize.quantize import quantize
from cairn.kernels.tuned import trying

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 1e-2, F32: 1e-5}
KINDS = ["silu", "gelu_tanh", "gelu"]


def truth(x, kind):
    return gated_activation_reference(*x.double().chunk(2, dim=-1), kind)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 130), (2, 3, 64), (1, 2), (0, 8)])
def test_forward_of_halves(shape, kind, dtype):
    # Far out on the left 1 + erf(x) cancels in float32, for torch as for us: a single value stays near 0.
    x = ((3 if shape[-1] > 2 else 0.5) * torch.randn(shape)).to(dtype)
    out = torch.empty(*shape[:-1], shape[-1] // 2, dtype=dtype)
    poison(out)
    assert gated_activation(x, activation=kind, out=out, impl="triton") is out
    assert relative_error(out, truth(x, kind)) < TOLERANCE[dtype]
    plain = gated_activation_reference(*x.chunk(2, dim=-1), kind)
    assert relative_error(out, plain) < TOLERANCE[dtype] / 4


def test_several_blocks_in_a_row():
    x = torch.randn(3, 2 * 100)
    with trying("activation", "float32", {"block": 32, "warps": 1}):
        assert relative_error(swiglu(x, impl="triton"), truth(x, "silu")) < 1e-5


def test_two_tensors():
    gate, up = torch.randn(2, 6, 48)
    both = torch.cat((gate, up), dim=-1)
    assert torch.equal(geglu(gate, up, impl="triton"), geglu(both, impl="triton"))
    assert torch.equal(
        swiglu(gate[:, 8:40], up[:, 8:40], impl="triton"), swiglu(gate, up, impl="triton")[:, 8:40]
    )


def test_large_values_do_not_become_nan():
    x = torch.tensor([[-200.0, 200.0, -1e4, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for kind in KINDS:
        found = gated_activation(x, activation=kind, impl="triton")
        assert found.tolist() == [[0.0, 200.0, 0.0, 1e4]]
        grads = gated_activation_backward(torch.ones(1, 4), x, activation=kind, impl="triton")[0]
        assert grads.isfinite().all()


@pytest.mark.parametrize("layout", [{}, dict(rows=2, warps=1, stages=2, per_sm=1)])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_equals_its_parts(kind, layout):
    x = torch.randn(7, 2 * 72).to(BF16)
    with trying("activation", key("fp8", 72, BF16), layout):
        found = gated_activation_fp8(x, activation=kind, impl="triton")
    parts = quantize(gated_activation(x, activation=kind, impl="triton"), impl="triton")
    assert relative_error(found, parts) == 0


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_gradients(fused, kind, dtype):
    x = torch.randn(4, 3, 2 * 36).to(dtype)
    leaves = [x] if fused else [half.contiguous() for half in x.chunk(2, dim=-1)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    grad = torch.randn(4, 3, 36).to(dtype)
    gated_activation(*leaves, activation=kind, impl="triton").backward(grad)
    wide = x.double().requires_grad_()
    gated_activation_reference(*wide.chunk(2, dim=-1), kind).backward(grad.double())
    found = torch.cat([leaf.grad for leaf in leaves], dim=-1)
    assert relative_error(found, wide.grad) < TOLERANCE[dtype]
    plain = gated_activation_backward(
        grad, *(leaf.detach() for leaf in leaves), activation=kind, impl="reference"
    )
    assert (
        relative_error(torch.cat([one for one in plain if one is not None], -1), wide.grad)
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_gives_the_same_result_again(kind, dtype):
    x, grad = torch.randn(5, 2 * 70).to(dtype), torch.randn(5, 70).to(dtype)
    y = torch.empty(5, 70, dtype=dtype)
    poison(y)
    found, _ = gated_activation_backward(grad, x, activation=kind, y=y, impl="triton")
    assert torch.equal(y, gated_activation(x, activation=kind, impl="triton"))
    assert torch.equal(found, gated_activation_backward(grad, x, activation=kind, impl="triton")[0])
