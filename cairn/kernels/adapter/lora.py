"""Multi-adapter LoRA, in place: y[rows] += s B (A x[rows]), with the adapter of each row.

    shrink   h = A x         one program for each tile of rows and part of K                  `shrink.py`
    expand   y += s B h      one program for each tile and span of columns                    `expand.py`
    gated    SwiGLU of gate and up, with what is added to both
    beside   h lies behind the columns of y: A was part of the matrix that y is the product with, and nothing shrinks

Tiles are rows of one adapter, which stays where it was loaded (`table.py`). Nothing is added atomically, so a result
repeats.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.adapter.expand import expand, expand_swiglu
from cairn.kernels.adapter.shrink import shrink
from cairn.kernels.adapter.table import ENTRY, PARTS, TILE, LoraTable, Tiles, Widest
from cairn.kernels.arguments import FLOATS, as_rows, check, require
from cairn.kernels.kernel import Cost


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


def lora_add(
    y_MN: Tensor,
    x_MK: Tensor,
    table: LoraTable,
    map_number: int,
    part_rows: Sequence[int],
    tiles: Tiles,
    widest: Widest,
) -> Tensor:
    """Adds to y what the adapter of each row adds to this map."""
    _check(y_MN, x_MK, table, map_number, part_rows, tiles)
    h_STR = shrink(x_MK, table, map_number, tiles, widest.together)
    expand(y_MN, h_STR, x_MK, table, map_number, part_rows, tiles, widest.part)
    return y_MN


def lora_swiglu(
    y_MN: Tensor, x_MK: Tensor, table: LoraTable, map_number: int, tiles: Tiles, widest: Widest
) -> Tensor:
    """SwiGLU of gate and up, which lie side by side in y, with what the adapter of each row adds to them; y stays."""
    half = y_MN.shape[1] // 2
    _check(y_MN, x_MK, table, map_number, (half, half), tiles)
    h_STR = shrink(x_MK, table, map_number, tiles, widest.together)
    return expand_swiglu(y_MN, h_STR, x_MK, table, map_number, tiles, widest.part)


def lora_add_beside(
    wide_MN: Tensor, table: LoraTable, map_number: int, part_rows: Sequence[int], tiles: Tiles, widest: Widest
) -> Tensor:  # fmt: skip
    """The columns of the map, with what is added; behind them in `wide_MN` lies A x of each of the tiles' positions."""
    y_MN, h_MR = _beside(wide_MN, table, map_number, part_rows, tiles, widest)
    expand(y_MN, h_MR, wide_MN, table, map_number, part_rows, tiles, widest.part)
    return y_MN


def lora_swiglu_beside(
    wide_MN: Tensor, table: LoraTable, map_number: int, half: int, tiles: Tiles, widest: Widest
) -> Tensor:
    """SwiGLU of gate and up, `half` columns each, with what is added; behind them lies A x, as above."""
    y_MN, h_MR = _beside(wide_MN, table, map_number, (half, half), tiles, widest)
    return expand_swiglu(y_MN, h_MR, wide_MN, table, map_number, tiles, widest.part)


def _beside(
    wide_MN: Tensor, table: LoraTable, map_number: int, part_rows: Sequence[int], tiles: Tiles, widest: Widest
) -> tuple[Tensor, Tensor]:  # fmt: skip
    own = sum(part_rows)
    y_MN, h_MR = wide_MN[:, :own], wide_MN[:, own:]
    _check(y_MN, wide_MN, table, map_number, part_rows, tiles)
    require(tiles.positions > 0, "tiles", "at least one position", tiles.positions)
    room, rest = divmod(h_MR.shape[1], tiles.positions)
    wanted = f"columns of {tiles.positions} positions for ranks of up to {widest.together}"
    require(not rest and room >= widest.together, "wide_MN", wanted, h_MR.shape[1])
    return y_MN, h_MR


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
    check("tiles", tiles.tiles_N4, dtypes=int32, shape=(None, TILE), **how)


def cost(tokens: int, width_k: int, rows: int, rank: int, adapters: int) -> Cost:
    """A and B of each adapter once, x once, y read and written."""
    flops = 2.0 * tokens * rank * (width_k + rows)
    return Cost(flops, 2.0 * (adapters * rank * (width_k + rows) + tokens * (width_k + 2 * rows)))
