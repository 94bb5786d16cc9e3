"""Memory behind a few rows, so that a tile of a product that is taller than they are reads no further than it.

TMA fills what lies outside a tensor with zeros, and is slow at it: a product of 144 rows in tiles of 128 took 53 us on
an H200, and 28 where the second tile's other rows were there to be read (4096 x 12288 in float8). What they hold does
not matter, because no result of theirs is stored. `empty_rows` makes such room; `readable_rows` says how many rows a
tensor map may claim, and looks at the storage alone: a tensor from elsewhere is as slow as ever, and as right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TILE_ROWS = 128  # that a program of a product of few rows takes at most
MOST_ROWS = 256  # of such a product


def padded_rows(m: int) -> int:
    """8, 16, 32, 64, 128 or 256: as tall as the tiles of a product of so many rows, together."""
    return max(8, 1 << (m - 1).bit_length())


def empty_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [rows, ..]; on a GPU a few rows have memory behind them up to the end of a tile."""
    rows = shape[0] if len(shape) > 1 else 0
    if device.type != "cuda" or not 1 < rows <= MOST_ROWS or padded_rows(rows) == rows:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty((padded_rows(rows), *shape[1:]), dtype=dtype, device=device)[:rows]


def readable_rows(rows_MK: Tensor, tile: int) -> int:
    """Up to the end of the last tile, where that memory is the tensor's own; else as many as there are."""
    count = rows_MK.shape[0]
    whole = -(-count // tile) * tile
    if whole == count:
        return count
    end = rows_MK.storage_offset() + (whole - 1) * rows_MK.stride(0) + rows_MK.shape[1]
    allocated = rows_MK.untyped_storage().nbytes() // rows_MK.element_size()
    return whole if end <= allocated else count
