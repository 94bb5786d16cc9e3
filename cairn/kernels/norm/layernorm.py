"""y = (x - mean) / sqrt(variance + eps) * weight + bias, for each row, and its gradients.

    layernorm        x -> y                                          differentiable
    add_layernorm    x, residual -> y of their sum; the sum is kept where `residual_out` is given

Computed in float32 from registers, so the variance is that of the differences from the mean and no precision is
lost to large means; rounded once. Bytes moved: 2*T*D elements forward, 3*T*D backward. The sums over rows that the
gradients of weight and bias need are kept by each program and added up in a fixed order, as in rmsnorm_backward.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import (
    default_layout,
    launch,
    layout,
    shared_row,
    sum_parts,
    summing_layout,
    too_wide,
    width,
)


class Added(NamedTuple):
    """Residual that is added before the norm, and the output for the sum."""

    residual: Tensor | None = None
    total: Tensor | None = None


def layernorm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (wide if bias is None else wide + bias).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _layernorm_kernel(
    x, residual, weight, bias, y, total, mean, rstd, rows,
    x_stride, residual_stride, y_stride, total_stride, eps,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < COLUMNS
    kept_w = shared_row(weight, column, inside) if STAGES > 1 else None
    kept_b = shared_row(bias, column, inside) if STAGES > 1 and bias is not None else None
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside
        at = row.to(tl.int64)
        v = tl.load(x + at * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        if residual is not None:
            before = tl.load(residual + at * residual_stride + column, mask=mask, other=0.0)
            narrow = (v + before.to(tl.float32)).to(residual.dtype.element_ty)
            if total is not None:
                tl.store(total + at * total_stride + column, narrow, mask=mask)
            v = narrow.to(tl.float32)
        m = tl.sum(v, axis=1)[:, None] / COLUMNS
        v = tl.where(inside, v - m, 0.0)
        r = tl.rsqrt(tl.sum(v * v, axis=1)[:, None] / COLUMNS + eps)
        if mean is not None:
            tl.store(mean + row, m, mask=row < rows)
            tl.store(rstd + row, r, mask=row < rows)
        w = shared_row(weight, column, inside) if STAGES == 1 else kept_w
        n = v * r * tl.cast(w, tl.float32)
        if bias is not None:
            b = shared_row(bias, column, inside) if STAGES == 1 else kept_b
            n += tl.cast(b, tl.float32)
        tl.store(y + at * y_stride + column, n.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _layernorm_backward_kernel(
    grad, x, mean, rstd, weight, dx, parts, rows, grad_stride, x_stride, dx_stride,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < COLUMNS
    w = shared_row(weight, column, inside).to(tl.float32)
    dw = tl.zeros([ROWS, WIDTH], tl.float32)
    db = tl.zeros([ROWS, WIDTH], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside
        at = row.to(tl.int64)
        m = tl.load(mean + row, mask=row < rows, other=0.0)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        v = tl.load(x + at * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        n = tl.where(inside, v - m, 0.0) * r
        g = tl.load(grad + at * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        dw += g * n
        db += g
        g = g * w
        along = tl.sum(g * n, axis=1)[:, None] / COLUMNS
        d = (g - n * along - tl.sum(g, axis=1)[:, None] / COLUMNS) * r
        tl.store(dx + at * dx_stride + column, d.to(dx.dtype.element_ty), mask=mask)
    here = parts + tl.program_id(0).to(tl.int64) * (2 if BIAS else 1) * COLUMNS + column
    tl.store(here, tl.sum(dw, axis=0)[None, :], mask=inside)
    if BIAS:
        tl.store(here + COLUMNS, tl.sum(db, axis=0)[None, :], mask=inside)


def layernorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """x [..., D] -> y like x. Differentiable."""
    check("x", x, dtypes=FLOATS)
    check("weight", weight, dtypes=FLOATS, shape=x.shape[-1:], beside=x, packed=True)
    if bias is not None:
        check("bias", bias, dtypes=FLOATS, shape=x.shape[-1:], beside=x, packed=True)
    offers = {"triton": needs_cuda(x) or too_wide(x.shape[-1]), "reference": None}
    if choose("layernorm", impl, offers).impl == "reference":
        y = layernorm_reference(x, weight, bias, eps)
        return y if out is None else output("out", out, x.shape, x.dtype, x).copy_(y)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        require(out is None, "out", "none while gradients are kept", "one")
        return _LayerNorm.apply(x, weight, bias, eps)
    y = output("out", out, x.shape, x.dtype, x)
    _launch(x, weight, bias, y, eps)
    return y


def add_layernorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """x, residual [..., D] -> y like x. Not differentiable; the outputs may be the inputs."""
    check("x", x, dtypes=FLOATS)
    check("residual", residual, dtypes=FLOATS, shape=x.shape, beside=x)
    check("weight", weight, dtypes=FLOATS, shape=x.shape[-1:], beside=x, packed=True)
    if bias is not None:
        check("bias", bias, dtypes=FLOATS, shape=x.shape[-1:], beside=x, packed=True)
    total = None
    if residual_out is not None:
        total = output("residual_out", residual_out, residual.shape, residual.dtype, residual)
    y = output("out", out, x.shape, x.dtype, x)
    offers = {"triton": needs_cuda(x) or too_wide(x.shape[-1]), "reference": None}
    if choose("layernorm", impl, offers).impl == "triton":
        _launch(x, weight, bias, y, eps, Added(residual, total))
        return y
    added = (x + residual).to(residual.dtype)
    if total is not None:
        total.copy_(added)
    return y.copy_(layernorm_reference(added, weight, bias, eps))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = x.numel() // x.shape[-1]
        mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        _launch(x, weight, bias, y, eps, statistics=(mean, rstd))
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        return *_launch_backward(grad, x, weight, mean, rstd, ctx.bias_dtype), None


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    eps: float,
    added: Added = Added(),  # noqa: B008 (immutable)
    statistics: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """`statistics`: where the mean and the reciprocal deviation of each row go."""
    x_TD, y_TD = as_rows("x", x), as_rows("out", y)
    residual_TD, total_TD = (None if one is None else as_rows("residual", one) for one in added)
    rows, columns = x_TD.shape
    if not rows:
        return
    how = layout("layernorm", "forward", columns, x.dtype, default_layout(columns))
    launch(
        _layernorm_kernel, how.programs(rows, x.device),
        x_TD, residual_TD, weight, bias, y_TD, total_TD, *statistics, rows,
        *(0 if one is None else one.stride(0) for one in (x_TD, residual_TD, y_TD, total_TD)), eps,
        COLUMNS=columns, WIDTH=width(columns), ROWS=how.rows, STAGES=how.stages,
        num_warps=how.warps,
    )  # fmt: skip


def _launch_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    x_TD, grad_TD = as_rows("x", x), as_rows("grad", grad)
    rows, columns = x_TD.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    how = layout("layernorm", "backward", columns, x.dtype, summing_layout(columns))
    programs = max(how.programs(rows, x.device), 1)
    sums = 1 if bias_dtype is None else 2  # of the weight, and of the bias, side by side
    parts = torch.empty(programs, sums * columns, dtype=torch.float32, device=x.device)
    launch(
        _layernorm_backward_kernel, programs,
        grad_TD, x_TD, mean, rstd, weight, dx, parts,
        rows, grad_TD.stride(0), x_TD.stride(0), columns,
        COLUMNS=columns, WIDTH=width(columns), ROWS=how.rows, STAGES=how.stages, BIAS=sums == 2,
        num_warps=how.warps,
    )  # fmt: skip
    same = bias_dtype in (None, weight.dtype)
    found = sum_parts(parts, weight.dtype if same else torch.float32)
    db = None if bias_dtype is None else found[columns:].to(bias_dtype)
    return dx, found[:columns].to(weight.dtype), db


def cost(rows: int, columns: int, element_bytes: int = 2, backward: bool = False) -> Cost:
    elements = rows * columns
    passes, flops = (3, 12) if backward else (2, 8)
    return Cost(flops * elements, passes * elements * element_bytes)
