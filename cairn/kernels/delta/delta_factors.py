"""Many tokens through the gated delta rule with as little as possible in the serial pass; `rule` says what is computed.

`delta_chunk` computes the same, and y in the pass over the chunks of a sequence. Here that pass is three
products of tiles that lie in memory as they are multiplied, and leaves the state before each chunk:

    factors   (I + A)^-1 and four rates of each token                            all chunks at once
    states    new = (I + A)^-1 b (v - e * (k S));   S <- d S + k^T (f * new)     one chunk after the other
    outputs   y = e * (q S) + P new,   P: faded scores of the tokens             all chunks at once

A system is solved in two halves of 32 rows, a quarter of the multiplications of whole ones, and lengths, strengths and
fades multiply rows and columns of small results instead of q, k and v.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.delta.delta_chunk import _inverse, _place
from cairn.kernels.delta.delta_step import value_block
from cairn.kernels.delta.rule import CHUNK, DeltaCall
from cairn.kernels.paged.paged_tiles import bucket, counted

HALF = CHUNK // 2
LEVELS = HALF.bit_length() - 1  # of blocks of 2, 4, ... rows
# Products in a row give every warp 16 rows: more than two would repeat each other's.
FACTOR_WARPS = 2
# Three products of bfloat16 halves: of systems of 64 keys that resemble each other they err by 1e-5, a hundredth of
# what the rounding of the solved rows to bfloat16 does.
SOLVE = "bf16x3"
VALUES = 64  # columns of a state that a program has
STATE_WARPS, STAGES = 4, 3  # chunks' tiles are copied while those before are computed
OUTPUTS, OUTPUT_WARPS = 128, 4  # columns of y that a program has


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


@triton.jit
def _half(keys, g, beta, row, there, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Keys of some rows of a head, 1 / their lengths, and what the rows fade and write by."""
    k = tl.load(keys + row[:, None] * WIDTH, mask=there[:, None], other=0.0)
    of_head = row * HEADS + head
    fades = tl.load(g + of_head, mask=there, other=0.0)
    return k, _lengths(k), fades, tl.load(beta + of_head, mask=there, other=0.0)


@triton.jit
def _keep_rates(rates, of_head, there, rate, sums, last):
    """What the other two launches multiply a token with: `LEFT`, `SUMS`, `RATE`, `FADE`."""
    tl.store(rates + of_head * 4, rate * tl.exp(last - sums), mask=there)
    tl.store(rates + of_head * 4 + 1, sums, mask=there)
    tl.store(rates + of_head * 4 + 2, rate, mask=there)
    tl.store(rates + of_head * 4 + 3, tl.exp(last) + 0.0 * sums, mask=there)


@triton.jit(do_not_specialize=["sequences"])
def _factors_kernel(
    mixed, g, beta, rates, slots, starts, solved, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """The solved system and the rates of one chunk and head. What lies above the diagonal is not written."""
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
        k0, rate0, fade0, beta0 = _half(keys, g, beta, row0, there0, head, HEADS, WIDTH)
        k1, rate1, fade1, beta1 = _half(keys, g, beta, row1, there1, head, HEADS, WIDTH)
        sum0, sum1 = tl.cumsum(fade0, 0), tl.sum(fade0, 0) + tl.cumsum(fade1, 0)
        last = tl.sum(fade0, 0) + tl.sum(fade1, 0)
        _keep_rates(rates, row0 * HEADS + head, there0, rate0, sum0, last)
        _keep_rates(rates, row1 * HEADS + head, there1, rate1, sum1, last)
        later = own[:, None] > own[None, :]
        a0 = _among(k0, k0, rate0 * beta0, rate0, sum0, sum0, PRECISION)
        a1 = _among(k1, k1, rate1 * beta1, rate1, sum1, sum1, PRECISION)
        between = _among(k1, k0, rate1 * beta1, rate0, sum1, sum0, PRECISION)
        a0, a1 = tl.where(later, a0, 0.0), tl.where(later, a1, 0.0)
        top = _inverse(a0, HALF, LEVELS, SOLVE)
        low = _inverse(a1, HALF, LEVELS, SOLVE)
        between = tl.dot(low, tl.dot(between, top, input_precision=SOLVE), input_precision=SOLVE)

        of0, of1 = (row0 * HEADS + head)[:, None], (row1 * HEADS + head)[:, None]
        before, behind = own[None, :], own[None, :] + HALF
        some0, some1 = there0[:, None] & (before <= own[:, None]), there1[:, None]
        top *= beta0[None, :]
        between *= -beta0[None, :]
        low *= beta1[None, :]
        tl.store(solved + of0 * CHUNK + before, top.to(kind), mask=some0)
        tl.store(solved + of1 * CHUNK + before, between.to(kind), mask=some1)
        some1 &= before <= own[:, None]
        tl.store(solved + of1 * CHUNK + behind, low.to(kind), mask=some1)


@triton.jit
def _chunks_before(starts, sequences, sequence, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr):
    """Chunks of all sequences before this one, in the order of `_place`."""
    every = tl.arange(0, SEQUENCES)
    _, counts = counted(starts, every, every < tl.minimum(sequence, sequences), True)
    return tl.sum(tl.where(counts > 1, tl.cdiv(counts, CHUNK), 0), 0)


@triton.jit(do_not_specialize=["sequences"])
def _states_kernel(
    mixed, solved, rates, new, state, states, slots, starts, sequences, slot_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    BV: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state through all chunks of a sequence, and what each token writes."""
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
        in_state = (head * K + key)[:, None] * V + column
        place = state + slot.to(tl.int64) * slot_stride + in_state
        s = tl.load(place)
        keys = mixed + KEYS + head // (HEADS // KEY_HEADS) * K + key[None, :]
        values = mixed + 2 * KEYS + head * V + column
        lower = own[:, None] >= own[None, :]
        chunk = _chunks_before(starts, sequences, sequence, SEQUENCES, CHUNK).to(tl.int64)
        before = states + chunk * (HEADS * K * V) + in_state
        for start in tl.range(0, count, CHUNK):
            row = (first + start + own).to(tl.int64)
            there = start + own < count
            some = there[:, None]
            of_head = row * HEADS + head
            k = tl.load(keys + row[:, None] * WIDTH, mask=some, other=0.0)
            v = tl.load(values + row[:, None] * WIDTH, mask=some, other=0.0)
            system = solved + of_head[:, None] * CHUNK + own[None, :]
            factor = tl.load(system, mask=some & lower, other=0.0)
            left = tl.load(rates + of_head * 4, mask=there, other=0.0)
            sums = tl.load(rates + of_head * 4 + 1, mask=there, other=0.0)
            rate = tl.load(rates + of_head * 4 + 2, mask=there, other=0.0)
            fade = tl.load(rates + ((first + start).to(tl.int64) * HEADS + head) * 4 + 3)
            small = s.to(kind)
            tl.store(before, small)
            known = tl.dot(k, small, input_precision=PRECISION) * (rate * tl.exp(sums))[:, None]
            unknown = (v.to(tl.float32) - known).to(kind)
            written = tl.dot(factor, unknown, input_precision=PRECISION)
            tl.store(new + of_head[:, None] * V + column, written.to(kind), mask=some)
            faded = (written * left[:, None]).to(kind)
            s = s * fade + tl.dot(tl.trans(k), faded, input_precision=PRECISION)
            before += HEADS * K * V
        tl.store(place, s)


@triton.jit(do_not_specialize=["sequences"])
def _outputs_kernel(
    mixed, new, rates, states, slots, starts, y, sequences, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    BV: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of y of one chunk and head."""
    head = tl.program_id(1)
    chunk = tl.program_id(0)
    column = tl.program_id(2) * BV + tl.arange(0, BV)[None, :]
    sequence, first, rows = _place(starts, sequences, chunk, SEQUENCES, CHUNK)
    slot = tl.load(slots + sequence, mask=rows > 0, other=-1)
    if slot >= 0:
        KEYS: tl.constexpr = KEY_HEADS * K
        WIDTH: tl.constexpr = 2 * KEYS + HEADS * V
        own = tl.arange(0, CHUNK)
        there = own < rows
        some = there[:, None]
        row = (first + own).to(tl.int64)
        of_head = row * HEADS + head
        key = tl.arange(0, K)
        line = mixed + row[:, None] * WIDTH + head // (HEADS // KEY_HEADS) * K + key[None, :]
        q = tl.load(line, mask=some, other=0.0)
        k = tl.load(line + KEYS, mask=some, other=0.0)
        s = tl.load(
            states + chunk.to(tl.int64) * (HEADS * K * V) + (head * K + key)[:, None] * V + column
        )
        written = tl.load(new + of_head[:, None] * V + column, mask=some, other=0.0)
        sums = tl.load(rates + of_head * 4 + 1, mask=there, other=0.0)
        k_rate = tl.load(rates + of_head * 4 + 2, mask=there, other=0.0)
        q_rate = _lengths(q) * scale
        scores = _among(q, k, q_rate, k_rate, sums, sums, PRECISION)
        scores = tl.where(own[:, None] >= own[None, :], scores, 0.0).to(mixed.dtype.element_ty)
        result = tl.dot(q, s, input_precision=PRECISION) * (q_rate * tl.exp(sums))[:, None]
        result += tl.dot(scores, written, input_precision=PRECISION)
        tl.store(y + of_head[:, None] * V + column, result.to(y.dtype.element_ty), mask=some)


def launch_factored(call: DeltaCall, y_THV: Tensor) -> None:
    """Sequences with several tokens: their rows of y, and their states. On a GPU, without waiting for it."""
    mixed_TE, sequences = call.mixed_TE, call.sequences
    tokens, heads, width = y_THV.shape
    exact = mixed_TE.dtype == torch.float32
    solved_THN, new_THV = y_THV.new_empty(tokens, heads, CHUNK), torch.empty_like(y_THV)
    rates_TH4 = y_THV.new_empty(tokens, heads, 4, dtype=torch.float32)
    count = len(sequences.slots_B)
    chunks = tokens // CHUNK + count
    states_CHKV = y_THV.new_empty(chunks, heads, call.key_width, width)
    common = {**call.constants(), "CHUNK": CHUNK, "PRECISION": "ieee" if exact else "tf32"}
    common |= {"SEQUENCES": bucket(count)}
    rows = (sequences.slots_B, sequences.bounds)
    factors: Any = _factors_kernel
    factors[(chunks, heads)](
        *(mixed_TE, call.g_TH, call.beta_TH, rates_TH4, *rows, solved_THN, count),
        **common,
        LEVELS=LEVELS,
        SOLVE="ieee" if exact else SOLVE,
        num_warps=FACTOR_WARPS,
    )
    block = value_block(width, VALUES)
    scan: Any = _states_kernel
    scan[(count, heads, width // block)](
        *(mixed_TE, solved_THN, rates_TH4, new_THV, call.state_NRV, states_CHKV, *rows, count),
        call.state_NRV.stride(0),
        **common,
        BV=block,
        num_warps=STATE_WARPS,
        num_stages=1 if exact else STAGES,
    )
    block = value_block(width, OUTPUTS)
    outputs: Any = _outputs_kernel
    outputs[(chunks, heads, width // block)](
        *(mixed_TE, new_THV, rates_TH4, states_CHKV, *rows, y_THV, count, call.key_width**-0.5),
        **common,
        BV=block,
        num_warps=OUTPUT_WARPS,
        num_stages=1,
    )
