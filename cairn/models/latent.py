"""Latent attention (MLA, arXiv:2405.04434): one narrow row per token is cached, and all heads' keys and values follow.

    row    [T, R + P]   the latent (R columns, normed) and one rotated key (P columns) that all heads share
    expanded            k = [W_k latent, rotated key], v = W_v latent: ordinary attention of H heads   prefill, training
    absorbed            (q W_k) latent + rotated: H queries of one head over the rows; W_v afterwards  decode

Both compute the same; the absorbed form reads a token's R + P values instead of making H keys and values of them, and
multiplies wider rows for it. Who attends chooses (`KeepsRows`); one that keeps no rows gets the expanded form.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from cairn.models.attend import AttentionRule, attention
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.cpu_half_precision import einsum, linear
from cairn.models.layer_loop import ForwardStep, Sublayer
from cairn.models.layers import Norm
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.rope import Rotation
from cairn.models.shards import ALONE, even_share
from cairn.models.spec import Latent, ModelSpec

NORM_EPS = 1e-6  # of the two norms inside, whatever the others have


@runtime_checkable
class KeepsRows(Protocol):
    """An attend with a cache of latent rows."""

    def latent(self, tokens: "LatentTokens", rule: AttentionRule) -> Tensor:
        """Store the rows, and attend; [T, H, value]."""
        ...


class Expansion(SlotModule):
    """The map from a latent to keys and values of all heads; per head first the rows for keys, then for values.

    It multiplies from both sides, so its weight is always held in floating point.
    """

    def __init__(self, build: ModelBuild, spec: ModelSpec, sizes: Latent) -> None:
        super().__init__()
        self.sizes, self.heads, self.shards = sizes, spec.heads, build.shards
        self.local = even_share(spec.heads, build.shards, "attention heads")
        self.weight = build.parameter(self.local * (sizes.unrotated + sizes.value), sizes.rank)

    def by_head(self) -> tuple[Tensor, Tensor]:
        """[H, unrotated, R] and [H, value, R]."""
        weight_HXR = self.weight.unflatten(0, (self.local, -1))
        return weight_HXR[:, : self.sizes.unrotated], weight_HXR[:, self.sizes.unrotated :]

    def expanded(self, rows_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [N, H, unrotated + rotated] and values [N, H, value] of cached rows."""
        sizes = self.sizes
        latent_NR, key_NP = rows_NE.split((sizes.rank, sizes.rotated), dim=-1)
        both_NHX = linear(latent_NR, self.weight).unflatten(-1, (self.local, -1))
        k_NHC, v_NHV = both_NHX.split((sizes.unrotated, sizes.value), dim=-1)
        return torch.cat((k_NHC, key_NP[:, None].expand(-1, self.local, -1)), dim=-1), v_NHV

    def absorbed(self, q_THC: Tensor) -> Tensor:
        """Queries as they meet rows, [T, H, R + P]."""
        q_THU, q_THP = q_THC.split((self.sizes.unrotated, self.sizes.rotated), dim=-1)
        q_THR = einsum("thu,hur->thr", q_THU, self.by_head()[0])
        return torch.cat((q_THR, q_THP), dim=-1)

    def restored(self, out_THR: Tensor) -> Tensor:
        """Averages of latents as averages of values, [T, H, value]."""
        return einsum("thr,hvr->thv", out_THR, self.by_head()[1])

    def slots(self) -> Iterator[Slot]:
        rows, columns = self.weight.shape
        first, size = rows * self.shards.rank, self.shards.size
        cut = (0, first, first + rows) if size > 1 else None
        yield Slot("weight", "weight", (rows * size, columns), cut=cut)


class LatentTokens(NamedTuple):
    """The tokens of one step, as a cache of rows wants them."""

    q_THC: Tensor  # of the expanded form
    rows_TE: Tensor
    expansion: Expansion

    def attended(self, span: slice, rows_N1E: Tensor, rule: AttentionRule) -> Tensor:
        """Some tokens of this step, the last of a sequence of N: several expanded, one absorbed."""
        q_SHC = self.q_THC[span]
        if len(q_SHC) > 1:
            return attention(q_SHC, *self.expansion.expanded(rows_N1E[:, 0]), rule)
        return self.restored(attention(self.absorbed(q_SHC), rows_N1E, rows_N1E, rule))

    def absorbed(self, q_SHC: Tensor) -> Tensor:
        return self.expansion.absorbed(q_SHC)

    def restored(self, out_SHE: Tensor) -> Tensor:
        """Expand averaged rows to values; only their leading latent part is a value."""
        return self.expansion.restored(out_SHE[..., : self.expansion.sizes.rank])


class LatentAttention(Sublayer):
    def __init__(self, build: ModelBuild, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        sizes = cast(Latent, spec.latent)
        self.sizes, self.head_dim = sizes, spec.head_dim
        self.heads = even_share(spec.heads, build.shards, "attention heads")  # on this rank
        alone = build._replace(shards=ALONE)  # narrow products, whole on every rank
        self.query_down = self.query_norm = None
        if sizes.query_rank:
            self.query_down = ColumnParallelLinear(
                alone, spec.hidden, {"q": sizes.query_rank}, spec.qkv_bias
            )
            self.query_norm = _norm(build, spec, sizes.query_rank)
        queries = spec.heads * spec.head_dim
        part = "up" if sizes.query_rank else "q"
        self.query = ColumnParallelLinear(
            build, sizes.query_rank or spec.hidden, {part: queries}, bias=False
        )
        self.down = ColumnParallelLinear(alone, spec.hidden, {"kv": sizes.width}, spec.qkv_bias)
        self.norm = _norm(build, spec, sizes.rank)
        self.expansion = Expansion(build, spec, sizes)
        self.out = RowParallelLinear(build, spec.heads * sizes.value, spec.hidden, spec.out_bias)
        self.rule = AttentionRule(layer, spec.scale, spec.window(layer), spec.attention_softcap)
        self.rope = spec.rope_of(layer)

    def plain(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        rotate = cast(Rotation, step.rotation(self.rope))
        q_THC, rows_TE = self._queries(x_TD, rotate), self._rows(x_TD, rotate)
        if isinstance(step.attend, KeepsRows):
            tokens = LatentTokens(q_THC, rows_TE, self.expansion)
            out_THV = step.attend.latent(tokens, self.rule)
        else:
            out_THV = step.attend(q_THC, *self.expansion.expanded(rows_TE), self.rule)
        return self.out(out_THV.flatten(-2))

    def _queries(self, x_TD: Tensor, rotate: Rotation) -> Tensor:
        if self.query_down is not None and self.query_norm is not None:
            x_TD = self.query_norm(self.query_down(x_TD)[0])
        q_THC = self.query(x_TD)[0].unflatten(-1, (self.heads, self.head_dim))
        q_THU, q_THP = q_THC.split((self.sizes.unrotated, self.sizes.rotated), dim=-1)
        return torch.cat((q_THU, rotate(self._paired(q_THP))), dim=-1)

    def _rows(self, x_TD: Tensor, rotate: Rotation) -> Tensor:
        widths, shards = (self.sizes.rank, self.sizes.rotated), self.expansion.shards
        latent_TR, key_TP = self.down(x_TD)[0].split(widths, dim=-1)
        latent_TR = self.norm(latent_TR)
        if shards.size > 1:  # tokens that were cut over the ranks are all here from now on
            entered_TE = shards.enter(torch.cat((latent_TR, key_TP), dim=-1))
            latent_TR, key_TP = entered_TE.split(widths, dim=-1)
        key_T1P = rotate(self._paired(key_TP[:, None]))
        return torch.cat((latent_TR, key_T1P[:, 0]), dim=-1)

    def _paired(self, x: Tensor) -> Tensor:
        """Columns in the order that `Rotation` pairs; queries and keys are reordered alike, which no score feels."""
        if not self.sizes.interleaved:
            return x
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _norm(build: ModelBuild, spec: ModelSpec, width: int) -> Norm:
    norm = Norm(build, spec, width)
    norm.eps = NORM_EPS
    return norm
