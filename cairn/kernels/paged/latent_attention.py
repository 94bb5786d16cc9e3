"""Attention over pages of latent rows (MLA in its absorbed form): decode, prefill behind a prefix, and both at once.

    out[t, h] = sum over the rows j that t sees of softmax(scale * q[t, h] . row[j])[j] * row[j, :rank]

A row is the latent of a token (`rank` columns) and one rotated key; it is key and value of all heads, so it is read
once for all of them. One program has a tile of queries x heads, and one part of the rows that they see: few tiles are
cut into several parts so that they fill the GPU, and the parts are added up by their log-sum-exp in a fixed order.
The grid follows from shapes alone, so a call can be part of a CUDA graph. Rows of padding are zeros.
`paged_tiles` says what lies where; queries of a sequence are its last tokens. The cache must be finite everywhere.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.paged import latent_float8, latent_gluon
from cairn.kernels.paged.latent_layout import RowLayout
from cairn.kernels.paged.latent_rows import check_cache, layout_of, unpacked_rows, views
from cairn.kernels.paged.paged_tiles import (
    LOG2_E,
    bucket,
    counted,
    owner_of,
    pages_of,
    power_of_2,
    rows_of,
)

MOST_PARTS = 32  # of the rows that a tile sees
LEAST_ROWS = 16  # queries x heads of a tile: what a product takes
MANY_HEADS = 64  # that share a tile of decode: what the tensor cores of a warpgroup take
MOST_ROWS = 32  # queries x heads of a tile: more would not fit the registers


class Latents(NamedTuple):
    """Checked arguments of a call."""

    q_THE: Tensor
    cache: Tensor  # [pages, page_size, 1, columns], as `latent_rows` says
    block_tables: Tensor
    lengths: Tensor
    starts: Tensor | None
    max_query: int
    scale: float
    rank: int

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def page_size(self) -> int:
        return self.cache.shape[1]

    @property
    def layout(self) -> RowLayout:
        return layout_of(self.cache, self.rank, self.q_THE.shape[2] - self.rank)


class Plan(NamedTuple):
    heads: int  # of a tile
    queries: int  # of a tile
    block: int  # rows of the cache in a step
    parts: int
    warps: int
    stages: int = 2

    @property
    def rows(self) -> int:
        return self.heads * self.queries


def latent_attention_reference(call: Latents) -> Tensor:
    """Reference in float32, one sequence after another; returns [T, H, rank]."""
    out_THR = call.q_THE.new_zeros(*call.q_THE.shape[:2], call.rank, dtype=torch.float32)
    starts = range(call.sequences + 1) if call.starts is None else call.starts.tolist()
    for sequence, length in enumerate(call.lengths.tolist()):
        span = slice(starts[sequence], starts[sequence + 1])
        count = span.stop - span.start
        fits = 0 <= count <= call.max_query and span.stop <= len(call.q_THE)
        wanted = f"0 to {call.max_query} (max_query) queries of a sequence, within the rows of q"
        require(fits, "cu_seqlens_q", wanted, list(starts))
        room = call.block_tables.shape[1] * call.page_size
        fits = 0 <= length <= room
        require(fits, "lengths", f"at most the {room} tokens of a row of block_tables", length)
        if not length or not count:
            continue
        pages = call.block_tables[sequence, : -(-length // call.page_size)].long()
        stored_NB = call.cache[pages].flatten(0, 2)[:length]
        rows_NE = unpacked_rows(stored_NB, call.layout, call.q_THE.dtype).float()
        scores_QHN = torch.einsum("qhe,ne->qhn", call.q_THE[span].float(), rows_NE) * call.scale
        position_Q = torch.arange(length - count, length, device=rows_NE.device)
        hidden_QN = torch.arange(length, device=rows_NE.device) > position_Q[:, None]
        weights_QHN = scores_QHN.masked_fill(hidden_QN[:, None], -torch.inf).softmax(-1)
        out_THR[span] = weights_QHN @ rows_NE[:, : call.rank]
    return out_THR


@triton.jit
def _latents(
    cache, scales, rows, there, kind: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, FLOAT8: tl.constexpr,
    GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
):  # fmt: skip
    """Latents of these rows of the cache, [BLOCK, R]; float8 times a power of 2 is exact in 16 bits."""
    column = tl.arange(0, R)
    whole = there[:, None] if R == RANK else there[:, None] & (column < RANK)[None, :]
    stored = tl.load(cache + rows[:, None] + column[None, :], mask=whole, other=0.0)
    if FLOAT8:
        GROUPS: tl.constexpr = R // GROUP
        group = tl.arange(0, GROUPS)
        some = there[:, None] & (group < RANK // GROUP)[None, :]
        at = scales + (rows // 4 + SCALES_AT)[:, None] + group[None, :]
        scale = tl.load(at, mask=some, other=0.0).to(kind)
        wide = tl.reshape(stored.to(kind), (stored.shape[0], GROUPS, GROUP))
        return tl.reshape(wide * scale[:, :, None], (stored.shape[0], R))
    else:
        return stored


@triton.jit
def _walk(
    acc, total, top, tile_ql, tile_qr, cache, scales, keys, table, first, last, seen, limit, scale, page_stride,
    token_stride, RANK: tl.constexpr, R: tl.constexpr, ROTATED: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
):  # fmt: skip
    """Take the tiles [first, last) of rows into the running softmax of every query and head."""
    across = 2 if FLOAT8 else 1  # columns of the cache in one of a key
    rotated = tl.arange(0, P)
    token = tl.arange(0, BLOCK)
    for tile in tl.range(first, last):
        key = tile * BLOCK + token
        pages = pages_of(table, tile, limit, PAGE, BLOCK)
        rows = rows_of(pages, tile, page_stride, token_stride, PAGE, BLOCK)
        there = key < limit  # behind the end there may be anything, NaN too
        tile_l = _latents(
            cache, scales, rows, there, tile_ql.dtype, RANK, R, FLOAT8, GROUP, SCALES_AT
        )
        whole_r = there[:, None] if P == ROTATED else there[:, None] & (rotated < ROTATED)[None, :]
        at = keys + (rows // across + KEY_AT)[:, None]
        tile_r = tl.load(at + rotated[None, :], mask=whole_r, other=0.0)
        scores = tl.dot(tile_ql, tl.trans(tile_l), input_precision="ieee" if EXACT else "tf32")
        scores = tl.dot(
            tile_qr, tl.trans(tile_r), scores, input_precision="ieee" if EXACT else "tf32"
        )
        scores = tl.where(key[None, :] < seen[:, None], scores * (scale * LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores - anchor[:, None])
        shrink = tl.math.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(tile_l.dtype),
            tile_l,
            acc * shrink[:, None],
            input_precision="ieee" if EXACT else "tf32",
        )
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["sequences"])
def _latent_kernel(
    q, cache, scales, keys, tables, lengths, starts, out, lse, sequences, tokens, scale, table_stride, q_token, q_head,
    page_stride, token_stride,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_QUERIES: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    ROTATED: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr, STARTS: tl.constexpr, EXACT: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr, KEY_AT: tl.constexpr,
):  # fmt: skip
    HEAD_TILES: tl.constexpr = HEADS // TILE_HEADS
    ROWS: tl.constexpr = TILE_HEADS * TILE_QUERIES
    place = tl.program_id(0) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    part = tl.program_id(1)

    every = tl.arange(0, SEQUENCES)
    _, queries_S = counted(starts, every, every < sequences, STARTS)
    ends_S = tl.cumsum(tl.cdiv(queries_S, TILE_QUERIES), 0)
    if place >= tl.max(ends_S, 0):
        return
    sequence, before = owner_of(ends_S, place)
    first_query = (place - before) * TILE_QUERIES
    start, queries = counted(starts, sequence, sequence >= 0, STARTS)
    length = tl.load(lengths + sequence)

    row = tl.arange(0, ROWS)
    query = first_query + row // TILE_HEADS
    head = head_tile * TILE_HEADS + row % TILE_HEADS
    ours = query < queries
    seen = tl.where(ours, length - queries + query + 1, 0)  # rows that each query sees
    token_row = (start + query).to(tl.int64)
    latent = tl.arange(0, R)
    rotated = tl.arange(0, P)
    q_at = q + (token_row * q_token + head * q_head)[:, None]
    tile_ql = tl.load(
        q_at + latent[None, :], mask=ours[:, None] & (latent < RANK)[None, :], other=0.0
    )
    tile_qr = tl.load(
        q_at + RANK + rotated[None, :], mask=ours[:, None] & (rotated < ROTATED)[None, :], other=0.0
    )

    acc = tl.zeros([ROWS, R], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    limit = tl.maximum(tl.minimum(length, length - queries + first_query + TILE_QUERIES), 0)
    tiles = tl.cdiv(limit, BLOCK)
    share = tl.cdiv(tiles, PARTS)
    acc, total, top = _walk(
        acc, total, top, tile_ql, tile_qr, cache, scales, keys, table, part * share,
        tl.minimum((part + 1) * share, tiles), seen, limit, scale, page_stride, token_stride, RANK, R, ROTATED, P,
        PAGE, BLOCK, EXACT, FLOAT8, GROUP, SCALES_AT, KEY_AT,
    )  # fmt: skip
    saw = total > 0.0
    result = acc / tl.where(saw, total, 1.0)[:, None]
    place_out = (part * tokens + token_row) * HEADS + head
    at = out + place_out[:, None] * RANK + latent[None, :]
    mask = ours[:, None] & (latent < RANK)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)
    if PARTS > 1:
        level = tl.where(saw, top + tl.math.log2(tl.where(saw, total, 1.0)), float("-inf"))
        tl.store(lse + place_out, level, mask=ours)


def latent_attention(
    q_THE: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    rank: int,
    max_query: int,
    scale: float,
    impl: Impl = "auto",
) -> Tensor:
    """The last tokens of each sequence attend to its rows; averages of latents, [T, H, rank] as q."""
    call = _checked(
        q_THE,
        cache,
        block_tables,
        lengths,
        cu_seqlens_q,
        rank=rank,
        max_query=max_query,
        scale=scale,
    )
    shape = (q_THE, cache, rank, max_query, cu_seqlens_q)
    offers = {
        "gluon": latent_gluon.obstacle(*shape),
        "triton": needs_cuda(q_THE),
        "reference": None,
    }
    chosen = choose("latent_attention", impl, offers).impl
    if chosen == "reference":
        return latent_attention_reference(call).to(q_THE.dtype)
    return _launch_gluon(call) if chosen == "gluon" else _launch(call)


def _launch_gluon(call: Latents, plan: latent_gluon.GluonPlan | None = None) -> Tensor:
    plan = plan or latent_gluon.plan_of(call.q_THE.shape[1])
    out, lse = latent_gluon.output(call, plan)
    latent_gluon.decode(call, out, lse, plan)
    return _added_up(out, lse, call.q_THE.dtype) if len(out) > 1 else out[0]


def _launch(call: Latents) -> Tensor:
    tokens, heads, _ = call.q_THE.shape
    plan = plan_of(heads, call.max_query, tokens, call.sequences, call.q_THE)
    plan = for_float8(plan) if call.layout.float8 else plan
    kind = torch.float32 if plan.parts > 1 else call.q_THE.dtype
    # Rows behind the last sequence belong to nobody: they become zero.
    make = torch.empty if plan.parts > 1 else torch.zeros
    out = make(plan.parts, tokens, heads, call.rank, dtype=kind, device=call.q_THE.device)
    lse = torch.full(out.shape[:3], -torch.inf, device=out.device) if plan.parts > 1 else out
    starts = call.lengths if call.starts is None else call.starts
    tiles = _tiles(tokens, call.sequences, call.max_query, plan.queries)
    if call.layout.float8 and latent_float8.unfit(call) is None:
        latent_float8.decode(call, out, lse)
        return _added_up(out, lse, call.q_THE.dtype) if plan.parts > 1 else out[0]
    kernel: Any = _latent_kernel
    kernel[(tiles * (heads // plan.heads), plan.parts)](
        call.q_THE, *views(call.cache, call.q_THE.dtype), call.block_tables, call.lengths, starts, out, lse,
        call.sequences, tokens, call.scale, call.block_tables.stride(0), call.q_THE.stride(0), call.q_THE.stride(1),
        call.cache.stride(0), call.cache.stride(1),
        HEADS=heads, TILE_HEADS=plan.heads, TILE_QUERIES=plan.queries, **call.layout.constants(),
        PAGE=call.page_size, BLOCK=plan.block, PARTS=plan.parts, SEQUENCES=bucket(call.sequences),
        STARTS=call.starts is not None, EXACT=call.q_THE.dtype == torch.float32,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return _added_up(out, lse, call.q_THE.dtype) if plan.parts > 1 else out[0]


@triton.jit
def _add_up_kernel(parts, lse, out, rows, RANK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):
    """One row of one head: its parts, weighed by their log-sum-exp (base 2); one that saw nothing is 0."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, R)
    level = tl.load(lse + part * rows + row)
    top = tl.max(level, 0)
    weight = tl.math.exp2(level - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    wanted = (weight > 0.0)[:, None] & (column < RANK)[None, :]  # others may not be written
    at = parts + (part * rows + row)[:, None] * RANK + column[None, :]
    values = tl.load(at, mask=wanted, other=0.0)
    result = tl.sum(values * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * RANK + column, result.to(out.dtype.element_ty), mask=column < RANK)


def _added_up(out_STHR: Tensor, lse_STH: Tensor, dtype: torch.dtype) -> Tensor:
    parts, tokens, heads, rank = out_STHR.shape
    y_THR = torch.empty(tokens, heads, rank, dtype=dtype, device=out_STHR.device)
    kernel: Any = _add_up_kernel
    kernel[(tokens * heads,)](
        out_STHR, lse_STH, y_THR, tokens * heads,
        RANK=rank, R=max(16, power_of_2(rank)), PARTS=parts, num_warps=4,
    )  # fmt: skip
    return y_THR


def plan_of(heads: int, max_query: int, tokens: int, sequences: int, on: Tensor) -> Plan:
    """Few tiles are cut into parts, so that every multiprocessor has two."""
    wide = heads % MANY_HEADS == 0 and max_query == 1 and on.dtype != torch.float32
    sizes = (MANY_HEADS,) if wide else (16, 8, 4, 2, 1)
    tile_heads = next(size for size in sizes if heads % size == 0)
    queries = max(1, (LEAST_ROWS if max_query == 1 else MOST_ROWS) // tile_heads)
    tiles = _tiles(tokens, sequences, max_query, queries) * (heads // tile_heads)
    chip = multiprocessors(on.device) if on.is_cuda else 4
    each = chip if wide else 2 * chip  # one of the wide tiles fills a multiprocessor
    parts = min(MOST_PARTS, power_of_2(max(1, each // max(tiles, 1))))
    block = 16 if on.dtype == torch.float32 else MANY_HEADS if wide else 32
    return Plan(tile_heads, queries, block, parts, warps=8 if wide or max_query > 1 else 4)


def for_float8(plan: Plan) -> Plan:
    """Rows take more registers: more warps share them, and several queries copy nothing ahead."""
    return plan._replace(warps=8, stages=1 if plan.queries > 1 else 2)


def _tiles(tokens: int, sequences: int, max_query: int, queries: int) -> int:
    """Room for the tiles of queries: one of each sequence may be partly filled."""
    return sequences if max_query == 1 else tokens // queries + sequences


def _checked(
    q_THE: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, starts: Tensor | None,
    *, rank: int, max_query: int, scale: float,
) -> Latents:  # fmt: skip
    check("q", q_THE, dtypes=FLOATS, shape=(None, None, None))
    tokens, heads, width = q_THE.shape
    require(q_THE.stride(2) == 1, "q", "stride 1 in the last dimension", q_THE.stride())
    require(0 < rank < width, "rank", f"fewer than the {width} columns of q", rank)
    require(heads >= 1, "q", "at least one head", heads)
    check_cache(cache, layout_of(cache, rank, width - rank), q_THE)
    check("lengths", lengths, dtypes=(torch.int32,), shape=(None,), beside=q_THE, packed=True)
    sequences = lengths.shape[0]
    check(
        "block_tables", block_tables, dtypes=(torch.int32,), shape=(sequences, None), beside=q_THE
    )
    side_by_side = block_tables.stride(1) == 1 or block_tables.shape[1] <= 1
    require(side_by_side, "block_tables", "stride 1 in the last dimension", block_tables.stride())
    if starts is not None:
        shape = (sequences + 1,)
        check("cu_seqlens_q", starts, dtypes=(torch.int32,), shape=shape, beside=q_THE, packed=True)
    else:
        fits = tokens == sequences
        require(fits, "cu_seqlens_q", f"bounds, since {tokens} rows are not {sequences}", None)
    require(max_query >= 1, "max_query", "at least 1", max_query)
    require(0 < scale < float("inf"), "scale", "above 0", scale)
    return Latents(q_THE, cache, block_tables, lengths, starts, max_query, scale, rank)


def cost(tokens: int, length: int, heads: int, layout: RowLayout) -> Cost:
    """Cost with one query per sequence of `length` rows: two matmuls, every row read once."""
    pairs, rank = tokens * length, layout.rank
    width = rank + layout.rotated
    read = (1.0 if layout.float8 else 2.0) * pairs * layout.columns + 2.0 * tokens * heads * (
        width + rank
    )
    return Cost(flops=2.0 * pairs * heads * (width + rank), bytes=read)
