"""Keys and values in pages, and attention over them: the `attend` of the engine.

    pool     [layer, key or value, page, place in the page, head, column]; page 0 belongs to nobody
    Paged    one step: where each token's key goes, which pages each sequence has, how long it is

All keys of a layer are written before any query of that layer attends, so a sequence may use pages that another fills
in the same step. This is the plain form, in torch: sequences with one token attend all at once, the others one after
another. `gpu_pages` has the form for a GPU. Knows nothing about who owns which page.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes
from cairn.models.attend import Rule, attention
from cairn.models.spec import ModelSpec

NULL_PAGE = 0


class PagePool:
    """The memory of all pages."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        shards: int = 1,
    ) -> None:
        kv_heads = spec.kv_heads // shards
        # A GPU reads the tokens of one head in long runs; a CPU gathers whole tokens.
        self.heads_first = torch.device(device).type == "cuda"
        inside = (kv_heads, page_size) if self.heads_first else (page_size, kv_heads)
        shape = (spec.layers, 2, pages, *inside, spec.head_dim)
        self.page_size, self.pages = page_size, pages
        self._room: Tensor | None = None
        try:
            # Zeros, because a tile may read beyond a sequence, and what is masked must at least be finite.
            self.cache = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if self.heads_first and not isinstance(error, torch.OutOfMemoryError):
                raise  # of a GPU that is broken; a CPU has no type of its own for what is too much
            needed = pages * page_bytes(spec, page_size, dtype, shards)
            raise HardwareError(
                f"{pages} pages of {page_size} tokens need {format_bytes(needed, 'binary')}, "
                f"and {device} has not that much left",
                hint="lower gpu_memory_utilization, or num_gpu_blocks_override",
            ) from error

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [pages, page_size, kv_heads, C]."""
        keys, values = self.cache[layer].transpose(2, 3) if self.heads_first else self.cache[layer]
        return keys, values

    @cached_property
    def by_slot(self) -> Tensor:
        """[layer, key or value, slot, head, column]; only where whole tokens lie together."""
        return self.cache.flatten(2, 3)

    @cached_property
    def slots(self) -> list[Tensor]:
        """Of each layer, keys and values by slot: [2, slots, head, column]."""
        return [part.flatten(1, 2) for part in self.cache]

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer; a view made once costs nothing in a step."""
        return [self.of_layer(layer) for layer in range(len(self.cache))]

    def together(self, pages_P: Tensor) -> Tensor:
        """A copy of these pages, one behind the other, as `by_slot`; the next one takes its memory."""
        shape = (*self.cache.shape[:2], len(pages_P), *self.cache.shape[3:])
        if self._room is None or self._room.numel() < math.prod(shape):
            # More than now, so that a growing sequence seldom needs another.
            self._room = None  # before the next one is there
            ample = min(math.prod(shape) * 5 // 4, max(math.prod(shape), self.cache.numel()))
            self._room = self.cache.new_empty(ample)
        copy = self._room[: math.prod(shape)].view(shape)
        torch.index_select(self.cache, 2, pages_P, out=copy)
        return copy.flatten(2, 3)

    @cached_property
    def rows(self) -> list[Tensor]:
        """Of each layer, pages of keys and behind them those of values, a row for each."""
        return [part.view(2 * self.pages, -1) for part in self.cache]


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype, shards: int = 1) -> int:
    values = 2 * spec.layers * page_size * (spec.kv_heads // shards) * spec.head_dim
    return values * dtype.itemsize


class Paged:
    """The attention of one step over the pages of its sequences."""

    def __init__(
        self,
        pool: PagePool,
        slots_T: Tensor,
        positions_T: Tensor,
        lengths_B: Tensor,
        tables_BP: Tensor,
        bounds_B1: Tensor | None,  # None: one token for each sequence
    ) -> None:
        self.pool, self.slots_T, self.positions_T = pool, slots_T, positions_T
        self.lengths_B, self.tables_BP, self.bounds_B1 = lengths_B, tables_BP, bounds_B1

    def lengths_T(self) -> Tensor:
        if self.bounds_B1 is None:
            return self.lengths_B
        # By search rather than by repetition, whose size the host would have to know: a CUDA graph holds this.
        token_T = torch.arange(
            len(self.slots_T), dtype=self.bounds_B1.dtype, device=self.bounds_B1.device
        )
        owner_T = torch.searchsorted(self.bounds_B1, token_T, right=True) - 1
        return self.lengths_B[owner_T.clamp(max=len(self.lengths_B) - 1)]

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: Rule) -> Tensor:
        """Store this layer's keys and values, then attend."""
        keys, values = self.pool.of_layer(rule.layer)
        self._store(keys, k_TKC)
        self._store(values, v_TKC)
        return self._attend(q_THC, keys, values, rule)

    def joined(self, qkv_TEC: Tensor, heads: int, rule: Rule) -> Tensor:
        """The same for q, k and v side by side; [T, H * C]."""
        if not rule.softcap and self.alone is not None:
            return self.alone.joined(qkv_TEC, heads, rule)
        kv_2TKC = qkv_TEC[:, heads:].unflatten(1, (2, -1)).transpose(0, 1)
        self.pool.slots[rule.layer].index_copy_(1, self._slots_T, kv_2TKC)
        keys, values = self.pool.layers[rule.layer]
        return self._attend(qkv_TEC[:, :heads], keys, values, rule).flatten(1)

    def _attend(self, q_THC: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        singles, others = self._plan
        if not others and singles is not None and not rule.softcap:
            return singles.attend(q_THC, rule)
        out_THC = q_THC.new_empty(q_THC.shape)
        if singles is not None and not rule.softcap:
            out_THC[singles.tokens_B] = singles.attend(q_THC[singles.tokens_B], rule)
        elif singles is not None:
            others = [*others, *singles.one_by_one()]
        for one in others:
            k_NKC, v_NKC = (gather(cache, one.pages_P)[: one.length] for cache in (keys, values))
            out_THC[one.tokens] = attention(q_THC[one.tokens], k_NKC, v_NKC, rule)
        return out_THC

    @cached_property
    def alone(self) -> "Alone | None":
        """The only sequence with its only token."""
        if len(self.slots_T) != 1:
            return None
        (length,), (slot,), size = (
            self.lengths_B.tolist(),
            self.slots_T.tolist(),
            self.pool.page_size,
        )
        first, *rest = self.tables_BP[0, : -(-length // size)].tolist() or [NULL_PAGE]
        if slot < 0 or not length:
            return None
        if rest == list(range(first + 1, first + 1 + len(rest))):
            return Alone.of(self.pool.by_slot, slot, first * size, length)
        # In a cache that was full once, pages come back in any order.
        together = self.pool.together(self.tables_BP[0, : 1 + len(rest)].long())
        kept = Kept(together.select(2, length - 1), self.pool.by_slot.select(2, slot))
        return Alone.of(together, length - 1, 0, length)._replace(kept=kept)

    @cached_property
    def _slots_T(self) -> Tensor:
        return self.slots_T.clamp(min=NULL_PAGE).long()  # padding goes where nobody reads

    def _store(self, cache: Tensor, new_TKC: Tensor) -> None:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, self._slots_T, new_TKC.to(cache.dtype))

    @cached_property
    def _plan(self) -> "tuple[Singles | None, list[Several]]":
        """Who attends together, and who alone; the same for all layers."""
        lengths, size = self.lengths_B.tolist(), self.pool.page_size
        bounds = range(len(lengths) + 1) if self.bounds_B1 is None else self.bounds_B1.tolist()
        tables_BP = self.tables_BP.long()
        single, several = [], []
        for b, length in enumerate(lengths):
            tokens = slice(bounds[b], bounds[b + 1])
            if bounds[b + 1] - bounds[b] == 1:
                single.append(b)
            else:
                several.append(Several(tokens, length, tables_BP[b, : -(-length // size)]))
        if not single:
            return None, several
        pages = -(-max(lengths[b] for b in single) // size)
        tokens_B = torch.tensor([bounds[b] for b in single])
        return Singles(
            self.pool, tokens_B, self.lengths_B[single], tables_BP[single, :pages]
        ), several


class Kept(NamedTuple):
    """A token's keys and values of all layers, [layer, 2, K, C]: in a copy of its page, and in its page."""

    new: Tensor
    home: Tensor


class Alone(NamedTuple):
    """One sequence with one token: its keys and values are views of the pool, or of a copy of its pages."""

    shape: tuple[int, int, int]  # of a token's key and value
    new: tuple[Tensor, ...]  # of each layer, where this token's go
    keys: tuple[Tensor, ...]  # [1, K, N, C]
    values: tuple[Tensor, ...]
    length: int
    kept: "Kept | None" = None  # of a copy: what this token adds belongs into the pool as well

    @staticmethod
    def of(cache: Tensor, slot: int, start: int, length: int) -> "Alone":
        """All layers' views at once, for the price of a few; `cache` as `by_slot`."""
        kept = cache.narrow(2, start, length).transpose(2, 3)
        keys, values = kept[:, 0:1].unbind(), kept[:, 1:2].unbind()
        shape = (2, cache.shape[3], cache.shape[4])
        return Alone(
            shape, tuple(cache.select(2, slot).unbind()), tuple(keys), tuple(values), length
        )

    def joined(self, qkv_1EC: Tensor, heads: int, rule: Rule) -> Tensor:
        _, kv_heads, size = self.shape
        self.new[rule.layer].copy_(qkv_1EC[0, heads:].view(self.shape))
        if self.kept is not None:
            self.kept.home[rule.layer].copy_(self.kept.new[rule.layer])
        k_1KNC, v_1KNC = self.keys[rule.layer], self.values[rule.layer]
        if 0 < rule.window < self.length:
            k_1KNC, v_1KNC = (kept[:, :, -rule.window :] for kept in (k_1KNC, v_1KNC))
        # The heads of a group see the same keys: they are queries of one head, and no key is copied.
        q_1KGC = qkv_1EC[:, :heads].view(1, kv_heads, -1, size)
        out_1KGC = F.scaled_dot_product_attention(q_1KGC, k_1KNC, v_1KNC, scale=rule.scale)
        return out_1KGC.reshape(1, heads * size)


class Several(NamedTuple):
    """A sequence with several tokens in this step."""

    tokens: slice
    length: int
    pages_P: Tensor


class Singles:
    """Sequences with one token each: all at once, as if all were as long as the longest."""

    def __init__(
        self, pool: PagePool, tokens_B: Tensor, lengths_B: Tensor, tables_BP: Tensor
    ) -> None:
        self.pool, self.size = pool, pool.page_size
        self.tokens_B, self.lengths_B, self.tables_BP = tokens_B, lengths_B, tables_BP
        pages = tables_BP.flatten()
        self.pages = torch.cat((pages, pages + pool.pages))  # of keys, and of values
        # Every layer's keys and values are gathered into the same memory, so its views are made once.
        self._room = pool.rows[0].new_empty(len(self.pages), pool.rows[0].shape[1])
        shape = (2, len(tables_BP), -1, *pool.cache.shape[4:])
        self._k_BKNC, self._v_BKNC = self._room.view(shape).transpose(2, 3)
        self._masks: dict[int, Tensor] = {}

    def attend(self, q_BHC: Tensor, rule: Rule) -> Tensor:
        torch.index_select(self.pool.rows[rule.layer], 0, self.pages, out=self._room)
        # The heads of a group see the same keys: they are queries of one head, and no key is copied.
        q_BKGC = q_BHC.unflatten(1, (self._k_BKNC.shape[1], -1))
        mask = self._mask(rule.window, q_BHC.dtype)
        out_BKGC = F.scaled_dot_product_attention(
            q_BKGC, self._k_BKNC, self._v_BKNC, attn_mask=mask, scale=rule.scale
        )
        return out_BKGC.flatten(1, 2)

    def one_by_one(self) -> list[Several]:
        """The same sequences, for a rule that torch's attention does not know."""
        rows = zip(self.tokens_B.tolist(), self.lengths_B.tolist(), self.tables_BP, strict=True)
        return [Several(slice(token, token + 1), length, pages_P[: -(-length // self.size)])
                for token, length, pages_P in rows]  # fmt: skip

    def _mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, [B, 1, 1, N]."""
        if window not in self._masks:
            place_N, lengths_B1 = (
                torch.arange(self.tables_BP.shape[1] * self.size),
                self.lengths_B[:, None],
            )
            seen_BN = place_N < lengths_B1
            if window:
                seen_BN &= place_N >= lengths_B1 - window
            hidden_BN = torch.zeros(seen_BN.shape, dtype=dtype).masked_fill_(~seen_BN, -torch.inf)
            self._masks[window] = hidden_BN[:, None, None]
        return self._masks[window]


def gather(cache: Tensor, pages_P: Tensor) -> Tensor:
    """Pages side by side, [tokens, heads, columns]; several times as fast as indexing."""
    return torch.index_select(cache.flatten(1), 0, pages_P).view(-1, *cache.shape[2:])
