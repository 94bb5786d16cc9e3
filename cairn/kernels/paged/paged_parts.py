"""Partial results of split attention, and their reduction.

A program of the decode kernel leaves at most two unfinished pairs of a sequence and a key head: one that came in from
the program before (slot 2p) and one that goes on to the next (slot 2p + 1). The pair that goes on belongs to p, its
owner; its other parts lie in the even slots of the programs that follow. Parts are normalised, and weighed by their
log-sum-exp; they are added in the order of the programs, so the result is the same every time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.dependent import begin, behind
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.paged.paged_tiles import LN_2, LOG2_E, counted, factor, tiles_of

MOST_PER_SM = 4  # programs of the decode kernel
PARTS = tl.constexpr(32)  # added up at a time by the second kernel


class Workspace(NamedTuple):
    """Two unfinished pairs for each program, and how many parts of the one that starts there have arrived."""

    partial: Tensor  # float32 [2 * programs, rows, width]
    partial_lse: Tensor  # float32 [2 * programs, rows]
    arrivals: Tensor  # int32 [programs]: zero between launches


@triton.jit
def begin_rows(
    q, sinks, k_scale, rows, heads, head, ours, done, scale, q_token, q_head,
    ROWS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Queries, what multiplies their scores, and what a walk over keys adds to. `done`: tiles that others walk over."""
    column = tl.arange(0, WIDTH)
    q_at = q + (rows * q_token + heads * q_head)[:, None] + column[None, :]
    tile_q = tl.load(q_at, mask=ours[:, None] & (column < C)[None, :], other=0.0)
    strength = scale
    if SCALES:  # 8-bit keys become float16, which holds each of them and is near
        tile_q = (tile_q.to(tl.float32) * scale).to(tl.float16)
        strength = factor(k_scale, head, SCALES)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a key of value 0 that everyone sees, counted in the first part
        sink = tl.load(sinks + heads, mask=ours, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(done == 0, sink, top)
        total = tl.where(done == 0, 1.0, total)
    return tile_q, strength, tl.zeros([ROWS, WIDTH], tl.float32), total, top


@triton.jit
def store_rows(
    acc, total, top, at, lse_at, out, lse, ours, v_factor, C: tl.constexpr, WIDTH: tl.constexpr, LSE: tl.constexpr
):  # fmt: skip
    """acc / total, and the log-sum-exp; a row that saw nothing is 0 and -inf."""
    column = tl.arange(0, WIDTH)
    saw = total > 0.0
    result = acc * tl.where(saw, v_factor / tl.where(saw, total, 1.0), 0.0)[:, None]
    mask = ours[:, None] & (column < C)[None, :]
    tl.store(out + at[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)
    if LSE:
        level = tl.where(saw, (top + tl.math.log2(tl.where(saw, total, 1.0))) * LN_2, float("-inf"))
        tl.store(lse + lse_at, level, mask=ours)


@triton.jit
def store_empty(
    start, queries, out, lse, sinks, out_token, out_head,
    HEADS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Queries that see no key."""
    column = tl.arange(0, WIDTH)
    for index in tl.range(0, queries * HEADS, num_stages=1):
        row = (start + index // HEADS).to(tl.int64)
        head = index % HEADS
        at = out + row * out_token + head * out_head + column
        tl.store(at, tl.zeros([WIDTH], tl.float32).to(out.dtype.element_ty), mask=column < C)
        if LSE:
            if SINKS:
                tl.store(lse + row * HEADS + head, tl.load(sinks + head).to(tl.float32))
            else:
                tl.store(lse + row * HEADS + head, float("-inf"))


@triton.jit
def add_up(
    partial, partial_lse, owner, parts, ours, ROWS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """All rows of a pair, one part after the other: there are few."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mask = ours[:, None] & (column < C)[None, :]
    for part in tl.range(0, parts, num_stages=1):
        slot = tl.where(part == 0, 2 * owner + 1, 2 * (owner + part)) * ROWS + row
        # Past the first-level cache, which may hold what lay here before.
        level = (
            tl.load(partial_lse + slot, mask=ours, other=float("-inf"), cache_modifier=".cg")
            * LOG2_E
        )
        at = partial + slot[:, None] * WIDTH + column[None, :]
        values = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, level)
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.math.exp2(level - anchor)
        shrink = tl.math.exp2(top - anchor)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + values * weight[:, None]
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["sequences"])
def add_up_kernel(
    partial, partial_lse, lengths, starts, out, lse, sequences, programs, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr,
    STARTS: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of one pair: its parts, weighed by their log-sum-exp. Where it was cut follows from the lengths."""
    pair = tl.program_id(0)
    row = tl.program_id(1)
    begin(OVERLAP, EARLY)
    every = tl.arange(0, SEQUENCES)
    real = every < sequences
    _, queries_S = counted(starts, every, real, STARTS)
    lengths_S = tl.load(lengths + every, mask=real, other=0)
    tiles_S = tiles_of(lengths_S, queries_S, QUERIES, WINDOW, BLOCK)
    piece = tl.maximum(tl.cdiv(tl.sum(tiles_S, 0) * KV_HEADS, programs), 1)
    sequence = pair // KV_HEADS
    tiles = tl.sum(tl.where(every == sequence, tiles_S, 0), 0)
    place = tl.sum(tl.where(every < sequence, tiles_S, 0), 0) * KV_HEADS + pair % KV_HEADS * tiles
    owner = place // piece
    parts = tl.cdiv(place + tiles, piece) - owner
    start, queries = counted(starts, sequence, sequence >= 0, STARTS)
    behind(OVERLAP, EARLY)
    if (tiles == 0) | (parts < 2) | (row >= queries * GROUP):
        return
    column = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    top = float("-inf")
    total = 0.0
    for first in tl.range(0, parts, PARTS, num_stages=1):
        part = first + tl.arange(0, PARTS)
        there = part < parts
        slot = tl.where(part == 0, 2 * owner + 1, 2 * (owner + part)) * ROWS + row
        level = tl.load(partial_lse + slot, mask=there, other=float("-inf")) * LOG2_E
        mask = there[:, None] & (column < C)[None, :]
        values = tl.load(partial + slot[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(level, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(level - anchor)
        shrink = tl.math.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        top = new_top
    saw = total > 0.0
    total = tl.where(saw, total, 1.0)
    token = (start + row // GROUP).to(tl.int64)
    head = pair % KV_HEADS * GROUP + row % GROUP
    at = out + token * out_token + head * out_head + column
    tl.store(at, (acc / total).to(out.dtype.element_ty), mask=column < C)
    if LSE:
        level = tl.where(saw, (top + tl.math.log2(total)) * LN_2, float("-inf"))
        tl.store(lse + token * (KV_HEADS * GROUP) + head, level)


def has_few_parts(pairs: int, programs: int) -> bool:
    """Return whether the pairs are too few for reduction by the last program; each then has many parts."""
    return 4 * pairs >= programs


def new_workspace(programs: int, rows: int, width: int, device: torch.device) -> Workspace:
    """Everything in it is written before it is read, but for the count of arrivals, which is not used."""
    partial = torch.empty((2 * programs, rows, width), dtype=torch.float32, device=device)
    partial_lse = torch.empty((2 * programs, rows), dtype=torch.float32, device=device)
    return Workspace(partial, partial_lse, torch.empty(programs, dtype=torch.int32, device=device))


def lasting_workspace(device: torch.device, rows: int = 16, width: int = 128) -> Workspace:
    """Workspace for any plan, created once and reused by successive calls on the same stream."""
    room = new_workspace(MOST_PER_SM * multiprocessors(device), rows, width, device)
    return room._replace(arrivals=torch.zeros_like(room.arrivals))
