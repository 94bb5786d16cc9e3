"""Many tokens through the gated delta rule, a chunk of 64 at a time; `rule` says what is computed.

The pass over the chunks of a sequence is serial, so as little as possible is in it. Two launches, which have all chunks
at once, leave the scores of the tokens among themselves, four rates of each token, U and W; the pass is four products
of tiles that lie in memory as they are multiplied:

    new = U - W S;   y = e * (q S) + P new;   S <- d S + k^T (f * new)      e, f: of each token, d: of the chunk

Sequences with one token take `delta_step`. A system I + A is inverted from its diagonal outwards, in blocks of 2, 4,
... rows:

    | X 0 |^-1    |     X^-1        0  |
    | C Y |     = | -Y^-1 C X^-1   Y^-1 |        for all blocks of a size at once: D <- D - D C D

in two halves of 32 rows, a quarter of the multiplications of whole ones. Sums of powers of A would need no inverses of
blocks, and cancel where keys resemble each other. Lengths, strengths and fades multiply rows and columns of small
results instead of q, k and v.

Tried on an H200 and slower for 8,192 tokens of one sequence (0.47 ms as it is): y in a launch of its own behind the
pass, which leaves the state before each chunk (0.55 ms); a pass that solves from k and v, without U and W (0.69 ms).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.delta.delta_step import delta_step, value_block
from cairn.kernels.delta.rule import CHUNK, DeltaCall
from cairn.kernels.kernel import Cost
from cairn.kernels.paged.paged_tiles import bucket, counted

HALF = CHUNK // 2
LEVELS = HALF.bit_length() - 1  # of blocks of 2, 4, ... rows
# Products in a row give every warp 16 rows: more than two would repeat each other's.
FACTOR_WARPS = 2
# Three products of bfloat16 halves: of systems of 64 keys that resemble each other they err by 1e-5, a hundredth of
# what the rounding of the solved rows to bfloat16 does.
SOLVE = "bf16x3"
COLUMNS = 64  # of U and W that are solved at once
# Columns of a state that a program has: many where such programs fill the multiprocessors, few otherwise.
MANY_VALUES, FEW_VALUES, PROGRAMS = 64, 32, 132
STAGES = 3  # chunks' tiles are copied while those before are computed


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


@triton.jit
def _lengths(x):
    """1 / length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)


@triton.jit
def _among(x, y, x_rate, y_rate, x_sum, y_sum, PRECISION: tl.constexpr):
    """Products of rows, scaled and faded by the time between them."""
    fade = tl.exp(tl.minimum(x_sum[:, None] - y_sum[None, :], 0.0))
    found = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    return found * fade * (x_rate[:, None] * y_rate[None, :])


@triton.jit(do_not_specialize=["sequences"])
def _scores_kernel(
    mixed, g, slots, starts, scores, rates, sequences, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and rates of one chunk and head."""
    head = tl.program_id(1)
    sequence, first, rows = _place(starts, sequences, tl.program_id(0), SEQUENCES, CHUNK)
    slot = tl.load(slots + sequence, mask=rows > 0, other=-1)
    if slot >= 0:
        KEYS: tl.constexpr = KEY_HEADS * K
        WIDTH: tl.constexpr = 2 * KEYS + HEADS * V
        own = tl.arange(0, CHUNK)
        there = own < rows
        row = (first + own).to(tl.int64)
        of_head = row * HEADS + head
        key = head // (HEADS // KEY_HEADS) * K + tl.arange(0, K)[None, :]
        line = mixed + row[:, None] * WIDTH + key
        q = tl.load(line, mask=there[:, None], other=0.0)
        k = tl.load(line + KEYS, mask=there[:, None], other=0.0)
        fades = tl.load(g + of_head, mask=there, other=0.0)
        sums, last = tl.cumsum(fades, 0), tl.sum(fades, 0)
        q_rate, k_rate = _lengths(q) * scale, _lengths(k)
        found = _among(q, k, q_rate, k_rate, sums, sums, PRECISION)
        found = tl.where(own[:, None] >= own[None, :], found, 0.0).to(scores.dtype.element_ty)
        tl.store(scores + of_head[:, None] * CHUNK + own[None, :], found, mask=there[:, None])
        tl.store(rates + of_head * 4, q_rate * tl.exp(sums), mask=there)
        tl.store(rates + of_head * 4 + 1, k_rate * tl.exp(last - sums), mask=there)
        tl.store(rates + of_head * 4 + 2, tl.exp(last) + 0.0 * sums, mask=there)
        tl.store(rates + of_head * 4 + 3, k_rate, mask=there)


@triton.jit
def _half(keys, g, beta, rates, row, there, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Keys of some rows of a head, 1 / their lengths, and what the rows fade and write by."""
    k = tl.load(keys + row[:, None] * WIDTH, mask=there[:, None], other=0.0)
    of_head = row * HEADS + head
    rate = tl.load(rates + of_head * 4 + 3, mask=there, other=0.0)
    fades = tl.load(g + of_head, mask=there, other=0.0)
    return k, rate, fades, tl.load(beta + of_head, mask=there, other=0.0)


@triton.jit(do_not_specialize=["sequences"])
def _factors_kernel(
    mixed, g, beta, rates, slots, starts, u, w, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """U and W of one chunk and head."""
    head = tl.program_id(1)
    sequence, first, rows = _place(starts, sequences, tl.program_id(0), SEQUENCES, CHUNK)
    slot = tl.load(slots + sequence, mask=rows > 0, other=-1)
    if slot >= 0:
        WIDTH: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
        HALF: tl.constexpr = CHUNK // 2
        kind = mixed.dtype.element_ty
        own = tl.arange(0, HALF)
        there0, there1 = own < rows, own + HALF < rows
        row0, row1 = (first + own).to(tl.int64), (first + HALF + own).to(tl.int64)
        keys = mixed + KEY_HEADS * K + head // (HEADS // KEY_HEADS) * K + tl.arange(0, K)[None, :]
        k0, rate0, fade0, beta0 = _half(keys, g, beta, rates, row0, there0, head, HEADS, WIDTH)
        k1, rate1, fade1, beta1 = _half(keys, g, beta, rates, row1, there1, head, HEADS, WIDTH)
        sum0, sum1 = tl.cumsum(fade0, 0), tl.sum(fade0, 0) + tl.cumsum(fade1, 0)
        later = own[:, None] > own[None, :]
        a0 = _among(k0, k0, rate0 * beta0, rate0, sum0, sum0, PRECISION)
        a1 = _among(k1, k1, rate1 * beta1, rate1, sum1, sum1, PRECISION)
        between = _among(k1, k0, rate1 * beta1, rate0, sum1, sum0, PRECISION)
        a0, a1 = tl.where(later, a0, 0.0), tl.where(later, a1, 0.0)
        top = _inverse(a0, HALF, LEVELS, SOLVE)
        low = _inverse(a1, HALF, LEVELS, SOLVE)
        between = tl.dot(low, tl.dot(between, top, input_precision=SOLVE), input_precision=SOLVE)

        grown0, grown1 = beta0 * rate0 * tl.exp(sum0), beta1 * rate1 * tl.exp(sum1)
        of0, of1 = (row0 * HEADS + head)[:, None], (row1 * HEADS + head)[:, None]
        some0, some1 = there0[:, None], there1[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        for part in tl.range((K + V) // COLUMNS, num_stages=1):  # of W, then of U
            is_key = part < K // COLUMNS
            at = part * COLUMNS + column
            at -= tl.where(is_key, 0, K)
            place = tl.where(
                is_key,
                KEY_HEADS * K + head // (HEADS // KEY_HEADS) * K,
                2 * KEY_HEADS * K + head * V,
            )
            strength0 = tl.where(is_key, grown0, beta0)[None, :]
            strength1 = tl.where(is_key, grown1, beta1)[None, :]
            above = tl.load(mixed + row0[:, None] * WIDTH + place + at, mask=some0, other=0.0)
            under = tl.load(mixed + row1[:, None] * WIDTH + place + at, mask=some1, other=0.0)
            upper = tl.dot((top * strength0).to(kind), above, input_precision=PRECISION)
            lower = tl.dot((low * strength1).to(kind), under, input_precision=PRECISION)
            lower -= tl.dot((between * strength0).to(kind), above, input_precision=PRECISION)
            out = tl.where(is_key, w, u)
            width = tl.where(is_key, K, V)
            tl.store(out + of0 * width + at, upper.to(kind), mask=some0)
            tl.store(out + of1 * width + at, lower.to(kind), mask=some1)


@triton.jit
def _pass_kernel(
    mixed, u, w, scores, rates, state, slots, starts, y, slot_stride,
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
        kind = mixed.dtype.element_ty
        own = tl.arange(0, CHUNK)
        key = tl.arange(0, K)
        place = state + slot.to(tl.int64) * slot_stride + (head * K + key)[:, None] * V + column
        s = tl.load(place)
        keys = head // (HEADS // KEY_HEADS) * K + key[None, :]
        for start in tl.range(0, count, CHUNK):
            row = (first + start + own).to(tl.int64)
            there = start + own < count
            some = there[:, None]
            of_head = row * HEADS + head
            line = mixed + row[:, None] * WIDTH + keys
            given = tl.load(w + of_head[:, None] * K + key[None, :], mask=some, other=0.0)
            q = tl.load(line, mask=some, other=0.0)
            k = tl.load(line + KEYS, mask=some, other=0.0)
            p = tl.load(scores + of_head[:, None] * CHUNK + own[None, :], mask=some, other=0.0)
            solved = tl.load(u + of_head[:, None] * V + column, mask=some, other=0.0)
            grown = tl.load(rates + of_head * 4, mask=there, other=0.0)
            left = tl.load(rates + of_head * 4 + 1, mask=there, other=0.0)
            fade = tl.load(rates + ((first + start).to(tl.int64) * HEADS + head) * 4 + 2)
            small = s.to(kind)
            new = solved.to(tl.float32) - tl.dot(given, small, input_precision=PRECISION)
            result = tl.dot(q, small, input_precision=PRECISION) * grown[:, None]
            faded = (new * left[:, None]).to(kind)
            s = s * fade + tl.dot(tl.trans(k), faded, input_precision=PRECISION)
            result += tl.dot(p, new.to(kind), input_precision=PRECISION)
            tl.store(y + of_head[:, None] * V + column, result.to(y.dtype.element_ty), mask=some)
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
        launch_chunks(call, y_THV)
    return y_THV


def launch_chunks(call: DeltaCall, y_THV: Tensor) -> None:
    """Sequences with several tokens: their rows of y, and their states. On a GPU, without waiting for it."""
    mixed_TE, sequences = call.mixed_TE, call.sequences
    tokens, heads, width = y_THV.shape
    exact = mixed_TE.dtype == torch.float32
    u_THV, w_THK = torch.empty_like(y_THV), y_THV.new_empty(tokens, heads, call.key_width)
    scores_THN = y_THV.new_empty(tokens, heads, CHUNK)
    rates_TH4 = y_THV.new_empty(tokens, heads, 4, dtype=torch.float32)
    count = len(sequences.slots_B)
    common = {**call.constants(), "CHUNK": CHUNK, "PRECISION": "ieee" if exact else "tf32"}
    grid, places = (tokens // CHUNK + count, heads), {"SEQUENCES": bucket(count)}
    scores: Any = _scores_kernel
    scores[grid](
        *(mixed_TE, call.g_TH, sequences.slots_B, sequences.bounds, scores_THN, rates_TH4),
        *(count, call.key_width**-0.5),
        **common,
        **places,
        num_warps=4,
    )
    factors: Any = _factors_kernel
    factors[grid](
        *(mixed_TE, call.g_TH, call.beta_TH, rates_TH4, sequences.slots_B, sequences.bounds),
        *(u_THV, w_THK, count),
        **common,
        **places,
        COLUMNS=min(value_block(width, COLUMNS), value_block(call.key_width, COLUMNS)),
        LEVELS=LEVELS,
        SOLVE="ieee" if exact else SOLVE,
        num_warps=FACTOR_WARPS,
    )
    block = state_columns(width, count * heads)
    scan: Any = _pass_kernel
    scan[(count, heads, width // block)](
        *(mixed_TE, u_THV, w_THK, scores_THN, rates_TH4, call.state_NRV, sequences.slots_B),
        *(sequences.bounds, y_THV, call.state_NRV.stride(0)),
        **common,
        BV=block,
        num_warps=4,
        num_stages=1 if exact else STAGES,
    )


def state_columns(value_width: int, states: int) -> int:
    """State columns of a program for this number of states."""
    many = value_block(value_width, MANY_VALUES)
    full = states * value_width // many >= PROGRAMS
    return many if full else value_block(value_width, FEW_VALUES)


def cost(tokens: int, heads: int, key_width: int, value_width: int) -> Cost:
    """The five products of a chunk for each token and head, and q, k, v, U, W and y in 16 bits."""
    wide = key_width + value_width
    flops = (
        2.0 * tokens * heads * (CHUNK * (2 * key_width + 2 * wide) + 3 * key_width * value_width)
    )
    return Cost(flops, 2.0 * tokens * heads * (4 * key_width + 4 * value_width))
