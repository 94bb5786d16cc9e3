# pyrefly: ignore-errors
"""The Triton kernels of the backward pass: rows, keys and values, queries. `attention_backward` says what they compute.

Tiles are found, and split into masked and unmasked parts, as in the forward pass.
"""

import triton
import triton.language as tl

from cairn.kernels.attention.attention_tiles import (
    LOG2_E,
    NOTHING,
    bounded,
    find_tile,
    key_ranges,
    load_rows,
    padded_start,
    query_tile,
    rows_source,
    span,
    visible,
)

# level and delta lie in tiles of as many rows, so that each sequence starts a tile
ROWS = tl.constexpr(128)


@triton.jit
def rows_kernel(out, dout, lse, dlse, level, delta, cu, sequences, tokens, longest, stride, stride_head, stride_lse,
                 stride_dlse, stride_level, level_scale, delta_scale, HEADS: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr, DENSE: tl.constexpr, DLSE: tl.constexpr):  # fmt: skip
    """What the other two kernels need of each row: its log-sum-exp and delta, in the units that they like.

    A row that sees nothing, or is none, has an infinite level: all its weights become 0.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if DENSE:
        tiles = tl.cdiv(longest, ROWS)
        start, length, place = slot // tiles * longest, longest, slot % tiles
    else:
        _, start, length, place = find_tile(slot, cu, sequences, tokens, ROWS)
    row0 = start + place * ROWS
    end = start + length
    a = load_rows(out, row0, head, end, HEADS * D, D, ROWS, D, BLOCK_D, False, True)
    b = load_rows(dout, row0, head, end, stride, stride_head, ROWS, D, BLOCK_D, False, True)
    rows = row0 + tl.arange(0, ROWS)
    ours = rows < end
    share = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    if DLSE:  # d lse / d score is the weight, as in delta
        share -= tl.load(dlse + head * stride_dlse + rows, mask=ours, other=0.0)
    logarithm = tl.load(lse + head * stride_lse + rows, mask=ours, other=float("-inf"))
    logarithm = tl.where(logarithm == float("-inf"), float("inf"), logarithm)
    target = head * stride_level + slot * ROWS + tl.arange(0, ROWS)
    tl.store(level + target, logarithm * level_scale)
    tl.store(delta + target, share * delta_scale)


@triton.jit
def _load_numbers(source, head, row0, stride, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """level or delta of BLOCK_M rows. A descriptor keeps many pointers out of registers."""
    if TMA:
        return source.load([head, row0]).reshape([BLOCK_M])
    else:
        return tl.load(source + head.to(tl.int64) * stride + row0 + tl.arange(0, BLOCK_M))


@triton.jit
def _exponents(scores, level, scale_log2, softcap, SOFTCAP: tl.constexpr):
    """score - lse in units of log2(e), and what the soft-cap leaves of a slope."""
    if SOFTCAP:
        capped = bounded(scores * scale_log2)
        return capped * (softcap * LOG2_E) - level, 1.0 - capped * capped
    else:
        return scores * scale_log2 - level, 1.0


@triton.jit
def _walk_queries(dk, dv, k, v, q_source, dout_source, level_source, delta_source, head, first, last, keys, padded,
                  q_length, k_length, stride_q, stride_dout, stride_q_head, stride_dout_head, stride_level, scale_log2,
                  softcap, window, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
                  WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr,
                  PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Add what the queries [first, last) of one head give to a tile of keys and values; scores are [keys, queries]."""
    for row0 in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        q = load_rows(
            q_source, row0, head, q_length, stride_q, stride_q_head, BLOCK_M, D, BLOCK_D, TMA, True
        )
        level = _load_numbers(level_source, head, padded + row0, stride_level, BLOCK_M, TMA)
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        exponents, rest = _exponents(scores, level[None, :], scale_log2, softcap, SOFTCAP)
        if MASK:
            position = row0 + tl.arange(0, BLOCK_M) + k_length - q_length
            seen = visible(position[None, :], keys[:, None], k_length, window, CAUSAL, WINDOW)
            exponents = tl.where(seen, exponents, NOTHING)
        weights = tl.math.exp2(exponents)
        dout = load_rows(dout_source, row0, head, q_length, stride_dout, stride_dout_head, BLOCK_M, D, BLOCK_D, TMA,
                         True)  # fmt: skip
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        slopes = tl.dot(v, dout.T, input_precision=PRECISION)
        share = _load_numbers(delta_source, head, padded + row0, stride_level, BLOCK_M, TMA)
        slopes = weights * (slopes - share[None, :]) * rest
        dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _numbers_source(numbers, heads, stride, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """What `_load_numbers` reads from."""
    if TMA:
        return tl.make_tensor_descriptor(numbers, [heads, stride], [stride, 1], [1, BLOCK_M])
    else:
        return numbers


@triton.jit
def _seeing(
    key0, q_length, k_length, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Which queries see any of these keys, and from which on they see all: first, first of all, and end."""
    ahead = k_length - q_length
    lo = 0
    full_lo = 0
    hi = q_length
    if CAUSAL:
        lo = tl.maximum(key0 - ahead, 0) // BLOCK_M * BLOCK_M
        full_lo = tl.cdiv(tl.maximum(key0 + BLOCK_N - 1 - ahead, 0), BLOCK_M) * BLOCK_M
    if WINDOW:
        hi = tl.minimum(q_length, tl.maximum(key0 + BLOCK_N - 1 + window - ahead, 0))
    return lo, tl.minimum(full_lo, tl.cdiv(hi, BLOCK_M) * BLOCK_M), hi


@triton.jit
def keys_kernel(q, k, v, dout, level, delta, dk, dv, cu_q, cu_k, sequences, tokens_k, max_q, max_k, stride_q,
                 stride_k, stride_v, stride_dout, stride_q_head, stride_k_head, stride_v_head, stride_dout_head,
                 stride_level, scale, scale_log2, softcap, window, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                 D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 DENSE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                 TMA: tl.constexpr, PRECISION: tl.constexpr, ONE_WALK: tl.constexpr):  # fmt: skip
    slot = tl.program_id(0)
    kv_head = tl.program_id(1)
    if DENSE:
        tiles = tl.cdiv(max_k, BLOCK_N)
        sequence = slot // tiles
        k_start, k_length, place = sequence * max_k, max_k, slot % tiles
        q_start, q_length = sequence * max_q, max_q
    else:
        sequence, k_start, k_length, place = find_tile(slot, cu_k, sequences, tokens_k, BLOCK_N)
        q_start, q_length = span(cu_q, sequence, sequences)
    key0 = place * BLOCK_N  # the first keys are seen by most: longest first
    if key0 >= k_length:
        return
    keys = key0 + tl.arange(0, BLOCK_N)
    lo, full_lo, hi = _seeing(key0, q_length, k_length, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    k_base = rows_source(
        k, k_start, k_length, KV_HEADS, stride_k, stride_k_head, BLOCK_N, D, BLOCK_D, False
    )
    v_base = rows_source(
        v, k_start, k_length, KV_HEADS, stride_v, stride_v_head, BLOCK_N, D, BLOCK_D, False
    )
    k_tile = load_rows(
        k_base, key0, kv_head, k_length, stride_k, stride_k_head, BLOCK_N, D, BLOCK_D, False, True
    )
    v_tile = load_rows(
        v_base, key0, kv_head, k_length, stride_v, stride_v_head, BLOCK_N, D, BLOCK_D, False, True
    )
    heads = KV_HEADS * GROUP
    q_source = rows_source(
        q, q_start, q_length, heads, stride_q, stride_q_head, BLOCK_M, D, BLOCK_D, TMA
    )
    dout_source = rows_source(
        dout, q_start, q_length, heads, stride_dout, stride_dout_head, BLOCK_M, D, BLOCK_D, TMA
    )
    level_source = _numbers_source(level, heads, stride_level, BLOCK_M, TMA)
    delta_source = _numbers_source(delta, heads, stride_level, BLOCK_M, TMA)
    padded = padded_start(sequence, q_start, max_q, ROWS, DENSE)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # A loop over the group around each walk, not one around all: that takes fewer registers.
    if ONE_WALK:
        for member in range(GROUP):
            acc_k, acc_v = _walk_queries(
                acc_k, acc_v, k_tile, v_tile, q_source, dout_source, level_source, delta_source,
                kv_head * GROUP + member, lo, hi, keys, padded, q_length, k_length, stride_q, stride_dout,
                stride_q_head, stride_dout_head, stride_level, scale_log2, softcap, window, D, BLOCK_D, BLOCK_M, CAUSAL,
                WINDOW, SOFTCAP, True, TMA, PRECISION, None)  # fmt: skip
    else:
        if CAUSAL:  # few blocks: without a pipeline they leave registers to the others
            for member in range(GROUP):
                acc_k, acc_v = _walk_queries(
                    acc_k, acc_v, k_tile, v_tile, q_source, dout_source, level_source, delta_source,
                    kv_head * GROUP + member, lo, full_lo, keys, padded, q_length, k_length, stride_q, stride_dout,
                    stride_q_head, stride_dout_head, stride_level, scale_log2, softcap, window, D, BLOCK_D, BLOCK_M,
                    CAUSAL, WINDOW, SOFTCAP, True, TMA, PRECISION, 1)  # fmt: skip
        for member in range(GROUP):
            acc_k, acc_v = _walk_queries(
                acc_k, acc_v, k_tile, v_tile, q_source, dout_source, level_source, delta_source,
                kv_head * GROUP + member, full_lo, hi, keys, padded, q_length, k_length, stride_q, stride_dout,
                stride_q_head, stride_dout_head, stride_level, scale_log2, softcap, window, D, BLOCK_D, BLOCK_M, CAUSAL,
                WINDOW, SOFTCAP, False, TMA, PRECISION, None)  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    target = ((k_start + keys).to(tl.int64) * KV_HEADS + kv_head)[:, None] * D + columns[None, :]
    ours = (keys < k_length)[:, None] & (columns < D)[None, :]
    tl.store(dk + target, (acc_k * scale).to(dk.dtype.element_ty), mask=ours)
    tl.store(dv + target, acc_v.to(dv.dtype.element_ty), mask=ours)


@triton.jit
def _walk_keys(dq, q, dout, level, share, k_source, v_source, head, first, last, position, length, stride_k, stride_v,
               stride_k_head, stride_v_head, scale_log2, softcap, window, D: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_N: tl.constexpr,
               CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
               TMA: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what the keys [first, last) give to a tile of queries."""
    for key0 in tl.range(first, last, BLOCK_N):
        k = load_rows(
            k_source, key0, head, length, stride_k, stride_k_head, BLOCK_N, D, BLOCK_D, TMA, MASK
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        exponents, rest = _exponents(scores, level[:, None], scale_log2, softcap, SOFTCAP)
        if MASK:
            keys = key0 + tl.arange(0, BLOCK_N)
            seen = visible(position[:, None], keys[None, :], length, window, CAUSAL, WINDOW)
            exponents = tl.where(seen, exponents, NOTHING)
        weights = tl.math.exp2(exponents)
        v = load_rows(
            v_source, key0, head, length, stride_v, stride_v_head, BLOCK_N, D, BLOCK_D, TMA, MASK
        )
        slopes = tl.dot(dout, v.T, input_precision=PRECISION)
        slopes = weights * (slopes - share[:, None]) * rest
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def queries_kernel(q, k, v, dout, level, delta, dq, cu_q, cu_k, sequences, tokens_q, max_q, max_k, stride_q, stride_k,
                    stride_v, stride_dout, stride_q_head, stride_k_head, stride_v_head, stride_dout_head, stride_level,
                    scale, scale_log2, softcap, window, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
                    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DENSE: tl.constexpr,
                    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    sequence, q_start, q_length, k_start, k_length, row0 = query_tile(
        tl.program_id(0), cu_q, cu_k, sequences, tokens_q, max_q, max_k, BLOCK_M, DENSE
    )
    if row0 < 0:
        return
    rows = row0 + tl.arange(0, BLOCK_M)
    position = rows + k_length - q_length
    lo, full_lo, full_hi, hi = key_ranges(
        row0, q_length, k_length, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
    )

    q_base = rows_source(
        q, q_start, q_length, HEADS, stride_q, stride_q_head, BLOCK_M, D, BLOCK_D, False
    )
    dout_base = rows_source(
        dout, q_start, q_length, HEADS, stride_dout, stride_dout_head, BLOCK_M, D, BLOCK_D, False
    )
    q_tile = load_rows(
        q_base, row0, head, q_length, stride_q, stride_q_head, BLOCK_M, D, BLOCK_D, False, True
    )
    dout_tile = load_rows(dout_base, row0, head, q_length, stride_dout, stride_dout_head, BLOCK_M, D, BLOCK_D, False,
                          True)  # fmt: skip
    padded_row0 = padded_start(sequence, q_start, max_q, ROWS, DENSE) + row0
    height = _load_numbers(level, head, padded_row0, stride_level, BLOCK_M, False)
    share = _load_numbers(delta, head, padded_row0, stride_level, BLOCK_M, False)
    kv_head = head // GROUP
    k_source = rows_source(
        k, k_start, k_length, HEADS // GROUP, stride_k, stride_k_head, BLOCK_N, D, BLOCK_D, TMA
    )
    v_source = rows_source(
        v, k_start, k_length, HEADS // GROUP, stride_v, stride_v_head, BLOCK_N, D, BLOCK_D, TMA
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW:
        acc = _walk_keys(acc, q_tile, dout_tile, height, share, k_source, v_source, kv_head, lo, full_lo, position,
                         k_length, stride_k, stride_v, stride_k_head, stride_v_head, scale_log2, softcap, window, D,
                         BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, True, TMA, PRECISION)  # fmt: skip
    acc = _walk_keys(acc, q_tile, dout_tile, height, share, k_source, v_source, kv_head, full_lo, full_hi, position,
                     k_length, stride_k, stride_v, stride_k_head, stride_v_head, scale_log2, softcap, window, D,
                     BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, False, TMA, PRECISION)  # fmt: skip
    acc = _walk_keys(acc, q_tile, dout_tile, height, share, k_source, v_source, kv_head,
                     tl.maximum(full_lo, full_hi), hi, position, k_length, stride_k, stride_v, stride_k_head,
                     stride_v_head, scale_log2, softcap, window, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, True,
                     TMA, PRECISION)  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    target = dq + ((q_start + rows).to(tl.int64) * HEADS + head)[:, None] * D + columns[None, :]
    tl.store(
        target,
        (acc * scale).to(dq.dtype.element_ty),
        mask=(rows < q_length)[:, None] & (columns < D)[None, :],
    )
