"""Weights of 4 or 8 bits with a scale for each row and group of columns; activations stay in 16 bits (W4A16, W8A16).

Whole numbers (int4, int8) or floats (mxfp4, nvfp4, fp8), in groups of 16, 32 or a multiple of 64 columns. For few rows
the kernel reads packed weights and nothing else. For many rows, where arithmetic is the limit, a product first
dequantises its matrix into bfloat16 and multiplies as floating point does. `W4A16`, `W8A16` and `NVFP4` round a matrix
to the nearest level when the engine starts; `PackedTiles` takes planes as a checkpoint has them. Scales of groups of 16
and 32 are rounded to bfloat16, as the kernel rounds every weight.
"""

from typing import cast

import torch
from torch import Tensor

from cairn.kernels.dispatch import capability, needs_hopper
from cairn.kernels.matmul.packed_matmul import packed_matmul, packed_parts
from cairn.kernels.matmul.packed_weights import (
    MOST_ROWS,
    MOST_SCALE,
    SMALL_GROUPS,
    PackedWeights,
    counted,
    dequantize_packed,
    in_order,
    packed_reference,
    packed_weights,
)
from cairn.kernels.matmul.tile_order import TILE, paired_rows
from cairn.kernels.norm.join_norm import Parts
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, Kernels, Product, finished
from cairn.models.linear.gpu_product import dequantised_product
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.rounding import SCHEMES, rounded
from cairn.models.quantized.sharding import by_row

GROUP = 128
# What the kernels call the kinds of planes.
KINDS = {"int4": "int4", "int8": "int8", "fp8": "fp8", "mxfp4": "e2m1", "nvfp4": "e2m1"}
E4M3 = torch.float8_e4m3fn


class PackedTiles(AnyRows):
    def __init__(self, planes: Planes) -> None:
        self.weight = counted(_weights(planes))
        self.order_K = planes.order_K
        self.paired = False  # rows of gate and up lie as the kernel with SwiGLU wants them

    @property
    def nbytes(self) -> int:
        parts = (*self.weight[:3], self.weight.factor_N)
        return sum(part.nbytes for part in parts if part is not None)

    @staticmethod
    def obstacle(planes: Planes) -> str | None:
        """Why these planes have no such form, or None."""
        (rows, columns), group = planes.shape, min(planes.group, planes.shape[1])
        if planes.block_rows != 1 and planes.block_rows % TILE:
            return f"a scale for {planes.block_rows} rows, which is no multiple of {TILE}"
        e2m1 = KINDS[planes.kind] == "e2m1"
        known = group in SMALL_GROUPS or (not e2m1 and group % TILE == 0)
        if rows % TILE or columns % TILE or columns % group or not known:
            return f"{rows} x {columns} in groups of {group} are no multiples of {TILE}"
        if e2m1 and float(planes.scales.max()) > MOST_SCALE:
            return f"a scale of {float(planes.scales.max()):g}, more than {MOST_SCALE:g}"
        if planes.kind == "fp8" and bool(planes.levels_NK.isnan().any()):
            return "a level that is not a number"
        return _other_gpu()

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        if self.order_K is not None:
            x_MK = x_MK.index_select(1, self.order_K)
        if not x_MK.is_cuda:
            w_NK = packed_reference(self.weight, x_MK.dtype)
            return finished(linear(x_MK, w_NK), bias_N, epilogue)
        kernels, gate = epilogue.kernels or Kernels(), epilogue.gate
        swiglu = gate is not None and gate.is_swiglu
        if swiglu:
            self.pair()
        few = len(x_MK) <= MOST_ROWS and x_MK.dtype == torch.bfloat16 and not kernels.invariant
        few = few and needs_hopper(x_MK) is None
        if not few or self.paired != swiglu:
            w_NK = dequantize_packed(self.weight, paired=self.paired).to(x_MK.dtype)
            return dequantised_product(x_MK, w_NK, bias_N, epilogue, kernels)
        prefetch = epilogue.kernels is not None
        if epilogue.onto_MN is not None and bias_N is None:
            sums_SMN = packed_parts(x_MK, self.weight, prefetch=prefetch)
            if sums_SMN is not None:
                return Parts(sums_SMN)
        activation = "swiglu" if swiglu else None
        y_MN = packed_matmul(
            x_MK, self.weight, bias_N=bias_N, activation=activation, prefetch=prefetch
        )
        return y_MN if gate is None or swiglu else gate.fast(y_MN)

    def pair(self) -> None:
        """Order the rows for SwiGLU, in the first product: a captured graph must find the weights as they stay."""
        if self.paired or not self.weight.tiles.is_cuda:
            return
        order_N = paired_rows(self.weight.shape[0], self.weight.tiles.device)
        self.weight = in_order(self.weight, order_N)
        self.paired = True


class W4A16(PackedTiles):
    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(nearest_levels(weight_NK))

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:  # pyrefly: ignore[bad-override-param-name]
        """Why a matrix has no such form here, or None."""
        rows, columns = cast(tuple[int, int], tuple(weight_NK.shape))
        if rows % TILE or columns % GROUP:
            return f"{rows} x {columns} are no multiples of {TILE} x {GROUP}"
        return None


class W8A16(PackedTiles):
    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(rounded(weight_NK.detach(), SCHEMES["w8a8"]))

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:  # pyrefly: ignore[bad-override-param-name]
        """Why a matrix has no such form here, or None."""
        return _no_tiles(weight_NK)


class NVFP4(PackedTiles):
    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(rounded(weight_NK.detach(), SCHEMES["nvfp4"]))

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:  # pyrefly: ignore[bad-override-param-name]
        """Why a matrix has no such form here, or None."""
        return _no_tiles(weight_NK)


def _no_tiles(weight_NK: Tensor) -> str | None:
    rows, columns = weight_NK.shape
    fits = rows % TILE == 0 and columns % TILE == 0
    return None if fits else f"{rows} x {columns} are no multiples of {TILE}"


def _other_gpu() -> str | None:
    """Why the GPU here does without the kernel of few rows, or None; a machine without one is not asked."""
    if torch.cuda.is_available() and capability(torch.device("cuda")) != (9, 0):
        return "the kernel needs a GPU of compute capability 9.0"
    return None


def _weights(planes: Planes) -> PackedWeights:
    planes = by_row(planes) if planes.block_rows > 1 else planes
    scales_NG, kind, factor_N = planes.scales.float().contiguous(), KINDS[planes.kind], None
    shifts_NG = planes.shifts
    if kind == "int4":
        shifts_NG = shifts_around_8(planes, scales_NG)
    elif planes.global_scale is not None:
        scales_NG, factor_N = in_e4m3(scales_NG, planes.global_scale)
    return packed_weights(planes.levels_NK, scales_NG.float(), shifts_NG, kind, factor_N)


def shifts_around_8(planes: Planes, scales_NG: Tensor) -> Tensor | None:
    """Shift added to scale * (level - 8); None for 0."""
    shifts_NG = 0.0 if planes.shifts is None else planes.shifts.float()
    around_NG = shifts_NG + 8 * scales_NG
    symmetric = bool((around_NG.abs() <= 1e-5 * scales_NG.abs()).all())
    return None if symmetric else around_NG.contiguous()


def in_e4m3(scales_NG: Tensor, global_scale: float) -> tuple[Tensor, Tensor | None]:
    """Scales in the byte that a file of nvfp4 has them in, and the factor of each row; or as they are."""
    short_NG = (scales_NG * global_scale).to(E4M3)
    if not torch.allclose(short_NG.float() / global_scale, scales_NG, rtol=1e-6, atol=0.0):
        return scales_NG, None
    return short_NG, torch.full_like(scales_NG[:, 0], 1 / global_scale)


def nearest_levels(weight_NK: Tensor, group: int = GROUP) -> Planes:
    """Symmetric, by the largest weight of each group: levels 0 to 15 stand for -8 to 7 times the scale.

    Scales are numbers of the weights' own type.
    """
    parts_NGg = weight_NK.detach().float().unflatten(1, (-1, group))
    scales_NG = (parts_NGg.abs().amax(-1).clamp(min=1e-6) / 7.5).to(weight_NK.dtype).float()
    levels = (parts_NGg / scales_NG[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8)
    return Planes("int4", levels.flatten(1), scales_NG, -8 * scales_NG, group)
