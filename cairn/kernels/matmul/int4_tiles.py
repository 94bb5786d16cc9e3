"""How 4-bit weights lie in memory, so that a thread reads its own operand of a tensor-core instruction.

    levels [N, K], 0 to 15  ->  tiles [N / 64, K / 64] of 2,048 bytes, 16 for each of 128 threads

The left operand of `wgmma` is 64 x 16: a thread holds rows r and r + 8, and in each the columns c, c + 1, c + 8, c + 9.
Its 16 bytes are four such pieces along K, a word each. In a word the low half-word has the even columns and the high
one the odd columns, its bytes columns 0-7 and 8-15, and the nibbles of a byte rows r and r + 8: one shift and one mask
give two neighbours in K. Scales of groups of 16 and 32 columns lie as tiles, too. Pure torch.
"""

import torch
from torch import Tensor

TILE = 64
TILE_BYTES = TILE * TILE // 2


def packed_tiles(levels_NK: Tensor) -> Tensor:
    """uint8 [N / 64, K / 64, 2048]. N and K are multiples of 64."""
    rows, columns = levels_NK.shape
    # row: piece, warp, half, r; column: tile, step of 16, half, pair, odd
    bits = levels_NK.to(torch.uint8).view(rows // TILE, 4, 2, 8, columns // TILE, 4, 2, 4, 2)
    ordered = bits.permute(
        0, 4, 1, 3, 7, 5, 8, 6, 2
    )  # thread = warp, r, pair; word; odd; half; row + 8
    both = ordered[..., 0] | ordered[..., 1] << 4
    return both.reshape(rows // TILE, columns // TILE, TILE_BYTES).contiguous()


def unpacked_tiles(packed: Tensor) -> Tensor:
    """Back to the levels, uint8 [N, K]."""
    pieces, tiles, _ = packed.shape
    bytes_ = packed.view(pieces, tiles, 4, 8, 4, 4, 2, 2)
    bits = torch.stack((bytes_ & 15, bytes_ >> 4), -1)
    ordered = bits.permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return ordered.reshape(pieces * TILE, tiles * TILE)


def small_group_tiles(plane_NG: Tensor, columns: int) -> Tensor:
    """bfloat16 [N / 64, K / 64, 64 * groups of a tile]: rows r and r + 8 beside each other, for each group."""
    rows, groups = len(plane_NG), plane_NG.shape[1] * TILE // columns
    # piece, warp, half, r; tile, group
    parts = plane_NG.to(torch.bfloat16).view(rows // TILE, 4, 2, 8, columns // TILE, groups)
    tiles = parts.permute(0, 4, 1, 3, 5, 2)
    return tiles.reshape(rows // TILE, columns // TILE, TILE * groups).contiguous()


def small_groups(tiles: Tensor) -> Tensor:
    """Back to a plane, bfloat16 [N, K / group]."""
    pieces, across, numbers = tiles.shape
    parts = tiles.view(pieces, across, 4, 8, numbers // TILE, 2).permute(0, 2, 5, 3, 1, 4)
    return parts.reshape(pieces * TILE, -1)


def paired_rows(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """The order in which every 16 rows are 8 of the gate and the 8 of up that belong to them; `rows` counts both."""
    both = torch.arange(rows, device=device).view(2, rows // 16, 8)
    return both.transpose(0, 1).reshape(-1)
