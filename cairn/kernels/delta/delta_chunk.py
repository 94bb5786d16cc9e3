"""Many tokens through the gated delta rule, a chunk of 64 at a time; `rule` says what is computed.

One launch inverts the systems of all chunks at once; a second one has a program for each head of a sequence and some
columns of its state, which stays in registers from the first chunk to the last. Sequences with one token take
`delta_step`. A system I + A is inverted from its diagonal outwards, in blocks of 2, 4, ... 64 rows:

    | X 0 |^-1    |     X^-1        0  |
    | C Y |     = | -Y^-1 C X^-1   Y^-1 |        for all blocks of a size at once: D <- D - D C D

Sums of powers of A would need no inverses of blocks, and cancel where keys resemble each other.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.delta.delta_step import delta_step, unit_rows, value_block
from cairn.kernels.delta.rule import CHUNK, DeltaCall
from cairn.kernels.kernel import Cost
from cairn.kernels.paged.paged_tiles import bucket, counted

VALUES = 32  # columns of a state that a program has: more would not leave enough registers
STAGES = 2  # a chunk's rows are copied while the one before is computed
LEVELS = CHUNK.bit_length() - 1  # of blocks of 2, 4, ... rows
# What a row takes over from those before it adds up: the ten bits of tf32 would be too few.
SOLVE = "tf32x3"


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
def _inverse(a, CHUNK: tl.constexpr, LEVELS: tl.constexpr, SOLVE: tl.constexpr):
    """Of I + a, where a [CHUNK, CHUNK] is strictly lower: of blocks twice as large in every step."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    found = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    for level in tl.range(1, LEVELS, num_stages=1):
        between = (row >> level + 1 == column >> level + 1) & (row >> level != column >> level)
        taken = tl.dot(tl.where(between, a, 0.0), found, input_precision=SOLVE)
        found -= tl.dot(found, taken, input_precision=SOLVE)
    return found


@triton.jit(do_not_specialize=["sequences"])
def _solve_kernel(
    mixed, g, beta, slots, starts, u, w, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """U and W of one chunk and head."""
    head = tl.program_id(1)
    sequence, first, rows = _place(starts, sequences, tl.program_id(0), SEQUENCES, CHUNK)
    slot = tl.load(slots + sequence, mask=rows > 0, other=-1)
    if slot >= 0:
        KEYS: tl.constexpr = KEY_HEADS * K
        WIDTH: tl.constexpr = 2 * KEYS + HEADS * V
        kind = mixed.dtype.element_ty
        own = tl.arange(0, CHUNK)
        column = tl.arange(0, COLUMNS)[None, :]
        there = own < rows
        some = there[:, None]
        line = mixed + (first + own).to(tl.int64)[:, None] * WIDTH
        keys = line + KEYS + head // (HEADS // KEY_HEADS) * K
        values = line + 2 * KEYS + head * V
        wide = tl.load(keys + tl.arange(0, K)[None, :], mask=some, other=0.0).to(tl.float32)
        shrink = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
        k = (wide * shrink[:, None]).to(kind)
        strength = tl.load(beta + (first + own) * HEADS + head, mask=there, other=0.0)
        sums = tl.cumsum(tl.load(g + (first + own) * HEADS + head, mask=there, other=0.0), 0)
        fade = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * fade * strength[:, None]
        a = tl.where(own[:, None] > own[None, :], a, 0.0)
        inverse = _inverse(a, CHUNK, LEVELS, SOLVE)
        of_head = ((first + own).to(tl.int64) * HEADS + head)[:, None]
        for part in tl.range(V // COLUMNS, num_stages=1):
            at = part * COLUMNS + column
            right = tl.load(values + at, mask=some, other=0.0).to(tl.float32) * strength[:, None]
            solved = tl.dot(inverse, right, input_precision=SOLVE)
            tl.store(u + of_head * V + at, solved.to(kind), mask=some)
        strength *= tl.exp(sums) * shrink
        for part in tl.range(K // COLUMNS, num_stages=1):
            at = part * COLUMNS + column
            right = tl.load(keys + at, mask=some, other=0.0).to(tl.float32) * strength[:, None]
            solved = tl.dot(inverse, right, input_precision=SOLVE)
            tl.store(w + of_head * K + at, solved.to(kind), mask=some)


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


def delta_rule(
    call: DeltaCall, chunks: Callable[[DeltaCall, Tensor], None] | None = None
) -> Tensor:
    """y [T, H, V] of all tokens in the type of q; states are changed where they lie. On a GPU, without waiting for it.

    Rows of padding say nothing. `chunks` launches for sequences with several tokens: `launch_chunks`, or
    `delta_factors.launch_factored`, which has not been timed yet.
    """
    call.check()
    mixed_TE, sequences = call.mixed_TE, call.sequences
    tokens, heads, width = sequences.tokens, call.heads, call.value_width
    y_THV = mixed_TE.new_empty(tokens, heads, width)
    if not tokens or not len(sequences.slots_B):
        return y_THV
    delta_step(call, y_THV)
    if sequences.starts_B1 is not None:
        (chunks or launch_chunks)(call, y_THV)
    return y_THV


def launch_chunks(call: DeltaCall, y_THV: Tensor) -> None:
    """Sequences with several tokens."""
    mixed_TE, sequences = call.mixed_TE, call.sequences
    tokens, heads, width = y_THV.shape
    u_THV, w_THK = torch.empty_like(y_THV), y_THV.new_empty(tokens, heads, call.key_width)
    count, columns = len(sequences.slots_B), solved_columns(call.key_width, width)
    precision = "ieee" if mixed_TE.dtype == torch.float32 else "tf32"
    common = {**call.constants(), "CHUNK": CHUNK, "PRECISION": precision}
    solve: Any = _solve_kernel
    solve[(tokens // CHUNK + count, heads)](
        *(mixed_TE, call.g_TH, call.beta_TH, sequences.slots_B, sequences.bounds),
        *(u_THV, w_THK, count),
        **common,
        COLUMNS=columns,
        SEQUENCES=bucket(count),
        LEVELS=LEVELS,
        SOLVE="ieee" if mixed_TE.dtype == torch.float32 else SOLVE,
        num_warps=4,
    )
    block = value_block(width, VALUES)
    chunk: Any = _chunk_kernel
    chunk[(count, heads, width // block)](
        *(mixed_TE, call.g_TH, u_THV, w_THK, call.state_NRV, sequences.slots_B),
        *(sequences.bounds, y_THV, call.state_NRV.stride(0), call.key_width**-0.5),
        **common,
        BV=block,
        num_warps=4,
        num_stages=STAGES,
    )


def solved_columns(key_width: int, value_width: int) -> int:
    """As many as divide both U and W, and leave enough registers."""
    return next(size for size in (32, 16) if key_width % size == value_width % size == 0)


def cost(tokens: int, heads: int, key_width: int, value_width: int) -> Cost:
    """The five products of a chunk for each token and head, and q, k, v, U, W and y in 16 bits."""
    wide = key_width + value_width
    flops = (
        2.0 * tokens * heads * (CHUNK * (2 * key_width + 2 * wide) + 3 * key_width * value_width)
    )
    return Cost(flops, 2.0 * tokens * heads * (4 * key_width + 4 * value_width))
