"""Arguments of paged attention, and the lookup of a tile of keys in the blocks.

    cache_k, cache_v   [pages, page_size, kv_heads, C]; the strides are free but for the last, which is 1, so pages that
                       keep each head's tokens together ([pages, kv_heads, page_size, C]) come as a transposed view
    block_tables       int32 [sequences, columns]: token t of a sequence lies in page block_tables[s, t // page_size]
    lengths            int32 [sequences]: tokens in the cache, those of this call included; 0 for padding
    starts             int32 [sequences + 1]: whose query rows are whose; None: one row for each sequence

The queries of a sequence are its last tokens: query i of n stands at position p = length - n + i, and sees the keys
0 .. p, or the last `window` of them. Both kernels lay the heads that share a key head side by side in the rows of
one tile, so a key is loaded once for all of them: row r is query r // group, head r % group of its group.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Paged(NamedTuple):
    """Checked arguments of a call."""

    q_THC: Tensor
    cache_k: Tensor
    cache_v: Tensor
    block_tables: Tensor
    lengths: Tensor
    starts: Tensor | None
    max_query: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    sinks_H: Tensor | None
    k_scale: Tensor | None  # float32 [1] or [kv_heads]: what a stored key has to be multiplied by
    v_scale: Tensor | None
    out_THC: Tensor
    lse_TH: Tensor | None

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def page_size(self) -> int:
        return self.cache_k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.cache_k.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q_THC.shape[1] // self.kv_heads

    @property
    def columns(self) -> int:
        return self.q_THC.shape[2]

    def tensors(self) -> dict[str, Any]:
        """Tensor arguments of both kernels. An absent tensor is never read; another one provides its pointer."""
        absent = self.lengths
        return dict(
            q=self.q_THC, k=self.cache_k, v=self.cache_v, tables=self.block_tables, lengths=self.lengths,
            starts=absent if self.starts is None else self.starts,
            out=self.out_THC,
            lse=absent if self.lse_TH is None else self.lse_TH,
            sinks=absent if self.sinks_H is None else self.sinks_H,
            k_scale=absent if self.k_scale is None else self.k_scale,
            v_scale=absent if self.v_scale is None else self.v_scale,
        )  # fmt: skip

    def numbers(self) -> dict[str, Any]:
        q, out, cache = self.q_THC, self.out_THC, self.cache_k
        return dict(
            sequences=self.sequences, scale=self.scale, table_stride=self.block_tables.stride(0),
            q_token=q.stride(0), q_head=q.stride(1), out_token=out.stride(0), out_head=out.stride(1),
            page_stride=cache.stride(0), token_stride=cache.stride(1), head_stride=cache.stride(2),
        )  # fmt: skip

    def constants(self) -> dict[str, Any]:
        scales = 0 if self.k_scale is None else 1 + (self.k_scale.numel() > 1)
        return dict(
            KV_HEADS=self.kv_heads, GROUP=self.group, C=self.columns,
            WIDTH=power_of_2(self.columns), PAGE=self.page_size,
            SEQUENCES=bucket(self.sequences), WINDOW=self.window, SOFTCAP=self.softcap,
            SINKS=self.sinks_H is not None, SCALES=scales, LSE=self.lse_TH is not None,
            STARTS=self.starts is not None, EXACT=self.q_THC.dtype == torch.float32,
        )  # fmt: skip


def power_of_2(size: int) -> int:
    """The next one from `size` on."""
    return 1 << (size - 1).bit_length()


def bucket(sequences: int) -> int:
    """The lengths of all sequences are one vector in each program: a few sizes, so few kernels to compile."""
    few = next((size for size in (16, 128, 1024) if sequences <= size), None)
    return few or power_of_2(sequences)


@triton.jit
def counted(starts, sequence, mask, STARTS: tl.constexpr):
    """First query row of each of these sequences, and how many it has."""
    if STARTS:
        first = tl.load(starts + sequence, mask=mask, other=0)
        return first, tl.load(starts + sequence + 1, mask=mask, other=0) - first
    else:
        return sequence, tl.where(mask, 1, 0)


@triton.jit
def owner_of(ends_S, place):
    """Which sequence a place in a line of tiles belongs to, and where its own tiles begin; `ends_S`: where they end."""
    ended = ends_S <= place
    return tl.sum(ended.to(tl.int32), 0), tl.max(tl.where(ended, ends_S, 0), 0)


@triton.jit
def first_tile(length, queries, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first tile of keys that any of the last `queries` tokens sees."""
    if WINDOW:
        return tl.maximum(length - queries + 1 - WINDOW, 0) // BLOCK
    else:
        return length * 0


@triton.jit
def tiles_of(length, queries, QUERIES: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """How many tiles of keys a sequence has to read; 0 if it has too many queries to be ours, or none."""
    tiles = tl.cdiv(length, BLOCK) - first_tile(length, queries, WINDOW, BLOCK)
    return tl.where((queries > 0) & (queries <= QUERIES), tl.maximum(tiles, 0), 0)


@triton.jit
def pages_of(table, tile, limit, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tokens of a tile lie: one page for all of them, or the page of each. Behind `limit`: page 0."""
    if PAGE >= BLOCK:
        token = tile * BLOCK
        return tl.load(table + token // PAGE, mask=token < limit, other=0)
    else:
        tokens = tile * BLOCK + tl.arange(0, BLOCK)
        return tl.load(table + tokens // PAGE, mask=tokens < limit, other=0)


@triton.jit
def rows_of(pages, tile, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the tokens of a tile in the cache, in elements."""
    if PAGE >= BLOCK:
        start = pages.to(tl.int64) * page_stride + (tile * BLOCK % PAGE) * token_stride
        return start + tl.arange(0, BLOCK) * token_stride
    else:
        inside = tl.arange(0, BLOCK) % PAGE
        return pages.to(tl.int64) * page_stride + inside * token_stride


@triton.jit
def scaled(products, strength, SOFTCAP: tl.constexpr):
    """Scores in units of log2(e), from products of queries and keys.

    A soft-cap makes them softcap * tanh(score / softcap) first: one exp2, good to the last bits of float32.
    """
    if SOFTCAP > 0:
        grown = tl.math.exp2(products * (strength * (2.0 * LOG2_E / SOFTCAP)))
        return SOFTCAP * LOG2_E - (2.0 * SOFTCAP * LOG2_E) / (grown + 1.0)
    else:
        return products * (strength * LOG2_E)


@triton.jit
def factor(scales, head, SCALES: tl.constexpr):
    """What stored keys or values have to be multiplied by: nothing, one factor, or one for each head."""
    if SCALES == 0:
        return 1.0
    elif SCALES == 1:
        return tl.load(scales)
    else:
        return tl.load(scales + head)
