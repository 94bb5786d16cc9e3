"""y = x @ w.T with weights of 4 or 8 bits in any published form and 16-bit activations, for few rows of x.

    w = factor * (scale * level + shift)     scale and shift for a row and a group of columns, factor for a row
    int4   0 to 15, from which 8 is taken     mxfp4, nvfp4   floats of 4 bits (e2m1)     int8, fp8   a byte each
    x [M, K]  ->  + bias  ->  y [M, N]; or the float32 parts of a K that was cut

`packed_matmul` and `skinny_fp8` are faster for what they take; this takes any number of rows and columns, and runs on
other GPUs. A byte has two levels of 4 bits: the low half is of one span of columns, the high half of the next one, so
that both are multiplied as they lie. Groups of at least a span scale its product; smaller ones scale the weights, in
float32, before these are rounded to the type of x. For many rows `dequantize_rows` writes the matrix in floating point,
once for each product.
Bytes moved: N*K/2 or N*K, scales and shifts, 2*M*K and 2*M*N.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.experts.matrices import E2M1
from cairn.kernels.kernel import Cost
from cairn.kernels.matmul.epilogue import Epilogue, matmul_reference
from cairn.kernels.matmul.packed_weights import float_of_4_bits
from cairn.kernels.matmul.skinny_fp8 import LONGEST_ROW, fp8_plan, launch_row
from cairn.kernels.matmul.skinny_matmul import JOINED, KERNELS
from cairn.kernels.quantize.quantize import Quantized

MOST_ROWS = 128  # of x
SPANS = (64, 32)  # columns that are multiplied at once
TILE = 64  # rows of w in a program
PROGRAMS = 528  # fewer leave multiprocessors waiting: four for each
SHORTEST_PART = 512  # columns
# Of two warps each multiplies on its own: a warpgroup of four, whose operand is unpacked into registers, has to wait.
STAGES, WARPS = 4, 2
LEAST_GROUP = 16
HALVES = (torch.bfloat16, torch.float16)
NIBBLES = ("int4", "e2m1")
E4M3 = torch.float8_e4m3fn
OF_LEVELS = {"int4": torch.uint8, "e2m1": torch.uint8, "int8": torch.int8, "fp8": E4M3}


class PackedRows(NamedTuple):
    """A matrix [N, K]."""

    kind: str  # of `OF_LEVELS`
    values: Tensor  # [N, K], or of 4 bits uint8 [N, K / 2]
    span: int
    scales_NG: Tensor | None = None  # None: 1
    shifts_NG: Tensor | None = None
    factor_N: Tensor | None = None  # float32

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * self.per_byte

    @property
    def per_byte(self) -> int:
        return 2 if self.kind in NIBBLES else 1

    @property
    def group(self) -> int:
        return self.shape[1] if self.scales_NG is None else self.shape[1] // self.scales_NG.shape[1]


def span_of(columns: int, group: int, nibbles: bool) -> int | None:
    """Columns of a span that fits, or None."""
    for span in SPANS:
        fits = (group % span == 0 or span % group == 0) and group >= LEAST_GROUP
        if fits and columns % (span * (1 + nibbles)) == 0 and columns % group == 0:
            return span
    return None


def pack_nibbles(levels_NK: Tensor, span: int) -> Tensor:
    """uint8 [N, K / 2] of levels 0 to 15: a span in the low halves, the next one in the high halves."""
    low, high = levels_NK.view(len(levels_NK), -1, 2, span).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def rows_reference(w: PackedRows, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] that is meant."""
    levels = w.values
    if w.kind in NIBBLES:
        spans = levels.view(len(levels), -1, 1, w.span)
        levels = torch.cat([spans & 15, spans >> 4], 2).flatten(1)
    if w.kind == "e2m1":
        table = torch.tensor([*E2M1, *(-size for size in E2M1)], device=levels.device)
        w_NK = table[levels.int()]
    else:
        w_NK = levels.float() - (8 if w.kind == "int4" else 0)
    if w.scales_NG is not None:
        w_NK = w_NK * w.scales_NG.float().repeat_interleave(w.group, 1)
    if w.shifts_NG is not None:
        w_NK = w_NK + w.shifts_NG.float().repeat_interleave(w.group, 1)
    return (w_NK if w.factor_N is None else w_NK * w.factor_N[:, None]).to(dtype)


@triton.jit
def _levels(code, KIND: tl.constexpr):
    """In float32."""
    if KIND == "int4":
        return code.to(tl.float32) - 8.0
    elif KIND == "e2m1":
        return float_of_4_bits(code)
    else:
        return code.to(tl.float32)


@triton.jit
def _numbers(plane, n, column, K, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """Scales or shifts of a span: one for each row, or where groups are smaller one for each weight."""
    if GROUP >= SPAN:
        return tl.load(plane + n * (K // GROUP) + column // GROUP).to(tl.float32)[:, None]
    else:
        COUNT: tl.constexpr = SPAN // GROUP
        group = column // GROUP + tl.arange(0, COUNT)
        each = tl.load(plane + n[:, None] * (K // GROUP) + group[None, :]).to(tl.float32)
        wide = tl.broadcast_to(each[:, :, None], [each.shape[0], COUNT, GROUP])
        return tl.reshape(wide, [each.shape[0], SPAN])


@triton.jit
def _span_product(
    level, x_MS, scales, shifts, n, column, K, GROUP: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """[rows of w, rows of x]."""
    SCALED: tl.constexpr = scales is not None  # pyrefly: ignore
    SHIFTED: tl.constexpr = shifts is not None  # pyrefly: ignore
    w = level
    if SCALED and GROUP < SPAN:
        w *= _numbers(scales, n, column, K, GROUP, SPAN)
        if SHIFTED:
            w += _numbers(shifts, n, column, K, GROUP, SPAN)
    product = tl.dot(w.to(x_MS.dtype), tl.trans(x_MS))
    if SCALED and GROUP >= SPAN:
        product *= _numbers(scales, n, column, K, GROUP, SPAN)
        if SHIFTED:
            of_x = tl.sum(x_MS.to(tl.float32), 1)[None, :]
            product += _numbers(shifts, n, column, K, GROUP, SPAN) * of_x
    return product


@triton.jit
def weight_only_kernel(
    x, values, scales, shifts, factor, bias, y, parts, stride_x, stride_y, M, N, K,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(row, N - 1)  # rows behind the last are read from the last one, and not stored
    part = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    steps = K // (SPAN * PER_BYTE)
    begin, end = steps * part // SPLIT, steps * (part + 1) // SPLIT
    span = tl.arange(0, SPAN)
    of_w = values + n.to(tl.int64)[:, None] * tl.multiple_of(K // PER_BYTE, 32) + span[None, :]
    of_x = x + m.to(tl.int64)[:, None] * stride_x + span[None, :]
    total = tl.zeros([BN, BM], tl.float32)
    for step in range(begin, end):
        code = tl.load(of_w + step * SPAN)
        for half in tl.static_range(PER_BYTE):
            column = (step * PER_BYTE + half) * SPAN
            x_MS = tl.load(of_x + column, mask=m[:, None] < M, other=0.0)
            if PER_BYTE == 2:
                level = _levels((code >> (4 * half)) & 15, KIND)
            else:
                level = _levels(code, KIND)
            total += _span_product(level, x_MS, scales, shifts, n, column, K, GROUP, SPAN)
    if factor is not None:
        total *= tl.load(factor + n)[:, None]
    inside = (m[:, None] < M) & (row[None, :] < N)
    if parts is not None:
        at = parts + (part * M + m).to(tl.int64)[:, None] * N + row[None, :]
        tl.store(at, tl.trans(total), mask=inside)
    else:
        if bias is not None:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        at = y + m.to(tl.int64)[:, None] * stride_y + row[None, :]
        tl.store(at, tl.trans(total).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    values, scales, shifts, factor, y, N, K,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The spans of one step, for some rows."""
    step, row = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    n = tl.minimum(row, N - 1)
    span = tl.arange(0, SPAN)
    code = tl.load(
        values
        + n.to(tl.int64)[:, None] * tl.multiple_of(K // PER_BYTE, 32)
        + step * SPAN
        + span[None, :]
    )
    for half in tl.static_range(PER_BYTE):
        column = (step * PER_BYTE + half) * SPAN
        if PER_BYTE == 2:
            w = _levels((code >> (4 * half)) & 15, KIND)
        else:
            w = _levels(code, KIND)
        if scales is not None:
            w *= _numbers(scales, n, column, K, GROUP, SPAN)
        if shifts is not None:
            w += _numbers(shifts, n, column, K, GROUP, SPAN)
        if factor is not None:
            w *= tl.load(factor + n)[:, None]
        at = y + row.to(tl.int64)[:, None] * K + column + span[None, :]
        tl.store(at, w.to(y.dtype.element_ty), mask=row[:, None] < N)


def weight_only_matmul(
    x_MK: Tensor,
    w: PackedRows,
    *,
    bias_N: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """x [M, K] in 16 bits with at most 128 rows. `prefetch`, of one row: that of skinny_matmul."""
    x = _checked(x_MK, w)
    n, k = w.shape
    if bias_N is not None:
        check("bias_N", bias_N, dtypes=FLOATS, shape=(n,), beside=x, packed=True)
    if choose("weight_only", impl, _offers(x)).impl == "reference":
        return matmul_reference(x, rows_reference(w), Epilogue(bias_N), x.dtype)
    y = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    if len(x) == 1 and needs_hopper(x) is None and _has_rows_of_bytes(w):
        _launch_one_row(x, w, bias_N, y, prefetch)
        return y
    split = parts_of(len(x), n, k)
    if split == 1 or not y.numel():
        _launch(x, w, bias_N, y, None, 1)
        return y
    parts = _parts(x, w, split)
    KERNELS["join"][triton.cdiv(n, JOINED), len(x)](
        *(parts, bias_N, None, y, 0, y.stride(0), len(x), n),
        PARTS=split,
        SWIGLU=False,
        BLOCK=JOINED,
        OVERLAP=False,
        num_warps=2,
    )
    return y


def weight_only_parts(x_MK: Tensor, w: PackedRows) -> Tensor | None:
    """Float32 sums [parts, M, N], for whoever joins them together with what follows; None where K is not cut."""
    x = _checked(x_MK, w)
    split = parts_of(len(x), *w.shape)
    if split == 1 or len(x) < 2 or _offers(x)["triton"] is not None:
        return None
    return _parts(x, w, split)


def dequantize_rows(w: PackedRows, dtype: torch.dtype, impl: Impl = "auto") -> Tensor:
    """The matrix [N, K] that is meant, in a type of 16 or 32 bits."""
    _check_weight(w)
    require(dtype in FLOATS, "dtype", "a floating-point type", dtype)
    offers = {"triton": needs_cuda(w.values), "reference": None}
    if choose("weight_only", impl, offers).impl == "reference":
        return rows_reference(w, dtype)
    (n, k), per_byte = w.shape, w.per_byte
    y = torch.empty(n, k, dtype=dtype, device=w.values.device)
    kernel: Any = _dequantize_kernel
    kernel[(k // (w.span * per_byte), triton.cdiv(n, TILE))](
        *(w.values, w.scales_NG, w.shifts_NG, w.factor_N, y, n, k),
        **constants_of(w),
        BN=TILE,
        num_warps=WARPS,
    )
    return y


def parts_of(m: int, n: int, k: int) -> int:
    """Into how many parts K is cut, so that all multiprocessors have work."""
    tiles, split = triton.cdiv(n, TILE) * triton.cdiv(max(m, 1), row_block(m)), 1
    while tiles * split < PROGRAMS and k >= 2 * split * SHORTEST_PART:
        split *= 2
    return split


def most_rows(kind: str) -> int:
    """Maximum rows of x; with more, dequantising the matrix costs less than unpacking it for each block of rows."""
    return MOST_ROWS // 2 if kind in NIBBLES else MOST_ROWS


def row_block(m: int) -> int:
    """Rows of x that a program takes; more would not fit its registers."""
    return 16 if m <= 16 else 32


def constants_of(w: PackedRows) -> dict[str, Any]:
    return dict(KIND=w.kind, PER_BYTE=w.per_byte, GROUP=w.group, SPAN=w.span)


def _offers(x: Tensor) -> dict[str, str | None]:
    sixteen = None if x.dtype in HALVES else "it takes x in 16 bits, not float32"
    return {"triton": needs_cuda(x) or sixteen, "reference": None}


def _parts(x: Tensor, w: PackedRows, split: int) -> Tensor:
    parts = torch.empty(split, len(x), w.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, w, None, parts, parts, split)
    return parts


def _launch(
    x: Tensor, w: PackedRows, bias_N: Tensor | None, y: Tensor, parts: Tensor | None, split: int
) -> None:
    (m, k), n, rows = x.shape, w.shape[0], row_block(len(x))
    kernel: Any = weight_only_kernel
    if m:
        kernel[(triton.cdiv(n, TILE), split, triton.cdiv(m, rows))](
            *(x, w.values, w.scales_NG, w.shifts_NG, w.factor_N, bias_N, y, parts),
            *(x.stride(0), y.stride(-2), m, n, k),
            **constants_of(w),
            SPLIT=split,
            BN=TILE,
            BM=rows,
            num_warps=WARPS,
            num_stages=STAGES,
        )


def _has_rows_of_bytes(w: PackedRows) -> bool:
    """Bytes with a scale for each row: the kernel for one row of float8 reads a byte as whatever it is."""
    bytes_ = w.per_byte == 1 and w.scales_NG is None and w.factor_N is not None
    return bytes_ and w.shape[1] <= LONGEST_ROW


def _launch_one_row(
    x: Tensor, w: PackedRows, bias_N: Tensor | None, y: Tensor, prefetch: bool
) -> None:
    assert w.factor_N is not None
    plan = fp8_plan(1, *w.shape, one_row=True)
    scaled = Quantized(w.values, w.factor_N[:, None])
    launch_row(x, scaled, y, Epilogue(bias_N), plan, prefetch)


def _checked(x_MK: Tensor, w: PackedRows) -> Tensor:
    _check_weight(w)
    check("x_MK", x_MK, dtypes=FLOATS, shape=(None, w.shape[1]), beside=w.values)
    require(len(x_MK) <= MOST_ROWS, "x_MK", f"at most {MOST_ROWS} rows", len(x_MK))
    return as_rows("x_MK", x_MK)


def _check_weight(w: PackedRows) -> None:
    require(w.kind in OF_LEVELS, "w.kind", " or ".join(OF_LEVELS), repr(w.kind))
    values = check(
        "w.values", w.values, dtypes=(OF_LEVELS[w.kind],), shape=(None, None), packed=True
    )
    (n, k), scales = w.shape, w.scales_NG
    require(n > 0 and k > 0, "w.values", "at least one row and column", list(values.shape))
    if scales is not None:
        kinds = (*FLOATS, E4M3)
        check("w.scales", scales, dtypes=kinds, shape=(n, None), beside=values, packed=True)
        groups = scales.shape[1]
        require(groups > 0 and k % groups == 0, "w.scales", f"equal groups of {k} columns", groups)
    fits = span_of(k, w.group, w.per_byte == 2)
    require(w.span in SPANS and fits is not None and w.span <= fits, "w.span", f"{fits}", w.span)
    if w.shifts_NG is not None:
        require(scales is not None, "w.shifts", "scales beside them", "none")
        shape = None if scales is None else tuple(scales.shape)
        check("w.shifts", w.shifts_NG, dtypes=FLOATS, shape=shape, beside=values, packed=True)
    if w.factor_N is not None:
        check(
            "w.factor", w.factor_N, dtypes=(torch.float32,), shape=(n,), beside=values, packed=True
        )


def cost(m: int, n: int, k: int, bits: float) -> Cost:
    """`bits` of a weight, with its share of scales and shifts."""
    return Cost(2.0 * m * n * k, n * k * bits / 8 + 2.0 * (m * k + m * n))
