"""Attention of one token (or a few) of each sequence to its pages: the kernel of the decode step.

Reading the keys and values is all the work, so it is cut evenly, whatever the lengths:

    tiles     seq 0 head 0 |  seq 0 head 1 |  seq 1 head 0      | seq 1 head 1       | ...
    programs  [-- 0 --][-- 1 --][-- 2 --][-- 3 --][-- 4 --][-- 5 --] ...

The tiles of all (sequence, key head) pairs stand in one line, and each program takes an equal piece of it. Where that
line is cut is computed by every program from the lengths on the GPU: the grid depends on the device alone, nothing
is copied to the host, and a CUDA graph replays with any lengths. A pair that lies in one program is finished there.
A pair that was cut leaves partial results with their log-sum-exp: the program where it starts is its owner, and the
parts of each owner are added up, always in the same order: by a second kernel or, given a workspace that counts
arrivals, by whoever finishes the last part, which saves a launch. Bytes moved: keys and values once.

A sequence of length 0 (padding of a graph) gets zeros, and -inf (or its sink) as log-sum-exp. A result depends on the
other sequences of the batch in its last bits, since they decide where the cuts are.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cairn.kernels.arguments import require, short
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.paged.paged_parts import (
    Workspace,
    add_up,
    add_up_kernel,
    begin_rows,
    has_few_parts,
    new_workspace,
    store_empty,
    store_rows,
)
from cairn.kernels.paged.paged_tiles import (
    Paged,
    counted,
    factor,
    first_tile,
    owner_of,
    pages_of,
    power_of_2,
    rows_of,
    scaled,
    tiles_of,
)
from cairn.kernels.tuned import tuned

MOST_ROWS = 64  # queries x heads of a group that fit a tile


class Plan(NamedTuple):
    """Launch parameters; the tuned tables have the same fields."""

    block: int = 64  # keys of a tile
    warps: int = 4
    stages: int = 3  # tiles under way or in work
    per_sm: int = 2  # programs


@triton.jit
def _attend(
    tile_q, k_head, v_head, table, pages, first, count, length, seen, strength, acc, total, top,
    page_stride, token_stride, C: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of one pair, added to what is known: weighted values, their weights' sum, the largest score."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"  # pyrefly: ignore[bad-assignment]
    column = tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK)
    oldest = (
        tl.min(seen, 0) - WINDOW
    )  # key that anybody sees; pages before its own may be somebody else's
    for tile in tl.range(first, first + count, num_stages=STAGES):
        rows = rows_of(pages, tile, page_stride, token_stride, PAGE, BLOCK)
        at = rows[:, None] + column[None, :]
        pages = pages_of(table, tile + 1, length, PAGE, BLOCK)  # a step ahead of who needs it
        key = tile * BLOCK + token
        mask = (key < length)[:, None] & (column < C)[None, :]
        if WINDOW:
            mask = mask & (key >= oldest)[:, None]
        tile_k = tl.load(k_head + at, mask=mask, other=0.0)
        tile_v = tl.load(v_head + at, mask=mask, other=0.0)
        if SCALES:
            tile_k = tile_k.to(tl.float16)
            tile_v = tile_v.to(tl.float16)
        products = tl.dot(tile_q, tl.trans(tile_k), input_precision=PRECISION)
        scores = scaled(products, strength, SOFTCAP)
        visible = key[None, :] < seen[:, None]
        if WINDOW:
            visible = visible & (key[None, :] >= seen[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # No key yet: no difference of infinities.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores - anchor[:, None])
        shrink = tl.math.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(tile_v.dtype), tile_v, acc, input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def _add_if_last(
    arrivals, partial, partial_lse, owner, parts, at, at_lse, out, lse, ours,
    ROWS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """This program's part is stored; if it was the last one of its owner, all are added up here."""
    tl.debug_barrier()  # every thread has stored its share before one of them says so
    if tl.atomic_add(arrivals + owner, 1, sem="acq_rel") == parts - 1:
        acc, total, top = add_up(partial, partial_lse, owner, parts, ours, ROWS, C, WIDTH)
        store_rows(acc, total, top, at, at_lse, out, lse, ours, 1.0, C, WIDTH, LSE)
        tl.store(arrivals + owner, 0)  # for the next launch


@triton.jit
def _cut_line(
    lengths, starts, sequences, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Where each sequence ends in the line of tiles; this program's piece of it, from and to; and its length."""
    every = tl.arange(0, SEQUENCES)
    there = every < sequences
    _, queries_S = counted(starts, every, there, STARTS)
    lengths_S = tl.load(lengths + every, mask=there, other=0)
    tiles_S = tiles_of(lengths_S, queries_S, QUERIES, WINDOW, BLOCK)
    line = tl.sum(tiles_S, 0) * KV_HEADS
    piece = tl.cdiv(line, tl.num_programs(0))
    place = tl.program_id(0) * piece
    return tl.cumsum(tiles_S, 0) * KV_HEADS, place, tl.minimum(place + piece, line), piece


@triton.jit(do_not_specialize=["sequences"])
def _decode_kernel(
    q, k, v, tables, lengths, starts, out, lse, sinks, k_scale, v_scale, partial, partial_lse, arrivals,
    sequences, scale, table_stride, q_token, q_head, out_token, out_head, page_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr, LSE: tl.constexpr, STARTS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, LAST_ADDS: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = tl.arange(0, ROWS)
    begin(OVERLAP, EARLY)

    ends_S, place, end, piece = _cut_line(
        lengths, starts, sequences, KV_HEADS, QUERIES, BLOCK, SEQUENCES, WINDOW, STARTS
    )
    while place < end:
        sequence, before = owner_of(ends_S, place)
        length = tl.load(lengths + sequence)
        start, queries = counted(starts, sequence, sequence >= 0, STARTS)
        tiles = tiles_of(length, queries, QUERIES, WINDOW, BLOCK)
        head = (place - before) // tiles
        done = (place - before) % tiles  # tiles of this pair that programs before this one read
        count = tl.minimum(tiles - done, end - place)
        first = first_tile(length, queries, WINDOW, BLOCK) + done
        table = tables + sequence.to(tl.int64) * table_stride
        pages = pages_of(table, first, length, PAGE, BLOCK)
        behind(OVERLAP, EARLY)  # up to here nothing that the predecessor writes

        ours = row < queries * GROUP
        seen = length - queries + row // GROUP + 1  # how many keys each row sees
        heads = head * GROUP + row % GROUP
        rows = (start + row // GROUP).to(tl.int64)
        tile_q, strength, acc, total, top = begin_rows(
            q, sinks, k_scale, rows, heads, head, ours, done, scale, q_token, q_head, ROWS, C, WIDTH, SINKS, SCALES
        )  # fmt: skip
        acc, total, top = _attend(
            tile_q, k + head * head_stride, v + head * head_stride, table, pages, first, count, length, seen, strength,
            acc, total, top, page_stride, token_stride, C, WIDTH, PAGE, BLOCK, WINDOW, SOFTCAP, SCALES, EXACT, STAGES,
        )  # fmt: skip

        v_factor = factor(v_scale, head, SCALES)
        at = rows * out_token + heads * out_head
        at_lse = rows * HEADS + heads
        if count == tiles:
            store_rows(acc, total, top, at, at_lse, out, lse, ours, v_factor, C, WIDTH, LSE)
        else:
            # At most one pair comes in from the program before, and at most one goes on to the next.
            slot = (2 * program + (done == 0).to(tl.int32)) * ROWS + row
            store_rows(
                acc, total, top, slot * WIDTH, slot, partial, partial_lse, ours, v_factor, C, WIDTH, True,
            )  # fmt: skip
            if LAST_ADDS:
                owner = (place - done) // piece
                parts = tl.cdiv(place - done + tiles, piece) - owner
                _add_if_last(
                    arrivals, partial, partial_lse, owner, parts, at, at_lse, out, lse, ours, ROWS, C, WIDTH, LSE
                )  # fmt: skip
        place += count
    behind(OVERLAP, EARLY)
    for sequence in tl.range(program, sequences, programs, num_stages=1):
        start, queries = counted(starts, sequence, sequence >= 0, STARTS)
        length = tl.load(lengths + sequence)
        if (length <= 0) & (queries > 0) & (queries <= QUERIES):
            store_empty(
                start, queries, out, lse, sinks, out_token, out_head, HEADS, C, WIDTH, SINKS, LSE
            )


def fits(call: Paged, queries: int) -> bool:
    """Return whether this number of queries of a sequence fits into one tile."""
    return queries * call.group <= MOST_ROWS


def decode(
    call: Paged, queries: int, workspace: Workspace | None = None, prefetch: bool = False
) -> None:
    """Fill the rows of every sequence that has 1 to `queries` of them; other rows are left alone.

    `prefetch`: nothing that is still running writes lengths, tables or bounds.
    """
    plan = plan_of(call, queries)
    programs = plan.per_sm * multiprocessors(call.q_THC.device)
    constants = call.constants()
    rows, width = tile_rows(call.group, queries), constants["WIDTH"]
    last_adds = workspace is not None and has_few_parts(call.sequences * call.kv_heads, programs)
    room = workspace or new_workspace(programs, rows, width, call.q_THC.device)
    enough = (
        room.arrivals.shape[0] >= programs and room.partial.numel() >= 2 * programs * rows * width
    )
    require(
        enough, "workspace", f"room for [{2 * programs}, {rows}, {width}]", list(room.partial.shape)
    )
    kernel: Any = _decode_kernel
    kernel[(programs,)](
        **call.tensors(), **room._asdict(), **call.numbers(), **constants, QUERIES=queries, ROWS=rows,
        BLOCK=plan.block, STAGES=plan.stages, LAST_ADDS=last_adds, EARLY=prefetch, num_warps=plan.warps,
        **pdl(call.q_THC.device),
    )  # fmt: skip
    if not last_adds:
        shared = ("KV_HEADS", "GROUP", "C", "WIDTH", "SEQUENCES", "WINDOW", "LSE", "STARTS")
        tensors = call.tensors()
        adding: Any = add_up_kernel
        adding[(call.sequences * call.kv_heads, queries * call.group)](
            *room[:2], tensors["lengths"], tensors["starts"], call.out_THC, tensors["lse"], call.sequences, programs,
            call.out_THC.stride(0), call.out_THC.stride(1), QUERIES=queries, ROWS=rows, BLOCK=plan.block,
            **{name: constants[name] for name in shared}, EARLY=prefetch, num_warps=4, **pdl(call.q_THC.device),
        )  # fmt: skip


def tile_rows(group: int, queries: int) -> int:
    return max(16, power_of_2(group * queries))


def key(columns: int, page_size: int, cache: torch.dtype, rows: int) -> str:
    """Key of the configuration in the tuned tables, which are stored under the name of the public function."""
    return f"decode,columns={columns},page={page_size},{short(cache)},rows={rows}"


def plan_of(call: Paged, queries: int) -> Plan:
    wide = call.columns > 128 or call.cache_k.dtype == torch.float32
    default = Plan(block=32 if wide else 64)
    place = key(call.columns, call.page_size, call.cache_k.dtype, tile_rows(call.group, queries))
    return Plan(**tuned("paged_attention", place, default._asdict()))


CANDIDATES = [
    Plan(), Plan(per_sm=4), Plan(block=32, stages=4), Plan(block=32, stages=4, per_sm=3), Plan(stages=4),
    Plan(warps=8), Plan(warps=8, stages=4), Plan(block=128, warps=8, stages=2),
    Plan(block=128, warps=8, stages=3, per_sm=1), Plan(block=128, stages=2),
]  # fmt: skip
