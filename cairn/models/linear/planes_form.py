"""Quantised weights that are dequantised for each product: the reference for every kind, on any device.

Activations are multiplied as they are, also where the checkpoint wants them rounded: what the planes stand for is
exact, and a kernel that rounds activations is held against it within its rounding.
"""

import torch
from torch import Tensor

from cairn.models.cpu_half_precision import linear
from cairn.models.linear.float_product import float_product
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, LinearForm, Product, finished
from cairn.models.quantized.planes import Planes, dequantized


class PlanesForm(AnyRows):
    def __init__(self, planes: Planes) -> None:
        self.planes = planes

    @property
    def nbytes(self) -> int:
        kept = (self.planes.levels_NK, self.planes.scales, self.planes.shifts, self.planes.order_K)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        y_MN = linear(x_MK, dequantized(self.planes, x_MK.dtype))
        return finished(y_MN, bias_N, epilogue)


class FloatForm(AnyRows):
    """A matrix in floating point: beside others that are quantised, or dequantised for want of a kernel."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK

    @property
    def nbytes(self) -> int:
        return self.weight_NK.nbytes

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        return float_product(x_MK, self.weight_NK, bias_N, epilogue)


class SideBySide(AnyRows):
    """Maps of one input whose matrices have no common form: each multiplies in its own."""

    def __init__(self, forms: list[LinearForm]) -> None:
        self.forms = forms

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self.forms)

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        inner = Epilogue(kernels=epilogue.kernels)
        parts = [form.product(x_MK, None, inner) for form in self.forms]
        whole = [part for part in parts if isinstance(part, Tensor)]
        return finished(torch.cat(whole, -1), bias_N, epilogue)
