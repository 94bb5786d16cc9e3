"""Grouped-query attention: the mixer of most decoders. Where the keys live is the business of `attend`."""

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError
from cairn.models.attend import AttentionRule
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.layer_loop import ForwardStep, Input, Sublayer
from cairn.models.layers import Norm
from cairn.models.linear.form import Product
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.shards import even_share
from cairn.models.spec import ModelSpec


class Attention(Sublayer, SlotModule):
    """Queries, keys and values of heads; several heads of queries share one of keys."""

    def __init__(self, build: ModelBuild, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        even_share(spec.kv_heads, build.shards, "key/value heads")
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = {"q": queries, "k": keys, "v": keys}
        self.head_dim = spec.head_dim
        self.heads = spec.heads // build.shards.size  # on this rank
        self.kv_heads = spec.kv_heads // build.shards.size
        self.qkv = ColumnParallelLinear(build, spec.hidden, parts, spec.qkv_bias)
        # Columns of their own: the joined heads go to the cache, the gate does not.
        gate = {"gate": queries}
        self.gate = (
            ColumnParallelLinear(build, spec.hidden, gate, spec.qkv_bias)
            if spec.output_gate
            else None
        )
        self.norms_width, self.norms_rotated = spec.qk_norm_over == "width", spec.qk_norm_rotated
        if self.norms_width and build.shards.size > 1:
            raise ConfigError(
                f"{spec.family} norms all heads of a token at once, which {build.shards.size} ranks share",
                hint="run it without tensor parallelism",
            )
        widths = (queries, keys) if self.norms_width else (spec.head_dim, spec.head_dim)
        norms = [
            Norm(build, spec, width, build.shards) if spec.qk_norm else None for width in widths
        ]
        self.q_norm, self.k_norm = norms
        self.out = RowParallelLinear(build, queries, spec.hidden, spec.out_bias)
        self.plain_rule = AttentionRule(
            layer, spec.scale, spec.window(layer), spec.attention_softcap
        )
        self.sinks_H = build.parameter(self.heads) if spec.sinks else None
        self.shards = build.shards
        self.rope = spec.rope_of(layer)

    @property
    def rule(self) -> AttentionRule:
        """Attention rule with the current sinks, which loading and training replace."""
        if self.sinks_H is None:
            return self.plain_rule
        return msgspec.structs.replace(self.plain_rule, sinks_H=self.sinks_H)

    def slots(self) -> Iterator[Slot]:
        if self.sinks_H is not None:
            first, every = self.heads * self.shards.rank, self.heads * self.shards.size
            cut = (0, first, first + self.heads) if self.shards.size > 1 else None
            yield Slot("sinks", "sinks_H", (every,), cut=cut)

    @property
    def entry(self) -> ColumnParallelLinear | None:
        return self.qkv if self.has_fused else None

    @property
    def has_fused(self) -> bool:
        """Return whether norm and rotation of the joined heads can be fused: RMS norms and tabulated angles.

        With a gate of the output another product reads the input, which no fused form has.
        """
        tabulated = self.rope is None or self.rope.is_tabulated
        before = self.q_norm is None or (self.q_norm.is_rms and not self.norms_rotated)
        return tabulated and before and self.gate is None

    @property
    def head_norms(self) -> tuple[Norm, Norm] | None:
        """Per-head norms of q and k, or None."""
        if self.q_norm is None or self.k_norm is None or self.norms_width:
            return None
        return self.q_norm, self.k_norm

    def plain(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        q_TN, k_TN, v_TN = self.qkv(x_TD)
        if self.norms_width and self.q_norm is not None and self.k_norm is not None:
            q_TN, k_TN = self.q_norm(q_TN), self.k_norm(k_TN)
        q_THC, k_TKC, v_TKC = (y.unflatten(-1, (-1, self.head_dim)) for y in (q_TN, k_TN, v_TN))
        norms, rotate = self.head_norms, step.rotation(self.rope)
        if norms is not None and not self.norms_rotated:
            q_THC, k_TKC = norms[0](q_THC), norms[1](k_TKC)
        if rotate is not None:
            q_THC, k_TKC = rotate(q_THC), rotate(k_TKC)
            if rotate.temperature_T11 is not None:
                q_THC = q_THC * rotate.temperature_T11
        if norms is not None and self.norms_rotated:
            q_THC, k_TKC = norms[0](q_THC), norms[1](k_TKC)
        y_TN = step.attend(q_THC, k_TKC, v_TKC, self.rule).flatten(-2)
        if self.gate is not None:
            y_TN = y_TN * self.gate(x_TD)[0].sigmoid()
        return self.out(y_TN)

    def fused(self, x: Input, step: ForwardStep) -> Product:
        if not self.has_fused:
            return self.plain(x.tensor, step)
        qkv_TE = step.columns(self.qkv, x)
        if self.norms_width and self.q_norm is not None and self.k_norm is not None:
            sizes = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
            q_TN, k_TN, v_TN = qkv_TE.split(sizes, dim=-1)
            qkv_TE = torch.cat((self.q_norm(q_TN), self.k_norm(k_TN), v_TN), dim=-1)
        return step.rows(self.out, step.attended(self, qkv_TE), x.onto)


def joined_attentions(model: nn.Module) -> Iterator[Attention]:
    """The mixers of a model whose heads stay joined from the projection to the cache."""
    for module in model.modules():
        if isinstance(module, Attention) and module.has_fused:
            yield module
