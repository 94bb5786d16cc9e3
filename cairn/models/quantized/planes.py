"""A quantised matrix [N, K] in the one form that every file format is read into: w = scale * level + shift.

Levels are whole numbers or small floats, one value per byte; scale and shift hold for a block of rows and columns.
Readers make planes out of the tensors of a file, forms of `models.linear` make what their kernel reads out of planes,
and writers go the other way. Planes know nothing of files, devices or kernels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4"]

# How activations enter the product: as they are; or rounded to 8 bits by token, by group of 128 columns,
# or by one known scale.
Activations = Literal["float", "token", "group", "tensor"]

BITS: dict[Kind, int] = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4, "nvfp4": 4}

# e2m1: bit 3 is the sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Planes:
    kind: Kind
    levels_NK: Tensor  # int4: uint8 0..15; int8: int8; fp8: float8_e4m3fn; mxfp4, nvfp4: uint8 codes of e2m1
    scales: Tensor  # float32 [ceil(N / block_rows), ceil(K / group)]
    shifts: Tensor | None  # float32 like scales, or None: 0 (symmetric int4 has -8 * scale)
    group: int  # columns that share a scale
    block_rows: int = 1  # rows that share a scale
    order_K: Tensor | None = None  # int64: column j of levels multiplies column order_K[j] of x
    activations: Activations = "float"
    input_scale: float | None = None  # with activations "tensor"
    global_scale: float | None = None  # nvfp4, where known: scales are e4m3 numbers divided by it

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.levels_NK.shape
        return rows, columns


def level_values(planes: Planes) -> Tensor:
    """The levels as float32."""
    if planes.kind in ("mxfp4", "nvfp4"):
        table = torch.tensor((*E2M1, *(-v for v in E2M1)), device=planes.levels_NK.device)
        return table[planes.levels_NK.int()]
    return planes.levels_NK.float()


def spread(plane: Tensor, planes: Planes) -> Tensor:
    """A plane of scales or shifts with one value for every weight."""
    rows, columns = planes.shape
    wide = plane.repeat_interleave(planes.block_rows, 0).repeat_interleave(planes.group, 1)
    return wide[:rows, :columns]


def dequantized(planes: Planes, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix that the planes stand for, with its columns in the model's order."""
    w_NK = level_values(planes) * spread(planes.scales, planes)
    if planes.shifts is not None:
        w_NK = w_NK + spread(planes.shifts, planes)
    if planes.order_K is not None:
        w_NK = torch.empty_like(w_NK).index_copy_(1, planes.order_K, w_NK)
    return w_NK.to(dtype)
