"""Weights as float8 e4m3 with a scale per row: half the bytes of bfloat16.

On a GPU the activations are rounded to float8 as well, each token by its own largest value, and the tensor cores
multiply in float8; elsewhere the weights are dequantised for each product, which shows what they stand for.
"""

import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.matmul.matmul_fp8 import matmul_fp8
from cairn.kernels.quantize.quantize import dequantize, quantize
from cairn.models.linear.form import PLAIN, Epilogue, finished


class Fp8Rows:
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

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        if x_MK.is_cuda:
            x, weight = quantize(x_MK.contiguous()), self.quantized
            y_MN = matmul_fp8(x.values, weight.values, x.scale, weight.scale, out_dtype=x_MK.dtype)
        else:
            y_MN = F.linear(x_MK, dequantize(self.quantized, x_MK.dtype))
        return finished(y_MN, bias_N, epilogue)
