"""The same model through fewer and larger kernels: the form that serves on a GPU.

    Transformer.forward     one torch operation after another; any device, with gradients; the form to read first
    Fused                   its weights as they are, without gradients, per layer:

        add + norm | q, k, v | norm, rotate, write to the pages | attend | out | add + norm | gate, up, SwiGLU | down

A product of few rows takes the kernel that reads weights at the memory's speed, one of many rows takes cuBLAS; with
`invariant` all take one kernel with one tile, so that a row's result does not depend on how many there are. What the
kernels cannot express (LayerNorm, learned positions, angles that depend on the length) is served by the plain
form; `obstacle` says so. The two agree up to the rounding of bfloat16.
"""

import copy
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.layer.activation import gated_activation
from cairn.kernels.layer.rope import Heads, rope_table
from cairn.kernels.matmul.epilogue import Epilogue
from cairn.kernels.matmul.matmul import SMALL, launch, matmul
from cairn.kernels.matmul.skinny_matmul import skinny_matmul, skinny_parts
from cairn.kernels.matmul.skinny_plans import pays
from cairn.kernels.norm.join_norm import Parts, join_add_rmsnorm
from cairn.kernels.norm.rmsnorm import add_rmsnorm, rmsnorm
from cairn.models.attend import Attend, Rule
from cairn.models.experts import ExpertLayer
from cairn.models.layers import ACTIVATIONS, Attention, Columns, FeedForward, Norm, Rows
from cairn.models.rope import frequencies
from cairn.models.spec import Activation, ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer

LONGEST = 4096  # columns of a product that is added to the residual at once; cuBLAS has slower forms for longer ones
MANY_ROWS = (
    1024  # from here on SwiGLU in our product's epilogue is ahead of cuBLAS and a kernel behind it
)


class Projected(Protocol):
    """An attend that takes the fused projection as it is: it norms, rotates and stores on the way."""

    def projected(
        self, qkv_TE: Tensor, heads: Heads, table: Tensor | None, rule: Rule
    ) -> Tensor: ...


def obstacle(spec: ModelSpec, fused: bool) -> str | None:
    """Why this model has no fused form, or None."""
    if not fused:
        return "its projections are separate"
    if spec.norm != "rms":
        return "it norms by mean and variance"
    if spec.positions != "rope":
        return "its positions are learned"
    if any(spec.rope_of(layer).kind == "dynamic" for layer in range(spec.layers)):
        return "its rotation depends on how long a sequence is"
    if spec.activation == "relu" and spec.gated:
        return "its gate is a relu"
    return None


class Fused:
    """Call it as the model: tokens, positions and an attend in, hidden states [T, D] out."""

    def __init__(self, model: Transformer, context: int, invariant: bool = False) -> None:
        """`context`: positions that the rotations are tabulated for."""
        spec = model.spec
        self.model, self.spec, self.context, self.invariant = model, spec, context, invariant
        self.shares = False  # the chip with attention of other rows
        weight = model.embedding.weight
        kinds = {spec.rope_of(layer) for layer in range(spec.layers)}
        self.tables: dict[Rope, Tensor] = {kind: _table(kind, spec, context, weight.device)
                                           for kind in kinds}  # fmt: skip
        self.layers = [cast(Layer, layer) for layer in model.layers]
        self.heads = [self._heads(layer.attention) for layer in self.layers]

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x_TD = self.model.embed(tokens_T, positions_T)
        y_TD = self._norm(x_TD, self.layers[0].attention_norm)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            onto_TD = x_TD if layer.attention_post_norm is None else None
            out_TD = self._attention(i, layer.attention, y_TD, cast(Projected, attend), onto_TD)
            out_TD = self._after(out_TD, layer.attention_post_norm)
            y_TD, x_TD = self._add_norm(out_TD, x_TD, layer.feed_forward_norm)
            onto_TD = x_TD if layer.feed_forward_post_norm is None else None
            out_TD = self._feed_forward(layer.feed_forward, y_TD, onto_TD)
            out_TD = self._after(out_TD, layer.feed_forward_post_norm)
            after = self.model.norm if i == last else self.layers[i + 1].attention_norm
            y_TD, x_TD = self._add_norm(out_TD, x_TD, after)
        return y_TD

    def sharing(self) -> "Fused":
        """The same, in kernels that leave room for attention of other rows in another stream."""
        twin = copy.copy(self)
        twin.shares = True
        return twin

    def small(self, rows: int) -> bool:
        """Do all products of a layer go through the kernels that can share the chip?"""
        first = self.layers[0]
        inner = first.feed_forward
        if self.invariant or isinstance(inner, ExpertLayer) or first.attention.out.shards.size > 1:
            return False
        inner = cast(FeedForward, inner)
        joined = [part.fused for part in (first.attention.qkv, inner.inner)]
        weights = [part.weight for part in joined if part is not None]
        weights += [first.attention.out.weight, inner.down.weight]
        return all(pays(rows, *weight.shape) for weight in weights)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Scores [T, V], as the model's."""
        vocabulary = self.model.head or self.model.embedding
        if vocabulary.shards.size > 1:
            return self.model.logits(hidden_TD)
        scores_TV = self._linear(hidden_TD, vocabulary.weight, None)
        cap = self.spec.logit_softcap
        return cap * torch.tanh(scores_TV / cap) if cap else scores_TV

    def _heads(self, attention: Attention) -> Heads:
        q, k = attention.q_norm, attention.k_norm
        share = attention.qkv.shards.size
        weights = (None, None) if q is None or k is None else (q.weight.data, k.weight.data)
        return Heads(self.spec.heads // share, self.spec.kv_heads // share, *weights,
                     self.spec.norm_eps, self.spec.norm_plus_one)  # fmt: skip

    def _attention(
        self, i: int, part: Attention, y_TD: Tensor, attend: Projected, onto_TD: Tensor | None
    ) -> Tensor | Parts | None:
        qkv_TE = self._joined(part.qkv, y_TD)
        out_THC = attend.projected(
            qkv_TE, self.heads[i], self.tables[self.spec.rope_of(i)], part.rule
        )
        return self._rows(part.out, out_THC.flatten(-2), onto_TD)

    def _feed_forward(
        self, part: FeedForward | ExpertLayer, y_TD: Tensor, onto_TD: Tensor | None
    ) -> Tensor | Parts | None:
        if isinstance(part, ExpertLayer):
            return part(y_TD)
        if self.spec.gated and self.spec.activation == "silu" and self._joins(part.inner, y_TD):
            inner_TF = self._joined(part.inner, y_TD, "swiglu")
        else:
            inner_TF = self._joined(part.inner, y_TD)
            inner_TF = _activated(inner_TF, self.spec.activation, self.spec.gated)
        return self._rows(part.down, inner_TF, onto_TD)

    def _joins(self, part: Columns, y_TD: Tensor) -> bool:
        """SwiGLU in the product's epilogue: for few rows and for many, not for those between."""
        rows, inner = len(y_TD), sum(part.rows.values())
        pays_off = pays(rows, inner, part.width, gated=True) or rows >= MANY_ROWS
        return pays_off and not self.invariant

    def _joined(self, part: Columns, y_TD: Tensor, activation: str | None = None) -> Tensor:
        if part.fused is None:
            raise TypeError("the fused form wants joined projections; see `obstacle`")
        return self._linear(y_TD, part.fused.weight, part.fused.bias, activation)

    def _rows(self, part: Rows, x_TF: Tensor, onto_TD: Tensor | None) -> Tensor | Parts | None:
        """`onto_TD`: the result is added to this next. Parts are joined there; None: it has been added here."""
        if part.shards.size > 1:
            y_TD = part.shards.reduce(self._linear(x_TF, part.weight, None))
            return y_TD if part.bias is None else y_TD + part.bias
        if onto_TD is not None and part.bias is None and not self.invariant:
            if pays(len(x_TF), *part.weight.shape):
                sums_SMD = skinny_parts(x_TF, part.weight.data, settled=True, beside=self.shares)
                if sums_SMD is not None:
                    return Parts(sums_SMD)
            elif len(x_TF) >= MANY_ROWS and part.weight.shape[1] <= LONGEST:
                onto_TD.addmm_(x_TF, part.weight.data.T)
                return None
        return self._linear(x_TF, part.weight, part.bias)

    def _linear(
        self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, activation: str | None = None
    ) -> Tensor:
        if self.invariant:
            y_MN = x_MK.new_empty(len(x_MK), len(w_NK))
            launch(x_MK, w_NK.data, y_MN, Epilogue(bias_N), SMALL)
            return y_MN
        if pays(len(x_MK), *w_NK.shape, gated=activation == "swiglu"):
            how = "swiglu" if activation == "swiglu" else None
            return skinny_matmul(x_MK, w_NK.data, bias_N=bias_N, activation=how, settled=True,
                                 beside=self.shares)  # fmt: skip
        if activation == "swiglu":
            return matmul(x_MK, w_NK.data, bias_N=bias_N, activation="swiglu")
        return F.linear(x_MK, w_NK, bias_N)

    def _norm(self, x_TD: Tensor, norm: Norm) -> Tensor:
        return rmsnorm(x_TD, norm.weight.data, norm.eps, plus_one=norm.plus_one, settled=True)

    def _after(self, y_TD: Tensor | Parts | None, norm: Norm | None) -> Tensor | Parts | None:
        return y_TD if norm is None else self._norm(cast(Tensor, y_TD), norm)

    def _add_norm(
        self, y_TD: Tensor | Parts | None, x_TD: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum, each where its operand was. None has been added already."""
        if y_TD is None:
            return self._norm(x_TD, norm), x_TD
        if isinstance(y_TD, Parts):
            return join_add_rmsnorm(
                y_TD, x_TD, norm.weight.data, norm.eps, plus_one=norm.plus_one, residual_out=x_TD,
                settled=True,
            )  # fmt: skip
        return add_rmsnorm(
            y_TD, x_TD, norm.weight.data, norm.eps, plus_one=norm.plus_one, out=y_TD, residual_out=x_TD,
            settled=True,
        )  # fmt: skip


def _table(kind: Rope, spec: ModelSpec, context: int, device: torch.device) -> Tensor:
    angles, amplitude = frequencies(kind, spec, device)
    return rope_table(angles, context, amplitude)


def _activated(inner_TF: Tensor, activation: Activation, gated: bool) -> Tensor:
    if gated and activation != "relu":
        return gated_activation(inner_TF, None, activation)
    return ACTIVATIONS[activation](inner_TF)
