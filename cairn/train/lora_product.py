"""A frozen product and its adapter as one operation with a backward of its own: few passes over large tensors.

    forward    y = x W'      h = x A'      y += s h B'          y is written once and added to once
    backward   dh = s dy B   dx = dy W + dh A   dA = dh' x   dB = s dy' h

Composed of torch's operations the same takes a scaled copy of each part, their concatenation and a sum: four more
passes over y. For LoRA and rsLoRA on one rank; everything else is composed (`models.adapter.lora`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.models.adapter.lora import LoRA
from cairn.models.linear.maps import Linear
from cairn.train.fused_products import Settings, plain_product


class Span(NamedTuple):
    """Where a part lies: columns of y, columns of h."""

    rows: slice
    ranks: slice
    scale: float


def adapted_product(part: Linear, x_MK: Tensor, weight_NK: Tensor, how: Settings) -> Tensor:
    """x W' and what hangs on this map, with gradients."""
    adapter = getattr(part, "adapter", None)
    if part.addend is None:
        return plain_product(x_MK, weight_NK, how)
    if not isinstance(adapter, LoRA) or not suits(adapter, weight_NK, how):
        return plain_product(x_MK, weight_NK, how) + part.addend(x_MK)
    spans = list(spans_of(adapter))
    bs = [adapter.b_of(part) for part in adapter.parts if part.rank]
    return _LoraProduct.apply(x_MK, weight_NK, adapter.a_RK, spans, how, *bs)


def suits(adapter: LoRA, weight_NK: Tensor, how: Settings) -> bool:
    alone = adapter.shards.size == 1 and how.deferred is None
    same = adapter.a_RK.dtype == weight_NK.dtype
    return alone and same and adapter.enabled and not adapter.dora


def spans_of(adapter: LoRA) -> Iterator[Span]:
    row = rank = 0
    for part in adapter.parts:
        if part.rank:
            yield Span(slice(row, row + part.rows), slice(rank, rank + part.rank), part.scale)
        row, rank = row + part.rows, rank + part.rank


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        spans: list[Span],
        settings: Settings,
        *bs: Tensor,
    ) -> Tensor:
        y, kept = settings.products.forward(x, weight)
        h = x @ a.T
        for span, b in zip(spans, bs, strict=True):
            y[:, span.rows].addmm_(h[:, span.ranks], b.T, alpha=span.scale)
        ctx.save_for_backward(x, weight, a, h, *bs, *kept)
        ctx.spans, ctx.settings = spans, settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, a, h, *rest = ctx.saved_tensors
        spans: list[Span] = ctx.spans
        bs, kept = rest[: len(spans)], rest[len(spans) :]
        g = grads[0].contiguous()
        dx, of_weight = ctx.settings.products.backward(g, weight, tuple(kept))
        dh, dbs = torch.empty_like(h), []
        for span, b in zip(spans, bs, strict=True):
            part = g[:, span.rows]
            dh[:, span.ranks] = span.scale * (part @ b)
            dbs.append(span.scale * (part.T @ h[:, span.ranks]))
        dx = dx.addmm_(dh, a)
        dw = of_weight(x) if ctx.needs_input_grad[1] else None
        return dx, dw, dh.T @ x, None, None, *dbs
