"""A frozen product and its adapter as one operation with a backward of its own: few passes over large tensors.

    forward    h = x A'      y = s h B'    y += x W'
    backward   dh = s dy B   dx = dh A     dx += dy W     dA = dh' x   dB = s dy' h

The small product comes first and the large one adds to it: a large product hides what it reads of its result, and a
small one that adds takes two to three times as long as one that writes. Composed of torch's operations the same takes a
scaled copy of each part, their concatenation and a sum: four more passes over y. A frozen weight in 4 bits is
dequantised in forward and again in backward, and not kept between. For LoRA and rsLoRA on one rank; everything else is
composed (`models.adapter.lora`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.models.adapter.lora import LoRA
from cairn.models.linear.form import PLAIN
from cairn.models.linear.maps import Linear
from cairn.models.linear.nf4 import NF4Form
from cairn.train.fused_products import Settings, plain_product
from cairn.train.products import PLAIN as PLAIN_PRODUCTS

LONGEST = 16384  # columns of a sum over which cuBLAS adds to a result as fast as it writes one


class Span(NamedTuple):
    """Where a part lies: columns of y, columns of h."""

    rows: slice
    ranks: slice
    scale: float


def adapted_product(part: Linear, x_MK: Tensor, how: Settings) -> Tensor:
    """x W' and what hangs on this map, with gradients; without the bias."""
    adapter = getattr(part, "adapter", None)
    frozen = part.form if isinstance(part.form, NF4Form) else None
    if not isinstance(adapter, LoRA) or not suits(adapter, x_MK.dtype, how):
        if part.form is None:
            y_MN = plain_product(x_MK, part.matrix(), how)
        else:
            y_MN = cast(Tensor, part._multiply(x_MK, PLAIN, biased=False))
        return y_MN if part.addend is None else y_MN + part.addend(x_MK)
    weight = part.matrix() if frozen is None else frozen
    spans = list(spans_of(adapter))
    bs = [adapter.b_of(part) for part in adapter.parts if part.rank]
    return _LoraProduct.apply(x_MK, weight, adapter.a_RK, spans, how, *bs)


def suits(adapter: LoRA, dtype: torch.dtype, how: Settings) -> bool:
    alone = adapter.shards.size == 1 and how.deferred is None
    same = adapter.a_RK.dtype == dtype
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
        weight: Tensor | NF4Form,
        a: Tensor,
        spans: list[Span],
        settings: Settings,
        *bs: Tensor,
    ) -> Tensor:
        dense, h = _dense(weight, x), x @ a.T
        if settings.products is PLAIN_PRODUCTS:
            covered = sum(span.rows.stop - span.rows.start for span in spans)
            y = (x.new_empty if covered == len(dense) else x.new_zeros)(len(x), len(dense))
            for span, b in zip(spans, bs, strict=True):
                _times(h[:, span.ranks], b.T, span.scale, y[:, span.rows])
            y.addmm_(x, dense.T)
            kept: tuple[Tensor, ...] = ()
        else:
            y, kept = settings.products.forward(x, dense)
            for span, b in zip(spans, bs, strict=True):
                y[:, span.rows].addmm_(h[:, span.ranks], b.T, alpha=span.scale)
        ctx.form = None if isinstance(weight, Tensor) else weight
        ctx.save_for_backward(x, None if ctx.form else weight, a, h, *bs, *kept)
        ctx.spans, ctx.settings = spans, settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, a, h, *rest = ctx.saved_tensors
        spans: list[Span] = ctx.spans
        bs, kept = rest[: len(spans)], rest[len(spans) :]
        g = grads[0].contiguous()
        weight = _dense(ctx.form or weight, g)
        dh, dbs = torch.empty_like(h), []
        for span, b in zip(spans, bs, strict=True):
            part = g[:, span.rows]
            _times(part, b, span.scale, dh[:, span.ranks])
            dbs.append(_times(part.T, h[:, span.ranks], span.scale, torch.empty_like(b)))
        if ctx.settings.products is PLAIN_PRODUCTS and len(weight) <= LONGEST:
            dx = (dh @ a).addmm_(g, weight)
            dw = g.T @ x if ctx.needs_input_grad[1] else None
        else:
            dx, of_weight = ctx.settings.products.backward(g, weight, tuple(kept))
            dx = dx.addmm_(dh, a)
            dw = of_weight(x) if ctx.needs_input_grad[1] else None
        return dx, dw, dh.T @ x, None, None, *dbs


def _times(x: Tensor, y: Tensor, scale: float, out: Tensor) -> Tensor:
    """scale * x y, written to `out`, whatever lies there."""
    return out.addmm_(x, y, beta=0.0, alpha=scale)


def _dense(weight: Tensor | NF4Form, like: Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense(like.dtype)
