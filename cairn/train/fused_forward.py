"""The same model through fewer and larger kernels, with gradients: the form that trains on a GPU.

    Transformer.forward     one torch operation after another; any device; the form to read first
    FusedTraining           the same parameters, per layer:

        add + norm + q, k, v | norm heads, rotate | attend | out | add + norm + gate, up | activation + down

What stands before a product is cheap to compute again and large to keep: with `norms`, the outputs of norms are not
kept but computed a second time in backward, with `selective` those of activations, too: two percent of the time and a
fifth of the memory. With `full` a layer keeps its input only. What the kernels cannot express is trained by the plain
form; `obstacle` says so. The two agree up to rounding. Knows one process; wants joined projections.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from cairn.kernels.activation import gated_activation
from cairn.kernels.activation_backward import gated_activation_backward
from cairn.kernels.attention import attention
from cairn.kernels.attention_problem import WIDTHS
from cairn.kernels.embedding import embedding
from cairn.kernels.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_with_rstd
from cairn.kernels.rmsnorm_backward import rmsnorm_backward
from cairn.kernels.rope import Heads, rope, rope_table
from cairn.models.attend import Attend, Packed, Rule
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Attention, Columns, FeedForward, Norm
from cairn.models.rope import frequencies
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer
from cairn.train.products import Products, product
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


class FusedTraining:
    """Call it as the model: tokens, positions and an attend in, hidden states [T, D] out."""

    def __init__(
        self, model: Transformer, context: int, products: Products, recompute: Recompute = "none"
    ) -> None:
        """`context`: positions that the rotations are tabulated for."""
        spec = model.spec
        self.model, self.spec, self.products, self.recompute = model, spec, products, recompute
        self.keeps_norms = recompute in ("none", "full")
        self.keeps_activations = recompute != "selective"
        device = model.embedding.weight.device
        kinds = {spec.rope_of(layer) for layer in range(spec.layers)}
        self.tables: dict[Rope, Tensor] = {}
        for kind in kinds:
            angles, amplitude = frequencies(kind, spec, device)
            self.tables[kind] = rope_table(angles, context, amplitude)
        self.layers = [cast(Layer, layer) for layer in model.layers]

    def attend(self, batch: "Batch") -> Attend:
        """By our kernels, or by torch where heads have a size that these do not know."""
        if self.spec.head_dim in WIDTHS:
            return Varlen(batch)
        return Packed(batch.lengths, batch.tokens_T.device)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x_TD = embedding(tokens_T, self.model.embedding.weight)
        if self.spec.embedding_scale != 1.0:
            x_TD = x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype).item()
        y_TD: Tensor | None = None  # what the last layer adds to x
        for i in range(len(self.layers)):
            run = partial(self._layer, i, positions_T, attend)
            if self.recompute == "full":
                y_TD, x_TD = checkpoint(
                    run, y_TD, x_TD, use_reentrant=False, preserve_rng_state=False
                )
            else:
                y_TD, x_TD = run(y_TD, x_TD)
        norm = self.model.norm
        hidden_TD, _ = add_rmsnorm(
            cast(Tensor, y_TD), x_TD, norm.weight, norm.eps, plus_one=norm.plus_one
        )
        return hidden_TD

    def _layer(
        self, i: int, positions_T: Tensor, attend: Attend, y_TD: Tensor | None, x_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What this layer adds, and what it adds it to."""
        layer = self.layers[i]
        qkv_TE, x_TD = self._normed_product(y_TD, x_TD, layer.attention_norm, layer.attention.qkv)
        y_TD = self._attention(i, layer.attention, qkv_TE, positions_T, attend)
        y_TD = self._after(y_TD, layer.attention_post_norm)
        part = layer.feed_forward
        if isinstance(part, ExpertLayer):
            norm = layer.feed_forward_norm
            y_TD, x_TD = add_rmsnorm(y_TD, x_TD, norm.weight, norm.eps, plus_one=norm.plus_one)
            y_TD = part(y_TD)
        else:
            inner_TF, x_TD = self._normed_product(y_TD, x_TD, layer.feed_forward_norm, part.inner)
            y_TD = self._down(part, inner_TF)
        return self._after(y_TD, layer.feed_forward_post_norm), x_TD

    def _normed_product(
        self, y_TD: Tensor | None, x_TD: Tensor, norm: Norm, part: Columns
    ) -> tuple[Tensor, Tensor]:
        if part.fused is None:
            raise TypeError("the fused form wants joined projections")
        how = Normed(norm.eps, norm.plus_one, self.products, self.keeps_norms)
        weight, bias = part.fused.weight, part.fused.bias
        if y_TD is None:
            out_TE = _NormProduct.apply(x_TD, None, norm.weight, weight, how)
        else:
            out_TE, x_TD = _NormProduct.apply(y_TD, x_TD, norm.weight, weight, how)
        return out_TE if bias is None else out_TE + bias, x_TD

    def _attention(
        self, i: int, part: Attention, qkv_TE: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        q, k = part.q_norm, part.k_norm
        weights = (None, None) if q is None or k is None else (q.weight, k.weight)
        heads = Heads(self.spec.heads, self.spec.kv_heads, *weights,
                      self.spec.norm_eps, self.spec.norm_plus_one)  # fmt: skip
        table = self.tables[self.spec.rope_of(i)]  # what comes out goes into attention alone
        q_THC, k_TKC, v_TKC = rope(qkv_TE, heads, table, positions_T, gradients_in_place=True)
        out_TE = attend(q_THC, k_TKC, v_TKC, part.rule).flatten(-2)
        y_TD = product(out_TE, part.out.weight, self.products)
        return y_TD if part.out.bias is None else y_TD + part.out.bias

    def _down(self, part: FeedForward, inner_TF: Tensor) -> Tensor:
        y_TD = _GatedProduct.apply(
            inner_TF, part.down.weight, self.spec.activation, self.products, self.keeps_activations
        )
        return y_TD if part.down.bias is None else y_TD + part.down.bias

    def _after(self, y_TD: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return y_TD
        return rmsnorm(y_TD, norm.weight, norm.eps, plus_one=norm.plus_one)
