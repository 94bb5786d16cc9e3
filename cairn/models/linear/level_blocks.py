"""Planes of a checkpoint that is no GGUF file, as packed rows for a CPU's compiled kernels (`models.linear.blocks`).

int4, symmetric int8, mxfp4, a scale for 32 columns or more    every level and scale is kept
fp8, nvfp4, int8 with offsets, columns in act order            rounded to 8-bit levels, a scale for 128 columns
"""

import torch

from cairn.kernels.cpu.level_rows import level_rows, rounded_rows
from cairn.kernels.cpu.level_rows import obstacle as no_rows
from cairn.kernels.cpu.packed_product import Blocks
from cairn.models.quantized.cuts import by_row
from cairn.models.quantized.planes import Planes, dequantized, level_values


def obstacle(planes: Planes) -> str | None:
    """Why packed rows cannot keep every number of these planes, or None."""
    if planes.kind not in ("int4", "int8", "mxfp4"):
        return f"{planes.kind} levels are no whole numbers"
    if planes.order_K is not None:
        return "its columns are in act order"
    if planes.kind == "int8" and planes.shifts is not None:
        return "8-bit levels have offsets"
    return no_rows(planes.shape[1], planes.group)


def kept(planes: Planes) -> Blocks:
    """The same numbers in packed rows."""
    planes = by_row(planes)
    if planes.kind == "mxfp4":  # halves
        levels_NK = (2 * level_values(planes)).to(torch.int8)
        return level_rows(levels_NK, planes.scales / 2, None, planes.group)
    shifts = planes.shifts
    if planes.kind == "int4" and shifts is None:
        shifts = torch.zeros_like(planes.scales)
    return level_rows(planes.levels_NK.contiguous(), planes.scales, shifts, planes.group)


def blocks_of(planes: Planes) -> Blocks:
    return kept(planes) if obstacle(planes) is None else rounded_rows(dequantized(planes))
