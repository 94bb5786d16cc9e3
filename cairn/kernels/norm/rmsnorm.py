"""y = x / sqrt(mean(x^2) + eps) * weight, for each row; also with what surrounds it in a model.

    rmsnorm           x -> y
    add_rmsnorm       x, residual -> y of their sum, the sum       (the sum is the new residual)
    rmsnorm_fp8       x -> y as fp8 with a scale for each row
    add_rmsnorm_fp8   all of it
    add_rmsnorm_both  the same with y in 16 bits as well, for who reads both

Computed in float32 and rounded where the plain model rounds: the sum to the residual's type, the normalised row to
x's type before the weight multiplies it (not so with Gemma's weights, which are offsets from one), y before it is
quantised. So a fused form gives what its parts give one after the other, but for the order in which a row's squares
are added up. Bytes moved: 2*T*D elements, with a residual 4*T*D, with fp8 T*D bytes fewer. Knows nothing about
shards: a norm sees whole rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rmsnorm_backward import rmsnorm_backward
from cairn.kernels.norm.rows import (
    default_layout,
    launch,
    layout,
    shared_row,
    too_wide,
    width,
)
from cairn.kernels.quantize.quantize import (
    Quantized,
    filled,
    fp8_rows,
    quantize_reference,
    quantized_rows,
)

FP8 = torch.float8_e4m3fn
# Up to here prefetch weights are asked for early: with more the registers are worth more.
FEW_ROWS = 1024


def rmsnorm_reference(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if plus_one:
        return (wide * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return (wide.to(x.dtype) * weight).to(x.dtype)


def add_rmsnorm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    total = (x + residual).to(residual.dtype)
    return rmsnorm_reference(total, weight, eps, plus_one).to(x.dtype), total


@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_kernel(
    x, residual, weight, y, total, scale, beside, rstd, rows,
    x_stride, residual_stride, y_stride, total_stride, eps,
    PLUS_ONE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`scale`: y is fp8, or, with `beside`, that is, and y stays as it is."""
    begin(OVERLAP, EARLY)
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < COLUMNS
    kept = shared_row(weight, column, inside) if STAGES > 1 or EARLY else None
    behind(OVERLAP, EARLY)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside
        at = row.to(tl.int64)
        v = tl.load(x + at * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        if residual is not None:
            before = tl.load(residual + at * residual_stride + column, mask=mask, other=0.0)
            v = (v + before.to(tl.float32)).to(residual.dtype.element_ty)
            tl.store(total + at * total_stride + column, v, mask=mask)
            v = v.to(tl.float32)
        r = tl.rsqrt(tl.sum(v * v, axis=1)[:, None] / COLUMNS + eps)
        if rstd is not None:
            tl.store(rstd + row, r, mask=row < rows)
        w = kept if STAGES > 1 or EARLY else shared_row(weight, column, inside)
        n = v * r
        if PLUS_ONE:
            n = n * (tl.cast(w, tl.float32) + 1.0)
        else:  # in 16 bits, as the plain model: two products are one instruction then
            n = n.to((residual if residual is not None else x).dtype.element_ty) * w
        n = n.to(x.dtype.element_ty)
        if beside is not None:
            tl.store(y + at * y_stride + column, n.to(y.dtype.element_ty), mask=mask)
        if scale is not None:
            n, row_scale = fp8_rows(n.to(tl.float32))
            tl.store(scale + row, row_scale[:, None], mask=row < rows)
        last = y if beside is None else beside
        tl.store(last + at * y_stride + column, n.to(last.dtype.element_ty), mask=mask)


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """x [..., D] -> y like x. Differentiable. `prefetch`: nothing that is still running writes the weight."""
    if _offer(x, None, weight, impl) == "reference":
        y = rmsnorm_reference(x, weight, eps, plus_one)
        return y if out is None else _buffer("out", out, x).copy_(y)
    if _tracked(x, weight, out=out):
        return _RMSNorm.apply(x, None, weight, eps, plus_one)
    y = _buffer("out", out, x)
    _launch(x, None, weight, y, None, None, None, eps, plus_one, prefetch)
    return y


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """x, residual [..., D] -> y like x, x + residual like the residual. The outputs may be the inputs."""
    if _offer(x, residual, weight, impl) == "reference":
        y, total = add_rmsnorm_reference(x, residual, weight, eps, plus_one)
        return (
            y if out is None else _buffer("out", out, x).copy_(y),
            total
            if residual_out is None
            else _buffer("residual_out", residual_out, residual).copy_(total),
        )
    if _tracked(x, residual, weight, out=out, residual_out=residual_out):
        return _RMSNorm.apply(x, residual, weight, eps, plus_one)
    y, total = _buffer("out", out, x), _buffer("residual_out", residual_out, residual)
    _launch(x, residual, weight, y, total, None, None, eps, plus_one, prefetch)
    return y, total


def rmsnorm_with_rstd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """y, what was normed (x, or its sum with the residual) and 1 / its root mean square [rows], for rmsnorm_backward.

    For those who write a backward pass of their own. Not differentiable. `out`: where y goes; its rows may be apart.
    """
    y = output("out", out, x.shape, x.dtype, x)
    if _offer(x, residual, weight, impl) == "reference":
        total = x if residual is None else (x + residual).to(residual.dtype)
        rstd = torch.rsqrt(total.float().square().mean(-1) + eps).flatten()
        return y.copy_(rmsnorm_reference(total, weight, eps, plus_one)), total, rstd
    total = None if residual is None else torch.empty_like(residual)
    rstd = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, y, total, None, rstd, eps, plus_one)
    return y, x if total is None else total, rstd


def rmsnorm_fp8(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    out: Quantized | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> Quantized:
    """quantize(rmsnorm(x)) without y ever leaving the chip. Not differentiable."""
    y = quantized_rows(x, FP8, out)
    if _offer(x, None, weight, impl) == "reference":
        return filled(y, quantize_reference(rmsnorm_reference(x, weight, eps, plus_one)))
    _launch(x, None, weight, y.values, None, y.scale, None, eps, plus_one, prefetch)
    return y


def add_rmsnorm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    out: Quantized | None = None,
    residual_out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> tuple[Quantized, Tensor]:
    y, total = quantized_rows(x, FP8, out), _buffer("residual_out", residual_out, residual)
    if _offer(x, residual, weight, impl) == "reference":
        normed, added = add_rmsnorm_reference(x, residual, weight, eps, plus_one)
        return filled(y, quantize_reference(normed)), total.copy_(added)
    _launch(x, residual, weight, y.values, total, y.scale, None, eps, plus_one, prefetch)
    return y, total


def add_rmsnorm_both(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    residual_out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Quantized, Tensor]:
    """add_rmsnorm, and quantize of its y. Not differentiable."""
    rows, total = quantized_rows(x, FP8, None), _buffer("residual_out", residual_out, residual)
    if _offer(x, residual, weight, impl) == "reference":
        y, added = add_rmsnorm_reference(x, residual, weight, eps, plus_one)
        return y, filled(rows, quantize_reference(y)), total.copy_(added)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, y, total, rows.scale, None, eps, plus_one, prefetch, rows.values)
    return y, rows, total


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool
    ) -> Any:
        y, total = torch.empty_like(x), None
        if residual is not None:
            total = torch.empty_like(residual)
        rstd = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        _launch(x, residual, weight, y, total, None, rstd, eps, plus_one)
        ctx.save_for_backward(x if total is None else total, rstd, weight)
        ctx.plus_one, ctx.dtype = plus_one, x.dtype
        return y if total is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        grad, grad_total = grad_outputs if len(grad_outputs) == 2 else (*grad_outputs, None)
        normed, rstd, weight = ctx.saved_tensors
        dx, dw = rmsnorm_backward(
            grad.contiguous(),
            normed,
            rstd,
            weight,
            plus_one=ctx.plus_one,
            grad_residual=None if grad_total is None else grad_total.contiguous(),
            weight_grad=ctx.needs_input_grad[2],
        )
        return dx.to(ctx.dtype), None if grad_total is None else dx, dw, None, None


def _offer(x: Tensor, residual: Tensor | None, weight: Tensor, impl: Impl) -> str:
    """Check the arguments and select the implementation."""
    check("x", x, dtypes=FLOATS)
    check("weight", weight, dtypes=FLOATS, shape=x.shape[-1:], beside=x, packed=True)
    if residual is not None:
        check("residual", residual, dtypes=FLOATS, shape=x.shape, beside=x)
    offers = {"triton": needs_cuda(x) or too_wide(x.shape[-1]), "reference": None}
    return choose("rmsnorm", impl, offers).impl


def _tracked(*inputs: Tensor, **outputs: Tensor | None) -> bool:
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    for name, buffer in outputs.items():
        require(not (tracked and buffer is not None), name, "none while gradients are kept", "one")
    return tracked


def _buffer(name: str, given: Tensor | None, like: Tensor) -> Tensor:
    return output(name, given, like.shape, like.dtype, like)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y: Tensor,
    total: Tensor | None,
    scale: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    plus_one: bool,
    prefetch: bool = False,
    beside: Tensor | None = None,
) -> None:
    x_TD, y_TD = as_rows("x", x), as_rows("out", y)
    added = None if residual is None else as_rows("residual", residual)
    total_TD = None if total is None else as_rows("residual_out", total)
    rows, columns = x_TD.shape
    if not rows:
        return
    fp8 = scale is not None and beside is None
    form = ("add" if residual is not None else "plain") + (",fp8" if fp8 else "")
    how = layout("rmsnorm", form, columns, x.dtype, default_layout(columns))
    launch(
        _rmsnorm_kernel, how.programs(rows, x.device),
        x_TD, added, weight, y_TD, total_TD, scale, beside, rstd, rows, x_TD.stride(0),
        added.stride(0) if added is not None else 0, y_TD.stride(0),
        total_TD.stride(0) if total_TD is not None else 0, eps,
        PLUS_ONE=plus_one, COLUMNS=columns, WIDTH=width(columns), ROWS=how.rows,
        STAGES=how.stages, EARLY=prefetch and rows <= FEW_ROWS, num_warps=how.warps, **pdl(x.device),
    )  # fmt: skip


def cost(
    rows: int, columns: int, element_bytes: int = 2, residual: bool = False, fp8: bool = False
) -> Cost:
    written = 1 if fp8 else element_bytes
    moved = element_bytes * (3 if residual else 1) + written
    return Cost(4 * rows * columns, rows * columns * moved + columns * element_bytes)
