"""The gradients of rmsnorm, from the one that comes in (g); n = x / sqrt(mean(x^2) + eps), y = n * w.

    dx = (g w - n * mean(g w n)) / sqrt(mean(x^2) + eps) + the gradient that the residual brings
    dw = sum over rows of g n

One pass over memory: each program keeps a float32 sum of dw over its rows and writes it once; a second, small
kernel adds these sums up in a fixed order, so that the result is the same in every run on the same GPU. On the way
y itself can be written once more, for a product that kept none. Bytes moved: 3*T*D elements (g, x in; dx out), T*D
more with a residual's gradient, and with y.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, apart, as_rows, check, output
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import (
    launch,
    layout,
    sum_parts,
    summing_layout,
    too_wide,
    width,
)

Gradients = tuple[Tensor, Tensor | None]


def rmsnorm_backward_reference(
    grad_TD: Tensor,
    x_TD: Tensor,
    rstd_T: Tensor,
    weight_D: Tensor,
    plus_one: bool = False,
    grad_residual_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference in float32 (float64 for a float64 x), rounded at the end only."""
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    g, w = grad_TD.to(wide), weight_D.to(wide) + plus_one
    n = x_TD.to(wide) * rstd_T.to(wide)[:, None]
    dx = (g * w - n * (g * w * n).mean(-1, keepdim=True)) * rstd_T.to(wide)[:, None]
    if grad_residual_TD is not None:
        dx = dx + grad_residual_TD
    return dx.to(x_TD.dtype), (g * n).sum(0).to(weight_D.dtype)


@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_backward_kernel(
    grad, grad_residual, x, rstd, weight, dx, y, dw_parts, rows,
    grad_stride, grad_residual_stride, x_stride, dx_stride, y_stride,
    PLUS_ONE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < COLUMNS
    narrow = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
    w = narrow.to(tl.float32) + (1.0 if PLUS_ONE else 0.0)
    dw = tl.zeros([ROWS, WIDTH], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside
        at = row.to(tl.int64)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        n = tl.load(x + at * x_stride + column, mask=mask, other=0.0).to(tl.float32) * r
        g = tl.load(grad + at * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        dw += g * n
        if y is not None:  # rounded as forward rounds it
            again = n * w if PLUS_ONE else n.to(x.dtype.element_ty) * narrow
            tl.store(y + at * y_stride + column, again.to(y.dtype.element_ty), mask=mask)
        g = g * w
        d = (g - n * (tl.sum(g * n, axis=1)[:, None] / COLUMNS)) * r
        if grad_residual is not None:
            beside = grad_residual + at * grad_residual_stride + column
            d += tl.load(beside, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at * dx_stride + column, d.to(dx.dtype.element_ty), mask=mask)
    if dw_parts is not None:
        total = tl.sum(dw, axis=0)[None, :]
        tl.store(dw_parts + tl.program_id(0).to(tl.int64) * COLUMNS + column, total, mask=inside)


def rmsnorm_backward(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    *,
    plus_one: bool = False,
    grad_residual: Tensor | None = None,
    weight_grad: bool = True,
    out: Tensor | None = None,
    y: Tensor | None = None,
    impl: Impl = "auto",
) -> Gradients:
    """dx like x, and dw like the weight or None. `x` is what was normalised: the sum where one was added.

    `y`: like grad; where the norm's own result is written again.
    """
    x_TD = as_rows("x", check("x", x, dtypes=FLOATS))
    rows, columns = x_TD.shape
    grad_TD = as_rows("grad", check("grad", grad, dtypes=FLOATS, shape=x.shape, beside=x))
    check("rstd", rstd, dtypes=(torch.float32,), shape=(rows,), beside=x, packed=True)
    check("weight", weight, dtypes=FLOATS, shape=(columns,), beside=x, packed=True)
    extra_TD = None
    if grad_residual is not None:
        check("grad_residual", grad_residual, dtypes=FLOATS, shape=x.shape, beside=x)
        extra_TD = as_rows("grad_residual", grad_residual)
    dx = output("out", out, x.shape, x.dtype, x)
    y_TD = None
    if y is not None:
        y_TD = as_rows("y", check("y", y, dtypes=FLOATS, shape=x.shape, beside=x))
        apart("y", y_TD)
    offers = {"triton": needs_cuda(x) or too_wide(columns), "reference": None}
    if choose("rmsnorm_backward", impl, offers).impl == "reference":
        found = rmsnorm_backward_reference(grad_TD, x_TD, rstd, weight, plus_one, extra_TD)
        if y_TD is not None:
            n_TD = x_TD.float() * rstd[:, None]
            y_TD.copy_(n_TD * (weight.float() + 1) if plus_one else n_TD.to(x.dtype) * weight)
        return dx.copy_(found[0].view(x.shape)), found[1] if weight_grad else None
    if not rows:
        return dx, torch.zeros_like(weight) if weight_grad else None
    return dx, _launch(grad_TD, extra_TD, x_TD, rstd, weight, dx, y_TD, plus_one, weight_grad)


def _launch(
    grad_TD: Tensor,
    extra_TD: Tensor | None,
    x_TD: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dx: Tensor,
    y_TD: Tensor | None,
    plus_one: bool,
    weight_grad: bool,
) -> Tensor | None:
    rows, columns = x_TD.shape
    how = layout("rmsnorm_backward", "rows", columns, x_TD.dtype, summing_layout(columns))
    programs = how.programs(rows, x_TD.device)
    parts = None
    if weight_grad:
        parts = torch.empty(programs, columns, dtype=torch.float32, device=x_TD.device)
    dx_TD = as_rows("out", dx)
    launch(
        _rmsnorm_backward_kernel, programs,
        grad_TD, extra_TD, x_TD, rstd, weight, dx_TD, y_TD, parts, rows,
        grad_TD.stride(0), extra_TD.stride(0) if extra_TD is not None else 0,
        x_TD.stride(0), dx_TD.stride(0), y_TD.stride(0) if y_TD is not None else 0,
        PLUS_ONE=plus_one, COLUMNS=columns, WIDTH=width(columns), ROWS=how.rows,
        STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip
    return None if parts is None else sum_parts(parts, weight.dtype)


def cost(rows: int, columns: int, element_bytes: int = 2, residual: bool = False) -> Cost:
    elements = rows * columns
    return Cost(9 * elements, (4 if residual else 3) * elements * element_bytes + 4 * rows)
