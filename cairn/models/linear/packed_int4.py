"""4-bit weights with a scale for each row and group of columns; activations stay in 16 bits (W4A16).

For few rows the kernel reads packed weights and nothing else. For many rows, where arithmetic is the limit, a product
first dequantises its matrix into bfloat16 and multiplies as floating point does, but not by a kernel that reads weights
before its predecessor has ended, which wrote them. `W4A16` rounds a matrix to the nearest
level when the engine starts; `PackedInt4` takes planes as a checkpoint has them.
"""

from typing import cast

import torch
from torch import Tensor

from cairn.kernels.matmul.int4_matmul import (
    MOST_ROWS,
    Int4,
    counted,
    dequantize_int4,
    int4_matmul,
    int4_parts,
    int4_reference,
)
from cairn.kernels.matmul.int4_tiles import TILE, packed_tiles, paired_rows, unpacked_tiles
from cairn.kernels.matmul.skinny_plans import MOST_ROWS as PREFETCHING_ROWS
from cairn.kernels.norm.join_norm import Parts
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, Kernels, Product, finished
from cairn.models.linear.gpu_product import gpu_product
from cairn.models.quantized.planes import Planes

GROUP = 128


class PackedInt4(AnyRows):
    def __init__(self, planes: Planes) -> None:
        scales_GN = planes.scales.float().T.contiguous()
        shifts_GN = None
        if planes.shifts is not None:  # of level - 8, which is what the kernel has
            around_GN = planes.shifts.float().T + 8 * scales_GN
            symmetric = bool((around_GN.abs() <= 1e-5 * scales_GN.abs()).all())
            shifts_GN = None if symmetric else around_GN.contiguous()
        else:
            shifts_GN = 8 * scales_GN
        if shifts_GN is None:
            scales_GN = in_16_bits(scales_GN)
        self.weight = counted(Int4(packed_tiles(planes.levels_NK), scales_GN, shifts_GN))
        self.order_K = planes.order_K
        self.paired = False  # rows of gate and up lie as the kernel with SwiGLU wants them

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.weight[:3] if part is not None)

    @staticmethod
    def obstacle(planes: Planes) -> str | None:
        """Why these planes have no such form, or None."""
        (rows, columns), group = planes.shape, min(planes.group, planes.shape[1])
        if planes.kind != "int4" or planes.block_rows != 1:
            return f"{planes.kind} levels, a scale for {planes.block_rows} rows"
        if rows % TILE or columns % TILE or group % TILE or columns % group:
            return f"{rows} x {columns} in groups of {group} are no multiples of {TILE}"
        return None

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        if self.order_K is not None:
            x_MK = x_MK.index_select(1, self.order_K)
        if not x_MK.is_cuda:
            w_NK = int4_reference(self.weight, x_MK.dtype)
            return finished(linear(x_MK, w_NK), bias_N, epilogue)
        kernels, gate = epilogue.kernels or Kernels(), epilogue.gate
        swiglu = gate is not None and gate.is_swiglu
        if swiglu:
            self.pair()
        few = len(x_MK) <= MOST_ROWS and x_MK.dtype == torch.bfloat16 and not kernels.invariant
        if not few or self.paired != swiglu:
            return self._dequantised(x_MK, bias_N, epilogue, kernels)
        prefetch = epilogue.kernels is not None
        if epilogue.onto_MN is not None and bias_N is None:
            sums_SMN = int4_parts(x_MK, self.weight, prefetch=prefetch)
            if sums_SMN is not None:
                return Parts(sums_SMN)
        activation = "swiglu" if swiglu else None
        y_MN = int4_matmul(
            x_MK, self.weight, bias_N=bias_N, activation=activation, prefetch=prefetch
        )
        return y_MN if gate is None or swiglu else gate.fast(y_MN)

    def _dequantised(
        self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue, kernels: Kernels
    ) -> Product:
        w_NK = dequantize_int4(self.weight, paired=self.paired).to(x_MK.dtype)
        if kernels.invariant or len(x_MK) > PREFETCHING_ROWS:
            return gpu_product(x_MK, w_NK, bias_N, epilogue, kernels)
        return finished(linear(x_MK, w_NK), bias_N, epilogue)

    def pair(self) -> None:
        """Order the rows for SwiGLU, in the first product: a captured graph must find the weights as they stay."""
        if self.paired or not self.weight.tiles.is_cuda:
            return
        w = self.weight
        order_N = paired_rows(w.shape[0], w.tiles.device)
        levels_NK = unpacked_tiles(w.tiles)[order_N]
        shifts_GN = None if w.shifts_GN is None else w.shifts_GN[:, order_N].contiguous()
        scales_GN = w.scales_GN[:, order_N].contiguous()
        self.weight = Int4(packed_tiles(levels_NK), scales_GN, shifts_GN, w.arrived)
        self.paired = True


class W4A16(PackedInt4):
    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(nearest_levels(weight_NK))

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:  # pyrefly: ignore[bad-override-param-name]
        """Why a matrix has no such form here, or None."""
        rows, columns = cast(tuple[int, int], tuple(weight_NK.shape))
        if rows % TILE or columns % GROUP:
            return f"{rows} x {columns} are no multiples of {TILE} x {GROUP}"
        return None


def in_16_bits(plane: Tensor) -> Tensor:
    """Scales or shifts in the type that a checkpoint had them in, if that is one of 16 bits: no number changes."""
    for kind in (torch.bfloat16, torch.float16):
        short = plane.to(kind)
        if torch.equal(short.float(), plane):
            return short
    return plane


def nearest_levels(weight_NK: Tensor, group: int = GROUP) -> Planes:
    """Symmetric, by the largest weight of each group: levels 0 to 15 stand for -8 to 7 times the scale.

    Scales are numbers of the weights' own type.
    """
    parts_NGg = weight_NK.detach().float().unflatten(1, (-1, group))
    scales_NG = (parts_NGg.abs().amax(-1).clamp(min=1e-6) / 7.5).to(weight_NK.dtype).float()
    levels = (parts_NGg / scales_NG[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8)
    return Planes("int4", levels.flatten(1), scales_NG, -8 * scales_NG, group)
