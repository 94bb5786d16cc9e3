"""Attention over pages on a GPU: our kernels, and nothing that the host has to know.

Everything about a step lies in tensors, so a CUDA graph replays it with other sequences. What does shape a step's
kernels is in `Extent`: it is part of a graph's identity. `projected` is the fast way in: it takes the fused projection,
norms and rotates q and k and writes the pages in one kernel. A step in which every sequence is new attends to the
projection itself, without pages, which is faster. A step in which all stand behind the same pages reads those once.
A cache in float8 has a scale for each layer's keys and values; the first prompts set them, unless they are known;
latent rows have theirs in themselves.
Where tokens of a picture see each other both ways, the kernels compute what stands before and torch, behind them, the
rows of those sequences once more: few steps hold such a picture, and no graph does.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cairn.kernels.attention.attention import attention
from cairn.kernels.attention.attention_problem import WIDTHS
from cairn.kernels.delta.rule import Sequences
from cairn.kernels.layer.rope import Heads, Pages, rope
from cairn.kernels.paged.cascade import Cascade, cascade_attention
from cairn.kernels.paged.kv_write import rope_write
from cairn.kernels.paged.latent_attention import latent_attention
from cairn.kernels.paged.latent_rows import latent_write
from cairn.kernels.paged.paged_attention import checked, paged_attention
from cairn.kernels.paged.paged_parts import Workspace
from cairn.kernels.paged.paged_prefill import prefill
from cairn.kernels.quantize.quantize import rounded
from cairn.models.attend import AttentionRule
from cairn.models.attend import attention as attend_by_torch
from cairn.models.latent import LatentTokens
from cairn.models.recurrence import Planes, Recurrence
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.spans import Reach


class Extent(NamedTuple):
    """Host-side information about a step that kernel launches need."""

    max_query: int  # no sequence has more tokens in this step
    fresh: bool = False  # no sequence has computed anything before
    invariant: bool = False  # one kernel for all lengths, which reads a sequence in one piece
    shared: bool = False  # all sequences begin with the same pages, and compute what is behind them
    shares_chip: bool = False  # another stream computes the rest of this step at the same time
    measures: bool = False  # its keys and values set the scales of the cache


class AroundAttention(Protocol):
    """Hooks around each attention of a step that runs concurrently with another."""

    def before(self) -> None: ...
    def after(self) -> None: ...


class PagedOnGPU(Paged):
    def __init__(
        self,
        pool: PagePool,
        slots_GT: Tensor,
        positions_T: Tensor,
        lengths_B: Tensor,
        tables_GBP: Tensor,
        bounds_B1: Tensor | None,
        extent: Extent,
        workspace: Workspace,
        cascade: Cascade | None = None,
        around: AroundAttention | None = None,
    ) -> None:
        super().__init__(pool, slots_GT, positions_T, lengths_B, tables_GBP, bounds_B1)
        self.extent, self.workspace, self.cascade = extent, workspace, cascade
        self.around = around
        self._group_slots, self._group_tables = slots_GT.unbind(), tables_GBP.unbind()

    def part(self, rows: slice, workspace: Workspace, around: AroundAttention) -> "PagedOnGPU":
        """Some of the sequences of a decode step, while another stream has the others."""
        part = PagedOnGPU(
            self.pool, self.slots_GT[:, rows], self.positions_T[rows], self.lengths_B[rows], self.tables_GBP[:, rows],
            None, self.extent._replace(shares_chip=True), workspace, around=around,
        )  # fmt: skip
        part.axes_3T = None if self.axes_3T is None else self.axes_3T[:, rows]
        return part

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        keys, values = self.pool.of_layer(rule.layer)
        if self.extent.measures and self.pool.scales is not None:
            self.pool.scales.measure(rule.layer, k_TKC, v_TKC)
        k_scale, v_scale = self._scales(rule)
        self._store(keys, k_TKC if k_scale is None else stored(k_TKC, k_scale), rule)
        self._store(values, v_TKC if v_scale is None else stored(v_TKC, v_scale), rule)
        return self._over_pages(q_THC, keys, values, rule)

    def projected(
        self, qkv_TE: Tensor, heads: Heads, table: Tensor | None, rule: AttentionRule
    ) -> Tensor:
        """Attention from the fused projection [T, (H + 2K) * C] to [T, H, C]; with axes the table is by token."""
        keys, values = self.pool.of_layer(rule.layer)
        positions_T = self.positions_T if self.axes_3T is None else None
        if self.extent.measures and self.pool.scales is not None:
            _, k_TKC, v_TKC = rope(qkv_TE, heads, table, positions_T)
            self.pool.scales.measure(rule.layer, k_TKC, v_TKC)
        slots_T = self._group_slots[self.pool.group_of[rule.layer]]
        pages = Pages(slots_T, keys, values, *self._scales(rule))
        size = keys.shape[-1]
        if not self.extent.fresh or self.extent.invariant or size not in WIDTHS:
            # Few rows prefetch and many do not, and the compiler contracts the two forms' sums differently: 4e-3 of q.
            prefetch = not self.extent.invariant
            q_THC = rope_write(
                qkv_TE, heads, table, positions_T, pages, in_place=True, prefetch=prefetch
            )
            return self._over_pages(q_THC, keys, values, rule)
        k_TKC = qkv_TE.new_empty(len(qkv_TE), heads.kv, size)
        q_THC = rope_write(qkv_TE, heads, table, positions_T, pages, k_out=k_TKC)
        v_TKC = qkv_TE[:, (heads.q + heads.kv) * size :].unflatten(-1, (heads.kv, size))
        out = attention(
            q_THC, k_TKC, v_TKC, self.bounds_B1, max_length=self.extent.max_query,
            window=rule.window, softcap=rule.softcap, scale=rule.scale, sinks_H=_sinks(rule),
        )  # fmt: skip
        return out if isinstance(out, Tensor) else out[0]

    def _scales(self, rule: AttentionRule) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.pool.scales is None else self.pool.scales.of_layer(rule.layer)

    def latent(self, tokens: LatentTokens, rule: AttentionRule) -> Tensor:
        """Store rows of latent attention, and attend: all tokens in the absorbed form, in one launch."""
        cache, _ = self.pool.of_layer(rule.layer)
        rank, group = tokens.expansion.sizes.rank, self.pool.group_of[rule.layer]
        latent_write(tokens.rows_TE, self._group_slots[group], cache, rank)
        out_THR = latent_attention(
            tokens.absorbed(tokens.q_THC),
            cache,
            self._group_tables[group],
            self.lengths_B,
            self.bounds_B1,
            rank=rank,
            max_query=self.extent.max_query,
            scale=rule.scale,
        )
        return tokens.expansion.restored(out_THR)

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """States are changed where they lie; their slots were staged with the step."""
        states = self.pool.states
        if states is None or not rule.has_kernels:
            return super().recur(rule, inputs)
        group, planes = states.of_layer(rule.layer)
        slots_B = states.slots_GB[group, : len(self.lengths_B)]
        return rule.in_slots(inputs, planes, Sequences(slots_B, self.bounds_B1, len(inputs[0])))

    def _store(self, cache: Tensor, new_TKC: Tensor, rule: AttentionRule) -> None:
        # Padding has slot -1; it goes to the null page, which is never read.
        size, slots_T = cache.shape[1], self._slots_of(rule).clamp(min=0)
        new_TKC = new_TKC.to(cache.dtype)
        if cache.itemsize == 1:  # 8-bit floats cannot be indexed everywhere
            cache, new_TKC = cache.view(torch.uint8), new_TKC.view(torch.uint8)
        cache[slots_T // size, slots_T % size] = new_TKC

    def _over_pages(
        self, q_THC: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        if self.around is not None:
            self.around.before()
        out_THC = self._attend_pages(q_THC, keys, values, rule)
        for reach in self.reaches:
            out_THC[reach.tokens] = self._both_ways(reach, q_THC, keys, values, rule)
        if self.around is not None:
            self.around.after()
        return out_THC

    def _both_ways(
        self, reach: Reach, q_THC: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attention, with torch, of a sequence with bidirectional spans."""
        size, tables_BP = self.pool.page_size, self._group_tables[self.pool.group_of[rule.layer]]
        count = reach.tokens.stop - reach.tokens.start
        first = max(0, reach.length - count + 1 - rule.window) // size if rule.window else 0
        pages_P = tables_BP[reach.sequence, first : -(-reach.length // size)].long()
        length = reach.length - first * size
        k_NKC, v_NKC = (cache[pages_P].flatten(0, 1)[:length] for cache in (keys, values))
        reach_S = torch.from_numpy(reach.reach_S - first * size).to(q_THC.device)
        return attend_by_torch(q_THC[reach.tokens], k_NKC, v_NKC, rule, reach_S)

    def _attend_pages(
        self, q_THC: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        tables_BP = self._group_tables[self.pool.group_of[rule.layer]]
        k_scale, v_scale = self._scales(rule)
        if self.extent.invariant:
            call = checked(q_THC, keys, values, tables_BP, self.lengths_B, self.bounds_B1,
                           self.extent.max_query, rule.scale, rule.window, rule.softcap, _sinks(rule),
                           k_scale=k_scale, v_scale=v_scale)  # fmt: skip
            prefill(call)
            return call.out_THC
        if self.cascade is not None and not rule.window and rule.sinks_H is None:
            return cascade_attention(q_THC, keys, values, self.cascade, self.bounds_B1,
                                     max_query=self.extent.max_query, scale=rule.scale,
                                     softcap=rule.softcap, k_scale=k_scale, v_scale=v_scale,
                                     workspace=self.workspace)  # fmt: skip
        return paged_attention(
            q_THC, keys, values, tables_BP, self.lengths_B, self.bounds_B1,
            max_query=self.extent.max_query, scale=rule.scale, window=rule.window,
            softcap=rule.softcap, sinks_H=_sinks(rule), k_scale=k_scale, v_scale=v_scale,
            workspace=self.workspace, prefetch=True,
            shares_chip=self.extent.shares_chip,
        )  # fmt: skip


def _sinks(rule: AttentionRule) -> Tensor | None:
    return None if rule.sinks_H is None else rule.sinks_H.detach()


def stored(new_TKC: Tensor, scale_1: Tensor) -> Tensor:
    """Keys or values as a float8 cache keeps them."""
    return rounded(new_TKC.float() / scale_1, torch.float8_e4m3fn)
