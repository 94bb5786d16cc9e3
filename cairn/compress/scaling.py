"""Scales of input columns that move from a matrix into whatever makes its input, at no cost when the model runs.

x W^T = (x / s) (W s)^T        the layer before gives out x / s from then on

norm -> q, k, v        norm -> gate, up (and router)        v -> out, where heads are not shared        up -> down
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from cairn.compress.layer_by_layer import LayerSites, MatrixSite
from cairn.compress.statistics import InputStatistics
from cairn.models.experts import ExpertLayer
from cairn.models.layers import FeedForward, Norm


class Fold(NamedTuple):
    """Matrices that share an input, and who can give that input out divided by a scale for each column."""

    name: str
    sites: list[MatrixSite]
    norm: Norm | None = None
    maker: MatrixSite | None = None  # or the matrix whose last rows make the columns: v, up
    layer: ExpertLayer | None = None  # whose router and shared gate read the same input

    @property
    def inputs(self) -> InputStatistics:
        return self.sites[0].inputs

    def weights(self) -> list[Tensor]:
        return [site.matrix.read().float() for site in self.sites]


def folds_of(walked: LayerSites) -> Iterator[Fold]:
    """Each fold once, in the order in which a token meets them."""
    layer, sites = walked.layer, {site.matrix.name.split(".", 2)[2]: site for site in walked.sites}
    qkv, out = sites["attention.qkv"], sites["attention.out"]
    if isinstance(layer.attention_norm, Norm):
        yield Fold("norm -> qkv", [qkv], norm=layer.attention_norm)
    if layer.attention.heads == layer.attention.kv_heads:
        yield Fold("v -> out", [out], maker=qkv)
    feed = layer.feed_forward
    if isinstance(feed, FeedForward):
        inner, down = sites["feed_forward.inner"], sites["feed_forward.down"]
        if isinstance(layer.feed_forward_norm, Norm):
            yield Fold("norm -> inner", [inner], norm=layer.feed_forward_norm)
        if feed.gate.is_linear_in_up:
            yield Fold("up -> down", [down], maker=inner)
        return
    own = [site for site in walked.sites if site.matrix.owner is feed]
    inner = [site for site in own if site.matrix.parameter == "inner_EFD"]
    if feed.shared is not None:
        inner.append(sites["feed_forward.shared.inner"])
    if isinstance(layer.feed_forward_norm, Norm):
        yield Fold("norm -> experts", inner, norm=layer.feed_forward_norm, layer=feed)
    if feed.gate.is_linear_in_up:
        for maker in inner:
            down = sites[maker.matrix.name.split(".", 2)[2].removesuffix("inner") + "down"]
            yield Fold("up -> down", [down], maker=maker)


def storable_scale(fold: Fold, scale_K: Tensor, stored: torch.dtype) -> Tensor:
    """The nearest scale that the layer before can take: the weights of a norm are stored in few bits."""
    if fold.norm is None:
        return scale_K
    one = 1.0 if fold.norm.plus_one else 0.0
    before_K = fold.norm.weight.detach().float() + one
    after_K = ((before_K / scale_K) - one).to(stored).float() + one
    usable_K = (after_K != 0) & (before_K != 0)
    return torch.where(usable_K, before_K / torch.where(usable_K, after_K, 1.0), 1.0)


def apply_scales(fold: Fold, scale_K: Tensor) -> None:
    """Divide what comes before, multiply the matrices. The scale is a storable one."""
    if fold.norm is not None:
        _divide_norm(fold.norm, scale_K)
    elif fold.maker is not None:
        _divide_rows(fold.maker, scale_K)
    for site in fold.sites:
        site.matrix.write(site.matrix.read().float() * scale_K)
    if fold.layer is not None:
        _multiply_columns(fold.layer.router, scale_K)
        shared = fold.layer.shared
        for owner in shared.output_gate.owners() if shared and shared.output_gate else ():
            _multiply_columns(owner, scale_K)


def _multiply_columns(owner: nn.Module, scale_K: Tensor) -> None:
    weight = owner.get_parameter("weight")
    value = (weight.detach().float() * scale_K).to(weight.dtype)
    owner.weight = nn.Parameter(value, requires_grad=False)


def _divide_norm(norm: Norm, scale_K: Tensor) -> None:
    one = 1.0 if norm.plus_one else 0.0
    after_K = (norm.weight.detach().float() + one) / scale_K - one
    norm.weight = nn.Parameter(after_K.to(norm.weight.dtype), requires_grad=False)
    if norm.bias is not None:
        bias = norm.bias.detach().float() / scale_K
        norm.bias = nn.Parameter(bias.to(norm.bias.dtype), requires_grad=False)


def _divide_rows(maker: MatrixSite, scale_K: Tensor) -> None:
    """The last rows of a joined matrix: v of qkv, up of gate and up; with their bias."""
    matrix = maker.matrix
    w_NK = matrix.read().float().clone()
    w_NK[-len(scale_K) :] /= scale_K[:, None]
    matrix.write(w_NK)
    if isinstance(matrix.owner, ExpertLayer) and matrix.owner.inner_bias_EF is not None:
        matrix.owner.inner_bias_EF.data[matrix.expert, -len(scale_K) :] /= scale_K
    if matrix.linear is not None:
        last = matrix.linear.owners()[-1]
        bias_N = cast(Tensor | None, getattr(last, "bias", None))
        if bias_N is not None:
            wide = bias_N.detach().float().clone()
            wide[-len(scale_K) :] /= scale_K
            last.bias = nn.Parameter(wide.to(bias_N.dtype), requires_grad=False)
