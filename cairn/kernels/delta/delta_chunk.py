"""Many tokens through the gated delta rule, a chunk of 64 at a time; `rule` says what is computed.

One launch solves the systems of all chunks at once, 16 rows of one after another; a second one has a program for each
head of a sequence and some columns of its state, which stays in registers from the first chunk to the last.
Sequences with one token take `delta_step`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.delta.delta_step import delta_step, unit_rows, value_block
from cairn.kernels.delta.rule import CHUNK, DeltaCall
from cairn.kernels.kernel import Cost
from cairn.kernels.paged.paged_tiles import bucket, counted

BLOCK = 16  # rows of a system that are solved at once
# What a row takes over from those before it adds up: the ten bits of tf32 would be too few.
SOLVE = "ieee"


@triton.jit
def _place(starts, sequences, place, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr):
    """The sequence of a chunk, the chunk's first row, and how many it has; 0 rows: there is no such chunk."""
    every = tl.arange(0, SEQUENCES)
    _, counts = counted(starts, every, every < sequences, True)
    ends = tl.cumsum(tl.where(counts > 1, tl.cdiv(counts, CHUNK), 0), 0)
    sequence = tl.sum(((ends <= place) & (every < sequences)).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= place, ends, 0), 0)
    known = sequence < sequences
    first, count = counted(starts, sequence, known, True)
    start = (place - before) * CHUNK
    rows = tl.where(known, tl.minimum(count - start, CHUNK), 0)
    return sequence, first + start, rows


@triton.jit
def _sums_to(g, first, rows, head, at, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """The running sum of g in a chunk, at these of its rows."""
    every = tl.arange(0, CHUNK)
    fades = tl.load(g + (first + every) * HEADS + head, mask=every < rows, other=0.0)
    return tl.sum(tl.where(every[None, :] <= at[:, None], fades[None, :], 0.0), axis=1)


@triton.jit
def _inverse(a, BLOCK: tl.constexpr):
    """Of I + a, where a is strictly lower: a row after another."""
    row = tl.arange(0, BLOCK)
    found = (row[:, None] == row[None, :]).to(tl.float32)
    for i in tl.range(1, BLOCK):
        of_row = tl.sum(tl.where(row[:, None] == i, a, 0.0), axis=0)
        new = tl.sum(of_row[:, None] * found, axis=0)
        found = tl.where(row[:, None] == i, found - new[None, :], found)
    return found


@triton.jit(do_not_specialize=["sequences"])
def _solve_kernel(
    mixed, g, beta, slots, starts, u, w, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """Some columns of U or of W of one chunk and head."""
    head, part = tl.program_id(1), tl.program_id(2)
    sequence, first, rows = _place(starts, sequences, tl.program_id(0), SEQUENCES, CHUNK)
    slot = tl.load(slots + sequence, mask=rows > 0, other=-1)
    if slot >= 0:
        KEYS: tl.constexpr = KEY_HEADS * K
        WIDTH: tl.constexpr = 2 * KEYS + HEADS * V
        own = tl.arange(0, BLOCK)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        of_value = part * COLUMNS < V
        key_at = KEYS + head // (HEADS // KEY_HEADS) * K
        right_at = tl.where(of_value, 2 * KEYS + head * V, key_at - V)
        base = mixed + first.to(tl.int64) * WIDTH
        held = ()
        for i in tl.static_range(CHUNK // BLOCK):
            at = i * BLOCK + own
            there = (at < rows)[:, None]
            line = base + at[:, None] * WIDTH
            wide = tl.load(line + key_at + tl.arange(0, K)[None, :], mask=there, other=0.0)
            wide = wide.to(tl.float32)
            shrink = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
            k_i = (wide * shrink[:, None]).to(mixed.dtype.element_ty)
            strength = tl.load(beta + (first + at) * HEADS + head, mask=at < rows, other=0.0)
            sums_i = _sums_to(g, first, rows, head, at, HEADS, CHUNK)
            right = tl.load(line + right_at + column[None, :], mask=there, other=0.0)
            factor = tl.where(of_value, strength, strength * tl.exp(sums_i) * shrink)
            right = right.to(tl.float32) * factor[:, None]
            for j in tl.static_range(i):
                past = j * BLOCK + own
                other = base + past[:, None] * WIDTH + key_at + tl.arange(0, K)[None, :]
                k_j = unit_rows(tl.load(other, mask=(past < rows)[:, None], other=0.0))
                k_j = k_j.to(mixed.dtype.element_ty)
                sums_j = _sums_to(g, first, rows, head, past, HEADS, CHUNK)
                fade = tl.exp(tl.minimum(sums_i[:, None] - sums_j[None, :], 0.0))
                a = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
                a = a * fade * strength[:, None]
                right -= tl.dot(a, held[j], input_precision=SOLVE)
            fade = tl.exp(tl.minimum(sums_i[:, None] - sums_i[None, :], 0.0))
            a = tl.dot(k_i, tl.trans(k_i), input_precision=PRECISION) * fade * strength[:, None]
            inverse = _inverse(tl.where(own[:, None] > own[None, :], a, 0.0), BLOCK)
            solved = tl.dot(inverse, right, input_precision=SOLVE)
            held = held + (solved,)  # noqa: RUF005  the compiler takes no star
            line = ((first + at).to(tl.int64) * HEADS + head)[:, None]
            result = solved.to(u.dtype.element_ty)
            tl.store(u + line * V + column[None, :], result, mask=there & of_value)
            tl.store(
                w + line * K + (column - V)[None, :], result, mask=there & (part * COLUMNS >= V)
            )


@triton.jit
def _chunk_kernel(
    mixed, g, u, w, state, slots, starts, y, slot_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    BV: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state through all chunks of a sequence; one of a single token has none."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BV + tl.arange(0, BV)[None, :]
    first, count = counted(starts, sequence, sequence >= 0, True)
    slot = tl.load(slots + sequence)
    if (slot >= 0) & (count > 1):
        KEYS: tl.constexpr = KEY_HEADS * K
        WIDTH: tl.constexpr = 2 * KEYS + HEADS * V
        own = tl.arange(0, CHUNK)
        key = tl.arange(0, K)
        place = state + slot.to(tl.int64) * slot_stride + (head * K + key)[:, None] * V + column
        s = tl.load(place)
        keys = head // (HEADS // KEY_HEADS) * K + key[None, :]
        for start in tl.range(0, count, CHUNK):
            row = (first + start + own).to(tl.int64)
            there = start + own < count
            some = there[:, None]
            fades = tl.load(g + row * HEADS + head, mask=there, other=0.0)
            sums, last = tl.cumsum(fades, 0), tl.sum(fades, 0)
            line = mixed + row[:, None] * WIDTH + keys
            q = unit_rows(tl.load(line, mask=some, other=0.0)) * scale
            q = q.to(mixed.dtype.element_ty)
            k = unit_rows(tl.load(line + KEYS, mask=some, other=0.0))
            of_head = (row * HEADS + head)[:, None]
            small = s.to(mixed.dtype.element_ty)
            given = tl.load(w + of_head * K + key[None, :], mask=some, other=0.0)
            new = tl.load(u + of_head * V + column, mask=some, other=0.0).to(tl.float32)
            new -= tl.dot(given, small, input_precision=PRECISION)
            new = new.to(mixed.dtype.element_ty)
            scores = tl.dot(q, tl.trans(k.to(mixed.dtype.element_ty)), input_precision=PRECISION)
            fade = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
            scores = tl.where(own[:, None] >= own[None, :], scores * fade, 0.0)
            result = tl.dot(q, small, input_precision=PRECISION) * tl.exp(sums)[:, None]
            result += tl.dot(scores.to(mixed.dtype.element_ty), new, input_precision=PRECISION)
            tl.store(y + of_head * V + column, result.to(y.dtype.element_ty), mask=some)
            left = (k * tl.exp(last - sums)[:, None]).to(mixed.dtype.element_ty)
            s = s * tl.exp(last) + tl.dot(tl.trans(left), new, input_precision=PRECISION)
        tl.store(place, s)


def delta_rule(call: DeltaCall) -> Tensor:
    """y [T, H, V] of all tokens in the type of q; states are changed where they lie. On a GPU, without waiting for it.

    Rows of padding say nothing.
    """
    call.check()
    mixed_TE, sequences = call.mixed_TE, call.sequences
    tokens, heads, width = sequences.tokens, call.heads, call.value_width
    y_THV = mixed_TE.new_empty(tokens, heads, width)
    if not tokens or not len(sequences.slots_B):
        return y_THV
    delta_step(call, y_THV)
    if sequences.starts_B1 is not None:
        _launch_chunks(call, y_THV)
    return y_THV


def _launch_chunks(call: DeltaCall, y_THV: Tensor) -> None:
    """Sequences with several tokens."""
    mixed_TE, sequences = call.mixed_TE, call.sequences
    tokens, heads, width = y_THV.shape
    u_THV, w_THK = torch.empty_like(y_THV), y_THV.new_empty(tokens, heads, call.key_width)
    count, columns = len(sequences.slots_B), solved_columns(call.key_width, width)
    precision = "ieee" if mixed_TE.dtype == torch.float32 else "tf32"
    common = {**call.constants(), "CHUNK": CHUNK, "PRECISION": precision}
    solve: Any = _solve_kernel
    solve[(tokens // CHUNK + count, heads, (width + call.key_width) // columns)](
        *(mixed_TE, call.g_TH, call.beta_TH, sequences.slots_B, sequences.bounds),
        *(u_THV, w_THK, count),
        **common,
        COLUMNS=columns,
        SEQUENCES=bucket(count),
        BLOCK=BLOCK,
        SOLVE=SOLVE,
        num_warps=4,
    )
    block = value_block(width)
    chunk: Any = _chunk_kernel
    chunk[(count, heads, width // block)](
        *(mixed_TE, call.g_TH, u_THV, w_THK, call.state_NRV, sequences.slots_B),
        *(sequences.bounds, y_THV, call.state_NRV.stride(0), call.key_width**-0.5),
        **common,
        BV=block,
        num_warps=4,
        num_stages=1,  # more would not leave enough registers
    )


def solved_columns(key_width: int, value_width: int) -> int:
    """As many as divide both U and W."""
    return next(size for size in (64, 32, 16) if key_width % size == value_width % size == 0)


def cost(tokens: int, heads: int, key_width: int, value_width: int) -> Cost:
    """The five products of a chunk for each token and head, and q, k, v, U, W and y in 16 bits."""
    wide = key_width + value_width
    flops = (
        2.0 * tokens * heads * (CHUNK * (2 * key_width + 2 * wide) + 3 * key_width * value_width)
    )
    return Cost(flops, 2.0 * tokens * heads * (4 * key_width + 4 * value_width))
