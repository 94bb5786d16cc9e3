"""The kernels behind cross_entropy, whose head says what they compute.

    loop_kernel     a program per row walks over it: once for the statistics, once more for the gradient
    pieces_kernel   bf16: the row is cut into pieces that stay in registers between the two, so that memory is read once

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
_SIGNS = tl.constexpr(-2147450880)  # the signs of two bf16 numbers: 0x80008000
_LOWEST_WORD = tl.constexpr(-8323200)  # twice -inf in bf16: 0xff80ff80


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
    logits, targets, scale, weights, loss, lse, statistics, T, V, stride, scale_stride, first_token, ignored, z_loss,
    smoothing, uniform, BLOCK: tl.constexpr, FORWARD: tl.constexpr, BACKWARD: tl.constexpr,
    SMOOTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FORWARD writes loss and lse, or this shard's statistics [4, T]; BACKWARD alone reads lse.

    BACKWARD writes the gradient over the logits; several programs may then share a row. `weights`: what multiplies the
    softmax, where it is not what `scale` and z_loss make of it. `uniform`: the share of label smoothing that each token
    of the vocabulary gets.
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
        if weights is not None:
            weight = tl.load(weights + index)
        else:
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
def _peek(records):
    """What the records hold now. Not a load: the compiler would fetch it rounds too early."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b64 both;
        ld.relaxed.gpu.global.b64 both, [$2];
        mov.b64 {$0, $1}, both;
        }""",
        "=f,=f,l",
        [records],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await(records, tops, totals):
    """Both numbers of each record: those that were seen there, or else as soon as they have been written."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred absent;
        .reg .b64 both;
        mov.f32 $0, $3;
        mov.f32 $1, $4;
        setp.eq.f32 absent, $1, 0f00000000;
        @!absent bra there;
        again:
        ld.relaxed.gpu.global.b64 both, [$2];
        mov.b64 {$0, $1}, both;
        setp.eq.f32 absent, $1, 0f00000000;
        @absent bra again;
        there:
        }""",
        "=&f,=&f,l,f,f",
        [records.to(tl.int64), tops, totals],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _halves(words):
    """Two bf16 numbers that were read as one word, in float32: the lower address is the lower half."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return low, (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high):
    """And back, in one instruction."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _higher(first, second):
    """The maxima of two numbers each: there is no need to take the words apart for them."""
    return tl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _log2(x):
    """One instruction, within 2^-22."""
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _meet():
    """All threads of the program; a barrier of Triton's own in a loop would keep its loads from being prefetched."""
    tl.inline_asm_elementwise(
        "bar.sync 0; mov.b32 $0, 0;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _joined(records, tops, totals, every, PIECES: tl.constexpr):
    """Maximum and sum of a row from those of its pieces."""
    tops, totals = _await(records, tops, totals)
    tops = tl.where(every < PIECES, tops, _LOWEST)
    top = tl.max(tops, axis=0)
    return top, tl.sum(totals * tl.exp2(tops - _finite(top)), axis=0)


@triton.jit
def pieces_kernel(
    words, logits, targets, scale, records, losses, T, V, stride, scale_stride, ignored, z_loss,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """losses [2, T] and gradient in one pass. `words`: the logits two at a time, which V, stride, SIZE and BLOCK count.

    PIECES programs, each with SIZE words of a row in a block of BLOCK, walk together over every so many rows; WIDTH
    is PIECES up to a power of two. A row's gradient comes a round after its statistics: by then the other programs
    have written theirs, and nobody has to wait. So there is one round more than there are rows; it reads any row, and
    publishes where nobody looks.
    """
    piece = tl.program_id(0) % PIECES
    at = tl.arange(0, BLOCK)
    inside = at < tl.minimum(V - piece * SIZE, SIZE)
    words += piece * SIZE
    every = tl.arange(0, WIDTH)
    groups = tl.num_programs(0) // PIECES
    start = tl.program_id(0) // PIECES
    # Of the round before: nothing yet.
    before = tl.full([BLOCK], _LOWEST_WORD, tl.int32)
    target, chosen, factor, top, total = -1, 0.0, 0.0, 0.0, 1.0
    for index in tl.range(start, T + groups, groups, num_stages=STAGES):
        row = words + tl.minimum(index, T - 1).to(tl.int64) * stride
        now = tl.load(row + at, mask=inside, other=_LOWEST_WORD)
        # Of this row, to be used in the next round. One of the pieces speaks for it.
        new_target = tl.load(targets + index, mask=index < T, other=ignored).to(tl.int32)
        new_factor = tl.load(scale + index * scale_stride, mask=index < T, other=0.0)
        place = index.to(tl.int64) * stride * 2 + new_target
        known = (new_target // (2 * SIZE) == piece) & (new_target != ignored)
        known = known & (new_target >= 0) & (new_target < 2 * V)  # else it is in another row
        new_chosen = tl.load(logits + place, mask=known, other=0.0).to(tl.float32)
        theirs = records + tl.maximum(index - groups, 0).to(tl.int64) * PIECES
        theirs += tl.minimum(every, PIECES - 1)
        tops, totals = _peek(theirs) if PIECES > 1 else (top, total)
        # Statistics of this row.
        first, second = _halves(tl.reduce(now, 0, _higher))
        new_top = tl.maximum(first, second) * _LOG2E
        base = _finite(new_top)
        low, high = _halves(now)
        powers = tl.exp2(low * _LOG2E - base) + tl.exp2(high * _LOG2E - base)
        new_total = tl.sum(powers, axis=0)
        if PIECES > 1:
            own = records + index.to(tl.int64) * PIECES + piece
            _publish(own, new_top, tl.where(new_top == _LOWEST, 1.0, new_total))
        # Gradient of the row before.
        if index >= groups:
            if PIECES > 1:
                top, total = _joined(theirs, tops, totals, every, PIECES)
            log = top + _log2(total)
            natural = log * _LN2
            counts = target != ignored
            here = counts & (target >= 0) & (target < 2 * V)
            weight = (1.0 + 2.0 * z_loss * natural) * factor
            # The weight's logarithm goes into the exponent and its sign into the words: fewer instructions for each
            # logit than to multiply.
            shift = log - _log2(tl.abs(weight))
            sign = tl.where(weight < 0, _SIGNS, 0)
            low, high = _halves(before)
            word = _word(tl.exp2(low * _LOG2E - shift), tl.exp2(high * _LOG2E - shift)) ^ sign
            there = words + (index - groups).to(tl.int64) * stride + at
            if counts:
                tl.store(there, word, mask=inside)
            else:
                # As other stores, or the compiler would make both one, and a choice for each word.
                tl.store(there, tl.zeros([BLOCK], tl.int32), mask=inside, cache_modifier=".cs")
            if tl.where(here, target // (2 * SIZE), 0) == piece:
                chosen *= _LOG2E
                value = (log - chosen) * _LN2 + z_loss * natural * natural
                at_loss = losses + index - groups
                tl.store(at_loss, tl.where(counts, value, 0.0))
                tl.store(at_loss + T, tl.where(counts, natural, 0.0))
                gradient = tl.exp2(chosen - log) * weight - factor
                _meet()  # the whole piece is written, and one number of it once more
                place = (index - groups).to(tl.int64) * stride * 2 + target
                tl.store(logits + place, gradient.to(tl.bfloat16), mask=here)
        before, target, chosen, factor = now, new_target, new_chosen, new_factor
        top, total = new_top, new_total
