"""Weights as float8 e4m3 with a scale per row: half the bytes of bfloat16.

On a GPU the activations of several rows are rounded to float8 as well, each token by its own largest value, and the
tensor cores multiply in float8; one row alone keeps its activations, because reading the weights is all the work. The
norm or activation before a product quantises on its way (`quantizes`). Elsewhere the weights are dequantised for each
product, which shows what they stand for.
"""

from typing import cast

import torch
from torch import Tensor

from cairn.kernels.arguments import as_rows
from cairn.kernels.matmul.matmul_fp8 import SMALL, launch, matmul_fp8
from cairn.kernels.matmul.skinny_fp8 import LONGEST_ROW, skinny_fp8, skinny_fp8_parts
from cairn.kernels.matmul.skinny_plans import FEW_ROWS, wave_plan
from cairn.kernels.norm.join_norm import Parts
from cairn.kernels.quantize.quantize import Quantized, dequantize, quantize
from cairn.kernels.tiles import aligned_rows
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Entering, Epilogue, Kernels, Product, finished


class Fp8Rows(AnyRows):
    def __init__(self, weight_NK: Tensor) -> None:
        self.quantized = quantize(weight_NK.detach().contiguous())

    @property
    def nbytes(self) -> int:
        return self.quantized.values.nbytes + self.quantized.scale.nbytes

    @staticmethod
    def obstacle(weight_NK: Tensor) -> str | None:
        """Why a matrix has no such form here, or None."""
        columns = weight_NK.shape[1]
        if weight_NK.is_cuda and columns % 16:
            return f"rows of {columns} values are no multiple of 16 bytes"
        return None

    def quantizes(self, rows: int, kernels: Kernels) -> bool:
        values = self.quantized.values
        alone = rows == 1 and values.shape[1] <= LONGEST_ROW and not kernels.invariant
        return values.is_cuda and not alone

    def product(
        self, x_MK: Entering, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        if not self.quantized.values.is_cuda:
            x = cast(Tensor, x_MK)
            return finished(linear(x, self.dequantised(x.dtype)), bias_N, epilogue)
        kernels = epilogue.kernels or Kernels()
        if isinstance(x_MK, Tensor) and self.quantizes(len(x_MK), kernels):
            x_MK = quantize(x_MK.contiguous())
        if isinstance(x_MK, Tensor):
            return self._one_row(x_MK, bias_N, epilogue)
        return self._quantized_rows(x_MK, bias_N, epilogue, kernels)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrix that is meant."""
        return dequantize(self.quantized, dtype)

    def _one_row(self, x_1K: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
        gate = epilogue.gate
        swiglu = gate is not None and gate.is_swiglu
        y_1N = skinny_fp8(
            x_1K,
            self.quantized,
            bias_N=bias_N,
            activation="swiglu" if swiglu else None,
            prefetch=epilogue.kernels is not None,
        )
        return y_1N if gate is None or swiglu else gate.fast(y_1N)

    def _quantized_rows(
        self, x: Quantized, bias_N: Tensor | None, epilogue: Epilogue, kernels: Kernels
    ) -> Product:
        few = self._streams(len(x.values)) and not kernels.invariant
        prefetch = epilogue.kernels is not None
        if few and epilogue.onto_MN is not None and bias_N is None:
            sums_SMN = skinny_fp8_parts(x, self.quantized, prefetch=prefetch)
            if sums_SMN is not None:
                return Parts(sums_SMN)
        if few:
            y_MN = skinny_fp8(x, self.quantized, bias_N=bias_N, prefetch=prefetch)
        else:
            y_MN = self._many(x, kernels.invariant)
            y_MN = y_MN if bias_N is None else y_MN + bias_N
        gate = epilogue.gate
        if gate is not None and gate.has_kernel and epilogue.quantized:
            return cast(Product, gate.fast_fp8(y_MN))
        return y_MN if gate is None else gate.fast(y_MN)

    def _streams(self, rows: int) -> bool:
        """Is the kernel that reads weights at the memory's speed ahead of cuBLAS?"""
        return rows <= FEW_ROWS or wave_plan(rows, *self.quantized.values.shape) is not None

    def _many(self, x: Quantized, invariant: bool) -> Tensor:
        weight = self.quantized
        if not invariant:
            return matmul_fp8(x.values, weight.values, x.scale, weight.scale)
        rows = as_rows("x", x.values)  # one tile, whatever the number of rows
        y_MN = aligned_rows(len(rows), len(weight.values), rows, torch.bfloat16)
        launch(rows, weight.values, y_MN, x.scale.flatten(), weight.scale.flatten(), SMALL)
        return y_MN.contiguous()
