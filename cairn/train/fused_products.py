"""Products with what stands before them, as one operation each with a backward of its own.

    norm_product     norm(x + residual) -> enter -> @ weight.T      and the sum, for the next residual
    gated_product    (act(gate) * up)            -> @ weight.T
    plain_product    x                           -> @ weight.T

What stands before a product is cheap to compute again and large to keep, so each may forget it. `enter` is a rank's
word for "now come the columns of the weight": nothing for one process; under tensor parallelism the gradients of all
ranks are summed there, under sequence parallelism tokens are gathered, too. A pipeline that wants weight gradients
later finds what they are made of in a list (`deferred`). Knows no layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.layer.activation import gated_activation
from cairn.kernels.layer.activation_backward import gated_activation_backward
from cairn.kernels.norm.rmsnorm import rmsnorm_with_rstd
from cairn.kernels.norm.rmsnorm_backward import rmsnorm_backward
from cairn.models.shards import ALONE, Shards
from cairn.train.parallel.pipeline.deferred import Deferred
from cairn.train.parallel.tensor import TensorShards
from cairn.train.products import OfWeight, Products


class Settings(NamedTuple):
    """Settings shared by all matmuls of a pass."""

    products: Products
    keep_norms: bool = True  # their outputs, rather than compute them again
    keep_activations: bool = True
    shards: Shards = ALONE
    # Where weight gradients go that are computed later; None: at once.
    deferred: Deferred | None = None


class Normed(NamedTuple):
    weight: Tensor
    eps: float
    plus_one: bool


def norm_product(
    x: Tensor, residual: Tensor | None, norm: Normed, weight: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The product, and x + residual; x itself where there is none."""
    how = (norm.eps, norm.plus_one, settings)
    if residual is None:
        return _NormProduct.apply(x, None, norm.weight, weight, *how), x
    return _NormProduct.apply(x, residual, norm.weight, weight, *how)


def gated_product(inner: Tensor, weight: Tensor, activation: Any, settings: Settings) -> Tensor:
    return _GatedProduct.apply(inner, weight, activation, settings)


def plain_product(x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    return _PlainProduct.apply(x, weight, settings)


class _NormProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        weight: Tensor,
        eps: float,
        plus_one: bool,
        settings: Settings,
    ) -> Any:
        y, total, rstd = rmsnorm_with_rstd(x, residual, norm, eps, plus_one=plus_one)
        y = settings.shards.enter(y)
        out, kept = settings.products.forward(y, weight)
        ctx.save_for_backward(total, rstd, norm, weight, y if settings.keep_norms else None, *kept)
        ctx.parameter, ctx.plus_one, ctx.settings = _to_defer(weight, settings), plus_one, settings
        ctx.added = residual is not None
        return (out, total) if residual is not None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        total, rstd, norm, weight, y, *kept = ctx.saved_tensors
        settings: Settings = ctx.settings
        g = grads[0].contiguous()
        dy, of_weight = settings.products.backward(g, weight, tuple(kept))
        dy = _left(settings.shards, dy)
        beside = grads[1].contiguous() if ctx.added else None
        again = torch.empty_like(dy) if y is None else None
        dx, dn = rmsnorm_backward(
            dy, total, rstd, norm, plus_one=ctx.plus_one, grad_residual=beside, y=again
        )
        y = y if again is None else settings.shards.enter(again)
        is_trained = ctx.needs_input_grad[3]  # a frozen weight has no gradient
        dw = _weight_gradient(settings, ctx.parameter, y, g, of_weight) if is_trained else None
        return dx, dx if ctx.added else None, dn, dw, None, None, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inner: Tensor, weight: Tensor, activation: Any, settings: Settings
    ) -> Tensor:
        y = gated_activation(inner, None, activation)
        out, kept = settings.products.forward(y, weight)
        ctx.save_for_backward(inner, weight, y if settings.keep_activations else None, *kept)
        ctx.parameter, ctx.activation, ctx.settings = (
            _to_defer(weight, settings),
            activation,
            settings,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        inner, weight, y, *kept = ctx.saved_tensors
        settings: Settings = ctx.settings
        g = grads[0].contiguous()
        dy, of_weight = settings.products.backward(g, weight, tuple(kept))
        again = torch.empty_like(dy) if y is None else None
        d_inner, _ = gated_activation_backward(dy, inner, None, ctx.activation, y=again)
        y = y if again is None else again
        is_trained = ctx.needs_input_grad[1]
        dw = _weight_gradient(settings, ctx.parameter, y, g, of_weight) if is_trained else None
        return d_inner, dw, None, None


class _PlainProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:  # type: ignore[override]
        y, kept = settings.products.forward(x, weight)
        ctx.save_for_backward(x, weight, *kept)
        ctx.parameter, ctx.settings = _to_defer(weight, settings), settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, *kept = ctx.saved_tensors
        settings: Settings = ctx.settings
        g = grads[0].contiguous()
        dx, of_weight = settings.products.backward(g, weight, tuple(kept))
        is_trained = ctx.needs_input_grad[1]
        dw = _weight_gradient(settings, ctx.parameter, x, g, of_weight) if is_trained else None
        return dx, dw, None


def _to_defer(weight: Tensor, settings: Settings) -> Tensor | None:
    """The parameter itself, which gets its gradient later; not what is kept of it for backward."""
    return weight if settings.deferred is not None else None


def _left(shards: Shards, gradient: Tensor) -> Tensor:
    """Gradient of `enter` for operations with a backward of their own."""
    return shards.leave(gradient) if isinstance(shards, TensorShards) else gradient


def _weight_gradient(
    settings: Settings, weight: Any, x: Tensor, g: Tensor, of_weight: OfWeight
) -> Tensor | None:
    if settings.deferred is None:
        return of_weight(x)
    settings.deferred.append((weight, x, g))
    return None
