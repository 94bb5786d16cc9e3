"""Rows of 8-bit or 4-bit levels with scales in float32, as the compiled kernels read them.

    LEVELS_8    a byte for each level, with a sign | scales                 w = scale * level
    LEVELS_4    two levels to a byte | scales | offsets                     w = scale * level + offset

Every number of a checkpoint is kept: levels as they are, scales in float32. A group of values that share a scale has 32
or 64 of them, or a multiple of 128; others are written as the largest of these that divides them. `rounded_rows` makes
8-bit levels of a matrix in floating point, and `rounded_q8_0` the blocks that GGUF files have. Knows nothing of files.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cairn.kernels.cpu.packed_product import COLUMNS, Blocks

PIECE = 128  # values: scales are there for whole ones, as in `blocks.h`
HALF = 16  # of 32 levels of 4 bits, those in the lower halves of the bytes
MOST = 127
ROUNDED_GROUP = 64  # values that share a scale where levels are rounded here
ROWS_AT_ONCE = 8192  # of a matrix that is being rounded


class RowsOfMatrix(Protocol):
    """A matrix [N, K] in floating point of which some rows are read at a time: a tensor, or one that is packed."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


def obstacle(columns: int, group: int) -> str | None:
    """Why rows of so many values in such groups have no kernel, or None."""
    if columns % COLUMNS:
        return f"rows of {columns} values are not whole blocks of {COLUMNS}"
    if group % COLUMNS and group < columns:
        return f"groups of {group} values are not whole blocks of {COLUMNS}"
    return None


def stored_group(columns: int, group: int) -> int:
    """The values that share a scale in a stored row."""
    if group >= columns:
        return -(-columns // PIECE) * PIECE
    return next(size for size in (group if group % PIECE == 0 else 64, 64, 32) if group % size == 0)


def level_rows(
    levels_NK: Tensor, scales_NG: Tensor, offsets_NG: Tensor | None, group: int
) -> Blocks:
    """int8 levels without offsets, or uint8 levels below 16 with them."""
    rows, columns = levels_NK.shape
    stored = stored_group(columns, group)
    if offsets_NG is None:
        kind, bytes_NB = "LEVELS_8", levels_NK.view(torch.uint8)
    else:
        halves_NB2H = levels_NK.view(rows, -1, 2, HALF)
        kind, bytes_NB = "LEVELS_4", (halves_NB2H[:, :, 0] | halves_NB2H[:, :, 1] << 4).flatten(1)
    floats = [scales_NG] if offsets_NG is None else [scales_NG, offsets_NG]
    parts = [bytes_NB, *(_stored_floats(one, columns, group, stored) for one in floats)]
    return Blocks(kind, torch.cat(parts, 1), columns, group=stored)


def _stored_floats(floats_NG: Tensor, columns: int, group: int, stored: int) -> Tensor:
    """Floats as bytes, one value for each stored group, padded with zeros."""
    if group < columns:
        floats_NG = floats_NG.repeat_interleave(group // stored, 1)
    floats_NG = floats_NG[:, : -(-columns // stored)]
    count = -(-(-(-columns // PIECE) * PIECE) // stored)
    padded_NG = torch.nn.functional.pad(floats_NG.float(), (0, count - floats_NG.shape[1]))
    return padded_NG.contiguous().view(torch.uint8)


def rounded_rows(weight_NK: RowsOfMatrix) -> Blocks:
    """The nearest 8-bit levels, few rows at a time, because a vocabulary is large."""
    rows = range(0, weight_NK.shape[0], ROWS_AT_ONCE)
    parts = [_rounded(weight_NK[first : first + ROWS_AT_ONCE]) for first in rows]
    bytes_NB = parts[0].bytes_NB if len(parts) == 1 else torch.cat([p.bytes_NB for p in parts])
    return parts[0]._replace(bytes_NB=bytes_NB)


def _rounded(weight_RK: Tensor) -> Blocks:
    columns = weight_RK.shape[1]
    count = -(-columns // ROUNDED_GROUP)
    padded_RK = torch.nn.functional.pad(
        weight_RK.detach().float(), (0, count * ROUNDED_GROUP - columns)
    )
    groups_RGE = padded_RK.view(len(weight_RK), count, ROUNDED_GROUP)
    scale_RG = groups_RGE.abs().amax(-1) / MOST
    scale_RG = scale_RG.where(scale_RG > 0, 1.0)
    level_RK = (groups_RGE / scale_RG[..., None]).round_().to(torch.int8).flatten(1)[:, :columns]
    return level_rows(level_RK.contiguous(), scale_RG, None, ROUNDED_GROUP)


def rounded_q8_0(weight_NK: RowsOfMatrix) -> Blocks:
    """32 levels behind a scale in float16, which loses weights below 1e-6: products with AVX-512 take half as long."""
    rows, columns = weight_NK.shape
    parts = []
    for first in range(0, rows, ROWS_AT_ONCE):
        groups_RGE = (
            weight_NK[first : first + ROWS_AT_ONCE].detach().float().unflatten(1, (-1, COLUMNS))
        )
        scale_RG1 = (groups_RGE.abs().amax(-1, keepdim=True) / MOST).half()
        divisor_RG1 = scale_RG1.float().where(scale_RG1 > 0, 1.0)
        level_RGE = (groups_RGE / divisor_RG1).round_().clamp_(-MOST, MOST).to(torch.int8)
        block_RGB = torch.cat((scale_RG1.view(torch.uint8), level_RGE.view(torch.uint8)), -1)
        parts.append(block_RGB.flatten(1))
    return Blocks("Q8_0", torch.cat(parts), columns)
