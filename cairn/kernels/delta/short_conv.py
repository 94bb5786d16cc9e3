"""Each column over its last few tokens, for sequences that keep those tokens as their state.

    y[t] = sum over i of w[:, i] * x[t - W + i]        i = 0 .. W; x before a sequence's first token is its state [W, E]

`short_conv` is for a step of several sequences on a GPU: states lie in slots, and are replaced by the last W inputs.
Who has which tokens and which slot is read on the device, so a CUDA graph can hold the launches; a slot of -1 is
padding, whose outputs say nothing. Bytes moved: x and y, and each state twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check
from cairn.kernels.delta.rule import Sequences
from cairn.kernels.paged.paged_tiles import bucket, counted, power_of_2

TOKENS, COLUMNS = 16, 128  # of a program


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _conv_kernel(
    x, weight, before, slots, starts, y, sequences, tokens, E, slot_stride,
    KEPT: tl.constexpr, SILU: tl.constexpr, SEQUENCES: tl.constexpr, STARTS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < E)[None, :]
    owner, first = token, token
    if STARTS:
        every = tl.arange(0, SEQUENCES)
        ends = tl.load(starts + every + 1, mask=every < sequences, other=0)
        over = (ends[None, :] <= token[:, None]) & (every < sequences)[None, :]
        owner = tl.sum(over.to(tl.int32), axis=1)
        first = tl.load(starts + owner, mask=owner < sequences, other=0)
    slot = tl.load(slots + owner, mask=(owner < sequences) & (token < tokens), other=-1)
    state = before + slot.to(tl.int64)[:, None] * slot_stride + column[None, :]
    sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for tap in tl.static_range(KEPT + 1):
        source = token - KEPT + tap
        here = (slot >= 0) & (source >= first)
        new = tl.load(
            x + source.to(tl.int64)[:, None] * E + column[None, :],
            mask=here[:, None] & inside,
            other=0.0,
        )
        old = tl.load(
            state + (source - first + KEPT)[:, None] * E,
            mask=((slot >= 0) & (source < first))[:, None] & inside,
            other=0.0,
        )
        w = tl.load(weight + column * (KEPT + 1) + tap, mask=column < E, other=0.0)
        sums += tl.where(here[:, None], new, old).to(tl.float32) * w.to(tl.float32)[None, :]
    if SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    at = y + token.to(tl.int64)[:, None] * E + column[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), mask=(slot >= 0)[:, None] & inside)


@triton.jit
def _keep_kernel(
    x, before, slots, starts, E, slot_stride,
    KEPT: tl.constexpr, ROWS: tl.constexpr, STARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last KEPT inputs of one sequence take the place of its state."""
    sequence = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first, count = counted(starts, sequence, sequence >= 0, STARTS)
    slot = tl.load(slots + sequence)
    if (slot >= 0) & (count > 0):
        place = tl.arange(0, ROWS)[:, None]
        known = (place < KEPT) & (column < E)
        source = count + place - KEPT  # before 0: in the state
        state = before + slot.to(tl.int64) * slot_stride + column
        new = tl.load(
            x + (first + source).to(tl.int64) * E + column, mask=known & (source >= 0), other=0.0
        )
        old = tl.load(state + (count + place) * E, mask=known & (source < 0), other=0.0)
        tl.debug_barrier()  # every thread has read before one of them writes
        tl.store(state + place * E, tl.where(source >= 0, new, old), mask=known)


def short_conv(
    x_TE: Tensor, weight_EW: Tensor, before_NWE: Tensor, sequences: Sequences, *, silu: bool = False
) -> Tensor:
    """The outputs [T, E], through SiLU if asked for; states of the sequences are replaced. On a GPU."""
    check("x_TE", x_TE, dtypes=FLOATS, shape=(sequences.tokens, None), packed=True)
    tokens, columns = x_TE.shape
    kept = weight_EW.shape[1] - 1
    shape = (columns, kept + 1)
    check("weight_EW", weight_EW, dtypes=(x_TE.dtype,), shape=shape, beside=x_TE, packed=True)
    shape = (None, kept, columns)
    check("before_NWE", before_NWE, dtypes=(x_TE.dtype,), shape=shape, beside=x_TE, packed=True)
    sequences.check(x_TE)
    y_TE, starts = torch.empty_like(x_TE), sequences.starts_B1 is not None
    count, across = len(sequences.slots_B), triton.cdiv(columns, COLUMNS)
    if not tokens or not count:
        return y_TE
    conv: Any = _conv_kernel
    conv[(triton.cdiv(tokens, TOKENS), across)](
        *(x_TE, weight_EW, before_NWE, sequences.slots_B, sequences.bounds, y_TE),
        *(count, tokens, columns, before_NWE.stride(0)),
        KEPT=kept,
        SILU=silu,
        SEQUENCES=bucket(count),
        STARTS=starts,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    keep: Any = _keep_kernel
    keep[(count, across)](
        *(x_TE, before_NWE, sequences.slots_B, sequences.bounds, columns, before_NWE.stride(0)),
        KEPT=kept,
        ROWS=power_of_2(kept),
        STARTS=starts,
        COLUMNS=COLUMNS,
        num_warps=1,
    )
    return y_TE
