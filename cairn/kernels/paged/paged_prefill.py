"""Attention of many tokens of a sequence to its pages: a chunk of a prompt behind what is already cached.

One program computes a tile of rows: BLOCK_Q queries of one sequence times the heads that share a key head. It walks
over the keys up to its last query; tiles of keys that every row sees whole need no mask and run in a loop of their
own. The grid is an upper bound that follows from shapes, floor(T / BLOCK_Q) + sequences tiles; each program finds its
tile from the query counts on the GPU, the ones with the most keys first, and those that are too many leave at once.

Keys and values come by pointers, 16 bytes at a time (any page size), or by descriptor, a whole tile per instruction
(pages that hold whole tiles). Sequences with `skip` queries or fewer are left to the decode kernel.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.arguments import short
from cairn.kernels.paged.paged_parts import begin_rows, store_rows
from cairn.kernels.paged.paged_tiles import (
    LOG2_E,
    Paged,
    counted,
    factor,
    first_tile,
    owner_of,
    pages_of,
    power_of_2,
    rows_of,
    scaled,
)
from cairn.kernels.paged.paged_views import View, matrix_view
from cairn.kernels.tuned import tuned


class Plan(NamedTuple):
    """Launch parameters; the tuned tables have the same fields."""

    rows: int = 128  # of a tile: queries x heads of a group
    block: int = 64  # keys of a tile
    warps: int = 8
    stages: int = 3
    tma: bool = True  # where the pages allow
    gluon: bool = False  # the kernel of paged_prefill_gluon, where it can run; the fields above do not matter then
    ping_pong: bool = True  # of that kernel


# Rows of float8 become float16 in registers and go back to shared memory before they are multiplied; with 4 warps two
# programs share a multiprocessor, and one multiplies meanwhile. On an H200: 29 prompts of 15,600 tokens in 253 us in
# place of 286, two chunks of 4096 tokens behind as many in 2.85 ms in place of 2.98.
PLAN_8_BITS = Plan(warps=4)


@triton.jit
def _walk(
    acc, total, top, tile_q, k, v, k_view, v_view, table, first, last, seen, limit, strength, view_row, view_column,
    page_stride, token_stride, page_rows,
    C: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALES: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Take the tiles [first, last) of keys into the running softmax of every row."""
    column = tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK)
    oldest = tl.min(tl.where(seen > 0, seen, limit), 0) - WINDOW  # key that anybody sees
    pages = pages_of(table, first, limit, PAGE, BLOCK)
    for tile in tl.range(first, last, num_stages=STAGES):
        key = tile * BLOCK + token
        if TMA and not MASK:
            row = pages * page_rows + view_row + tile * BLOCK % PAGE
            tile_k = k_view.load([row, view_column])
            tile_v = v_view.load([row, view_column])
        else:
            at = (
                rows_of(pages, tile, page_stride, token_stride, PAGE, BLOCK)[:, None]
                + column[None, :]
            )
            mask = (column < C)[None, :]
            if MASK:  # behind the end there may be anything, NaN too
                mask = mask & (key < limit)[:, None]
            if WINDOW:  # pages before that key's own may be somebody else's
                mask = mask & (key >= oldest)[:, None]
            tile_k = tl.load(k + at, mask=mask, other=0.0)
            tile_v = tl.load(v + at, mask=mask, other=0.0)
        pages = pages_of(
            table, tile + 1, limit, PAGE, BLOCK
        )  # a step ahead of the loads that need it
        if SCALES:
            tile_k = tile_k.to(tl.float16)
            tile_v = tile_v.to(tl.float16)
        scores = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee" if EXACT else "tf32")
        sharpness = strength * LOG2_E  # multiplied in together with the subtraction of the maximum
        if SOFTCAP > 0:
            scores = scaled(scores, strength, SOFTCAP)
            sharpness = 1.0
        if MASK:
            visible = key[None, :] < seen[:, None]
            if WINDOW:
                visible = visible & (key[None, :] >= seen[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * sharpness)
        anchor = new_top
        if MASK:
            anchor = tl.where(
                new_top == float("-inf"), 0.0, new_top
            )  # no key yet: no difference of infinities
        weights = tl.math.exp2(scores * sharpness - anchor[:, None])
        shrink = tl.math.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(tile_v.dtype),
            tile_v,
            acc * shrink[:, None],
            input_precision="ieee" if EXACT else "tf32",
        )
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["sequences", "skip"])
def _prefill_kernel(
    q, k, v, k_view, v_view, tables, lengths, starts, out, lse, sinks, k_scale, v_scale,
    sequences, skip, scale, table_stride, q_token, q_head, out_token, out_head, page_stride, token_stride, head_stride,
    page_rows, head_rows, head_columns,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SCALES: tl.constexpr, LSE: tl.constexpr, STARTS: tl.constexpr, EXACT: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0) % KV_HEADS
    place = tl.program_id(0) // KV_HEADS

    every = tl.arange(0, SEQUENCES)
    there = every < sequences
    _, queries_S = counted(starts, every, there, STARTS)
    tiles_S = tl.where(queries_S > skip, tl.cdiv(queries_S, BLOCK_Q), 0)
    ends_S = tl.cumsum(tiles_S, 0)
    place = (
        tl.sum(tiles_S, 0) - 1 - place
    )  # the last tiles of a sequence see the most keys: they start first
    if place < 0:
        return
    sequence, before = owner_of(ends_S, place)
    first_query = (place - before) * BLOCK_Q
    start, queries = counted(starts, sequence, sequence >= 0, STARTS)
    length = tl.load(lengths + sequence)

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    ours = (row < BLOCK_Q * GROUP) & (query < queries)
    sees = length - queries + first_query + 1  # keys that the first query sees
    if ALL:
        seen = tl.where(ours, length, 0)  # how many keys each row sees
        limit = length
        sees = length
    else:
        seen = tl.where(ours, length - queries + query + 1, 0)
        limit = tl.maximum(tl.minimum(length, length - queries + first_query + BLOCK_Q), 0)
    heads = head * GROUP + row % GROUP
    rows = (start + query).to(tl.int64)
    tile_q, strength, acc, total, top = begin_rows(
        q, sinks, k_scale, rows, heads, head, ours, 0, scale, q_token, q_head, ROWS, C, WIDTH, SINKS, SCALES
    )  # fmt: skip
    table = tables + sequence.to(tl.int64) * table_stride
    k += head * head_stride
    v += head * head_stride
    view_row = head * head_rows
    view_column = head * head_columns
    first = first_tile(limit, tl.minimum(BLOCK_Q, queries - first_query), WINDOW, BLOCK)
    last = tl.cdiv(limit, BLOCK)
    whole = first
    if WINDOW == 0:  # tiles that the first query sees whole, so every row does
        whole = tl.minimum(tl.maximum(sees, 0) // BLOCK, last)
        acc, total, top = _walk(
            acc, total, top, tile_q, k, v, k_view, v_view, table, first, whole, seen, limit, strength,
            view_row, view_column, page_stride, token_stride, page_rows,
            C, WIDTH, PAGE, BLOCK, WINDOW, SOFTCAP, SCALES, False, TMA, EXACT, STAGES,
        )  # fmt: skip
    acc, total, top = _walk(
        acc, total, top, tile_q, k, v, k_view, v_view, table, whole, last, seen, limit, strength,
        view_row, view_column, page_stride, token_stride, page_rows,
        C, WIDTH, PAGE, BLOCK, WINDOW, SOFTCAP, SCALES, True, TMA, EXACT, STAGES,
    )  # fmt: skip

    store_rows(
        acc, total, top, rows * out_token + heads * out_head, rows * HEADS + heads, out, lse, ours,
        factor(v_scale, head, SCALES), C, WIDTH, LSE,
    )  # fmt: skip


def prefill(
    call: Paged, skip: int = 0, plan: Plan | None = None, *, sees_all: bool = False
) -> None:
    """Fill the rows of every sequence that has more than `skip` queries; other rows are left alone.

    `sees_all`: the queries stand behind the keys, not among them, and each sees all of them.
    """
    plan = plan or plan_of(call)
    view = matrix_view(call.cache_k)
    aligned = call.cache_v.data_ptr() % 16 == 0
    tma = plan.tma and view is not None and aligned and call.page_size % plan.block == 0
    view = view or View()
    caches = {"k_view": call.cache_k, "v_view": call.cache_v}
    views: dict[str, Any] = caches  # stand in for descriptors, and are not read
    if tma:
        views = {name: _descriptor(cache, view, plan.block) for name, cache in caches.items()}
    block_q = plan.rows // call.group
    tiles = call.q_THC.shape[0] // block_q + call.sequences
    kernel: Any = _prefill_kernel
    kernel[(tiles * call.kv_heads,)](
        **call.tensors(), **views, **call.numbers(), skip=skip, page_rows=view.page_rows, head_rows=view.head_rows,
        head_columns=view.head_columns, **call.constants(), ROWS=plan.rows, BLOCK=plan.block, TMA=tma,
        STAGES=plan.stages, ALL=sees_all, num_warps=plan.warps,
    )  # fmt: skip


def _descriptor(cache: torch.Tensor, view: View, block: int) -> TensorDescriptor:
    shape, strides = [view.rows, view.columns], [cache.stride(1), 1]
    return TensorDescriptor(cache, shape, strides, [block, cache.shape[3]])


def key(columns: int, page_size: int, cache: torch.dtype) -> str:
    """Key of the configuration in the tuned tables, which are stored under the name of the public function."""
    return f"prefill,columns={columns},page={page_size},{short(cache)}"


def plan_of(call: Paged) -> Plan:
    wide = call.columns > 128 or call.q_THC.dtype == torch.float32
    usual = Plan() if call.k_scale is None else PLAN_8_BITS
    default = Plan(block=32, stages=2) if wide else usual
    place = key(call.columns, call.page_size, call.cache_k.dtype)
    plan = Plan(**tuned("paged_attention", place, default._asdict()))
    return plan._replace(rows=max(plan.rows, power_of_2(call.group)))


CANDIDATES = [
    Plan(128, 64, 8, 3, False), Plan(128, 128, 8, 2, False), Plan(64, 64, 4, 3, False), Plan(64, 64, 4, 2, False),
    Plan(128, 64, 8, 3, True), Plan(128, 64, 8, 4, True), Plan(128, 128, 8, 2, True), Plan(64, 64, 4, 3, True),
]  # fmt: skip
GLUON_CANDIDATES = [Plan(gluon=True), Plan(gluon=True, ping_pong=False)]
