"""What low-rank adapters add to a product whose rows belong to different ones: y[rows] += s B (A x[rows]), in place.

    rows sorted by adapter   | slot 0 | slot 3 .......... | slot 7 |        tiles of at most BLOCK_M rows of one slot
    shrink   h = A x         one program for each tile and part of K; parts are summed by who reads them
    expand   y += s B h      one program for each tile and block of columns
    gated    SwiGLU of gate and up, with what is added to both

A slot of the table holds addresses, ranks and scales, so adapters stay where they were loaded, each with its own rank,
and loading one changes no launch: the kernels can lie in a CUDA graph. Slot 0 has no adapter. Nothing is added
atomically, so a result repeats. A map has up to three parts (q, k, v) with one A each, stacked, and one B each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, require
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks as blocks_of
from cairn.kernels.norm.rows import width

PARTS = 3
ENTRY = (
    8  # words of a slot for one map: the address of A; of each part the address of B and its rank
)
NO_TILE = -1
FEW_TOKENS = 512  # steps up to here have small tiles, and cut K to fill the chip
SMALL_TILE, LARGE_TILE = 16, 64
PROGRAMS = 528  # of shrinking: K is cut for so many, four for each multiprocessor
WIDE = 8  # ranks and widths that are multiples of it are read 16 bytes at a time
SPLITS = 16
PART = 512  # columns of K that a part has at least
BLOCK_N = 128
NUMBERS = ("map_number", "maps")  # one kernel for all maps and models, whatever these are
WIDEST_RANK = 64  # columns of h that a program of shrink holds at a time


class LoraTable(NamedTuple):
    """Every adapter on the device, for every map."""

    entries_SME: Tensor  # int64 [slots, maps, ENTRY]
    scales_SMP: Tensor  # float32 [slots, maps, PARTS]


class Tiles(NamedTuple):
    """Which rows of a step belong to which slot."""

    rows_T: Tensor  # int32, all rows, sorted by slot
    tiles_N3: Tensor  # int32 [tiles, 3]: slot or NO_TILE, first and end in rows_T
    block: int  # rows of a tile at most
    # All ranks and widths are multiples of 8 and all adapters begin at multiples of 16 bytes: reads are wide.
    aligned: bool = False


def tile_block(tokens: int) -> int:
    return SMALL_TILE if tokens <= FEW_TOKENS else LARGE_TILE


def splits_of(tokens: int, width_k: int, tiles: int) -> int:
    """Parts that K is cut into. Who reads h adds them up, each program anew: no more than fill the chip."""
    if tokens > FEW_TOKENS:
        return 1
    return min(SPLITS, blocks_of(width_k, PART), max(1, PROGRAMS // max(1, tiles)))


def lora_add_reference(
    y_MN: Tensor,
    x_MK: Tensor,
    adapters: Sequence[Sequence[tuple[Tensor, Tensor, float]] | None],
    slots_M: Sequence[int],
    part_rows: Sequence[int],
) -> Tensor:
    """`adapters`: for each slot, A [r, K], B [n, r] and the scale of each part. Returns the sum in float32."""
    out_MN = y_MN.float().clone()
    for row, slot in enumerate(slots_M):
        start = 0
        for part, rows in zip(adapters[slot] or (), part_rows, strict=False):
            a_RK, b_NR, scale = part
            added_N = scale * (b_NR.float() @ (a_RK.float() @ x_MK[row].float()))
            out_MN[row, start : start + rows] += added_N
            start += rows
    return out_MN


@triton.jit
def _eights(value, ALIGNED: tl.constexpr):
    """The same number, of which the compiler knows that it is a multiple of 8, where it is."""
    return value // 8 * 8 if ALIGNED else value


@triton.jit
def _rank(entry, PART: tl.constexpr, ALIGNED: tl.constexpr):
    return _eights(tl.load(entry + 2 + 2 * PART).to(tl.int32), ALIGNED)


@triton.jit
def _address(entry, like, ALIGNED: tl.constexpr):
    address = tl.load(entry).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit(do_not_specialize=NUMBERS)
def _shrink_kernel(
    x, entries, rows, tiles, h, x_stride, tokens, map_number, maps,
    WORDS: tl.constexpr, K: tl.constexpr, PART_K: tl.constexpr, H_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, IEEE: tl.constexpr,
    ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP, True)
    tile, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile)
    if slot > 0:
        entry = entries + (slot * maps + map_number) * WORDS
        rank = _rank(entry, 0, ALIGNED) + _rank(entry, 1, ALIGNED) + _rank(entry, 2, ALIGNED)
        first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        a = _address(entry, x, ALIGNED)
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
        column = tl.arange(0, BLOCK_K)
        behind(OVERLAP, True)
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for begin_k in range(split * PART_K, min(split * PART_K + PART_K, K), BLOCK_K):
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


@triton.jit
def _grown(
    h, b, place, inside, n, tokens, h_start, rank, columns,
    H_WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, IEEE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """B h of a tile of rows and a block of columns, float32."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        b_mask = (n < columns)[:, None] & (r < rank)[None, :]
        b_tile = tl.load(b + n[:, None] * rank + r[None, :], mask=b_mask, other=0.0)
        h_mask = inside[:, None] & (r < rank)[None, :]
        h_tile = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLIT):
            at = (split * tokens + place)[:, None] * H_WIDTH + (h_start + r)[None, :]
            h_tile += tl.load(h + at, mask=h_mask, other=0.0)
        h_tile = h_tile.to(b_tile.dtype)
        sums = tl.dot(h_tile, tl.trans(b_tile), sums, input_precision="ieee" if IEEE else "tf32")
    return sums


@triton.jit(do_not_specialize=NUMBERS)
def _expand_kernel(
    y, h, entries, scales, rows, tiles, like, y_stride, tokens, map_number, maps,
    WORDS: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
    H_WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, IEEE: tl.constexpr, ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP, True)
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile)
    if slot > 0:
        entry = entries + (slot * maps + map_number) * WORDS
        rank_0, rank_1 = _rank(entry, 0, ALIGNED), _rank(entry, 1, ALIGNED)
        part, offset, h_start, rank, columns = 0, 0, 0, rank_0, N_0
        if block >= tl.cdiv(N_0, BLOCK_N):
            part, offset, h_start, rank, columns = 1, N_0, rank_0, rank_1, N_1
            block -= tl.cdiv(N_0, BLOCK_N)
            if block >= tl.cdiv(N_1, BLOCK_N):
                part, offset, h_start, rank, columns = (
                    2,
                    N_0 + N_1,
                    rank_0 + rank_1,
                    _rank(entry, 2, ALIGNED),
                    N_2,
                )
                block -= tl.cdiv(N_1, BLOCK_N)
        offset, h_start = _eights(offset, ALIGNED), _eights(h_start, ALIGNED)
        rank, columns = _eights(rank, ALIGNED), _eights(columns, ALIGNED)
        if rank > 0:
            first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
            b = _address(entry + 1 + 2 * part, like, ALIGNED)
            scale = tl.load(scales + (slot * maps + map_number) * 3 + part)
            place = first + tl.arange(0, BLOCK_M)
            inside = place < end
            row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            behind(OVERLAP, True)
            sums = _grown(
                h, b, place, inside, n, tokens, h_start, rank, columns,
                H_WIDTH, SPLIT, BLOCK_M, BLOCK_R, BLOCK_N, IEEE, ALIGNED,
            )  # fmt: skip
            at = row[:, None] * y_stride + offset + n[None, :]
            mask = inside[:, None] & (n < columns)[None, :]
            before = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(y + at, (before + scale * sums).to(y.dtype.element_ty), mask=mask)
        else:
            behind(OVERLAP, True)
    else:
        behind(OVERLAP, True)


@triton.jit(do_not_specialize=NUMBERS)
def _gated_kernel(
    y, out, h, entries, scales, rows, tiles, like, y_stride, out_stride, tokens, map_number, maps,
    WORDS: tl.constexpr, F: tl.constexpr, H_WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr,
    ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Gate and up with what their adapters add, and SwiGLU of the two: y is read once and not written."""
    begin(OVERLAP, True)
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile)
    if slot >= 0:
        entry = entries + (slot * maps + map_number) * WORDS
        rank_0, rank_1 = _rank(entry, 0, ALIGNED), _rank(entry, 1, ALIGNED)
        first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (n < F)[None, :]
        at = row[:, None] * y_stride + n[None, :]
        behind(OVERLAP, True)
        gate = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(y + at + F, mask=mask, other=0.0).to(tl.float32)
        if rank_0 > 0:
            scale = tl.load(scales + (slot * maps + map_number) * 3)
            b = _address(entry + 1, like, ALIGNED)
            sums = _grown(
                h, b, place, inside, n, tokens, 0, rank_0, F,
                H_WIDTH, SPLIT, BLOCK_M, BLOCK_R, BLOCK_N, IEEE, ALIGNED,
            )  # fmt: skip
            gate += scale * sums
        if rank_1 > 0:
            scale = tl.load(scales + (slot * maps + map_number) * 3 + 1)
            b = _address(entry + 3, like, ALIGNED)
            sums = _grown(
                h, b, place, inside, n, tokens, rank_0, rank_1, F,
                H_WIDTH, SPLIT, BLOCK_M, BLOCK_R, BLOCK_N, IEEE, ALIGNED,
            )  # fmt: skip
            up += scale * sums
        kind = out.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        active = (gate * tl.sigmoid(gate)).to(kind)
        tl.store(out + row[:, None] * out_stride + n[None, :], active * up.to(kind), mask=mask)
    else:
        behind(OVERLAP, True)


def lora_add(
    y_MN: Tensor,
    x_MK: Tensor,
    table: LoraTable,
    map_number: int,
    part_rows: Sequence[int],
    tiles: Tiles,
    widest: int,
) -> Tensor:
    """Adds to y what the adapter of each row adds to this map. `widest`: the largest sum of ranks of any slot here."""
    _check(y_MN, x_MK, table, map_number, part_rows, tiles)
    h_STR = _shrink(x_MK, table, map_number, tiles, widest)
    sizes = [*part_rows, *[0] * (PARTS - len(part_rows))]
    _launch(
        _expand_kernel, (len(tiles.tiles_N3), sum(blocks_of(rows, BLOCK_N) for rows in sizes)),
        y_MN, h_STR, table.entries_SME, table.scales_SMP, tiles.rows_T, tiles.tiles_N3, x_MK, y_MN.stride(0),
        h_STR.shape[1], map_number, table.entries_SME.shape[1], WORDS=ENTRY,
        N_0=sizes[0], N_1=sizes[1], N_2=sizes[2], **_expanding(x_MK, h_STR, tiles),
    )  # fmt: skip
    return y_MN


def lora_swiglu(
    y_MN: Tensor, x_MK: Tensor, table: LoraTable, map_number: int, tiles: Tiles, widest: int
) -> Tensor:
    """SwiGLU of gate and up, which lie side by side in y, with what the adapter of each row adds to them; y stays."""
    half = y_MN.shape[1] // 2
    _check(y_MN, x_MK, table, map_number, (half, half), tiles)
    h_STR = _shrink(x_MK, table, map_number, tiles, widest)
    out_MF = torch.empty(len(y_MN), half, dtype=x_MK.dtype, device=x_MK.device)
    _launch(
        _gated_kernel, (len(tiles.tiles_N3), blocks_of(half, BLOCK_N)),
        y_MN, out_MF, h_STR, table.entries_SME, table.scales_SMP, tiles.rows_T, tiles.tiles_N3, x_MK,
        y_MN.stride(0), out_MF.stride(0), h_STR.shape[1], map_number, table.entries_SME.shape[1],
        WORDS=ENTRY, F=half, **_expanding(x_MK, h_STR, tiles),
    )  # fmt: skip
    return out_MF


def _shrink(x_MK: Tensor, table: LoraTable, map_number: int, tiles: Tiles, widest: int) -> Tensor:
    """A x of each row's adapter, in the parts that K is cut into: float32 [parts, tokens, ranks], rows as sorted."""
    tokens, width_k = x_MK.shape
    splits = splits_of(tokens, width_k, len(tiles.tiles_N3))
    block_k = 128 if x_MK.element_size() == 2 else 32
    shape = (splits, tokens, width(max(16, widest)))
    h_STR = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    part_k = blocks_of(blocks_of(width_k, splits), block_k) * block_k
    _launch(
        _shrink_kernel, (len(tiles.tiles_N3), splits),
        x_MK, table.entries_SME, tiles.rows_T, tiles.tiles_N3, h_STR, x_MK.stride(0), tokens, map_number,
        table.entries_SME.shape[1], WORDS=ENTRY, K=width_k, PART_K=part_k, H_WIDTH=shape[2],
        BLOCK_M=tiles.block, BLOCK_R=min(shape[2], WIDEST_RANK), BLOCK_K=block_k,
        IEEE=x_MK.dtype == torch.float32, ALIGNED=tiles.aligned, num_warps=4, num_stages=3, **pdl(x_MK.device),
    )  # fmt: skip
    return h_STR


def _expanding(x_MK: Tensor, h_STR: Tensor, tiles: Tiles) -> dict[str, Any]:
    """What both kernels that multiply with B are launched with."""
    sizes = dict(
        H_WIDTH=h_STR.shape[2], SPLIT=len(h_STR), BLOCK_M=tiles.block, BLOCK_R=16, BLOCK_N=BLOCK_N
    )
    kinds = dict(IEEE=x_MK.dtype == torch.float32, ALIGNED=tiles.aligned)
    return {**sizes, **kinds, "num_warps": 4, "num_stages": 1, **pdl(x_MK.device)}


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **options: Any) -> None:
    """Triton's own types do not know what a launch takes."""
    kernel[grid](*arguments, **options)


def _check(
    y_MN: Tensor, x_MK: Tensor, table: LoraTable, map_number: int, part_rows: Sequence[int], tiles: Tiles
) -> None:  # fmt: skip
    check("x", x_MK, dtypes=FLOATS, shape=(None, None))
    tokens, (entries, scales) = len(x_MK), table
    check("y", y_MN, dtypes=FLOATS, shape=(tokens, sum(part_rows)), beside=x_MK)
    as_rows("x", x_MK), as_rows("y", y_MN)
    require(len(part_rows) <= PARTS, "part_rows", f"at most {PARTS} parts", len(part_rows))
    slots, maps = entries.shape[:2]
    int64, float32, int32 = (torch.int64,), (torch.float32,), (torch.int32,)
    how = dict(beside=x_MK, packed=True)
    check("entries", entries, dtypes=int64, shape=(None, None, ENTRY), **how)
    check("scales", scales, dtypes=float32, shape=(slots, maps, PARTS), **how)
    require(0 <= map_number < maps, "map_number", f"one of {maps} maps", map_number)
    check("rows", tiles.rows_T, dtypes=int32, shape=(tokens,), **how)
    check("tiles", tiles.tiles_N3, dtypes=int32, shape=(None, 3), **how)


def cost(tokens: int, width_k: int, rows: int, rank: int, adapters: int) -> Cost:
    """A and B of each adapter once, x once, y read and written."""
    flops = 2.0 * tokens * rank * (width_k + rows)
    return Cost(flops, 2.0 * (adapters * rank * (width_k + rows) + tokens * (width_k + 2 * rows)))
