"""Attention of a step with one sequence: its keys and values are views of the pool, and nothing is gathered.

    SingleToken    one token: a decode step of one stream
    FewTokens      several: a step that verifies drafts, or the end of a prompt whose beginning was cached

Both want pages that lie one behind the other, as they do until the cache has been full once. In any other order the
pages of all layers are copied together, once in a step. The heads of a group see the same keys: they are queries of one
head, and no key is repeated. Knows nothing about windows that free pages, soft-caps and sinks.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cairn.models import cpu_half_precision
from cairn.models.attend import AttentionRule

if TYPE_CHECKING:
    from cairn.serve.engine.pages import PagePool

MOST_TOKENS = 32  # of `FewTokens`: more are a prompt, whose own work is more than gathering keys


class CachedSequence(NamedTuple):
    """Cache view of a sequence with contiguous tokens."""

    by_slot: Tensor  # the pool, or a copy of the sequence's pages, as `PagePool.by_slot`
    first: int  # slot of its first token there
    copied: bool  # what a step adds belongs into the pool as well


def held_pages(pool: "PagePool", table_P: Tensor, length: int) -> CachedSequence:
    """`table_P`: the pages of a sequence of so many tokens."""
    table_P = table_P[: -(-length // pool.page_size)]
    first, *rest = table_P.tolist()
    if rest == list(range(first + 1, first + 1 + len(rest))):
        return CachedSequence(pool.by_slot, first * pool.page_size, False)
    # In a cache that was full once, pages come back in any order.
    return CachedSequence(pool.together(table_P.long()), 0, True)


class TokenEntry(NamedTuple):
    """A token's keys and values of all layers, [layer, 2, K, C]: in a copy of its page, and in its page."""

    new: Tensor
    home: Tensor


class SingleToken(NamedTuple):
    """Attention of one sequence with one token."""

    shape: tuple[int, int, int]  # of a token's key and value
    new: tuple[Tensor, ...]  # of each layer, where this token's go
    keys: tuple[Tensor, ...]  # [1, K, N, C]
    values: tuple[Tensor, ...]
    length: int
    kept: "TokenEntry | None" = (
        None  # of a copy: what this token adds belongs into the pool as well
    )

    @staticmethod
    def of(cache: Tensor, slot: int, start: int, length: int) -> "SingleToken":
        """All layers' views at once, for the price of a few; `cache` as `by_slot`."""
        keys, values = _keys_and_values(cache, start, length)
        shape = (2, cache.shape[3], cache.shape[4])
        return SingleToken(shape, tuple(cache.select(2, slot).unbind()), keys, values, length)

    def joined(self, qkv_1EC: Tensor, heads: int, rule: AttentionRule) -> Tensor:
        _, kv_heads, size = self.shape
        self.new[rule.layer].copy_(qkv_1EC[0, heads:].view(self.shape))
        if self.kept is not None:
            self.kept.home[rule.layer].copy_(self.kept.new[rule.layer])
        k_1KNC, v_1KNC = self.keys[rule.layer], self.values[rule.layer]
        if 0 < rule.window < self.length:
            k_1KNC, v_1KNC = (kept[:, :, -rule.window :] for kept in (k_1KNC, v_1KNC))
        q_1KGC = qkv_1EC[:, :heads].view(1, kv_heads, -1, size)
        out_1KGC = cpu_half_precision.attention(q_1KGC, k_1KNC, v_1KNC, scale=rule.scale)
        return out_1KGC.reshape(1, heads * size)


class FewTokens:
    """Causal attention of one sequence with its last `tokens` tokens."""

    def __init__(self, cached: CachedSequence, length: int, tokens: int) -> None:
        cache, first = cached.by_slot, cached.first
        self.length, self.tokens, self.copied = length, tokens, cached.copied
        self.new = cache.narrow(2, first + length - tokens, tokens).unbind()
        self.keys, self.values = _keys_and_values(cache, first, length)
        self._masks: dict[int, Tensor] = {}  # by queries of a token that a head of keys has

    def joined(self, q_THC: Tensor, kv_2TKC: Tensor, rule: AttentionRule) -> Tensor:
        """Store keys and values, and attend; [T, H * C]."""
        self.new[rule.layer].copy_(kv_2TKC)
        kv_heads, size = kv_2TKC.shape[2:]
        q_KTGC = q_THC.unflatten(1, (kv_heads, -1)).transpose(0, 1)
        group = q_KTGC.shape[2]
        out_1KSC = cpu_half_precision.attention(
            q_KTGC.reshape(1, kv_heads, -1, size),
            self.keys[rule.layer],
            self.values[rule.layer],
            attn_mask=self._hidden(group, q_THC.dtype),
            scale=rule.scale,
        )
        out_KTGC = out_1KSC.view(kv_heads, self.tokens, group, size)
        return out_KTGC.transpose(0, 1).reshape(self.tokens, -1)

    def _hidden(self, group: int, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [T * G, N]."""
        if group not in self._masks:
            hidden_TN = torch.zeros(self.tokens, self.length, dtype=dtype)
            ahead_TT = torch.full((self.tokens, self.tokens), -torch.inf, dtype=dtype).triu_(1)
            hidden_TN[:, -self.tokens :] = ahead_TT
            self._masks[group] = hidden_TN.repeat_interleave(group, dim=0)
        return self._masks[group]


def _keys_and_values(
    cache: Tensor, start: int, length: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of each layer, [1, K, N, C]."""
    kept = cache.narrow(2, start, length).transpose(2, 3)
    return tuple(kept[:, 0:1].unbind()), tuple(kept[:, 1:2].unbind())
