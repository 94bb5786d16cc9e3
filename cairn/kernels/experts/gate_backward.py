"""Backward through the gate of the experts, with the weights of the router: rows are pairs, sorted by expert.

    y[token] = sum over its pairs p of weights[p] * down(h[p]),   h = silu(gate) * up
    in:   grad[p] = down^T dy[token of p]: the gradient of h as if the weight were 1
    out:  d_gate, d_up: gradients of both halves, weighed       weighed[p] = weights[p] * h[p], which the gradient of
          d_weights[pair] = grad[p] . h[p]                      down multiplies with

So the results of the experts need not be kept for the gradient of their weights. Each pair is one row: no atomics.
Bytes moved: 6*P*F elements.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.layer.activation_backward import act


def gate_backward_reference(
    grad_PF: Tensor, inner_PI: Tensor, order_P: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if inner_PI.dtype == torch.float64 else torch.float32
    gate_PF, up_PF = inner_PI.to(wide).chunk(2, dim=-1)
    share_PF, grad = gate_PF.sigmoid(), grad_PF.to(wide)
    weight_P1 = weights_TK.flatten()[order_P.long()].to(wide)[:, None]
    hidden_PF = gate_PF * share_PF * up_PF
    slope_PF = share_PF + gate_PF * share_PF * (1 - share_PF)
    d_inner = torch.cat((grad * up_PF * slope_PF, grad * gate_PF * share_PF), dim=-1) * weight_P1
    d_weights = torch.zeros_like(weights_TK).flatten()
    d_weights[order_P.long()] = (grad * hidden_PF).sum(-1).to(weights_TK.dtype)
    kind = inner_PI.dtype
    return d_inner.to(kind), (hidden_PF * weight_P1).to(kind), d_weights.view_as(weights_TK)


@triton.jit
def _gate_backward_kernel(
    grad, inner, order, weights, d_inner, weighed, d_weights,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < COLUMNS
    pair = tl.load(order + row)
    weight = tl.load(weights + pair)
    at = row * COLUMNS + column
    gate_at = row * (2 * COLUMNS) + column
    x = tl.load(inner + gate_at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(inner + gate_at + COLUMNS, mask=there, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    value, slope = act(x, 0)
    hidden = value * up
    tl.store(d_weights + pair, tl.sum(g * hidden, axis=0))
    g *= weight
    kind = d_inner.dtype.element_ty
    tl.store(d_inner + gate_at, (g * up * slope).to(kind), mask=there)
    tl.store(d_inner + gate_at + COLUMNS, (g * value).to(kind), mask=there)
    tl.store(weighed + at, (weight * hidden).to(kind), mask=there)


def gate_backward(
    grad_PF: Tensor, inner_PI: Tensor, order_P: Tensor, weights_TK: Tensor, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up side by side [P, 2F], weighed rows [P, F], and gradients of the weights [T, K]."""
    check("grad_PF", grad_PF, dtypes=FLOATS, shape=(None, None), packed=True)
    pairs, columns = grad_PF.shape
    shape = (pairs, 2 * columns)
    check("inner_PI", inner_PI, dtypes=(grad_PF.dtype,), shape=shape, beside=grad_PF, packed=True)
    whole = (torch.int32,)
    check("order_P", order_P, dtypes=whole, shape=(pairs,), beside=grad_PF, packed=True)
    exact = (torch.float32,)
    check("weights_TK", weights_TK, dtypes=exact, shape=(None, None), beside=grad_PF, packed=True)
    require(weights_TK.numel() == pairs, "weights_TK", f"{pairs} weights", weights_TK.numel())
    offers = {"triton": needs_cuda(grad_PF), "reference": None}
    if choose("gate_backward", impl, offers).impl == "reference":
        return gate_backward_reference(grad_PF, inner_PI, order_P, weights_TK)
    d_inner_PI, weighed_PF = torch.empty_like(inner_PI), torch.empty_like(grad_PF)
    d_weights_TK = torch.empty_like(weights_TK)
    if pairs and columns:
        width = 1 << (columns - 1).bit_length()
        kernel: Any = _gate_backward_kernel
        kernel[(pairs,)](
            *(grad_PF, inner_PI, order_P, weights_TK, d_inner_PI, weighed_PF, d_weights_TK),
            COLUMNS=columns,
            WIDTH=width,
            num_warps=max(1, min(8, width // 256)),
        )
    return d_inner_PI, weighed_PF, d_weights_TK


def cost(pairs: int, columns: int) -> Cost:
    return Cost(16.0 * pairs * columns, 2.0 * 6 * pairs * columns + 12.0 * pairs)
