"""The kernels behind cross_entropy, whose head says what they compute.

    loop_kernel     a program per row walks over it: once for the statistics, once more for the gradient
    pieces_kernel   the row is cut into pieces that stay in registers between the two, so that memory is read once

Inside, logits are multiplied with log2(e), so that powers of two do for exponentials.

The programs that hold the pieces of one row exchange (maximum, sum) through records of 8 bytes in global memory,
which are written and read whole. A record of zeros is one that nobody has written yet: the sum that goes with a
maximum is at least 1. All programs of a launch run at the same time (it is cooperative), so waiting is safe. They add
up the same numbers in the same order, so all arrive at the same log-sum-exp, every time.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _finite(top):
    """-inf - -inf is not a number; 0 takes the place of a maximum of nothing."""
    return tl.where(top == _LOWEST, 0.0, top)


@triton.jit
def _statistics(row, V, first, step, BLOCK: tl.constexpr, SUM: tl.constexpr, STAGES: tl.constexpr):
    """Maximum, sum of powers of two relative to it, and (if asked for) sum of a row's logits, times log2(e)."""
    LANES: tl.constexpr = (
        BLOCK // 8
    )  # 8 neighbours belong to one thread, which keeps its own maximum
    tops = tl.full([LANES], _LOWEST, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    totals = tl.zeros([LANES], tl.float32)
    for start in tl.range(first, V, step, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < V, other=_LOWEST).to(tl.float32) * _LOG2E
        eight = tl.reshape(x, (LANES, 8))
        higher = tl.maximum(tops, tl.max(eight, axis=1))
        base = _finite(higher)
        powers = tl.sum(tl.exp2(eight - base[:, None]), axis=1)
        sums = sums * tl.exp2(tops - base) + powers
        tops = higher
        if SUM:
            kept = tl.where(column < V, x, 0.0)
            totals += tl.sum(tl.reshape(kept, (LANES, 8)), axis=1)
    top = tl.max(tops, axis=0)
    return top, tl.sum(sums * tl.exp2(tops - _finite(top)), axis=0), tl.sum(totals, axis=0)


@triton.jit
def loop_kernel(
    logits, targets, scale, loss, lse, statistics, T, V, stride, scale_stride, first_token, ignored, z_loss,
    smoothing, uniform, BLOCK: tl.constexpr, FORWARD: tl.constexpr, BACKWARD: tl.constexpr,
    SMOOTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FORWARD writes loss and lse, or this shard's statistics [4, T]; BACKWARD alone reads lse.

    BACKWARD writes the gradient over the logits; several programs may then share a row. `uniform`: the share of
    label smoothing that each token of the vocabulary gets.
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    target = tl.load(targets + index)
    counts = target != ignored
    local = target - first_token
    here = counts & (local >= 0) & (local < V)
    if FORWARD:
        chosen = tl.load(row + local, mask=here, other=0.0).to(tl.float32) * _LOG2E
        end = tl.where(counts, V, 0)  # nothing to read where nothing counts
        top, total, mass = _statistics(row, end, first, step, BLOCK, SMOOTH, STAGES)
        log = tl.where(counts, top + tl.log2(total), 0.0)
        natural = log * _LN2
        if statistics is not None:
            tl.store(statistics + index, top)
            tl.store(statistics + T + index, total)
            tl.store(statistics + 2 * T + index, chosen)
            tl.store(statistics + 3 * T + index, mass)
        else:
            value = (log - (1.0 - smoothing) * chosen - uniform * mass) * _LN2
            value += z_loss * natural * natural
            tl.store(lse + index, natural)
            tl.store(loss + index, tl.where(counts, value, 0.0))
    else:
        natural = tl.load(lse + index)
        log = natural * _LOG2E
    if BACKWARD:
        factor = tl.load(scale + index * scale_stride)
        weight = (1.0 + 2.0 * z_loss * natural) * factor
        for start in tl.range(first, V, step, num_stages=STAGES):
            column = start + tl.arange(0, BLOCK)
            inside = column < V
            x = tl.load(row + column, mask=inside & counts, other=_LOWEST).to(tl.float32)
            gradient = tl.exp2(x * _LOG2E - log) * weight - uniform * factor
            gradient -= tl.where(column == local, (1.0 - smoothing) * factor, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _publish(record, top, total):
    """One thread writes both numbers at once."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        .reg .b64 both;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.b64 both, {$2, $3};
        @first st.relaxed.gpu.global.b64 [$1], both;
        mov.b32 $0, 0;
        }""",
        "=r,l,f,f",
        [record.to(tl.int64), top, total],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await(records):
    """Both numbers of each record, as soon as it has been written. Not a load: the compiler would prefetch it."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred absent;
        .reg .b64 both;
        again:
        ld.relaxed.gpu.global.b64 both, [$2];
        mov.b64 {$0, $1}, both;
        setp.eq.f32 absent, $1, 0f00000000;
        @absent bra again;
        }""",
        "=f,=f,l",
        [records],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def pieces_kernel(
    logits, targets, scale, records, losses, T, V, stride, scale_stride, ignored, z_loss,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """losses [2, T] and gradient in one pass; WIDTH is PIECES up to a power of two.

    PIECES programs walk together over every so many rows; the next rows are on their way while they wait.
    """
    piece = tl.program_id(0) % PIECES
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    every = tl.arange(0, WIDTH)
    groups = tl.num_programs(0) // PIECES
    for index in tl.range(tl.program_id(0) // PIECES, T, groups, num_stages=STAGES):
        row = logits + index.to(tl.int64) * stride
        stored = tl.load(row + column, mask=inside, other=_LOWEST)
        target = tl.load(targets + index).to(tl.int32)  # half the registers of int64
        factor = tl.load(scale + index * scale_stride)
        x = stored.to(tl.float32) * _LOG2E
        top = tl.max(x, axis=0)
        total = tl.sum(tl.exp2(x - _finite(top)), axis=0)
        chosen = tl.sum(tl.where(column == target, x, 0.0), axis=0)
        if PIECES > 1:
            at = records + index.to(tl.int64) * PIECES
            _publish(at + piece, top, tl.where(top == _LOWEST, 1.0, total))
            tops, totals = _await(at + tl.minimum(every, PIECES - 1))
            tops = tl.where(every < PIECES, tops, _LOWEST)
            top = tl.max(tops, axis=0)
            total = tl.sum(totals * tl.exp2(tops - _finite(top)), axis=0)
        log = top + tl.log2(total)
        natural = log * _LN2
        counts = target != ignored
        owner = tl.where(counts, tl.minimum(tl.maximum(target // BLOCK, 0), PIECES - 1), 0)
        if piece == owner:
            value = (log - chosen) * _LN2 + z_loss * natural * natural
            tl.store(losses + index, tl.where(counts, value, 0.0))
            tl.store(losses + T + index, tl.where(counts, natural, 0.0))
        weight = (1.0 + 2.0 * z_loss * natural) * factor
        gradient = tl.exp2(stored.to(tl.float32) * _LOG2E - log) * weight
        gradient = tl.where(counts, tl.where(column == target, gradient - factor, gradient), 0.0)
        tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=inside)
