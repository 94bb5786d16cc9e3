"""Many tokens of every expert: the grouped product as one program per multiprocessor that walks over tiles by TMA.

    tiles of BM rows of one expert x BN columns; the operands of the next tile are on their way during an epilogue

The last tile of an expert reaches into the rows of the next one: it multiplies them and does not write them. A program
finds the expert of a tile in `ends` on the device, so a CUDA graph can hold the launch. TMA copies boxes, not scattered
rows, so x lies in the order of the experts. On an H200 it does 537 TFLOP/s where the other form of `grouped_matmul`
does 450 (65,536 rows, 768 to 2048, 128 experts chosen at random); with rows gathered first and SwiGLU inside it gained
less than the copy took. Float8 rows of whole tiles take `grouped_ring`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.dependent import begin, pdl
from cairn.kernels.experts.grouped_kernel import expert_blocks
from cairn.kernels.experts.matrices import Fp8Experts
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.quantize.quantize import Quantized


class LargeTiles(NamedTuple):
    block_m: int = 128
    block_n: int = 256  # rows of w
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
def _large_kernel(
    x, w, y, ends, x_scales, w_scales, N, K, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    e, _start, _end, blocks, behind = expert_blocks(ends, COUNT, WIDTH, BM)
    columns = tl.cdiv(N, BN)
    tiles = tl.sum(blocks, axis=0) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        block = tile // columns
        n0 = tile % columns * BN
        expert = tl.sum(((behind <= block) & (e < COUNT)).to(tl.int32), axis=0)
        before = tl.max(tl.where(behind <= block, behind, 0), axis=0)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0) + (block - before) * BM
        last = tl.load(ends + expert)
        sums = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            sums = tl.dot(x.load([first, k]), w.load([expert * N + n0, k]).T, sums)
        row = first + tl.arange(0, BM)
        n = n0 + tl.arange(0, BN)
        if w_scales is not None:  # float8: a scale for each row of both
            sums *= tl.load(w_scales + expert * N + n, mask=n < N, other=0.0)[None, :]
            sums *= tl.load(x_scales + row, mask=row < last, other=0.0)[:, None]
        mask = (row < last)[:, None] & (n < N)[None, :]
        out = y + row.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, sums.to(y.dtype.element_ty), mask=mask)


def grouped_large(
    x: Tensor | Quantized, w: Tensor | Fp8Experts, ends_E: Tensor, tiles: LargeTiles
) -> Tensor:
    """Rows in the order of the experts, through their matrices; the arguments have been checked."""
    x_PK, x_scales = (x, None) if isinstance(x, Tensor) else x
    w_ENK, w_scales = (w, None) if isinstance(w, Tensor) else (w.values_ENK, w.scale_EN)
    rows, (count, columns, inner) = len(x_PK), w_ENK.shape
    kind = x_PK.dtype if x_scales is None else torch.bfloat16
    y_PN = torch.empty(rows, columns, dtype=kind, device=x_PK.device)
    most = (min(rows, count) + rows // tiles.block_m) * triton.cdiv(columns, tiles.block_n)
    kernel: Any = _large_kernel
    kernel[(min(most, tiles.per_sm * multiprocessors(x_PK.device)),)](
        TensorDescriptor.from_tensor(x_PK, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(w_ENK.flatten(0, 1), [tiles.block_n, tiles.block_k]),
        y_PN,
        ends_E,
        x_scales,
        w_scales,
        columns,
        inner,
        **constants(tiles, count),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl(x_PK.device),
    )
    return y_PN


def constants(tiles: LargeTiles, count: int) -> dict[str, int | bool]:
    return {
        "COUNT": count,
        "WIDTH": 1 << (count - 1).bit_length(),
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
        "FLATTEN": tiles.flatten,
    }
