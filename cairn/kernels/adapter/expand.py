"""The second of an adapter's two products: y += s B h, in place, or SwiGLU of gate and up with what is added to both.

h = A x comes from `shrink.py`, or lies beside y, as further columns of the product that wrote it (`beside`).

One program has a tile of rows and a span of columns of one part, which it walks through block by block: the trip to an
address through the tables is made once, and the next blocks of B and y are on their way while the present one is
multiplied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.adapter.table import (
    ENTRY,
    NUMBERS,
    PARTS,
    LoraTable,
    Tiles,
    multiple_of_eight,
    read_address,
    read_position,
    read_rank,
    read_slot,
    read_tile,
)
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.norm.rows import blocks as blocks_of
from cairn.kernels.norm.rows import width

NARROWEST, BROADEST = 16, 128  # columns of a block
WARPS = 4


class Cut(NamedTuple):
    """Partition of the columns of a linear map."""

    programs: int  # that they are cut for
    numbers: int  # of a B that a program reads at a time: rank times columns


ADDED = Cut(1056, 2048)  # eight programs for each multiprocessor
# Blocks of two matrices B and two of y take twice the registers: half as wide, seven have room instead of three.
GATED = Cut(1848, 1024)


@triton.jit
def _b_block(b, n, r, rank, end):
    """Columns n of the part's B, [n, r]. It is read by one tile or a few, and then not before the next step."""
    mask = (n < end)[:, None] & (r < rank)[None, :]
    return tl.load(
        b + n[:, None] * rank + r[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _y_block(y, row, inside, n, end, y_stride):
    """Columns n of a tile's rows; those from `end` on are not read."""
    mask = inside[:, None] & (n < end)[None, :]
    return tl.load(y + row[:, None] * y_stride + n[None, :], mask=mask, other=0.0)


@triton.jit
def _h_tile(
    h, place, row, inside, r, tokens, h_start, rank, like, y_stride, position,
    H_WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """A x of a tile's rows for one part: the sum of the parts that K was cut into, or columns beside those of y."""
    mask = inside[:, None] & (r < rank)[None, :]
    if BESIDE:
        column = position * H_WIDTH + h_start + r
        found = tl.load(h + row[:, None] * y_stride + column[None, :], mask=mask, other=0.0)
    else:
        found = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLIT):
            at = (split * tokens + place)[:, None] * H_WIDTH + (h_start + r)[None, :]
            found += tl.load(h + at, mask=mask, other=0.0)
    return found.to(like.dtype.element_ty)


@triton.jit(do_not_specialize=NUMBERS)
def _expand_kernel(
    y, h, entries, scales, rows, tiles, like, y_stride, tokens, span_n, map_number, maps,
    WORDS: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
    H_WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr, ALIGNED: tl.constexpr,
    BESIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP, True)
    tile, span = tl.program_id(0), tl.program_id(1)
    slot = read_slot(tiles, tile)
    position = read_position(tiles, tile) if BESIDE else 0
    if slot > 0:
        entry = entries + (slot * maps + map_number) * WORDS
        rank_0, rank_1 = read_rank(entry, 0, ALIGNED), read_rank(entry, 1, ALIGNED)
        part, offset, h_start, rank, columns = 0, 0, 0, rank_0, N_0
        if span >= tl.cdiv(N_0, span_n):
            part, offset, h_start, rank, columns = 1, N_0, rank_0, rank_1, N_1
            span -= tl.cdiv(N_0, span_n)
            if span >= tl.cdiv(N_1, span_n):
                part, offset, h_start, rank, columns = (
                    2,
                    N_0 + N_1,
                    rank_0 + rank_1,
                    read_rank(entry, 2, ALIGNED),
                    N_2,
                )
                span -= tl.cdiv(N_1, span_n)
        offset = multiple_of_eight(offset, ALIGNED)
        h_start = multiple_of_eight(h_start, ALIGNED)
        rank = multiple_of_eight(rank, ALIGNED)
        if rank > 0:
            b = read_address(entry + 1 + 2 * part, like, ALIGNED)
            scale = tl.load(
                scales + (slot * maps + map_number) * 3 + part, eviction_policy="evict_last"
            )
            place, inside, row = read_tile(tiles, rows, tile, BLOCK_M)
            r, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
            end = min(span * span_n + span_n, columns)
            b_tile = _b_block(b, span * span_n + column, r, rank, end)
            behind(OVERLAP, True)
            h_tile = _h_tile(
                h, place, row, inside, r, tokens, h_start, rank, like, y_stride, position,
                H_WIDTH, SPLIT, BLOCK_M, BLOCK_R, BESIDE,
            )  # fmt: skip
            y += offset
            before = _y_block(y, row, inside, span * span_n + column, end, y_stride)
            for start in range(span * span_n, end, BLOCK_N):
                n = start + column
                next_tile = _b_block(b, n + BLOCK_N, r, rank, end)
                next_before = _y_block(y, row, inside, n + BLOCK_N, end, y_stride)
                sums = tl.dot(h_tile, tl.trans(b_tile), input_precision="ieee" if IEEE else "tf32")
                after = (before.to(tl.float32) + scale * sums).to(y.dtype.element_ty)
                mask = inside[:, None] & (n < end)[None, :]
                tl.store(y + row[:, None] * y_stride + n[None, :], after, mask=mask)
                b_tile, before = next_tile, next_before
        else:
            behind(OVERLAP, True)
    else:
        behind(OVERLAP, True)


@triton.jit(do_not_specialize=NUMBERS)
def _gated_kernel(
    y, out, h, entries, scales, rows, tiles, like, y_stride, out_stride, tokens, span_n, map_number,
    maps,
    WORDS: tl.constexpr, F: tl.constexpr, H_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    IEEE: tl.constexpr, ALIGNED: tl.constexpr, BESIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Gate and up with what their adapters add, and SwiGLU of the two: y is read once and not written."""
    begin(OVERLAP, True)
    tile, span = tl.program_id(0), tl.program_id(1)
    slot = read_slot(tiles, tile)
    position = read_position(tiles, tile) if BESIDE else 0
    if slot >= 0:
        entry = entries + (slot * maps + map_number) * WORDS
        factors = scales + (slot * maps + map_number) * 3
        rank_0, rank_1 = read_rank(entry, 0, ALIGNED), read_rank(entry, 1, ALIGNED)
        b_0 = read_address(entry + 1, like, ALIGNED)
        b_1 = read_address(entry + 3, like, ALIGNED)
        scale_0 = tl.load(factors, eviction_policy="evict_last")
        scale_1 = tl.load(factors + 1, eviction_policy="evict_last")
        place, inside, row = read_tile(tiles, rows, tile, BLOCK_M)
        r, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
        end = min(span * span_n + span_n, F)
        # A part without an adapter has rank 0: nothing of it is read, and its sums are 0.
        gate_tile = _b_block(b_0, span * span_n + column, r, rank_0, end)
        up_tile = _b_block(b_1, span * span_n + column, r, rank_1, end)
        behind(OVERLAP, True)
        h_0 = _h_tile(
            h, place, row, inside, r, tokens, 0, rank_0, like, y_stride, position,
            H_WIDTH, SPLIT, BLOCK_M, BLOCK_R, BESIDE,
        )  # fmt: skip
        h_1 = _h_tile(
            h, place, row, inside, r, tokens, rank_0, rank_1, like, y_stride, position,
            H_WIDTH, SPLIT, BLOCK_M, BLOCK_R, BESIDE,
        )  # fmt: skip
        kind = out.dtype.element_ty
        first = span * span_n + column
        gate_before = _y_block(y, row, inside, first, end, y_stride)
        up_before = _y_block(y + F, row, inside, first, end, y_stride)
        for start in range(span * span_n, end, BLOCK_N):
            n = start + column
            next_gate = _b_block(b_0, n + BLOCK_N, r, rank_0, end)
            next_up = _b_block(b_1, n + BLOCK_N, r, rank_1, end)
            next_gate_before = _y_block(y, row, inside, n + BLOCK_N, end, y_stride)
            next_up_before = _y_block(y + F, row, inside, n + BLOCK_N, end, y_stride)
            gate = gate_before.to(tl.float32) + scale_0 * tl.dot(
                h_0, tl.trans(gate_tile), input_precision="ieee" if IEEE else "tf32"
            )
            up = up_before.to(tl.float32) + scale_1 * tl.dot(
                h_1, tl.trans(up_tile), input_precision="ieee" if IEEE else "tf32"
            )
            gate = gate.to(kind).to(tl.float32)
            active = (gate * tl.sigmoid(gate)).to(kind)
            mask = inside[:, None] & (n < end)[None, :]
            tl.store(out + row[:, None] * out_stride + n[None, :], active * up.to(kind), mask=mask)
            gate_tile, up_tile = next_gate, next_up
            gate_before, up_before = next_gate_before, next_up_before
    else:
        behind(OVERLAP, True)


def expand(
    y_MN: Tensor, h: Tensor, like: Tensor, table: LoraTable, map_number: int, part_rows: Sequence[int],
    tiles: Tiles, rank: int,
) -> None:  # fmt: skip
    """Adds s B h to y. `rank`: the largest of any part here; `like`: has the adapters' dtype.

    `h`: what `shrink` returns, or the columns [M, positions * ranks] that lie behind those of y in the same rows.
    """
    sizes = [*part_rows, *[0] * (PARTS - len(part_rows))]
    block_r, block_n, span = _blocks(ADDED, tiles, rank, sum(part_rows))
    kernel: Any = _expand_kernel  # Triton's own types do not know what a launch takes
    kernel[(len(tiles.tiles_N4), sum(blocks_of(rows, span) for rows in sizes))](
        y_MN, h, table.entries_SME, table.scales_SMP, tiles.rows_T, tiles.tiles_N4, like, y_MN.stride(0),
        h.shape[1], span, map_number, table.entries_SME.shape[1], WORDS=ENTRY,
        N_0=sizes[0], N_1=sizes[1], N_2=sizes[2], BLOCK_R=block_r, BLOCK_N=block_n,
        **_launch_options(like, h, tiles),
    )  # fmt: skip


def expand_swiglu(
    y_MN: Tensor, h: Tensor, like: Tensor, table: LoraTable, map_number: int, tiles: Tiles, rank: int
) -> Tensor:  # fmt: skip
    """SwiGLU of gate and up side by side in y, with s B h added to both; y stays."""
    half = y_MN.shape[1] // 2
    out_MF = torch.empty(len(y_MN), half, dtype=like.dtype, device=like.device)
    block_r, block_n, span = _blocks(GATED, tiles, rank, half)
    kernel: Any = _gated_kernel
    kernel[(len(tiles.tiles_N4), blocks_of(half, span))](
        y_MN, out_MF, h, table.entries_SME, table.scales_SMP, tiles.rows_T, tiles.tiles_N4, like,
        y_MN.stride(0), out_MF.stride(0), h.shape[1], span, map_number, table.entries_SME.shape[1],
        WORDS=ENTRY, F=half, BLOCK_R=block_r, BLOCK_N=block_n, **_launch_options(like, h, tiles),
    )  # fmt: skip
    return out_MF


def _blocks(cut: Cut, tiles: Tiles, rank: int, columns: int) -> tuple[int, int, int]:
    """Ranks and columns of a block, and columns of a program."""
    block_r = width(max(16, rank))
    block_n = min(BROADEST, max(NARROWEST, cut.numbers // block_r))
    spans = max(1, cut.programs // max(1, len(tiles.tiles_N4)))
    return block_r, block_n, blocks_of(blocks_of(columns, spans), block_n) * block_n


def _launch_options(like: Tensor, h: Tensor, tiles: Tiles) -> dict[str, Any]:
    beside = h.dim() == 2
    h_width, split = (h.shape[1] // tiles.positions, 1) if beside else (h.shape[2], len(h))
    sizes = dict(H_WIDTH=h_width, SPLIT=split, BLOCK_M=tiles.block, BESIDE=beside)
    kinds = dict(IEEE=like.dtype == torch.float32, ALIGNED=tiles.aligned)
    return {**sizes, **kinds, "num_warps": WARPS, "num_stages": 1, **pdl(like.device)}
