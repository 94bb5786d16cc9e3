"""Memory layout of packed weights in which a thread reads its own operand of a tensor-core instruction.

    levels [N, K] of 4 or 8 bits  ->  tiles [N / 64, K / 64] of 2,048 or 4,096 bytes, 16 or 32 for each of 128 threads

The left operand of `wgmma` is 64 x 16: a thread holds rows r and r + 8, and in each the columns c, c + 1, c + 8, c + 9.

    4 bits   a word for each such piece along K, four for a thread. The low half-word has the even columns and the high
             one the odd columns, their bytes columns 0-7 and 8-15, and the nibbles of a byte rows r and r + 8
    8 bits   two words, of columns 0-7 and 8-15. The half-words as above; their bytes are rows r and r + 8. The first
             2,048 bytes of a tile are of its columns 0-31, so that here, too, a thread reads 16 bytes at once

One shift and one mask give two neighbours in K. Scales of groups of 16 and 32 columns lie as tiles, too. Pure torch.
"""

import torch
from torch import Tensor

TILE = 64


def packed_tiles(levels_NK: Tensor, bits: int) -> Tensor:
    """uint8 [N / 64, K / 64, 512 * bits]. N and K are multiples of 64; levels are of one byte each."""
    pieces, tiles = (size // TILE for size in levels_NK.shape)
    # row: piece, warp, half, r; column: tile, steps of 32 and of 16, half, pair, odd
    levels = levels_NK.view(torch.uint8).view(pieces, 4, 2, 8, tiles, 2, 2, 2, 4, 2)
    if bits == 8:
        # 32 columns; thread = warp, r, pair; word = 16 columns, 8 columns; odd; row + 8
        ordered = levels.permute(0, 4, 5, 1, 3, 8, 6, 7, 9, 2)
        return ordered.reshape(pieces, tiles, TILE * TILE).contiguous()
    # thread; word = 32 columns, 16 columns; odd; 8 columns; row + 8
    ordered = levels.permute(0, 4, 1, 3, 8, 5, 6, 9, 7, 2)
    both = ordered[..., 0] | ordered[..., 1] << 4
    return both.reshape(pieces, tiles, TILE * TILE // 2).contiguous()


def unpacked_tiles(packed: Tensor) -> Tensor:
    """Back to the levels, uint8 [N, K]."""
    pieces, tiles, size = packed.shape
    if size == TILE * TILE:
        bytes_ = packed.view(pieces, tiles, 2, 4, 8, 4, 2, 2, 2, 2)
        ordered = bytes_.permute(0, 3, 9, 4, 1, 2, 6, 7, 5, 8)
    else:
        bytes_ = packed.view(pieces, tiles, 4, 8, 4, 2, 2, 2, 2)
        levels = torch.stack((bytes_ & 15, bytes_ >> 4), -1)
        ordered = levels.permute(0, 2, 9, 3, 1, 5, 6, 8, 4, 7)
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
