"""Backward of an adapter from the output gradient g of its linear map, in one pass over g.

    dh = s g B     [M, N] [N, r] -> [M, r]         dB = s g' h     [N, M] [M, r] -> [N, r]

g is as large as the result of the map, and everything else is small: two products by cuBLAS read g twice. A program has
some rows of g and the columns of one part (q, k or v), which it walks through block by block: dh of its rows grows in
registers, and its share of dB is written in float32; a second kernel adds the shares up in a fixed order, so that a
result repeats. Bytes moved: M*N elements, and 8*N*r for each program's rows.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.adapter.table import PARTS
from cairn.kernels.arguments import FLOATS, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, sum_parts

RANKS = (16, 32, 64)  # that a tensor core multiplies without padding
MANY = 8192  # rows from which this is faster than cuBLAS: with fewer, the shares weigh too much
ROWS, WIDE = 256, 128  # of a block of g
OPTIONS = {"num_warps": 8, "num_stages": 3}


def lora_slopes_reference(
    g_MN: Tensor, b_NR: Tensor, h_MR: Tensor, part_rows: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Reference in float32 (float64 for a float64 g), rounded at the end only."""
    wide = torch.float64 if g_MN.dtype == torch.float64 else torch.float32
    rows = list(part_rows)
    gs, bs = g_MN.to(wide).split(rows, 1), b_NR.to(wide).split(rows)
    hs = h_MR.to(wide).split(b_NR.shape[1], 1)
    dh = torch.cat([scale * (g @ b) for g, b in zip(gs, bs, strict=True)], 1)
    db = torch.cat([scale * (g.T @ h) for g, h in zip(gs, hs, strict=True)])
    return dh.to(h_MR.dtype), db.to(b_NR.dtype)


@triton.jit(do_not_specialize=["rows"])
def _slopes_kernel(
    g, b, h, dh, shares, rows, columns, first_1, first_2, scale, g_row, h_row, dh_row,
    ROWS: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    begin, end = 0, first_1
    if part == 1:
        begin, end = first_1, first_2
    if part == 2:
        begin, end = first_2, columns
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, at = (row < rows)[:, None], row.to(tl.int64)[:, None]
    rank = tl.arange(0, RANK)[None, :]
    small = tl.load(h + at * h_row + part * RANK + rank, mask=there, other=0.0)
    total = tl.zeros([ROWS, RANK], tl.float32)
    shares += tl.program_id(0).to(tl.int64) * columns * RANK
    for start in tl.range(begin, end, WIDE):
        column = start + tl.arange(0, WIDE)
        inside = column < end
        tile = tl.load(g + at * g_row + column[None, :], mask=there & inside[None, :], other=0.0)
        of_column = column[:, None] * RANK + rank
        weight = tl.load(b + of_column, mask=inside[:, None], other=0.0)
        total = tl.dot(tile, weight, total, input_precision="ieee" if IEEE else "tf32")
        share = tl.dot(tl.trans(tile), small, input_precision="ieee" if IEEE else "tf32")
        tl.store(shares + of_column, share * scale, mask=inside[:, None])
    found = (total * scale).to(dh.dtype.element_ty)
    tl.store(dh + at * dh_row + part * RANK + rank, found, mask=there)


def lora_slopes(
    g_MN: Tensor,
    b_NR: Tensor,
    h_MR: Tensor,
    part_rows: Sequence[int],
    scale: float,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """dh like h, and dB like b. `b_NR`: of all parts, one below the other; `h_MR`: of all parts, side by side."""
    columns = sum(part_rows)
    check("g", g_MN, dtypes=FLOATS, shape=(None, columns))
    check("b", b_NR, dtypes=(g_MN.dtype,), shape=(columns, None), beside=g_MN, packed=True)
    rows, rank = len(g_MN), b_NR.shape[1]
    check("h", h_MR, dtypes=(g_MN.dtype,), shape=(rows, rank * len(part_rows)), beside=g_MN)
    require(0 < len(part_rows) <= PARTS, "part_rows", f"1 to {PARTS} parts", len(part_rows))
    for name, tensor in (("g", g_MN), ("h", h_MR)):
        require(tensor.stride(1) == 1, name, "rows without gaps", f"strides {tensor.stride()}")
    offers = {
        "triton": needs_cuda(g_MN) or (None if rank in RANKS else f"rank {rank}, not {RANKS}"),
        "reference": None,
    }
    if choose("lora_slopes", impl, offers).impl == "reference" or not rows:
        return lora_slopes_reference(g_MN, b_NR, h_MR, part_rows, scale)
    dh_MR = torch.empty(h_MR.shape, dtype=h_MR.dtype, device=g_MN.device)
    programs = blocks(rows, ROWS)
    shares = torch.empty(programs, columns * rank, dtype=torch.float32, device=g_MN.device)
    ends = [*accumulate(part_rows), columns, columns]
    kernel: Any = _slopes_kernel  # Triton's own types do not know what a launch takes
    kernel[(programs, len(part_rows))](
        g_MN, b_NR, h_MR, dh_MR, shares, rows, columns, ends[0], ends[1], scale, g_MN.stride(0),
        h_MR.stride(0), dh_MR.stride(0), ROWS=ROWS, WIDE=WIDE, RANK=rank,
        IEEE=g_MN.dtype == torch.float32, **OPTIONS,
    )  # fmt: skip
    return dh_MR, sum_parts(shares, b_NR.dtype).view(columns, rank)


def cost(rows: int, columns: int, rank: int, parts: int = 1) -> Cost:
    small = rows * rank * parts * 2 + columns * rank * 2
    return Cost(4.0 * rows * columns * rank, (rows * columns + small) * 2.0)
