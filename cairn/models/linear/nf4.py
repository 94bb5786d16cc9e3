"""Frozen weights in NF4, the base of QLoRA (arXiv:2305.14314): `kernels.quantize.nf4` as the form of a linear map.

A product dequantises the matrix, forward and backward, and keeps neither.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.quantize.nf4 import NF4, dequantize_nf4, quantize_nf4
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, Product, finished


class NF4Form(AnyRows):
    """The form of a frozen linear map."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.quantized = quantize_nf4(weight_NK)

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K], made anew."""
        return dequantize_nf4(self.quantized, dtype)

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        return finished(_NF4Product.apply(x_MK, self.quantized), bias_N, epilogue)


class _NF4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight: NF4) -> Tensor:  # type: ignore[override]
        ctx.weight = weight
        return linear(x_MK, dequantize_nf4(weight, x_MK.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0] @ dequantize_nf4(ctx.weight, grads[0].dtype), None
