"""Planes of any kind on a GPU, as small as in the file; activations stay in 16 bits.

The form of what has no faster kernel: int8, mxfp4, nvfp4, int4 in groups of 16 and 32, float8 in groups. Few rows are
multiplied by a kernel that reads packed weights; for many rows, where arithmetic is the limit, a product first
dequantises its matrix and multiplies as floating point does.
"""

import torch
from torch import Tensor

from cairn.kernels.matmul.skinny_plans import MOST_ROWS as PREFETCHING_ROWS
from cairn.kernels.matmul.weight_only import (
    E4M3,
    HALVES,
    Packed,
    dequantize_packed,
    most_rows,
    pack_nibbles,
    packed_reference,
    span_of,
    weight_only_matmul,
    weight_only_parts,
)
from cairn.kernels.norm.join_norm import Parts
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, Kernels, Product, finished
from cairn.models.linear.gpu_product import gpu_product
from cairn.models.linear.packed_int4 import in_16_bits
from cairn.models.quantized.cuts import by_row
from cairn.models.quantized.planes import BITS, Planes
from cairn.models.quantized.rounding import SCHEMES, Grid, rounded

KINDS = {"int4": "int4", "int8": "int8", "fp8": "fp8", "mxfp4": "e2m1", "nvfp4": "e2m1"}


class WeightOnly(AnyRows):
    def __init__(self, planes: Planes) -> None:
        planes = by_row(planes) if planes.block_rows > 1 else planes
        group, span = min(planes.group, planes.shape[1]), _span(planes)
        assert span is not None, self.obstacle(planes)
        levels, scales_NG = planes.levels_NK, planes.scales.float().contiguous()
        shifts_NG = _shifts(planes, scales_NG)
        factor_N = None
        if group == planes.shape[1] and shifts_NG is None:
            scales_NG, factor_N = None, scales_NG[:, 0].contiguous()
        elif planes.kind == "nvfp4" and planes.global_scale is not None:
            scales_NG, factor_N = _in_e4m3(scales_NG, planes.global_scale)
        else:
            scales_NG = in_16_bits(scales_NG)
        self.weight = Packed(
            KINDS[planes.kind],
            pack_nibbles(levels, span) if BITS[planes.kind] == 4 else levels.contiguous(),
            span,
            scales_NG,
            None if shifts_NG is None else in_16_bits(shifts_NG),
            factor_N,
        )
        self.order_K = planes.order_K

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.weight if isinstance(part, Tensor))

    @staticmethod
    def obstacle(planes: Planes) -> str | None:
        """Why these planes have no such form, or None."""
        if _span(planes) is None:
            return f"{planes.shape[1]} columns in groups of {planes.group} cannot be cut into equal spans"
        return None

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        if self.order_K is not None:
            x_MK = x_MK.index_select(1, self.order_K)
        if not x_MK.is_cuda:
            return finished(
                linear(x_MK, packed_reference(self.weight, x_MK.dtype)), bias_N, epilogue
            )
        kernels = epilogue.kernels or Kernels()
        if len(x_MK) > most_rows(self.weight.kind) or x_MK.dtype not in HALVES or kernels.invariant:
            return self._dequantised(x_MK, bias_N, epilogue, kernels)
        if epilogue.onto_MN is not None and bias_N is None:
            sums_SMN = weight_only_parts(x_MK, self.weight)
            if sums_SMN is not None:
                return Parts(sums_SMN)
        y_MN = weight_only_matmul(
            x_MK, self.weight, bias_N=bias_N, prefetch=epilogue.kernels is not None
        )
        return y_MN if epilogue.gate is None else epilogue.gate.fast(y_MN)

    def _dequantised(
        self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue, kernels: Kernels
    ) -> Product:
        """Not by a kernel that reads weights before its predecessor has ended, which wrote them."""
        w_NK = dequantize_packed(self.weight, x_MK.dtype)
        if kernels.invariant or len(x_MK) > PREFETCHING_ROWS:
            return gpu_product(x_MK, w_NK, bias_N, epilogue, kernels)
        return finished(linear(x_MK, w_NK), bias_N, epilogue)


class W8A16(WeightOnly):
    """A matrix in floating point, rounded to 8-bit levels with a scale for each row."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(rounded(weight_NK.detach(), SCHEMES["w8a8"]))

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:  # pyrefly: ignore[bad-override-param-name]
        """Why a matrix has no such form here, or None."""
        return _uncut(weight_NK.shape[1], SCHEMES["w8a8"])


class NVFP4(WeightOnly):
    """A matrix in floating point, rounded to 4-bit floats, 16 of which share a scale."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(rounded(weight_NK.detach(), SCHEMES["nvfp4"]))

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:  # pyrefly: ignore[bad-override-param-name]
        """Why a matrix has no such form here, or None."""
        return _uncut(weight_NK.shape[1], SCHEMES["nvfp4"])


def _uncut(columns: int, grid: Grid) -> str | None:
    span = span_of(columns, grid.group or columns, BITS[grid.kind] == 4)
    return f"{columns} columns cannot be cut into equal spans" if span is None else None


def _span(planes: Planes) -> int | None:
    columns = planes.shape[1]
    return span_of(columns, min(planes.group, columns), BITS[planes.kind] == 4)


def _shifts(planes: Planes, scales_NG: Tensor) -> Tensor | None:
    """What is added to scale * level, where the kernel's levels of int4 are 8 less than the file's; None: 0."""
    shifts_NG = None if planes.shifts is None else planes.shifts.float().contiguous()
    if planes.kind != "int4":
        return shifts_NG
    around_NG = 8 * scales_NG if shifts_NG is None else shifts_NG + 8 * scales_NG
    return None if bool((around_NG.abs() <= 1e-5 * scales_NG.abs()).all()) else around_NG


def _in_e4m3(scales_NG: Tensor, global_scale: float) -> tuple[Tensor, Tensor | None]:
    """Scales in the byte that a file of nvfp4 has them in, and the factor of each row; or as they are."""
    short_NG = (scales_NG * global_scale).to(E4M3)
    if not torch.allclose(short_NG.float() / global_scale, scales_NG, rtol=1e-6, atol=0.0):
        return scales_NG, None
    return short_NG, torch.full_like(scales_NG[:, 0], 1 / global_scale)
