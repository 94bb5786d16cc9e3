"""fp8 of a matrix and of its transpose, in one pass: what the backward products of a linear layer take.

    x [M, N]  ->  values [M, N] (if asked for) and transposed [N, M], one float32 scale for all: value = stored * scale

An fp8 tensor core wants both operands to lie along the dimension that is summed over; backward sums over another one
than forward, so it needs the transpose. Formats: e4m3 for weights and activations, e5m2, which reaches further down,
for gradients. The scale is given, or the smallest one that fits the largest magnitude, for which a pass goes before.
Bytes moved per element of a 16-bit matrix: 3 with a given scale, 4 with both results, 2 more to find the scale.

The kernels' result equals the reference bit for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch, multiprocessors, width
from cairn.kernels.quantize.quantize import SMALLEST
from cairn.kernels.quantize.quantize_tensor import factor_of, largest_kernel
from cairn.kernels.tuned import tuned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
DEFAULT = {"block_m": 128, "block_n": 64, "warps": 8}
FINDING = {"BLOCK": 8192, "STAGES": 1, "num_warps": 8}
PER_SM = 4


class Transposed(NamedTuple):
    values: Tensor | None  # [M, N], where it was asked for
    transposed: Tensor  # [N, M]
    scale: Tensor  # float32 []


def quantize_transposed_reference(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, both: bool
) -> Transposed:
    limit = torch.tensor(LIMITS[dtype], device=x.device)
    if scale is None:
        largest = x.float().abs().amax() if x.numel() else torch.zeros((), device=x.device)
        largest = largest.clamp(min=SMALLEST)
        factor, scale = limit / largest, largest / limit
    else:
        factor = scale.reciprocal()
    values = (x.float() * factor).clamp(-limit, limit).to(dtype)
    return Transposed(values if both else None, values.t().contiguous(), scale)


@triton.jit(do_not_specialize=["parts"])
def _transpose_kernel(
    x, values, transposed, scale, largest, rows, columns, parts,
    LIMIT: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    factor = factor_of(scale, largest, parts, LIMIT, PARTS)
    across = tl.cdiv(columns, BN)
    row = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * factor
    y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    stored = y.to(transposed.dtype.element_ty)
    if values is not None:
        tl.store(values + at, stored, mask=mask)
    at_transposed = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(transposed + at_transposed, tl.trans(stored), mask=tl.trans(mask))


def quantize_transposed(
    x: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    *,
    both: bool = False,
    impl: Impl = "auto",
) -> Transposed:
    """The transpose in fp8; `both`: the matrix itself as well."""
    check("x", x, dtypes=FLOATS, shape=(None, None), packed=True)
    require(dtype in LIMITS, "dtype", "float8_e4m3fn or float8_e5m2", dtype)
    if scale is not None:
        check("scale", scale, dtypes=(torch.float32,), beside=x)
        require(scale.numel() == 1, "scale", "one element", tuple(scale.shape))
    offers = {"triton": needs_cuda(x), "reference": None}
    if choose("quantize_transposed", impl, offers).impl == "reference":
        return quantize_transposed_reference(x, scale, dtype, both)
    rows, columns = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device) if both else None
    transposed = torch.empty(columns, rows, dtype=dtype, device=x.device)
    found = torch.empty((), device=x.device) if scale is None else scale
    if x.numel():
        _launch(x, values, transposed, found, dynamic=scale is None)
    elif scale is None:  # as if all of it were 0
        found.fill_(SMALLEST / LIMITS[dtype])
    return Transposed(values, transposed, found)


def _launch(
    x: Tensor, values: Tensor | None, transposed: Tensor, scale: Tensor, dynamic: bool
) -> None:
    how = tuned("quantize_transposed", short(transposed.dtype), DEFAULT)
    parts, largest = 0, scale
    if dynamic:
        most = PER_SM * multiprocessors(x.device)
        parts = min(blocks(x.numel(), FINDING["BLOCK"]), most)
        largest = torch.empty(parts, dtype=torch.float32, device=x.device)
        launch(largest_kernel, parts, x, largest, x.numel(), **FINDING)
    rows, columns = x.shape
    programs = blocks(rows, how["block_m"]) * blocks(columns, how["block_n"])
    launch(
        _transpose_kernel, programs, x, values, transposed, scale, largest, rows, columns, parts,
        LIMIT=LIMITS[transposed.dtype], PARTS=width(parts) if dynamic else 0,
        BM=how["block_m"], BN=how["block_n"], num_warps=how["warps"],
    )  # fmt: skip


def cost(elements: int, both: bool, dynamic: bool, bytes_in: int = 2) -> Cost:
    moved = bytes_in * (2 if dynamic else 1) + 1 + both
    return Cost(3 * elements, elements * moved)
