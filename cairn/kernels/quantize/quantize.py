"""Numbers of 8 bits with one float32 scale for each token: value = stored * scale.

The scale comes from the largest magnitude of the row, which becomes 448 (fp8, e4m3) or 127 (int8). Values are
rounded to nearest even; a row of zeros stays zero; a NaN stays a NaN in fp8. `fp8_rows` is what the fused forms
of other kernels call. Knows nothing about matrix products. Bytes moved per element of a 16-bit tensor: 3, there
(read 2, write 1) and back.

The kernel's result equals the reference bit for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import (
    blocks,
    launch,
    layout,
    packed_layout,
    too_wide,
    width,
)

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST = 1e-12  # the largest magnitude of a row counts as at least this, so that no scale is zero
SMALLEST_LARGEST = tl.constexpr(SMALLEST)
WIDEST_THIRD = 1024
THIRDS = {
    "ROWS": 4
}  # 131,072 rows of 768 columns on an H200: 3.9 TB/s, where a masked block has 2.7
FP8_LIMIT = tl.constexpr(448.0)
_INT8_LIMIT = tl.constexpr(127.0)


class Quantized(NamedTuple):
    values: Tensor  # fp8 or int8, as many as there were
    scale: Tensor  # float32: one for each row [..., 1], or a scalar []


def quantize_reference(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Quantized:
    return by_largest(x.float(), x.float().abs().amax(-1, keepdim=True), dtype)


def by_largest(wide: Tensor, largest: Tensor, dtype: torch.dtype) -> Quantized:
    largest = largest.clamp(min=SMALLEST)
    limit = torch.full_like(largest, LIMITS[dtype])  # number / tensor would round twice
    return Quantized(rounded(wide * (limit / largest), dtype), largest / limit)


def rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = scaled.clamp(-LIMITS[dtype], LIMITS[dtype])
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype)


def dequantize_reference(quantized: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (quantized.values.float() * quantized.scale).to(dtype)


@triton.jit
def fp8_scaled(y, factor):
    """y * factor as e4m3. The conversion itself saturates (`satfinite` in PTX), and NaN passes."""
    return (y * factor).to(tl.float8e4nv)


@triton.jit
def fp8_rows(y):
    """Rows [R, W] in float32 -> e4m3 values and the rows' scales."""
    largest = tl.maximum(tl.max(tl.abs(y), axis=1), SMALLEST_LARGEST)
    return fp8_scaled(y, tl.div_rn(FP8_LIMIT, largest)[:, None]), tl.div_rn(largest, FP8_LIMIT)


@triton.jit
def int8_rows(y):
    largest = tl.maximum(tl.max(tl.abs(y), axis=1), SMALLEST_LARGEST)
    whole = libdevice.rint(y * tl.div_rn(_INT8_LIMIT, largest)[:, None])  # ties to even
    return whole.to(tl.int8), tl.div_rn(largest, _INT8_LIMIT)  # pyrefly: ignore[missing-attribute]


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(
    x, values, scale, rows, x_stride, values_stride,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    column = tl.arange(0, WIDTH)[None, :]
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < COLUMNS)
        at = row.to(tl.int64)[:, None]
        y = tl.load(x + at * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        if values.dtype.element_ty == tl.int8:
            stored, row_scale = int8_rows(y)
        else:
            stored, row_scale = fp8_rows(y)
        tl.store(values + at * values_stride + column, stored, mask=mask)
        tl.store(scale + row, row_scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _quantize_thirds_kernel(
    x, values, scale, rows, x_stride, values_stride,
    THIRD: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of three times a power of two, without a quarter of a block that is masked: fp8 alone."""
    begin(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, column = row.to(tl.int64)[:, None], tl.arange(0, THIRD)[None, :]
    mask = (row < rows)[:, None]
    source, target = x + at * x_stride + column, values + at * values_stride + column
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + THIRD, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(source + 2 * THIRD, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
    largest = tl.maximum(tl.maximum(largest, tl.max(tl.abs(c), axis=1)), SMALLEST_LARGEST)
    factor = tl.div_rn(FP8_LIMIT, largest)[:, None]
    tl.store(target, fp8_scaled(a, factor), mask=mask)
    tl.store(target + THIRD, fp8_scaled(b, factor), mask=mask)
    tl.store(target + 2 * THIRD, fp8_scaled(c, factor), mask=mask)
    tl.store(scale + row, tl.div_rn(largest, FP8_LIMIT), mask=row < rows)


@triton.jit
def _dequantize_kernel(
    values, scale, x, scale_stride, values_stride, x_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tl.cdiv(COLUMNS, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(values + row * values_stride + column, mask=column < COLUMNS, other=0.0)
    y = y.to(tl.float32) * tl.load(scale + row * scale_stride)
    tl.store(x + row * x_stride + column, y.to(x.dtype.element_ty), mask=column < COLUMNS)


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Quantized | None = None,
    impl: Impl = "auto",
) -> Quantized:
    """Quantise with one scale for each row: x [..., D] -> values [..., D], scale [..., 1]."""
    rows_TD = as_rows("x", check("x", x, dtypes=FLOATS))
    require(dtype in LIMITS, "dtype", "float8_e4m3fn or int8", dtype)
    quantized = quantized_rows(x, dtype, out)
    rows, columns = rows_TD.shape
    offers = {"triton": needs_cuda(x) or too_wide(columns), "reference": None}
    if choose("quantize", impl, offers).impl == "reference":
        return filled(quantized, quantize_reference(x, dtype))
    values_TD = as_rows("out", quantized.values)
    if rows and dtype != torch.int8 and (third := _third(columns)):
        launch(
            _quantize_thirds_kernel, blocks(rows, THIRDS["ROWS"]),
            rows_TD, values_TD, quantized.scale, rows, rows_TD.stride(0), values_TD.stride(0),
            THIRD=third, **THIRDS, num_warps=4, **pdl(x.device),
        )  # fmt: skip
    elif rows:
        how = layout("quantize", "rows", columns, x.dtype, packed_layout(columns))
        launch(
            _quantize_kernel, how.programs(rows, x.device),
            rows_TD, values_TD, quantized.scale, rows, rows_TD.stride(0), values_TD.stride(0),
            COLUMNS=columns, WIDTH=width(columns), ROWS=how.rows, STAGES=how.stages,
            num_warps=how.warps, **pdl(x.device),
        )  # fmt: skip
    return quantized


def _third(columns: int) -> int:
    """A third of the columns if it is a power of two and fits into registers, else 0."""
    third = columns // 3
    fits = columns == 3 * third and third & (third - 1) == 0
    return third if fits and 32 <= third <= WIDEST_THIRD else 0


def dequantize(
    quantized: Quantized,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """stored * scale, for scales per row [..., 1] or for the tensor []."""
    values, scale = quantized
    values_TD = as_rows("values", check("values", values, dtypes=tuple(LIMITS)))
    check("scale", scale, dtypes=(torch.float32,), beside=values, packed=True)
    rows, columns = values_TD.shape
    by_rows = (*values.shape[:-1], 1)
    fits = scale.numel() == 1 or scale.shape == by_rows
    require(fits, "scale", f"one element or shape {list(by_rows)}", list(scale.shape))
    require(dtype in FLOATS, "dtype", "float32, bfloat16 or float16", dtype)
    x = output("out", out, values.shape, dtype, values)
    if choose("quantize", impl, {"triton": needs_cuda(x), "reference": None}).impl == "reference":
        one = scale.reshape(()) if scale.numel() == 1 else scale
        return x.copy_(dequantize_reference(Quantized(values, one), dtype))
    if rows:
        x_TD, block = as_rows("out", x), min(width(columns), 2048)
        launch(
            _dequantize_kernel, rows * blocks(columns, block),
            values_TD, scale, x_TD, int(scale.numel() > 1), values_TD.stride(0), x_TD.stride(0),
            COLUMNS=columns, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return x


def quantized_rows(x: Tensor, dtype: torch.dtype, out: Quantized | None) -> Quantized:
    """Room for x [..., D], quantised by rows."""
    check("x", x)
    values, scale = out or (None, None)
    scale = output("out.scale", scale, (*x.shape[:-1], 1), torch.float32, x)
    check("out.scale", scale, packed=True)
    return Quantized(output("out.values", values, x.shape, dtype, x), scale)


def filled(room: Quantized, result: Quantized) -> Quantized:
    room.values.copy_(result.values)
    room.scale.copy_(result.scale)
    return room


def cost(rows: int, columns: int, bytes_in: int = 2) -> Cost:
    elements = rows * columns
    return Cost(flops=4 * elements, bytes=elements * (bytes_in + 1) + 4 * rows)
