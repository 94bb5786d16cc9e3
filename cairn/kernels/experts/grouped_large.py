"""Many tokens of every expert: the grouped product as one program per multiprocessor that walks over tiles by TMA.

    gather_rows      x [T, K] -> rows in the order of the experts [T * k, K]: TMA copies boxes, not scattered rows
    grouped_large    tiles of BM rows of one expert x BN columns; the operands of the next tile are on their way

The last tile of an expert reaches into the rows of the next one: it multiplies them and does not write them. A program
finds the expert of a tile in `ends` on the device, so a CUDA graph can hold the launch. `grouped_matmul` chooses
between this form and its own, which gathers on the way in and wastes less where an expert has few tokens.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.dependent import begin, pdl
from cairn.kernels.experts.sort_pairs import Pairs
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import multiprocessors

WIDEST_COPY = 2048  # columns that a program of `gather_rows` copies


class LargeTiles(NamedTuple):
    block_m: int = 128
    block_n: int = 256  # rows of w; with SwiGLU half of them gate, half up
    block_k: int = 64
    warps: int = 8
    stages: int = 4
    per_sm: int = 1  # programs that share a multiprocessor, where tiles are small
    flatten: bool = True  # load the next tile's operands during this one's epilogue

    def name(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        flat = ", flattened" if self.flatten else ""
        return f"{size}, {self.warps} warps, {self.stages} stages, {self.per_sm} per sm{flat}"


@triton.jit
def _gather_kernel(
    x, y, order, ends, stride, K,
    COUNT: tl.constexpr, PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + COUNT - 1):  # behind it lies padding, whose order is not written
        token = (tl.load(order + row) // PER_TOKEN).to(tl.int64)
        for first in range(0, K, WIDTH):
            column = first + tl.arange(0, WIDTH)
            values = tl.load(x + token * stride + column, mask=column < K, other=0.0)
            tl.store(y + row * K + column, values, mask=column < K)


@triton.jit
def _large_kernel(
    x, w, y, ends, N, K,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, SWIGLU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """N columns of y. With SwiGLU each expert's matrix has 2 * N rows, and a tile has BN / 2 columns of y."""
    begin(OVERLAP)
    HALF: tl.constexpr = BN // 2
    ACROSS: tl.constexpr = HALF if SWIGLU else BN
    e = tl.arange(0, WIDTH)
    end = tl.load(ends + e, mask=e < COUNT, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < COUNT), other=0)
    blocks = tl.where(e < COUNT, (end - start + BM - 1) // BM, 0)
    behind = tl.cumsum(blocks, axis=0)
    columns = tl.cdiv(N, ACROSS)
    tiles = tl.sum(blocks, axis=0) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        block = tile // columns
        n0 = tile % columns * ACROSS
        expert = tl.sum(((behind <= block) & (e < COUNT)).to(tl.int32), axis=0)
        before = tl.max(tl.where(behind <= block, behind, 0), axis=0)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0) + (block - before) * BM
        last = tl.load(ends + expert)
        at = expert * (2 * N if SWIGLU else N) + n0
        row = first + tl.arange(0, BM)
        out = y + row.to(tl.int64)[:, None] * N
        if SWIGLU:
            gate = tl.zeros([BM, HALF], tl.float32)
            up = tl.zeros([BM, HALF], tl.float32)
            for k in range(0, K, BK):
                rows = x.load([first, k])
                gate = tl.dot(rows, w.load([at, k]).T, gate)
                up = tl.dot(rows, w.load([at + N, k]).T, up)
            n = n0 + tl.arange(0, HALF)
            mask = (row < last)[:, None] & (n < N)[None, :]
            result = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(out + n[None, :], result.to(y.dtype.element_ty), mask=mask)
        else:
            sums = tl.zeros([BM, BN], tl.float32)
            for k in range(0, K, BK):
                sums = tl.dot(x.load([first, k]), w.load([at, k]).T, sums)
            n = n0 + tl.arange(0, BN)
            mask = (row < last)[:, None] & (n < N)[None, :]
            tl.store(out + n[None, :], sums.to(y.dtype.element_ty), mask=mask)


def gather_rows(x_TK: Tensor, pairs: Pairs) -> Tensor:
    """The tokens in the order of the experts, [T * k, K]; rows behind the last end are not written."""
    y_PK = x_TK.new_empty(pairs.total, x_TK.shape[1])
    width = min(1 << (x_TK.shape[1] - 1).bit_length(), WIDEST_COPY)
    kernel: Any = _gather_kernel
    kernel[(pairs.total,)](
        x_TK,
        y_PK,
        pairs.order_P,
        pairs.ends_E,
        x_TK.stride(0),
        x_TK.shape[1],
        COUNT=len(pairs.ends_E),
        PER_TOKEN=pairs.per_token,
        WIDTH=width,
        num_warps=max(1, width // 512),
        **pdl(x_TK.device),
    )
    return y_PK


def grouped_large(
    x_PK: Tensor, w_ENK: Tensor, ends_E: Tensor, tiles: LargeTiles, *, swiglu: bool
) -> Tensor:
    """Rows in the order of the experts, through their matrices; the arguments have been checked."""
    rows, (count, n, inner) = len(x_PK), w_ENK.shape
    columns = n // 2 if swiglu else n
    y_PN = x_PK.new_empty(rows, columns)
    across = tiles.block_n // 2 if swiglu else tiles.block_n
    most = (min(rows, count) + rows // tiles.block_m) * triton.cdiv(columns, across)
    kernel: Any = _large_kernel
    kernel[(min(most, tiles.per_sm * multiprocessors(x_PK.device)),)](
        TensorDescriptor.from_tensor(x_PK, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(w_ENK.flatten(0, 1), [across, tiles.block_k]),
        y_PN,
        ends_E,
        columns,
        inner,
        **constants(tiles, count, swiglu),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl(x_PK.device),
    )
    return y_PN


def constants(tiles: LargeTiles, count: int, swiglu: bool) -> dict[str, int | bool]:
    return {
        "COUNT": count,
        "WIDTH": 1 << (count - 1).bit_length(),
        "SWIGLU": swiglu,
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
        "FLATTEN": tiles.flatten,
    }


def gather_cost(tokens: int, per_token: int, columns: int) -> Cost:
    return Cost(0.0, 2.0 * tokens * columns * (1 + per_token) + 4.0 * tokens * per_token)
