"""A frozen product and its adapter as one operation with a backward of its own: few passes over large tensors.

    forward    h = x A'      y = s h B'    y += x W'
    backward   dh = s dy B   dx = dh A     dx += dy W     dA = dh' x   dB = s dy' h

    of many tokens   h = x A'      y = [x h] [W sB]'      where x is made here, with room for h beside it

The small product comes first and the large one adds to it: a large product hides what it reads of its result, and a
small one that adds takes two to three times as long as one that writes. Composed of torch's operations the same takes a
scaled copy of each part, their concatenation and a sum: four more passes over y. A frozen weight in 4 bits is
dequantised in forward and again in backward, and not kept between. x is given, or is made here by a norm or an
activation and may be forgotten, as `fused_products` forgets it. For LoRA and rsLoRA on one rank; everything else is
composed (`models.adapter.lora`).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cairn.kernels.adapter.lora_slopes import MANY as MANY_ROWS
from cairn.kernels.adapter.lora_slopes import RANKS, lora_slopes
from cairn.kernels.layer.activation import gated_activation
from cairn.kernels.layer.activation_backward import gated_activation_backward
from cairn.kernels.norm.rmsnorm import rmsnorm_with_rstd
from cairn.kernels.norm.rmsnorm_backward import rmsnorm_backward
from cairn.models.adapter.lora import LoRA
from cairn.models.linear.form import PLAIN
from cairn.models.linear.maps import Linear
from cairn.models.linear.nf4 import NF4Form
from cairn.train.fused_products import Normed, Settings, plain_product
from cairn.train.products import PLAIN as PLAIN_PRODUCTS
from cairn.train.products import OfWeight

MANY = 4  # tokens for each column of x from which a copy of the weight costs less than a second pass over y
ALIGNED = 8  # columns that a tensor core wants rows of 16 bits to begin at
LINE = 64  # values of 16 bits in a cache line
LONGEST = 16384  # columns of a sum over which cuBLAS adds to a result as fast as it writes one


class Span(NamedTuple):
    """Location of a part: columns of y, columns of h."""

    rows: slice
    ranks: slice
    scale: float


class _Map(NamedTuple):
    """A map and its adapter, as the operations below take them."""

    weight: Tensor | NF4Form
    a_RK: Tensor
    bs: list[Tensor]
    spans: list[Span]

    def shrink(self, x: Tensor, out: Tensor) -> Tensor:
        """h, written to `out` with the zeros behind it."""
        ranks, spare = len(self.a_RK), self._spare()
        _times(x, F.pad(self.a_RK, (0, 0, 0, spare)).T if spare else self.a_RK.T, 1.0, out)
        return out[:, :ranks]

    def covers(self, rows: int) -> bool:
        return sum(span.rows.stop - span.rows.start for span in self.spans) == rows

    def room(self, like: Tensor, settings: Settings) -> Tensor | None:
        """Buffer for concatenated x and h if one matmul of both is faster than two."""
        ranks, width = self.a_RK.shape
        plain = settings.products is PLAIN_PRODUCTS and isinstance(self.weight, Tensor)
        if not plain or len(like) < MANY * width or ranks % ALIGNED or width % ALIGNED:
            return None
        return like.new_empty(len(like), width + ranks + self._spare())

    def _spare(self) -> int:
        """Columns of zeros behind h, so that every row begins at a cache line."""
        return -sum(self.a_RK.shape) % LINE

    def of_x(self, room: Tensor | None) -> Tensor | None:
        return None if room is None else room[:, : self.a_RK.shape[1]]

    def beside(self) -> Tensor:
        """W and s B side by side: what x and h side by side are multiplied with."""
        weight = cast(Tensor, self.weight)
        (rows, width), ranks = weight.shape, len(self.a_RK) + self._spare()
        both = weight.new_empty(rows, width + ranks)
        both[:, :width] = weight
        if ranks > len(self.bs[0].T) or not self.covers(rows):
            both[:, width:] = 0
        for span, b in zip(self.spans, self.bs, strict=True):
            into = both[span.rows, width + span.ranks.start : width + span.ranks.stop]
            torch.mul(b, span.scale, out=into)
        return both


def adapted_product(part: Linear, x_MK: Tensor, how: Settings) -> Tensor:
    """x W' and what hangs on this map, with gradients; without the bias."""
    if is_fused(part, x_MK.dtype, how):
        weight, a, bs, spans = _map(part)
        return _LoraProduct.apply(x_MK, weight, a, spans, how, *bs)
    if part.form is None:
        y_MN = plain_product(x_MK, part.matrix(), how)
    else:
        y_MN = cast(Tensor, part._multiply(x_MK, PLAIN, biased=False))
    return y_MN if part.addend is None else y_MN + part.addend(x_MK)


def norm_adapted_product(
    part: Linear, x: Tensor, residual: Tensor | None, norm: Normed, how: Settings
) -> tuple[Tensor, Tensor]:
    """Adapted matmul of norm(x + residual); also returns the sum (or x). Requires `is_fused`."""
    weight, a, bs, spans = _map(part)
    about = (norm.eps, norm.plus_one, spans, how)
    found = _NormLoraProduct.apply(x, residual, norm.weight, weight, a, about, *bs)
    return (found, x) if residual is None else found


def gated_adapted_product(part: Linear, inner: Tensor, activation: Any, how: Settings) -> Tensor:
    """Adapted matmul of act(gate) * up. Requires `is_fused`."""
    weight, a, bs, spans = _map(part)
    return _GatedLoraProduct.apply(inner, weight, a, (activation, spans, how), *bs)


def is_fused(part: Linear, dtype: torch.dtype, how: Settings) -> bool:
    """Return whether this map has an adapter that one fused operation supports."""
    adapter = getattr(part, "adapter", None)
    known = part.form is None or isinstance(part.form, NF4Form)
    return isinstance(adapter, LoRA) and known and suits(adapter, dtype, how)


def _map(part: Linear) -> _Map:
    adapter = cast(LoRA, part.adapter)
    weight = part.form if isinstance(part.form, NF4Form) else part.matrix()
    bs = [adapter.b_of(one) for one in adapter.parts if one.rank]
    return _Map(weight, adapter.a_RK, bs, list(spans_of(adapter)))


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
        y, kept = _multiply(ctx, x, _Map(weight, a, list(bs), spans), settings)
        ctx.save_for_backward(x, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        x, *kept = ctx.saved_tensors
        dx, dbs, of_x = _walk_back(ctx, grads[0].contiguous(), kept)
        dw, da = of_x(x, ctx.needs_input_grad[1])
        return dx, dw, da, None, None, *dbs


class _NormLoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        weight: Tensor | NF4Form,
        a: Tensor,
        about: tuple[float, bool, list[Span], Settings],
        *bs: Tensor,
    ) -> Any:
        eps, ctx.plus_one, spans, settings = about
        part = _Map(weight, a, list(bs), spans)
        room = part.room(x, settings)
        y, total, rstd = rmsnorm_with_rstd(
            x, residual, norm, eps, plus_one=ctx.plus_one, out=part.of_x(room)
        )
        out, kept = _multiply(ctx, y, part, settings, room, settings.keep_norms)
        ctx.save_for_backward(total, rstd, norm, y if settings.keep_norms else None, *kept)
        ctx.added = residual is not None
        return (out, total) if ctx.added else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        total, rstd, norm, y, *kept = ctx.saved_tensors
        # Below the first layer nothing is trained.
        wanted = any(ctx.needs_input_grad[:3]) or y is None
        dy, dbs, of_y = _walk_back(ctx, grads[0].contiguous(), kept, wanted)
        if dy is None:
            dw, da = of_y(y, ctx.needs_input_grad[3])
            return None, None, None, dw, da, None, *dbs
        again = torch.empty_like(dy) if y is None else None
        dx, dn = rmsnorm_backward(
            dy,
            total,
            rstd,
            norm,
            plus_one=ctx.plus_one,
            grad_residual=grads[1].contiguous() if ctx.added else None,
            weight_grad=ctx.needs_input_grad[2],
            y=again,
        )
        dw, da = of_y(y if again is None else again, ctx.needs_input_grad[3])
        return dx, dx if ctx.added else None, dn, dw, da, None, *dbs


class _GatedLoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        inner: Tensor,
        weight: Tensor | NF4Form,
        a: Tensor,
        about: tuple[Any, list[Span], Settings],
        *bs: Tensor,
    ) -> Tensor:
        ctx.activation, spans, settings = about
        part, keep = _Map(weight, a, list(bs), spans), settings.keep_activations
        room = part.room(inner, settings)
        y = gated_activation(inner, None, ctx.activation, out=part.of_x(room))
        out, kept = _multiply(ctx, y, part, settings, room, keep)
        ctx.save_for_backward(inner, y if keep else None, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        inner, y, *kept = ctx.saved_tensors
        dy, dbs, of_y = _walk_back(ctx, grads[0].contiguous(), kept)
        again = torch.empty_like(dy) if y is None else None
        d_inner, _ = gated_activation_backward(dy, inner, None, ctx.activation, y=again)
        dw, da = of_y(y if again is None else again, ctx.needs_input_grad[1])
        return d_inner, dw, da, None, *dbs


def _multiply(
    ctx: Any,
    x: Tensor,
    part: _Map,
    settings: Settings,
    room: Tensor | None = None,
    keep: bool = True,
) -> tuple[Tensor, list[Tensor | None]]:
    """The product, and what `_walk_back` needs of it beside x. `room`: x lies there, unless `keep` not for long."""
    weight, a, bs, spans = part
    ctx.form = None if isinstance(weight, Tensor) else weight
    ctx.spans, ctx.settings = spans, settings
    more: tuple[Tensor, ...] = ()
    if room is not None:
        h = part.shrink(x, room[:, x.shape[1] :])
        y = room @ part.beside().T
        h = h if keep else h.contiguous()
    else:
        dense, h = _dense(weight, x), x @ a.T
        y, more = _apart(x, dense, h, part, settings)
    return y, [weight if isinstance(weight, Tensor) else None, a, h, *bs, *more]


def _apart(
    x: Tensor, dense: Tensor, h: Tensor, part: _Map, settings: Settings
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x W' + s h B', one product after the other; and what the large one leaves for backward."""
    if settings.products is not PLAIN_PRODUCTS:
        y, more = settings.products.forward(x, dense)
        for span, b in zip(part.spans, part.bs, strict=True):
            y[:, span.rows].addmm_(h[:, span.ranks], b.T, alpha=span.scale)
        return y, more
    y = (x.new_empty if part.covers(len(dense)) else x.new_zeros)(len(x), len(dense))
    for span, b in zip(part.spans, part.bs, strict=True):
        _times(h[:, span.ranks], b.T, span.scale, y[:, span.rows])
    return y.addmm_(x, dense.T), ()


# dW, where it is wanted, and dA: from x, which may come later than dx does.
_OfX = Callable[[Tensor, bool], tuple[Tensor | None, Tensor]]


def _walk_back(
    ctx: Any, g: Tensor, kept: list[Any], wanted: bool = True
) -> tuple[Any, list[Tensor], _OfX]:
    """dx, dB of each part, and how the others come from x. Unless `wanted`, dx may be None."""
    weight, a, h, *rest = kept
    spans, products = ctx.spans, ctx.settings.products
    bs, more = rest[: len(spans)], tuple(rest[len(spans) :])
    dh, dbs = _slopes(g, h, bs, spans)
    of_weight: OfWeight = lambda x: g.T @ x  # noqa: E731
    if not wanted and products is PLAIN_PRODUCTS:
        return None, dbs, lambda x, wanted: (of_weight(x) if wanted else None, dh.T @ x)
    weight = _dense(ctx.form or weight, g)
    if products is PLAIN_PRODUCTS and len(weight) <= LONGEST:
        dx = (dh @ a).addmm_(g, weight)
    else:
        dx, of_weight = products.backward(g, weight, more)
        dx = dx.addmm_(dh, a)
    return dx, dbs, lambda x, wanted: (of_weight(x) if wanted else None, dh.T @ x)


def _slopes(
    g: Tensor, h: Tensor, bs: list[Tensor], spans: list[Span]
) -> tuple[Tensor, list[Tensor]]:
    """dh, and dB of each part: in one pass over g where the parts are alike and cover all columns."""
    sizes = [span.rows.stop - span.rows.start for span in spans]
    alike = len({(b.shape[1], span.scale) for span, b in zip(spans, bs, strict=True)}) == 1
    whole = sum(sizes) == g.shape[1] and len(g) >= MANY_ROWS
    if g.is_cuda and alike and whole and bs[0].shape[1] in RANKS:
        b = bs[0] if len(bs) == 1 else torch.cat(bs)
        dh, db = lora_slopes(g, b, h, sizes, spans[0].scale)
        return dh, list(db.split(sizes))
    dh, dbs = h.new_empty(h.shape), []
    for span, b in zip(spans, bs, strict=True):
        part = g[:, span.rows]
        _times(part, b, span.scale, dh[:, span.ranks])
        dbs.append(_times(part.T, h[:, span.ranks], span.scale, torch.empty_like(b)))
    return dh, dbs


def _times(x: Tensor, y: Tensor, scale: float, out: Tensor) -> Tensor:
    """scale * x y, written to `out`, whatever lies there."""
    return out.addmm_(x, y, beta=0.0, alpha=scale)


def _dense(weight: Tensor | NF4Form, like: Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense(like.dtype)
