"""The three products of a linear layer under training, in 16 or in 8 bits.

    forward     y  = x  @ w.T       [M, K] [N, K] -> [M, N]
    backward    dx = g  @ w         [M, N] [N, K] -> [M, K]
                dw = g.T @ x        [N, M] [M, K] -> [N, K]

In fp8 each operand is scaled so that its largest magnitude is the format's: one scale for a whole tensor, or one for
each row, along the dimension that is summed over. Values are e4m3; gradients, scaled by tensor, are e5m2, which
reaches further down. Sums are float32; results have the type of x. A tensor core wants both operands to lie along the
summed dimension, so backward quantises transposed copies. Masters and states stay as they are. Sizes that are no
multiple of 16 stay in 16 bits.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.kernels.quantize.quantize_tensor import quantize_tensor
from cairn.kernels.quantize.quantize_transposed import E5M2, quantize_transposed
from cairn.models.linear.form import Epilogue, finished
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear

Kept = tuple[Tensor, ...]  # small tensors that forward leaves for backward: scales
OfWeight = Callable[[Tensor], Tensor]  # the gradient of the weight, from x


class Products(Protocol):
    def forward(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Kept]: ...

    def backward(self, g_MN: Tensor, w_NK: Tensor, kept: Kept) -> tuple[Tensor, OfWeight]:
        """dx, and how dw comes from x: which may have to be computed again, from dx or beside it."""
        ...


class Plain:
    """Reference matmul with torch."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Kept]:
        return x_MK @ w_NK.t(), ()

    def backward(self, g_MN: Tensor, w_NK: Tensor, kept: Kept) -> tuple[Tensor, OfWeight]:
        return g_MN @ w_NK, lambda x_MK: g_MN.t() @ x_MK


class Fp8ByTensor:
    """Scales of x and w are found in forward and used again in backward, where both are the same tensors."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Kept]:
        if not _fits(x_MK, w_NK):
            return PLAIN.forward(x_MK, w_NK)
        x, w = quantize_tensor(x_MK.contiguous()), quantize_tensor(w_NK)
        return _product(x, w, x_MK.dtype, fast=True), (x.scale, w.scale)

    def backward(self, g_MN: Tensor, w_NK: Tensor, kept: Kept) -> tuple[Tensor, OfWeight]:
        if not kept:
            return PLAIN.backward(g_MN, w_NK, kept)
        scale_x, scale_w = kept
        values, g_transposed, scale = quantize_transposed(g_MN, None, E5M2, both=True)
        w = Quantized(quantize_transposed(w_NK, scale_w).transposed, scale_w)
        dx = _product(Quantized(cast(Tensor, values), scale), w, g_MN.dtype, fast=False)

        def of_weight(x_MK: Tensor) -> Tensor:
            x = Quantized(quantize_transposed(x_MK.contiguous(), scale_x).transposed, scale_x)
            return _product(Quantized(g_transposed, scale), x, x_MK.dtype, fast=False)

        return dx, of_weight


class Fp8ByRow:
    """dw stays in 16 bits: its sums run over all tokens, and so would each scale."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Kept]:
        if not _fits(x_MK, w_NK):
            return PLAIN.forward(x_MK, w_NK)
        x, w = quantize(x_MK.contiguous()), quantize(w_NK)
        return _product(x, w, x_MK.dtype, fast=True), ()

    def backward(self, g_MN: Tensor, w_NK: Tensor, kept: Kept) -> tuple[Tensor, OfWeight]:
        if not _fits(g_MN, w_NK):
            return PLAIN.backward(g_MN, w_NK, kept)
        g, w = quantize(g_MN), quantize(w_NK.t().contiguous())
        return _product(g, w, g_MN.dtype, fast=False), lambda x_MK: g_MN.t() @ x_MK


PLAIN = Plain()


def make_products(fp8: Literal["none", "tensor", "row"]) -> Products:
    return {"none": PLAIN, "tensor": Fp8ByTensor(), "row": Fp8ByRow()}[fp8]


def _fits(x_MK: Tensor, w_NK: Tensor) -> bool:
    return not any(size % 16 for size in (*x_MK.shape, *w_NK.shape))


def _product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] @ b [N, K].T; `fast`: the tensor core's own sums of about 14 bits."""
    scale_b = b.scale.reshape(()) if b.scale.numel() == 1 else b.scale.reshape(1, -1)
    scale_a = a.scale.reshape(()) if a.scale.numel() == 1 else a.scale.reshape(-1, 1)
    if a.values.is_cpu:
        # On a CPU torch multiplies float8 one number at a time, thousands of times slower; both sum in float32.
        return (a.values.float() @ b.values.float().t() * scale_a * scale_b).to(dtype)
    by_row = scale_a.dim() > 0
    # cuBLAS writes bfloat16 where there are scales by row.
    out = torch.bfloat16 if by_row and a.values.is_cuda else dtype
    fast = fast and a.values.is_cuda
    y = torch._scaled_mm(
        a.values, b.values.t(), scale_a, scale_b, out_dtype=out, use_fast_accum=fast
    )
    return y.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:  # type: ignore[override]
        y, kept = products.forward(x, weight)
        ctx.save_for_backward(x, weight, *kept)
        ctx.products = products
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, *kept = ctx.saved_tensors
        dx, of_weight = ctx.products.backward(grads[0].contiguous(), weight, tuple(kept))
        return dx, of_weight(x) if ctx.needs_input_grad[1] else None, None


def product(x_MK: Tensor, w_NK: Tensor, products: Products) -> Tensor:
    """x @ w.T, differentiable, by the given products."""
    return _Product.apply(x_MK, w_NK, products)


class ProductForm:
    """The parameters of a linear map, looked up at each call because FSDP puts others in their place."""

    nbytes = 0  # none of its own

    def __init__(self, part: Linear, products: Products) -> None:
        self.part, self.products = part, products

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
        (weight,) = self.part.matrices()
        owner = self.part.owners()[0]
        bias = None if bias_N is None else cast(Tensor, owner.bias)  # the parameter, not its copy
        return finished(product(x_MK, weight, self.products), bias, epilogue)


def through_products(model: nn.Module, products: Products) -> None:
    """The plain form of a model with other products: its linear maps, not the embedding and the head."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear) or (
            isinstance(module, ColumnParallelLinear) and module.fused is not None
        ):
            module.take(ProductForm(module, products))
