"""The gradients of y = act(gate) * up: d_gate = g * up * act'(gate), d_up = g * act(gate).

Also where the activations themselves are, each as its value and its slope. Recomputed from gate and up, so the
forward keeps nothing else; on the way y itself can be written once more, for a product that kept none. Gate and up
are two tensors or the halves of one, and so are their gradients. Bytes moved: 5*T*F elements (g, gate, up in; d_gate,
d_up out), T*F more with y.
"""

from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch, width
from cairn.kernels.tuned import tuned

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
DEFAULT = {"block": 2048, "warps": 4}


def gated_activation_backward_reference(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Reference in float32 (float64 for a float64 gate), rounded at the end only."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    x, g = gate.to(wide), grad.to(wide)
    if activation == "gelu":
        share = 0.5 * (1 + torch.erf(x * 0.5**0.5))
        slope = share + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
    else:
        inner, inner_slope = x, torch.ones_like(x)
        if activation == "gelu_tanh":
            inner = 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
            inner_slope = 2 * (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x * x)
        share = torch.sigmoid(inner)
        slope = share + x * share * (1 - share) * inner_slope
    return (g * up.to(wide) * slope).to(gate.dtype), (g * x * share).to(up.dtype)


@triton.jit
def power_of_two(x):
    """Results below the smallest normal number are 0; care for them would take three more instructions."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """One instruction where a division is eight, and as exact for what is rounded to 16 bits afterwards."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def act(x, KIND: tl.constexpr):
    """Value and slope in float32. Each activation is x times a share between 0 and 1.

    The tanh form of gelu needs no tanh: (1 + tanh(z)) / 2 is the logistic function of 2 z.
    """
    if KIND == 2:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        inner = x
        inner_slope = 1.0
        if KIND == 1:
            inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
            inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        share = reciprocal(1.0 + power_of_two(inner * -1.4426950408889634))
        slope = share + x * share * (1.0 - share) * inner_slope
    return x * share, slope


@triton.jit
def _gated_backward_kernel(
    grad, gate, up, d_gate, d_up, y, grad_stride, gate_stride, up_stride, d_gate_stride,
    d_up_stride, y_stride,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tl.cdiv(COLUMNS, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    x = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    narrow = tl.load(up + row * up_stride + column, mask=mask, other=0.0)
    u = narrow.to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    value, slope = act(x, KIND)
    dg, du = (g * u * slope).to(d_gate.dtype.element_ty), (g * value).to(d_up.dtype.element_ty)
    tl.store(d_gate + row * d_gate_stride + column, dg, mask=mask)
    tl.store(d_up + row * d_up_stride + column, du, mask=mask)
    if y is not None:  # rounded as forward rounds it
        tl.store(y + row * y_stride + column, value.to(narrow.dtype) * narrow, mask=mask)


def gated_activation_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    activation: str = "silu",
    *,
    y: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gradients like gate and like up; without `up` one tensor that holds both halves, and None.

    `y`: like grad; where act(gate) * up is written again.
    """
    require(activation in KINDS, "activation", " or ".join(KINDS), activation)
    gate_TF, up_TF = gated_rows(gate, up)
    columns = gate_TF.shape[1]
    check("grad", grad, dtypes=FLOATS, shape=(*gate.shape[:-1], columns), beside=gate)
    grad_TF = as_rows("grad", grad)
    y_TF = None
    if y is not None:
        y_TF = as_rows("y", output("y", y, grad.shape, gate.dtype, gate))
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_up = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
    d_gate_TF, d_up_TF = gated_rows(d_gate, d_up)
    offers = {"triton": needs_cuda(gate), "reference": None}
    if choose("activation_backward", impl, offers).impl == "reference":
        found = gated_activation_backward_reference(grad_TF, gate_TF, up_TF, activation)
        d_gate_TF.copy_(found[0])
        d_up_TF.copy_(found[1])
        if y_TF is not None:
            ones = torch.ones_like(grad_TF)
            value = gated_activation_backward_reference(ones, gate_TF, up_TF, activation)[1]
            y_TF.copy_(value.to(gate_TF.dtype) * up_TF)
    elif len(gate_TF):
        _launch((grad_TF, gate_TF, up_TF, d_gate_TF, d_up_TF, y_TF), KINDS[activation])
    return d_gate, d_up


def gated_rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both operands as [T, F]: two tensors, or the halves of one."""
    gate_TF = as_rows("gate", check("gate", gate, dtypes=FLOATS))
    if up is not None:
        check("up", up, dtypes=(gate.dtype,), shape=gate.shape, beside=gate)
        return gate_TF, as_rows("up", up)
    columns = gate.shape[-1] // 2
    require(gate.shape[-1] % 2 == 0, "gate", "an even number of columns", gate.shape[-1])
    return gate_TF[:, :columns], gate_TF[:, columns:]


def _launch(tensors: Sequence[Tensor | None], kind: int) -> None:
    gate = cast(Tensor, tensors[1])
    how = tuned("activation_backward", short(gate.dtype), DEFAULT)
    rows, columns = gate.shape
    block = min(how["block"], width(columns))
    strides = [0 if tensor is None else tensor.stride(0) for tensor in tensors]
    launch(
        _gated_backward_kernel, rows * blocks(columns, block), *tensors, *strides,
        KIND=kind, COLUMNS=columns, BLOCK=block, num_warps=how["warps"],
    )  # fmt: skip


def cost(rows: int, columns: int, element_bytes: int = 2) -> Cost:
    return Cost(14 * rows * columns, 5 * rows * columns * element_bytes)
