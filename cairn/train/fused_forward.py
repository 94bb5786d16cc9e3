"""The same model through fewer and larger kernels, with gradients: the form that trains on a GPU.

    Transformer.forward     one torch operation after another; any device; the form to read first
    FusedTraining           the same parameters, per layer:

        add + norm + q, k, v | norm heads, rotate | attend | out | add + norm + gate, up | activation + down

With `norms` the outputs of norms are not kept but computed a second time in backward, with `selective` those of
activations, too: two percent of the time and a fifth of the memory. With `full` a layer keeps its input only. What the
kernels cannot express is trained by the plain form; `obstacle` says so. The two agree up to rounding. Several ranks run
their layers through `FusedLayers`, whatever their part of the model is. Wants joined projections.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cairn.kernels.attention.attention import attention
from cairn.kernels.attention.attention_problem import WIDTHS
from cairn.kernels.layer.embedding import embedding
from cairn.kernels.layer.rope import Heads, rope, rope_table
from cairn.kernels.norm.rmsnorm import add_rmsnorm, rmsnorm
from cairn.models.attend import Attend, Packed, Rule
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Attention, Columns, Norm, Rows, Vocabulary
from cairn.models.rope import frequencies
from cairn.models.shards import Shards
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer
from cairn.train.fused_products import (
    Normed,
    Settings,
    gated_product,
    norm_product,
    plain_product,
)
from cairn.train.parallel.pipeline.deferred import Owed
from cairn.train.products import PLAIN, Products
from cairn.train.recompute_kinds import Recompute

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch


class Varlen:
    """Attention over packed documents by our kernels, forward and backward; `attend` of a training step."""

    def __init__(self, batch: "Batch") -> None:
        self.lengths, self.device = batch.lengths, batch.tokens_T.device
        self.longest = max(batch.lengths)
        equal = all(length == self.longest for length in batch.lengths)
        self.cu_seqlens = None if equal else batch.cu_seqlens  # equal lengths have faster kernels

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: Rule) -> Tensor:
        out = attention(
            q_THC, k_TKC, v_TKC, self.cu_seqlens, max_length=self.longest, window=rule.window,
            softcap=rule.softcap, scale=rule.scale,
        )  # fmt: skip
        return cast(Tensor, out)

    def lengths_T(self) -> Tensor:
        counts = torch.tensor(self.lengths, device=self.device)
        return counts.repeat_interleave(counts)


def obstacle(spec: ModelSpec) -> str | None:
    """Why this model has no fused form, or None."""
    if spec.norm != "rms":
        return "it norms by mean and variance"
    if spec.positions != "rope":
        return "its positions are learned"
    if any(spec.rope_of(layer).kind == "dynamic" for layer in range(spec.layers)):
        return "its rotation depends on how long a sequence is"
    if not spec.gated or spec.activation == "relu":
        return f"its activation is {spec.activation}{'' if spec.gated else ' without a gate'}"
    return None


class FusedLayers:
    """Runs layers as they stand in a model or in a stage of one; their projections are joined."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device | str,
        context: int,
        products: Products = PLAIN,
        recompute: Recompute = "none",
    ) -> None:
        """`context`: positions that the rotations are tabulated for."""
        self.spec, self.products, self.recompute = spec, products, recompute
        self.tables: dict[Rope, Tensor] = {}
        for kind in {spec.rope_of(layer) for layer in range(spec.layers)}:
            angles, amplitude = frequencies(kind, spec, torch.device(device))
            self.tables[kind] = rope_table(angles, context, amplitude)

    def adopt(self, layers: Mapping[int, Layer]) -> None:
        """Calling one of these now runs it here; as a module, with all that hangs on its being called (FSDP)."""
        for number, layer in layers.items():
            layer.forward = partial(self.layer, number, layer)  # type: ignore[method-assign]

    def embed(self, vocabulary: Vocabulary, tokens_T: Tensor) -> Tensor:
        if vocabulary.shards.size == 1:
            x_TD = embedding(tokens_T, vocabulary.weight)
        else:
            x_TD = vocabulary(tokens_T)
        if self.spec.embedding_scale != 1.0:
            x_TD = x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype).item()
        return x_TD

    def through(
        self,
        layers: Iterable[Callable[..., tuple[Tensor, Tensor]]],
        x_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        owed: Owed | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """What the last layer adds, and what it adds it to. `owed`: weight gradients to be computed later."""
        y_TD: Tensor | None = None
        for layer in layers:
            if self.recompute == "full":
                y_TD, x_TD = checkpoint(
                    layer, y_TD, x_TD, positions_T, attend, owed,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                y_TD, x_TD = layer(y_TD, x_TD, positions_T, attend, owed)
        return y_TD, x_TD

    def finish(self, y_TD: Tensor | None, x_TD: Tensor, norm: Norm) -> Tensor:
        """The sum, normed."""
        if y_TD is None:
            return rmsnorm(x_TD, norm.weight, norm.eps, plus_one=norm.plus_one)
        return add_rmsnorm(y_TD, x_TD, norm.weight, norm.eps, plus_one=norm.plus_one)[0]

    def layer(
        self,
        number: int,
        layer: Layer,
        y_TD: Tensor | None,
        x_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        owed: Owed | None,
    ) -> tuple[Tensor, Tensor]:
        """What this layer adds, and what it adds it to."""
        part, how = layer.attention, self._settings(layer.attention.qkv.shards, owed)
        qkv_TE, x_TD = _normed(y_TD, x_TD, layer.attention_norm, part.qkv, how)
        y_TD = self._attention(number, part, qkv_TE, positions_T, attend, how)
        y_TD = _after(y_TD, layer.attention_post_norm)
        feed = layer.feed_forward
        if isinstance(feed, ExpertLayer):
            norm = layer.feed_forward_norm
            y_TD, x_TD = add_rmsnorm(y_TD, x_TD, norm.weight, norm.eps, plus_one=norm.plus_one)
            y_TD = feed(y_TD)
        else:
            inner_TF, x_TD = _normed(y_TD, x_TD, layer.feed_forward_norm, feed.inner, how)
            y_TD = gated_product(inner_TF, feed.down.weight, self.spec.activation, how)
            y_TD = _joined(y_TD, feed.down)
        return _after(y_TD, layer.feed_forward_post_norm), x_TD

    def _settings(self, shards: Shards, owed: Owed | None) -> Settings:
        keep_norms = self.recompute in ("none", "full")
        return Settings(self.products, keep_norms, self.recompute != "selective", shards, owed)

    def _attention(
        self, number: int, part: Attention, qkv_TE: Tensor, positions_T: Tensor, attend: Attend,
        how: Settings,
    ) -> Tensor:  # fmt: skip
        spec, q, k = self.spec, part.q_norm, part.k_norm
        weights = (None, None)
        if q is not None and k is not None:  # whole on every rank, each of which has some heads
            weights = (how.shards.whole(q.weight), how.shards.whole(k.weight))
        ranks = how.shards.size
        heads = Heads(spec.heads // ranks, spec.kv_heads // ranks, *weights,
                      spec.norm_eps, spec.norm_plus_one)  # fmt: skip
        table = self.tables[spec.rope_of(number)]  # what comes out goes into attention alone
        q_THC, k_TKC, v_TKC = rope(qkv_TE, heads, table, positions_T, gradients_in_place=True)
        out_TE = attend(q_THC, k_TKC, v_TKC, part.rule).flatten(-2)
        return _joined(plain_product(out_TE, part.out.weight, how), part.out)


class FusedTraining(FusedLayers):
    """Call it as the model: tokens, positions and an attend in, hidden states [T, D] out."""

    def __init__(
        self, model: Transformer, context: int, products: Products, recompute: Recompute = "none"
    ) -> None:
        super().__init__(model.spec, model.embedding.weight.device, context, products, recompute)
        self.model = model
        layers = enumerate(cast(Iterable[Layer], model.layers))
        self.layers = [partial(self.layer, number, layer) for number, layer in layers]

    def attend(self, batch: "Batch") -> Attend:
        """By our kernels, or by torch where heads have a size that these do not know."""
        if self.spec.head_dim in WIDTHS:
            return Varlen(batch)
        return Packed(batch.lengths, batch.tokens_T.device)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x_TD = self.embed(self.model.embedding, tokens_T)
        y_TD, x_TD = self.through(self.layers, x_TD, positions_T, attend)
        return self.finish(y_TD, x_TD, self.model.norm)


def _normed(
    y_TD: Tensor | None, x_TD: Tensor, norm: Norm, part: Columns, how: Settings
) -> tuple[Tensor, Tensor]:
    """The projection of what is normed, and the sum that was normed."""
    if part.fused is None:
        raise TypeError("the fused form wants joined projections")
    x, residual = (x_TD, None) if y_TD is None else (y_TD, x_TD)
    by = Normed(norm.weight, norm.eps, norm.plus_one)
    out_TE, x_TD = norm_product(x, residual, by, part.fused.weight, how)
    return out_TE if part.fused.bias is None else out_TE + part.fused.bias, x_TD


def _joined(y_TD: Tensor, part: Rows) -> Tensor:
    """The sum of all ranks' parts; the bias once, not once for each."""
    y_TD = part.shards.reduce(y_TD)
    return y_TD if part.bias is None else y_TD + part.bias


def _after(y_TD: Tensor, norm: Norm | None) -> Tensor:
    return y_TD if norm is None else rmsnorm(y_TD, norm.weight, norm.eps, plus_one=norm.plus_one)
