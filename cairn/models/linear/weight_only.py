"""Planes of any kind on a GPU, as small as in the file; activations stay in 16 bits.

The form of what has no faster kernel: matrices that are no multiples of 64 rows and columns, other groups, and GPUs
other than Hopper. Few rows are multiplied by a kernel that reads packed weights; for many rows, where arithmetic is the
limit, a product first dequantises its matrix and multiplies as floating point does.
"""

from torch import Tensor

from cairn.kernels.matmul.packed_weights import in_16_bits
from cairn.kernels.matmul.weight_only import (
    HALVES,
    PackedRows,
    dequantize_rows,
    most_rows,
    pack_nibbles,
    rows_reference,
    span_of,
    weight_only_matmul,
    weight_only_parts,
)
from cairn.kernels.norm.join_norm import Parts
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, Kernels, Product, finished
from cairn.models.linear.gpu_product import dequantised_product
from cairn.models.linear.packed_tiles import KINDS, in_e4m3, shifts_around_8
from cairn.models.quantized.planes import BITS, Planes
from cairn.models.quantized.sharding import by_row


class WeightOnly(AnyRows):
    def __init__(self, planes: Planes) -> None:
        planes = by_row(planes) if planes.block_rows > 1 else planes
        group, span = min(planes.group, planes.shape[1]), _span(planes)
        assert span is not None, self.obstacle(planes)
        levels, scales_NG = planes.levels_NK, planes.scales.float().contiguous()
        shifts_NG = None if planes.shifts is None else planes.shifts.float().contiguous()
        if planes.kind == "int4":  # the kernel's levels are 8 less than the file's
            shifts_NG = shifts_around_8(planes, scales_NG)
        factor_N = None
        if group == planes.shape[1] and shifts_NG is None:
            scales_NG, factor_N = None, scales_NG[:, 0].contiguous()
        elif planes.kind == "nvfp4" and planes.global_scale is not None:
            scales_NG, factor_N = in_e4m3(scales_NG, planes.global_scale)
        else:
            scales_NG = in_16_bits(scales_NG)
        self.weight = PackedRows(
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
            return finished(linear(x_MK, rows_reference(self.weight, x_MK.dtype)), bias_N, epilogue)
        kernels = epilogue.kernels or Kernels()
        if len(x_MK) > most_rows(self.weight.kind) or x_MK.dtype not in HALVES or kernels.invariant:
            w_NK = dequantize_rows(self.weight, x_MK.dtype)
            return dequantised_product(x_MK, w_NK, bias_N, epilogue, kernels)
        if epilogue.onto_MN is not None and bias_N is None:
            sums_SMN = weight_only_parts(x_MK, self.weight)
            if sums_SMN is not None:
                return Parts(sums_SMN)
        y_MN = weight_only_matmul(
            x_MK, self.weight, bias_N=bias_N, prefetch=epilogue.kernels is not None
        )
        return y_MN if epilogue.gate is None else epilogue.gate.fast(y_MN)


def _span(planes: Planes) -> int | None:
    columns = planes.shape[1]
    return span_of(columns, min(planes.group, columns), BITS[planes.kind] == 4)
