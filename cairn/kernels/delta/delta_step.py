"""Gated delta rule for one token of each sequence; `rule` defines the computation.

Bytes moved: the state twice, B * H * K * V * 8. The kernel takes q, k and v side by side as the convolution leaves
them, and changes states where they lie.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.delta.rule import DeltaCall
from cairn.kernels.kernel import Cost
from cairn.kernels.paged.paged_tiles import counted

VALUES = 64  # columns of a state that a program has: longer rows than 32 have, and enough programs


def value_block(value_width: int, most: int = VALUES) -> int:
    """The largest power of 2 that divides the columns, up to `most`."""
    return min(value_width & -value_width, most)


@triton.jit
def unit_rows(x):
    """Rows [N, K] of length one."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _step_kernel(
    mixed, g, beta, state, slots, starts, y, slot_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STARTS: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One head of a sequence that has one token; those with several are left to `delta_chunk`."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    token, count = counted(starts, sequence, sequence >= 0, STARTS)
    slot = tl.load(slots + sequence)
    if (slot >= 0) & (count == 1):
        KEYS: tl.constexpr = KEY_HEADS * K
        key = tl.arange(0, K)
        row = mixed + token.to(tl.int64) * (2 * KEYS + HEADS * V)
        keys = row + head // (HEADS // KEY_HEADS) * K + key
        q = tl.load(keys).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
        k = tl.load(keys + KEYS).to(tl.float32)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        v = tl.load(row + 2 * KEYS + head * V + column).to(tl.float32)
        at = state + slot.to(tl.int64) * slot_stride + (head * K + key)[:, None] * V
        at += column[None, :]
        fade = tl.exp(tl.load(g + token * HEADS + head))
        s = tl.load(at) * fade
        change = (v - tl.sum(s * k[:, None], axis=0)) * tl.load(beta + token * HEADS + head)
        s += k[:, None] * change[None, :]
        tl.store(at, s)
        result = tl.sum(s * q[:, None], axis=0)
        out = y + (token.to(tl.int64) * HEADS + head) * V + column
        tl.store(out, result.to(y.dtype.element_ty))


def delta_step(call: DeltaCall, y_THV: Tensor) -> None:
    """Sequences with one token: their rows of y, and their states. On a GPU, without waiting for it."""
    count, block = len(call.sequences.slots_B), value_block(call.value_width)
    kernel: Any = _step_kernel
    kernel[(count, call.heads, call.value_width // block)](
        *(call.mixed_TE, call.g_TH, call.beta_TH, call.state_NRV, call.sequences.slots_B),
        *(call.sequences.bounds, y_THV, call.state_NRV.stride(0), call.key_width**-0.5),
        **call.constants(),
        BV=block,
        num_warps=4,
    )


def cost(sequences: int, heads: int, key_width: int, value_width: int) -> Cost:
    state = sequences * heads * key_width * value_width
    return Cost(7.0 * state, 8.0 * state)
