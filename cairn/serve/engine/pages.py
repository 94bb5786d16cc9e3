"""Keys and values in pages, and attention over them: the `attend` of the engine.

    pool     [place of the layer in its group, key or value, page, place in the page, head, column]
    Paged    one step: where each token's key goes, which pages each sequence has, how long it is

A page belongs to a cache group for as long as a request holds it, and has room for as many layers as a group has; page
0 belongs to no request. All keys of a layer are written before any query of that layer attends, so a sequence may use
pages that another fills in the same step. This is the plain form, in torch: sequences with one token attend all at
once, the others one after another, and what lies behind a window is not read. `gpu_pages` has the form for a GPU. Knows
nothing about who owns which page.
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import ConfigError, HardwareError
from cairn.core.units import format_bytes
from cairn.kernels.cpu.paged_decode import DecodeHeads, Sequences, fits
from cairn.models import cpu_half_precision
from cairn.models.attend import AttentionRule, attention
from cairn.models.cache import CacheGroup, page_bytes, page_layers, paged
from cairn.models.latent import LatentTokens
from cairn.models.recurrence import Planes, Recurrence
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.single_sequence import (
    MOST_TOKENS,
    FewTokens,
    SingleToken,
    TokenEntry,
    held_pages,
)
from cairn.serve.engine.spans import Reach
from cairn.serve.engine.state_slots import StateSlots

NULL_PAGE = 0


class PagePool:
    """The memory of all pages of all groups."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: CacheScales | None = None,
    ) -> None:
        """`scales`: of a cache in float8."""
        self.scales = scales
        with_pages = paged(groups)
        heads, width = _shape_of_planes(with_pages, dtype)
        # A GPU reads the tokens of one head in long runs; a CPU gathers whole tokens.
        self.heads_first = torch.device(device).type == "cuda"
        inside = (heads, page_size) if self.heads_first else (page_size, heads)
        shape = (page_layers(groups), len(with_pages[0].planes), pages, *inside, width)
        self.groups, self.page_size, self.pages = tuple(groups), page_size, pages
        places = {
            layer: (index, place)
            for index, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        # Of layers that keep a state, which have no place in a page.
        states = {layer for group in groups if group.kind == "state" for layer in group.layers}
        self.states: StateSlots | None = None  # where layers keep some, the runner gives them
        self.group_of = [places[layer][0] for layer in sorted(places)]  # of each layer of the model
        self._place_of = [0 if layer in states else places[layer][1] for layer in sorted(places)]
        self._room: Tensor | None = None
        try:
            # Zeros, because a tile may read beyond a sequence, and what is masked must at least be finite.
            self.cache = _zeros(shape, dtype, device)
        except RuntimeError as error:
            if self.heads_first and not isinstance(error, torch.OutOfMemoryError):
                raise  # of a GPU that is broken; a CPU has no type of its own for what is too much
            needed = pages * page_bytes(groups, page_size, dtype.itemsize)
            raise HardwareError(
                f"{pages} pages of {page_size} tokens need {format_bytes(needed, 'binary')}, "
                f"and {device} has not that much left",
                hint="lower gpu_memory_utilization, or num_gpu_blocks_override",
            ) from error

    def release(self) -> None:
        """Give the memory back. Further pages need a new pool."""
        self.cache, self._room, self.states = self.cache.new_empty(0), None, None
        self._forget_views()

    def move(self, cache: Tensor) -> None:
        """Go on in other memory. Addresses of the old one are invalid."""
        cache.copy_(self.cache)
        self.cache = cache
        self._forget_views()

    def blank(self, pages: Iterable[int]) -> None:
        """Zeros in pages that a sequence begins: what is masked is multiplied by 0, and must be finite."""
        for page in pages:
            self.cache[:, :, page].zero_()

    def _forget_views(self) -> None:
        """Drop the cached views, which are recreated on access."""
        for view in ("by_slot", "slots", "layers", "rows", "addresses"):
            self.__dict__.pop(view, None)

    @property
    def page_bytes(self) -> int:
        return self.cache.nbytes // self.pages

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [pages, page_size, kv_heads, C]."""
        part = self.cache[self._place_of[layer]]
        part = part.transpose(2, 3) if self.heads_first else part
        return part[0], part[-1]  # of a latent, one plane is both

    @cached_property
    def by_slot(self) -> Tensor:
        """[layer, key or value, slot, head, column] of a pool with one group; where whole tokens lie together."""
        return self.cache.flatten(2, 3)

    @cached_property
    def slots(self) -> list[Tensor]:
        """Keys and values of each layer by slot: [2, slots, head, column]."""
        return [self.cache[place].flatten(1, 2) for place in self._place_of]

    @cached_property
    def addresses(self) -> list[tuple[int, int]]:
        """Addresses of each layer's keys and values; tokens are contiguous."""
        return [(kept[0].data_ptr(), kept[-1].data_ptr()) for kept in self.slots]

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer; a view made once costs nothing in a step."""
        return [self.of_layer(layer) for layer in range(len(self._place_of))]

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
        """Blocks of each layer as rows: keys, then values."""
        return [
            self.cache[place].view(-1, self.cache[place, 0, 0].numel()) for place in self._place_of
        ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU from anonymous memory, so that unused blocks take no memory.

    Not from numpy, which asks for huge pages: the first token would take 2 MB of keys and 2 MB of values of each layer.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        room = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(str(error)) from error
    return torch.frombuffer(room, dtype=torch.uint8)[:size].view(dtype).view(shape)


def _shape_of_planes(groups: Sequence[CacheGroup], dtype: torch.dtype) -> tuple[int, int]:
    """Heads and columns of every plane. Groups share pages, and planes a tensor: they all have to be alike."""
    shapes = {
        (p.heads, int(p.token_bytes(dtype.itemsize)) // (p.heads * dtype.itemsize), p.value_bytes)
        for group in groups
        for p in group.planes
    }
    if len(shapes) != 1:
        raise ConfigError(
            f"a page pool of planes {sorted(map(str, shapes))}",
            hint="all planes of all groups have the same heads, columns and type",
        )
    ((heads, width, _),) = shapes
    return heads, width


class Paged:
    """The attention of one step over the pages of its sequences."""

    def __init__(
        self,
        pool: PagePool,
        slots_GT: Tensor,
        positions_T: Tensor,
        lengths_B: Tensor,
        tables_GBP: Tensor,
        bounds_B1: Tensor | None,  # None: one token for each sequence
    ) -> None:
        self.pool, self.positions_T = pool, positions_T
        self.slots_GT, self.tables_GBP = slots_GT, tables_GBP  # of each cache group
        self.lengths_B, self.bounds_B1 = lengths_B, bounds_B1
        self._plans: dict[tuple[int, int], tuple[Singles | None, list[Several]]] = {}
        self.reaches: Sequence[Reach] = ()  # of prompts whose pictures are seen both ways
        self.axes_3T: Tensor | None = None  # numbers by which tokens rotate, beside their positions

    def lengths_T(self) -> Tensor:
        if self.bounds_B1 is None:
            return self.lengths_B
        # By search rather than by repetition, whose size the host would have to know: a CUDA graph holds this.
        token_T = torch.arange(
            len(self.positions_T), dtype=self.bounds_B1.dtype, device=self.bounds_B1.device
        )
        owner_T = torch.searchsorted(self.bounds_B1, token_T, right=True) - 1
        return self.lengths_B[owner_T.clamp(max=len(self.lengths_B) - 1)]

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        """Store this layer's keys and values, then attend."""
        keys, values = self.pool.of_layer(rule.layer)
        self._store(keys, k_TKC, rule)
        self._store(values, v_TKC, rule)
        return self._attend(q_THC, keys, values, rule)

    def joined(self, qkv_TEC: Tensor, heads: int, rule: AttentionRule) -> Tensor:
        """The same for q, k and v side by side; [T, H * C]."""
        if not rule.by_scores and self.single_token is not None:
            return self.single_token.joined(qkv_TEC, heads, rule)
        kv_2TKC = qkv_TEC[:, heads:].unflatten(1, (2, -1)).transpose(0, 1)
        few = None if rule.by_scores else self.few_tokens
        if few is not None and 0 < rule.window < few.length:
            few = None
        if few is None or few.copied:
            self.pool.slots[rule.layer].index_copy_(1, self._slots_of(rule), kv_2TKC)
        if few is not None:
            return few.joined(qkv_TEC[:, :heads], kv_2TKC, rule)
        keys, values = self.pool.layers[rule.layer]
        return self._attend(qkv_TEC[:, :heads], keys, values, rule).flatten(1)

    def placed(
        self, qkv_TE: Tensor, heads: DecodeHeads, angles: tuple[Tensor, Tensor] | None, layer: int
    ) -> Tensor | None:
        """Norm, rotate, store and attend in one call, [T, H * C]; None: not in a step of this kind."""
        sequences, group = self.sequences, self.pool.group_of[layer]
        if sequences is None:
            return None
        return heads.attend(qkv_TE, angles, sequences, group, self.pool.addresses[layer])

    @cached_property
    def sequences(self) -> Sequences | None:
        """Sequences of the step for the compiled attention; None if it does not support the cache or the mask."""
        if self.reaches or not fits(self.pool.cache):
            return None
        return Sequences(
            self.slots_GT, self.lengths_B, self.tables_GBP, self.pool.page_size, self.bounds_B1
        )

    def _attend(self, q_THC: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        singles, others = self._plan(self.pool.group_of[rule.layer], rule.window)
        if not others and singles is not None and not rule.by_scores:
            return singles.attend(q_THC, rule)
        out_THC = q_THC.new_empty(q_THC.shape)
        if singles is not None and not rule.by_scores:
            out_THC[singles.tokens_B] = singles.attend(q_THC[singles.tokens_B], rule)
        elif singles is not None:
            others = [*others, *singles.one_by_one()]
        for one in others:
            k_NKC, v_NKC = (gather(cache, one.pages_P)[: one.length] for cache in (keys, values))
            reach_S = self._reach_of(one)
            out_THC[one.tokens] = attention(q_THC[one.tokens], k_NKC, v_NKC, rule, reach_S)
        return out_THC

    def _reach_of(self, one: "Several") -> Tensor | None:
        """Counted from the first of its keys; None: its tokens see what stands before them."""
        for reach in self.reaches:
            if reach.tokens == one.tokens:
                return torch.from_numpy(reach.reach_S - one.before)
        return None

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """Advance the states of this step's sequences."""
        if self.pool.states is None:
            raise ValueError(f"layer {rule.layer} keeps a state, and the pool has no slots for any")
        return self.pool.states.recur(rule, inputs)

    def latent(self, tokens: LatentTokens, rule: AttentionRule) -> Tensor:
        """Store rows of latent attention, and attend: one token of a sequence absorbed, several expanded."""
        rows, _ = self.pool.of_layer(rule.layer)
        self._store(rows, tokens.rows_TE[:, None], rule)
        singles, others = self._plan(self.pool.group_of[rule.layer], rule.window)
        q_THC = tokens.q_THC
        out_THV = q_THC.new_empty(*q_THC.shape[:2], tokens.expansion.sizes.value)
        if singles is not None:
            out_BHE = singles.attend(tokens.absorbed(q_THC[singles.tokens_B]), rule)
            out_THV[singles.tokens_B] = tokens.restored(out_BHE)
        for one in others:
            rows_N1E = gather(rows, one.pages_P)[: one.length]
            out_THV[one.tokens] = tokens.attended(one.tokens, rows_N1E, rule)
        return out_THV

    @cached_property
    def single_token(self) -> SingleToken | None:
        """The only sequence with its only token, where all layers have one table."""
        length = self._only_length
        if length is None or self.slots_GT.shape[1] > 1:
            return None
        cached = held_pages(self.pool, self.tables_GBP[0, 0], length)
        alone = SingleToken.of(cached.by_slot, cached.first + length - 1, cached.first, length)
        if not cached.copied:
            return alone
        new = cached.by_slot.select(2, length - 1)
        return alone._replace(
            kept=TokenEntry(new, self.pool.by_slot.select(2, int(self.slots_GT[0, 0])))
        )

    @cached_property
    def few_tokens(self) -> FewTokens | None:
        """The only sequence with several tokens, as drafts are verified; where all layers have one table."""
        length = self._only_length
        if length is None or not 1 < self.slots_GT.shape[1] <= MOST_TOKENS or self.reaches:
            return None
        cached = held_pages(self.pool, self.tables_GBP[0, 0], length)
        return FewTokens(cached, length, self.slots_GT.shape[1])

    @cached_property
    def _only_length(self) -> int | None:
        """Length of the only sequence; None with other sequences, padding, several tables or states."""
        if len(self.slots_GT) > 1 or len(self.lengths_B) > 1 or self.pool.states is not None:
            return None
        (length,) = self.lengths_B.tolist()
        full = self.pool.groups[0].kind == "full" and min(self.slots_GT[0].tolist()) >= 0
        return length if length and full else None

    @cached_property
    def _slots(self) -> tuple[Tensor, ...]:
        """Cache slots of each group; padding goes to the null block."""
        return self.slots_GT.clamp(min=NULL_PAGE).long().unbind()

    def _slots_of(self, rule: AttentionRule) -> Tensor:
        return self._slots[self.pool.group_of[rule.layer]]

    def _store(self, cache: Tensor, new_TKC: Tensor, rule: AttentionRule) -> None:
        flat = cache.view(-1, *cache.shape[2:])
        flat.index_copy_(0, self._slots_of(rule), new_TKC.to(cache.dtype))

    def _plan(self, group: int, window: int) -> "tuple[Singles | None, list[Several]]":
        """Batched and single attention calls, shared by all layers of a group with the same window."""
        if (group, window) not in self._plans:
            self._plans[group, window] = self._make_plan(group, window)
        return self._plans[group, window]

    def _make_plan(self, group: int, window: int) -> "tuple[Singles | None, list[Several]]":
        lengths, size = self.lengths_B.tolist(), self.pool.page_size
        bounds = range(len(lengths) + 1) if self.bounds_B1 is None else self.bounds_B1.tolist()
        tables_BP = self.tables_GBP[group].long()
        single, several = [], []
        for b, length in enumerate(lengths):
            tokens = slice(bounds[b], bounds[b + 1])
            count = tokens.stop - tokens.start
            if count == 1:
                single.append(b)
                continue
            first = max(0, length - count + 1 - window) // size if window else 0
            pages_P = tables_BP[b, first : -(-length // size)]
            several.append(Several(tokens, length - first * size, pages_P, first * size))
        if not single:
            return None, several
        tokens_B = torch.tensor([bounds[b] for b in single])
        singles = Singles(self.pool, tokens_B, self.lengths_B[single], tables_BP[single], window)
        return singles, several


class Several(NamedTuple):
    """A sequence with several tokens in this step."""

    tokens: slice
    length: int
    pages_P: Tensor
    before: int = 0  # tokens in front of the first of these pages


class Singles:
    """Sequences with one token each: all at once, as if all saw as many pages as the one that sees most."""

    def __init__(
        self, pool: PagePool, tokens_B: Tensor, lengths_B: Tensor, tables_BP: Tensor, window: int
    ) -> None:
        self.size, self.tokens_B, self.lengths_B, self.window = (
            pool.page_size,
            tokens_B,
            lengths_B,
            window,
        )
        self.first_B = torch.zeros_like(lengths_B)  # the page that a sequence sees first
        if window:
            self.first_B = (lengths_B - window).clamp(min=0) // self.size
        last_B = -(-lengths_B // self.size)
        most = int((last_B - self.first_B).max())
        places_BP = self.first_B[:, None] + torch.arange(most)
        self.tables_BP = tables_BP.gather(1, places_BP.clamp(max=tables_BP.shape[1] - 1).long())
        pages = self.tables_BP.flatten()
        self.pool = pool
        planes = pool.cache.shape[1]  # keys and values, or one that is both
        self.pages = torch.cat([pages + plane * pool.pages for plane in range(planes)])
        # Every layer's keys and values are gathered into the same memory, so its views are made once.
        self._room = pool.rows[0].new_empty(len(self.pages), pool.rows[0].shape[1])
        shape = (planes, len(tables_BP), -1, *pool.cache.shape[4:])
        kept = self._room.view(shape).transpose(2, 3)
        self._k_BKNC, self._v_BKNC = kept[0], kept[-1]
        self._mask: Tensor | None = None

    def attend(self, q_BHC: Tensor, rule: AttentionRule) -> Tensor:
        torch.index_select(self.pool.rows[rule.layer], 0, self.pages, out=self._room)
        # The heads of a group see the same keys: they are queries of one head, and no key is copied.
        q_BKGC = q_BHC.unflatten(1, (self._k_BKNC.shape[1], -1))
        out_BKGC = cpu_half_precision.attention(
            q_BKGC,
            self._k_BKNC,
            self._v_BKNC,
            attn_mask=self._hidden(q_BHC.dtype),
            scale=rule.scale,
        )
        return out_BKGC.flatten(1, 2)

    def one_by_one(self) -> list[Several]:
        """The same sequences, for a rule that torch's attention does not know."""
        lengths_B = self.lengths_B - self.first_B * self.size
        before_B = (self.first_B * self.size).tolist()
        tokens_B = self.tokens_B.tolist()
        rows = zip(tokens_B, lengths_B.tolist(), self.tables_BP, before_B, strict=True)
        return [
            Several(slice(token, token + 1), length, pages_P[: -(-length // self.size)], before)
            for token, length, pages_P, before in rows
        ]

    def _hidden(self, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [B, 1, 1, N]."""
        if self._mask is None:
            places = torch.arange(self.tables_BP.shape[1] * self.size)
            place_BN = self.first_B[:, None] * self.size + places
            lengths_B1 = self.lengths_B[:, None]
            seen_BN = place_BN < lengths_B1
            if self.window:
                seen_BN &= place_BN >= lengths_B1 - self.window
            hidden_BN = torch.zeros(seen_BN.shape, dtype=dtype).masked_fill_(~seen_BN, -torch.inf)
            self._mask = hidden_BN[:, None, None]
        return self._mask


def gather(cache: Tensor, pages_P: Tensor) -> Tensor:
    """Pages side by side, [tokens, heads, columns]; several times as fast as indexing."""
    return torch.index_select(cache.flatten(1), 0, pages_P).view(-1, *cache.shape[2:])
