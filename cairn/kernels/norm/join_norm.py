"""The parts of a skinny product become its sum, the new residual and its rmsnorm, in one pass.

    parts [S, M, D] float32  ->  x = their sum in order  ->  total = x + residual  ->  y = rmsnorm(total) * weight

In a decode step a product whose K was cut is followed by the addition to the residual and the norm of the next block.
Each of those is a kernel of two microseconds that mostly waits for its predecessor; together they are one. Rounded
where they would round, so the result is that of `skinny_matmul` and `add_rmsnorm` one after the other, bit by bit.
Bytes moved: S*M*D float32 through the L2 cache, and 3*M*D elements. Forward only. `join_add_rmsnorm_fp8` quantises y by
rows on the way, as `quantize` would.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.few_rows import empty_rows
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rmsnorm import add_rmsnorm_reference
from cairn.kernels.norm.rows import launch, too_wide, width
from cairn.kernels.quantize.quantize import (
    Quantized,
    fp8_rows,
    quantize_reference,
    quantized_rows,
)


class Parts(NamedTuple):
    """A product that is not joined yet."""

    sums_SMD: Tensor  # float32, packed


def join_add_rmsnorm_reference(
    parts: Parts, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    total = torch.zeros_like(parts.sums_SMD[0])
    for part_MD in parts.sums_SMD:  # in their order, as the kernel
        total += part_MD
    return add_rmsnorm_reference(total.to(residual.dtype), residual, weight, eps, plus_one)


@triton.jit
def add_and_norm(
    x, before, w, y, total, scale, inside, eps,
    PLUS_ONE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row of float32 values and its residual -> their sum, its rmsnorm, and with `scale` that in float8."""
    kind = before.dtype
    v = (x + before.to(tl.float32)).to(kind)
    tl.store(total, v, mask=inside)
    v = v.to(tl.float32)
    n = v * tl.rsqrt(tl.sum(v * v, axis=0) / COLUMNS + eps)
    if PLUS_ONE:
        n = n * (tl.cast(w, tl.float32) + 1.0)
    else:
        n = n.to(kind) * w
    if scale is not None:
        quantized, row_scale = fp8_rows(n.to(kind).to(tl.float32)[None, :])
        n = tl.reshape(quantized, [WIDTH])
        tl.store(scale, tl.sum(row_scale, axis=0))  # of one row
    tl.store(y, n.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _join_norm_kernel(
    parts, residual, weight, y, total, scale, rows, residual_stride, y_stride, total_stride, eps,
    PARTS: tl.constexpr, PLUS_ONE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP, EARLY)
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < COLUMNS
    w = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
    behind(OVERLAP, EARLY)
    sums = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + (part * rows + row) * COLUMNS + column, mask=inside, other=0.0)
    x = sums.to(residual.dtype.element_ty).to(tl.float32)
    before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
    y_row, total_row = y + row * y_stride + column, total + row * total_stride + column
    scale_row = None if scale is None else scale + row
    add_and_norm(x, before, w, y_row, total_row, scale_row, inside, eps, PLUS_ONE, COLUMNS, WIDTH)


def join_add_rmsnorm(
    parts: Parts,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    residual_out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Parts and a residual [M, D] -> y like the residual, and the sum of all; that may be where the residual was.

    `prefetch`: nothing that is still running writes the weight.
    """
    total, how = _checked(parts, residual, weight, residual_out, impl)
    if how == "reference":
        y, added = join_add_rmsnorm_reference(parts, residual, weight, eps, plus_one)
        return y, total.copy_(added)
    y = empty_rows(residual.shape, residual.dtype, residual.device)
    _launch(parts, residual, weight, y, None, total, eps, plus_one, prefetch)
    return y, total


def join_add_rmsnorm_fp8(
    parts: Parts,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    residual_out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> tuple[Quantized, Tensor]:
    """The same with y quantised by rows."""
    total, how = _checked(parts, residual, weight, residual_out, impl)
    if how == "reference":
        y, added = join_add_rmsnorm_reference(parts, residual, weight, eps, plus_one)
        return quantize_reference(y), total.copy_(added)
    room = quantized_rows(residual, torch.float8_e4m3fn, None)
    _launch(parts, residual, weight, room.values, room.scale, total, eps, plus_one, prefetch)
    return room, total


def _checked(
    parts: Parts, residual: Tensor, weight: Tensor, residual_out: Tensor | None, impl: Impl
) -> tuple[Tensor, str]:
    """Room for the sum, and which implementation runs."""
    check("residual", residual, dtypes=FLOATS, shape=(None, None))
    rows, columns = residual.shape
    shape = (None, rows, columns)
    sums_SMD = parts.sums_SMD
    check("parts", sums_SMD, dtypes=(torch.float32,), shape=shape, beside=residual, packed=True)
    require(len(sums_SMD) > 0, "parts", "at least one part", list(sums_SMD.shape))
    check("weight", weight, dtypes=FLOATS, shape=(columns,), beside=residual, packed=True)
    total = output("residual_out", residual_out, residual.shape, residual.dtype, residual)
    offers = {"triton": needs_cuda(residual) or too_wide(columns), "reference": None}
    return total, choose("join_norm", impl, offers).impl


def _launch(
    parts: Parts,
    residual: Tensor,
    weight: Tensor,
    y: Tensor,
    scale: Tensor | None,
    total: Tensor,
    eps: float,
    plus_one: bool,
    prefetch: bool,
) -> None:
    rows, columns = residual.shape
    if not rows:
        return
    before, after = as_rows("residual", residual), as_rows("residual_out", total)
    strides = (before.stride(0), y.stride(0), after.stride(0))
    launch(
        _join_norm_kernel,
        rows,
        *(parts.sums_SMD, before, weight, y, after, scale, rows, *strides, eps),
        PARTS=len(parts.sums_SMD),
        PLUS_ONE=plus_one,
        COLUMNS=columns,
        WIDTH=width(columns),
        EARLY=prefetch,
        num_warps=_warps(columns),
        **pdl(residual.device),
    )


def _warps(columns: int) -> int:
    """8 columns of each part for a thread."""
    return max(1, min(width(columns) // 256, 16))


def cost(parts: int, rows: int, columns: int) -> Cost:
    return Cost((4.0 + parts) * rows * columns, rows * columns * (4.0 * parts + 6.0))
