"""Every matrix of a model to its nearest levels: for schemes without calibration, and after training with rounding."""

from dataclasses import replace

import torch
from torch import Tensor

from cairn.models.quantized.matrices import NamedMatrix, matrices_of
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.rounding import QuantizationGrid, rounded
from cairn.models.quantized.write import QuantizedModel
from cairn.models.transformer import Transformer


@torch.no_grad()
def round_model(model: Transformer, grid: QuantizationGrid, stored: torch.dtype) -> QuantizedModel:
    """The planes of all layers; the model computes with what they stand for afterwards."""
    planes: dict[str, Planes] = {}
    for number in range(model.spec.layers):
        for matrix in matrices_of(model.get_submodule(f"layers.{number}"), number):
            parts = rounded_parts(matrix.read(), matrix, grid, stored)
            planes |= dict(zip(matrix.slots, parts, strict=True))
            matrix.write(torch.cat([dequantized(part) for part in parts]))
    return QuantizedModel(model, planes, grid, stored)


def rounded_parts(
    w_NK: Tensor, matrix: NamedMatrix, grid: QuantizationGrid, stored: torch.dtype
) -> list[Planes]:
    """Round to nearest, each slot of a matrix."""
    if grid.block_rows > 1:  # blocks do not reach from one tensor into the next
        return [rounded(part, grid, stored) for part in w_NK.split(list(matrix.rows))]
    return split_rows(rounded(w_NK, grid, stored), list(matrix.rows))


def split_rows(planes: Planes, rows: list[int]) -> list[Planes]:
    """Joined maps apart again: q, k and v of one matrix."""
    if planes.block_rows > 1 and any(n % planes.block_rows for n in rows[:-1]):
        raise ValueError(f"blocks of {planes.block_rows} rows do not end at {rows}")
    blocks = [-(-n // planes.block_rows) for n in rows]
    shifts = [None] * len(rows) if planes.shifts is None else planes.shifts.split(blocks)
    pieces = zip(planes.levels_NK.split(rows), planes.scales.split(blocks), shifts, strict=True)
    return [replace(planes, levels_NK=a, scales=b, shifts=c) for a, b, c in pieces]
