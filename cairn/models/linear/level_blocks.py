"""Planes of a checkpoint that is no GGUF file, as packed rows for a CPU's compiled kernels (`models.linear.blocks`).

    int4, symmetric int8, mxfp4, a scale for 32 columns or more    every level and scale is kept
    fp8, nvfp4, int8 with offsets, columns in act order            rounded to 8-bit levels, a scale for 64 columns

Maps whose rows are no whole blocks of 32 values are dequantised.
"""

import torch
from torch import nn

from cairn.kernels.cpu.level_rows import level_rows, rounded_rows
from cairn.kernels.cpu.level_rows import obstacle as no_rows
from cairn.kernels.cpu.packed_product import Blocks
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.form import LinearForm
from cairn.models.linear.maps import linears
from cairn.models.linear.planes_form import FloatForm, PlanesForm, SideBySide
from cairn.models.quantized.planes import Planes, dequantized, level_values
from cairn.models.quantized.sharding import by_row


def obstacle(planes: Planes) -> str | None:
    """Why packed rows cannot keep every number of these planes, or None."""
    if planes.kind not in ("int4", "int8", "mxfp4"):
        return f"{planes.kind} levels are no whole numbers"
    if planes.order_K is not None:
        return "columns are in act order"
    if planes.kind == "int8" and planes.shifts is not None:
        return "8-bit levels have offsets"
    return no_rows(planes.shape[1], planes.group)


def blocks_of(planes: Planes) -> Blocks:
    """The same numbers in packed rows, or the nearest that there are."""
    if obstacle(planes) is not None:
        return rounded_rows(dequantized(planes))
    planes = by_row(planes)
    if planes.kind == "mxfp4":  # values are halves
        levels_NK = (2 * level_values(planes)).to(torch.int8)
        return level_rows(levels_NK, planes.scales / 2, None, planes.group)
    shifts = planes.shifts
    if planes.kind == "int4" and shifts is None:
        shifts = torch.zeros_like(planes.scales)
    return level_rows(planes.levels_NK.contiguous(), planes.scales, shifts, planes.group)


def pack_planes(model: nn.Module) -> list[str]:
    """Give every map that multiplies with planes packed rows; why some were rounded, a line for each."""
    rounded: list[str] = []
    for part in linears(model):
        form = part.form
        forms = form.forms if isinstance(form, SideBySide) else [form]
        planes = [one.planes for one in forms if isinstance(one, PlanesForm)]
        if not planes:
            continue
        rounded += [why for one in planes if (why := obstacle(one))]
        rows = [len(weight) for weight in part.matrices()]
        if len(planes) == len(forms) and no_rows(planes[0].shape[1], planes[0].shape[1]) is None:
            part.take(BlocksForm(_split([blocks_of(one) for one in planes], rows)))
        else:
            packed = [_packed(one) if isinstance(one, PlanesForm) else one for one in forms]
            part.take(SideBySide([one for one in packed if one is not None]))
    return rounded


def _split(runs: list[Blocks], rows: list[int]) -> list[Blocks]:
    """A part for each matrix of the map; a run of neighbours was read as one."""
    found, left = [], list(rows)
    for run in runs:
        start, total = 0, len(run.bytes_NB)
        while start < total:
            count = min(left.pop(0), total - start) if left else total - start
            found.append(run._replace(bytes_NB=run.bytes_NB[start : start + count]))
            start += count
    return found


def _packed(form: PlanesForm) -> LinearForm:
    if no_rows(form.planes.shape[1], form.planes.shape[1]):
        return FloatForm(dequantized(form.planes))
    return BlocksForm([blocks_of(form.planes)])
