"""The same model through fewer and larger kernels, with gradients: the form that trains on a GPU.

    PlainStep       one torch operation after another; any device; the form to read first
    TrainingStep    the same parameters, per layer:

        add + norm + q, k, v | norm heads, rotate | attend | out | add + norm + gate, up | activation + down

With `norms` the outputs of norms are not kept but computed a second time in backward, with `selective` those of
activations, too: two percent of the time and a fifth of the memory. With `full` a layer keeps its input only. A part
that the kernels cannot express (LayerNorm, angles that depend on the length, a relu gate) runs by torch while the
others stay fused. The two forms agree up to rounding. Several ranks run their layers in the same steps, whatever
their part of the model is. Wants joined projections.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cairn.kernels.attention.attention import attention
from cairn.kernels.layer.embedding import embedding
from cairn.kernels.layer.rope import Heads, rope
from cairn.kernels.norm.rmsnorm import add_rmsnorm, rmsnorm
from cairn.models.activation import Gate
from cairn.models.attend import Attend, AttentionRule
from cairn.models.attention import Attention
from cairn.models.experts import ExpertLayer
from cairn.models.fused import rope_tables
from cairn.models.layers import Norm
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear, Vocabulary
from cairn.models.rope import Rotation
from cairn.models.shards import Shards
from cairn.models.spec import ModelSpec, Rope
from cairn.train.expert_products import has_own_backward, trained_experts
from cairn.train.fused_products import Normed, Settings, gated_product, norm_product
from cairn.train.lora_product import (
    adapted_product,
    gated_adapted_product,
    is_fused,
    norm_adapted_product,
)
from cairn.train.offload import Offload
from cairn.train.parallel.pipeline.deferred import Deferred
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

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        out = attention(
            q_THC,
            k_TKC,
            v_TKC,
            self.cu_seqlens,
            max_length=self.longest,
            window=rule.window,
            softcap=rule.softcap,
            scale=rule.scale,
            sinks_H=rule.sinks_H,
        )
        return cast(Tensor, out)

    def lengths_T(self) -> Tensor:
        counts = torch.tensor(self.lengths, device=self.device)
        return counts.repeat_interleave(counts)


class FusedLayers:
    """Fused layers of a model or pipeline stage, with joined projections."""

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
        kinds = spec.ropes(range(spec.layers))
        self.tables = rope_tables(kinds, spec, context, device)
        # Whether some mixers run by torch, and need rotations.
        by_torch = spec.qk_norm_rotated or spec.output_gate or spec.latent is not None
        by_torch = by_torch or (spec.qk_norm and spec.norm == "layer")
        self.rotates_by_torch = by_torch or not all(kind.is_tabulated for kind in kinds)

    def lookup(self, vocabulary: Vocabulary, tokens_T: Tensor) -> Tensor:
        if vocabulary.shards.size > 1 or vocabulary.lookup_addend is not None:
            return vocabulary(tokens_T)
        return embedding(tokens_T, vocabulary.matrix())

    def settings(self, shards: Shards, deferred: Deferred | None) -> Settings:
        keep_norms = self.recompute in ("none", "full")
        return Settings(self.products, keep_norms, self.recompute != "selective", shards, deferred)


class TrainingStep:
    """Forward pass with fused operations and gradients."""

    fuses = True

    def __init__(
        self,
        form: FusedLayers,
        positions_T: Tensor,
        attend: Attend,
        rotations: dict[Rope, Rotation],
        deferred: Deferred | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`deferred`: where weight gradients go that are computed later. `offload`: what layers keep may wait there."""
        self.form, self.positions_T, self.attend = form, positions_T, attend
        self.rotations, self.deferred, self.offload = rotations, deferred, offload

    def run(self, layer: Any, residual: Any) -> Any:
        if self.offload is not None:
            return self.offload.run(layer, lambda: layer(residual, self))
        if self.form.recompute != "full":
            return layer(residual, self)
        return checkpoint(layer, residual, self, use_reentrant=False, preserve_rng_state=False)

    def rotation(self, rope: Rope | None) -> Rotation | None:
        return None if rope is None else self.rotations[rope]

    def columns(
        self,
        part: ColumnParallelLinear,
        x: "TrainingInput",
        gate: Gate | None = None,
        then: RowParallelLinear | None = None,
    ) -> Any:
        inner = x.project(part, self.form.settings(part.shards, self.deferred))
        return inner if gate is None else Gated(inner, gate)

    def rows(self, part: RowParallelLinear, x: "Tensor | Gated", onto: Tensor | None) -> Tensor:
        how = self.form.settings(part.shards, self.deferred)
        alone = part.form is None and part.addend is None
        if alone and isinstance(x, Gated) and x.gate.has_kernel:
            return part.summed(gated_product(x.inner_TF, part.matrix(), x.gate.activation, how))
        if isinstance(x, Gated) and x.gate.has_kernel and is_fused(part, x.inner_TF.dtype, how):
            return part.summed(gated_adapted_product(part, x.inner_TF, x.gate.activation, how))
        x_TF = x.gate.fast(x.inner_TF) if isinstance(x, Gated) else x
        return part.summed(adapted_product(part, x_TF, how))

    def experts(self, part: ExpertLayer, x: "TrainingInput") -> Tensor:
        if has_own_backward(part, x.tensor):
            return trained_experts(part, x.tensor)
        return part.plain(x.tensor, self)

    def attended(self, mixer: Attention, qkv_TE: Tensor) -> Tensor:
        spec, shards, norms = self.form.spec, mixer.qkv.shards, mixer.head_norms
        weights = (None, None)
        if norms is not None:  # whole on every rank, each of which has some heads
            weights = (shards.whole(norms[0].weight), shards.whole(norms[1].weight))
        heads = Heads(mixer.heads, mixer.kv_heads, *weights, spec.norm_eps, spec.norm_plus_one)
        table = self.form.tables.get(mixer.rope)  # what comes out goes into attention alone
        q_THC, k_TKC, v_TKC = rope(qkv_TE, heads, table, self.positions_T, gradients_in_place=True)
        return self.attend(q_THC, k_TKC, v_TKC, mixer.rule).flatten(-2)


class Gated(NamedTuple):
    """An activation that the product behind it applies, and may forget."""

    inner_TF: Tensor
    gate: Gate


class TrainingResidual(NamedTuple):
    """The residual, and what the last part adds to it; the next norm adds the two."""

    x_TD: Tensor
    pending_TD: Tensor | None = None

    def normed(self, norm: Norm, post_norm: Norm | None = None) -> "TrainingInput":
        return TrainingInput(self, norm, post_norm)

    def hidden(self) -> Tensor:
        return self.x_TD if self.pending_TD is None else self.x_TD + self.pending_TD


class TrainingInput:
    """A norm that is not computed yet: the projection behind it does that, as one operation with its own backward."""

    onto: Tensor | None = None

    def __init__(self, residual: TrainingResidual, norm: Norm, post_norm: Norm | None) -> None:
        self.residual, self.norm, self.post_norm = residual, norm, post_norm
        self.total_TD: Tensor | None = None  # the sum that was normed

    @cached_property
    def tensor(self) -> Tensor:
        (x_TD, y_TD), norm = self.residual, self.norm
        if not norm.is_rms:
            self.total_TD = self.residual.hidden()
            return norm(self.total_TD)
        if y_TD is None:
            self.total_TD = x_TD
            return rmsnorm(x_TD, norm.weight, norm.eps, plus_one=norm.plus_one)
        normed_TD, self.total_TD = add_rmsnorm(
            y_TD, x_TD, norm.weight, norm.eps, plus_one=norm.plus_one
        )
        return normed_TD

    def project(self, part: ColumnParallelLinear, how: Settings) -> Tensor:
        (x_TD, y_TD), norm = self.residual, self.norm
        x, residual = (x_TD, None) if y_TD is None else (y_TD, x_TD)
        if norm.is_rms and part.addend is None and part.form is None:
            by = Normed(norm.weight, norm.eps, norm.plus_one)
            out_TE, self.total_TD = norm_product(x, residual, by, part.matrix(), how)
        elif norm.is_rms and is_fused(part, x.dtype, how):
            by = Normed(norm.weight, norm.eps, norm.plus_one)
            out_TE, self.total_TD = norm_adapted_product(part, x, residual, by, how)
        else:
            out_TE = adapted_product(part, how.shards.enter(self.tensor), how)
        bias = None if part.fused is None else part.fused.bias
        return out_TE if bias is None else out_TE + bias

    def add(self, y_TD: Any) -> TrainingResidual:
        if self.total_TD is None:
            raise TypeError("a part has computed nothing from its input")
        if self.post_norm is None:
            return TrainingResidual(self.total_TD, y_TD)
        return TrainingResidual(self.total_TD, TrainingResidual(y_TD).normed(self.post_norm).tensor)
