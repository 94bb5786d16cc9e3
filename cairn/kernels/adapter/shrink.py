"""The first of an adapter's two products, h = A x of each row's adapter: programs have a tile, a part of K, some ranks.

The parts are summed by who reads h. Nothing is added atomically, so a result repeats.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.adapter.table import (
    ENTRY,
    FEW_TOKENS,
    NUMBERS,
    LoraTable,
    Tiles,
    read_address,
    read_rank,
    read_slot,
    read_tile,
)
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.norm.rows import blocks as blocks_of
from cairn.kernels.norm.rows import width

PROGRAMS = 2112  # K is cut for so many at most, sixteen for each multiprocessor
SPLITS = 16
PART = 512  # columns of K that a part has at least
FEW_RANKS, MANY_RANKS = 16, 64  # columns of h that a program has, of small tiles and of large ones
# Columns of K that a program reads at a time, of small tiles and of large ones.
MANY_COLUMNS, FEW_COLUMNS = 256, 128
WARPS, STAGES = 4, 3


def splits_of(tokens: int, width_k: int, programs: int) -> int:
    """Parts that K is cut into, each for so many programs. Who reads h adds them up: no more than fill the chip."""
    if tokens > FEW_TOKENS:
        return 1
    most = min(SPLITS, blocks_of(width_k, PART), max(1, PROGRAMS // max(1, programs)))
    return 1 << (most.bit_length() - 1)  # of each number there is a kernel that reads h


@triton.jit(do_not_specialize=NUMBERS)
def _shrink_kernel(
    x, entries, rows, tiles, h, x_stride, tokens, part_k, map_number, maps,
    WORDS: tl.constexpr, K: tl.constexpr, H_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, IEEE: tl.constexpr,
    ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP, True)
    tile, split = tl.program_id(0), tl.program_id(1)
    slot = read_slot(tiles, tile)
    if slot > 0:
        entry = entries + (slot * maps + map_number) * WORDS
        rank = (
            read_rank(entry, 0, ALIGNED)
            + read_rank(entry, 1, ALIGNED)
            + read_rank(entry, 2, ALIGNED)
        )
        a = read_address(entry, x, ALIGNED)
        place, inside, row = read_tile(tiles, rows, tile, BLOCK_M)
        column = tl.arange(0, BLOCK_K)
        behind(OVERLAP, True)
        r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for begin_k in range(split * part_k, min(split * part_k + part_k, K), BLOCK_K):
            k = begin_k + column
            x_mask = inside[:, None] & (k < K)[None, :]
            x_tile = tl.load(x + row[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
            a_mask = (r < rank)[:, None] & (k < K)[None, :]
            a_tile = tl.load(a + r[:, None] * K + k[None, :], mask=a_mask, other=0.0)
            sums = tl.dot(
                x_tile, tl.trans(a_tile), sums, input_precision="ieee" if IEEE else "tf32"
            )
        at = (split * tokens + place)[:, None] * H_WIDTH + r[None, :]
        tl.store(h + at, sums, mask=inside[:, None] & (r < rank)[None, :])
    else:
        behind(OVERLAP, True)


def shrink(x_MK: Tensor, table: LoraTable, map_number: int, tiles: Tiles, widest: int) -> Tensor:
    """A x of each row's adapter, in the parts that K is cut into: float32 [parts, tokens, ranks], rows as sorted.

    `widest`: the largest sum of ranks of any slot here.
    """
    tokens, width_k = x_MK.shape
    h_width = width(max(16, widest))
    small = tokens <= FEW_TOKENS
    block_r = min(h_width, FEW_RANKS if small else MANY_RANKS)
    blocks = len(tiles.tiles_N4), blocks_of(widest, block_r)
    splits = splits_of(tokens, width_k, blocks[0] * blocks[1])
    block_k = (MANY_COLUMNS if small else FEW_COLUMNS) if x_MK.element_size() == 2 else 32
    part_k = blocks_of(blocks_of(width_k, splits), block_k) * block_k
    h_STR = torch.empty(splits, tokens, h_width, dtype=torch.float32, device=x_MK.device)
    kernel: Any = _shrink_kernel  # Triton's own types do not know what a launch takes
    kernel[(blocks[0], splits, blocks[1])](
        x_MK, table.entries_SME, tiles.rows_T, tiles.tiles_N4, h_STR, x_MK.stride(0), tokens, part_k,
        map_number, table.entries_SME.shape[1], WORDS=ENTRY, K=width_k, H_WIDTH=h_width,
        BLOCK_M=tiles.block, BLOCK_R=block_r, BLOCK_K=block_k,
        IEEE=x_MK.dtype == torch.float32, ALIGNED=tiles.aligned,
        num_warps=WARPS, num_stages=STAGES, **pdl(x_MK.device),
    )  # fmt: skip
    return h_STR
