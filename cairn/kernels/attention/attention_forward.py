"""Attention forward in plain Triton: any lengths, window, soft-cap, sinks; runs on any recent NVIDIA GPU.

One program computes BLOCK_M queries of one head: it walks over the keys that they see, BLOCK_N at a time, and keeps
a running maximum and sum of each row (online softmax), so scores never reach memory. Blocks that every query of the
tile sees in full need no mask and run in a loop of their own; only those on the diagonal, at the edge of the window
and at the end of the sequence are masked.

    keys    lo ......... full_lo ............... full_hi ......... hi
            window edge    every query sees all    diagonal, end

Which tile a program computes is found by a search over cu_seqlens on the GPU: the grid depends on shapes alone.
Within a sequence the longest tiles start first. Rows behind the last sequence see nothing: 0, and -inf or the sink.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import short
from cairn.kernels.attention.attention_problem import Problem
from cairn.kernels.attention.attention_tiles import (
    LN_2,
    LOG2_E,
    NOTHING,
    bounded,
    key_ranges,
    load_rows,
    query_tile,
    rows_source,
    score_scale,
    scratch_memory,
    size_class,
    slots,
    takes_descriptors,
    visible,
)
from cairn.kernels.tuned import tuned


@triton.jit
def _walk(acc, total, top, q, k_source, v_source, head, first, last, position, length, stride_k, stride_v,
          stride_k_head, stride_v_head, scale_log2, softcap, window, D: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
          WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Take the keys [first, last) into the running softmax of one tile; scores are in units of log2(e)."""
    for key0 in tl.range(first, last, BLOCK_N):
        k = load_rows(
            k_source, key0, head, length, stride_k, stride_k_head, BLOCK_N, D, BLOCK_D, TMA, MASK
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if SOFTCAP:  # scale_log2 is scale / softcap here
            scores = bounded(scores * scale_log2) * (softcap * LOG2_E)
        elif MASK:
            scores = scores * scale_log2
        if MASK:
            keys = key0 + tl.arange(0, BLOCK_N)
            seen = visible(position[:, None], keys[None, :], length, window, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, NOTHING)
        if SOFTCAP or MASK:
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.math.exp2(scores - new_top[:, None])
        else:  # the scale in one multiply-add with the subtraction
            new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
            weights = tl.math.exp2(scores * scale_log2 - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(
            v_source, key0, head, length, stride_v, stride_v_head, BLOCK_N, D, BLOCK_D, TMA, MASK
        )
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def _forward_kernel(q, k, v, sinks, out, lse, cu_q, cu_k, sequences, tokens, max_q, max_k, stride_q, stride_k, stride_v,
                    stride_q_head, stride_k_head, stride_v_head, scale_log2, softcap, window,
                    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DENSE: tl.constexpr, CAUSAL: tl.constexpr,
                    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TMA: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    _, q_start, q_length, k_start, k_length, row0 = query_tile(
        tl.program_id(0), cu_q, cu_k, sequences, tokens, max_q, max_k, BLOCK_M, DENSE
    )
    if row0 < 0:
        return
    rows = row0 + tl.arange(0, BLOCK_M)
    position = rows + k_length - q_length
    lo, full_lo, full_hi, hi = key_ranges(
        row0, q_length, k_length, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
    )

    kv_head = head // GROUP
    q_source = rows_source(
        q, q_start, q_length, HEADS, stride_q, stride_q_head, BLOCK_M, D, BLOCK_D, False
    )
    tile = load_rows(
        q_source, row0, head, q_length, stride_q, stride_q_head, BLOCK_M, D, BLOCK_D, False, True
    )
    k_source = rows_source(
        k, k_start, k_length, HEADS // GROUP, stride_k, stride_k_head, BLOCK_N, D, BLOCK_D, TMA
    )
    v_source = rows_source(
        v, k_start, k_length, HEADS // GROUP, stride_v, stride_v_head, BLOCK_N, D, BLOCK_D, TMA
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SINKS:  # a key of value 0 that everyone sees
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW:
        acc, total, top = _walk(acc, total, top, tile, k_source, v_source, kv_head, lo, full_lo, position,
                                k_length, stride_k, stride_v, stride_k_head, stride_v_head, scale_log2, softcap, window,
                                D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, True, TMA, PRECISION)  # fmt: skip
    acc, total, top = _walk(acc, total, top, tile, k_source, v_source, kv_head, full_lo, full_hi, position,
                            k_length, stride_k, stride_v, stride_k_head, stride_v_head, scale_log2, softcap, window,
                            D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, False, TMA, PRECISION)  # fmt: skip
    acc, total, top = _walk(acc, total, top, tile, k_source, v_source, kv_head,
                            tl.maximum(full_lo, full_hi), hi, position, k_length, stride_k, stride_v, stride_k_head,
                            stride_v_head, scale_log2, softcap, window, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP,
                            True, TMA, PRECISION)  # fmt: skip

    saw = top > 0.1 * NOTHING  # else its keys, if any, were all masked: what was summed is void
    ours = rows < q_length
    columns = tl.arange(0, BLOCK_D)
    result = tl.where(saw[:, None], acc / tl.where(saw, total, 1.0)[:, None], 0.0)
    target = out + ((q_start + rows).to(tl.int64) * HEADS + head)[:, None] * D + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=ours[:, None] & (columns < D)[None, :])
    level = tl.where(saw, (top + tl.math.log2(total)) * LN_2, float("-inf"))
    tl.store(lse + head.to(tl.int64) * tokens + q_start + rows, level, mask=ours)


def forward_config(width: int, dtype: torch.dtype, tma: bool) -> dict[str, int]:
    """Sound everywhere: no spills, no serialised wgmma, shared memory for two programs per SM up to D = 128."""
    if dtype == torch.float32:
        return dict(block_m=32, block_n=32, warps=4, stages=1, tma=0)
    if width == 256:
        return dict(block_m=128, block_n=64, warps=8, stages=2, tma=int(tma))
    return dict(block_m=64, block_n=64, warps=4, stages=3, tma=int(tma))


FORWARD_CANDIDATES = [
    dict(block_m=m, block_n=n, warps=warps, stages=stages, tma=tma)
    for m, n, warps, stages, tma in (
        (64, 64, 4, 3, 1), (64, 64, 4, 2, 1), (128, 64, 8, 3, 1), (128, 128, 8, 2, 1),
        (64, 64, 4, 3, 0), (128, 64, 8, 3, 0),
    )
]  # fmt: skip


def forward_key(width: int, dtype: torch.dtype, causal: bool, max_k: int) -> str:
    return f"forward D={width},{short(dtype)},{'causal' if causal else 'full'},keys<={size_class(max_k)}"


def attention_forward(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    sinks_H: Tensor | None,
    problem: Problem,
    out_THC: Tensor,
    lse_HT: Tensor,
) -> None:
    """Fill `out_THC` and `lse_HT` (natural logarithm)."""
    (tokens, heads, width), dtype = q_THC.shape, q_THC.dtype
    tma = takes_descriptors(k_TKC, v_TKC)
    key = forward_key(width, dtype, problem.causal, problem.max_k)
    config = tuned("attention", key, forward_config(width, dtype, tma))
    tma = bool(config["tma"]) and tma
    if tma:
        triton.set_allocator(scratch_memory)
    cu_q = problem.cu_q
    grid = (slots(tokens, problem, problem.max_q, config["block_m"]), heads)
    if grid[0] == 0:
        return
    kernel: Any = _forward_kernel
    kernel[grid](
        q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_HT,
        cu_q, cu_q if problem.cu_k is None else problem.cu_k,
        problem.sequences, tokens, problem.max_q, problem.max_k,
        q_THC.stride(0), k_TKC.stride(0), v_TKC.stride(0),
        q_THC.stride(1), k_TKC.stride(1), v_TKC.stride(1),
        score_scale(problem), problem.softcap, problem.window,
        num_warps=config["warps"], num_stages=config["stages"],
        **_constants(width, heads, k_TKC.shape[1], dtype == torch.float32, config, tma),
        DENSE=problem.dense, CAUSAL=problem.causal, WINDOW=problem.window > 0,
        SOFTCAP=problem.softcap > 0, SINKS=sinks_H is not None,
    )  # fmt: skip


def _constants(
    width: int, heads: int, kv_heads: int, wide: bool, config: dict[str, Any], tma: bool
) -> dict[str, Any]:
    return dict(
        HEADS=heads, GROUP=heads // kv_heads, D=width, BLOCK_D=triton.next_power_of_2(width),
        BLOCK_M=config["block_m"], BLOCK_N=config["block_n"], TMA=tma,
        PRECISION="ieee" if wide else "tf32",
    )  # fmt: skip
