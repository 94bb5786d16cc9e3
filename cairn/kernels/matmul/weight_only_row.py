# pyrefly: ignore-errors
"""The kernel of weight_only for one row of x and levels of 4 bits, in Gluon for sm_90: no number changes threads.

As in `skinny_row` a program keeps rows of w in registers, and multiplies on the ordinary cores. A thread has four words
of each row: 16 columns of one span and 16 of the next, which have one scale each. Their products are added up before
they are scaled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NEAR = gl.constexpr(4)  # words in which a thread has neighbours
# Of the 2^126 by which numbers of e2m1 are too small here: onto x, and onto the sums. No product leaves float32.
ONTO_X, ONTO_SUMS = gl.constexpr(2.0**100), gl.constexpr(2.0**26)


@gluon.jit
def _level(words, nibble: gl.constexpr, KIND: gl.constexpr):
    """One of the eight levels in a word, in float32; of e2m1 a number that is 2^126 times as small."""
    if KIND == "int4":
        bits = ((words >> (4 * nibble)) & 15) | 0x4B000000  # 2^23 + level
        return bits.to(gl.float32, bitcast=True) - 8388616.0
    else:
        if nibble < 6:
            size = words << (22 - 4 * nibble)
        else:
            size = words >> (4 * nibble - 22)
        bits = (size & 0x01C00000) | ((words << (28 - 4 * nibble)) & -0x80000000)
        return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _first_columns(place, half: gl.constexpr, SPAN: gl.constexpr):
    """Of a byte at `place` of a row the column of its low or its high half."""
    return place // SPAN * (2 * SPAN) + half * SPAN + place % SPAN


@gluon.jit
def _half(
    held, x, scales, shifts, first, n0, N, columns, half: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    SPAN: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Scaled sums [BN, WORDS / NEAR] of the low or the high halves."""
    BN: gl.constexpr = held.shape[0]
    WORDS: gl.constexpr = held.shape[1]
    own: gl.constexpr = held.type.layout
    across: gl.constexpr = gl.SliceLayout(0, own)
    word = first + gl.arange(0, WORDS, layout=across)
    inside = word < columns // 8
    near = gl.zeros([BN, WORDS], gl.float32, own)
    of_x = gl.zeros([WORDS], gl.float32, across)
    for byte in gl.static_range(4):
        at = _first_columns(word * 4 + byte, half, SPAN)
        given = gl.load(x + at) if WHOLE else gl.load(x + at, mask=inside, other=0.0)
        wide = given.to(gl.float32)
        of_x += wide
        if KIND == "e2m1":
            wide *= ONTO_X
        near += _level(held, 2 * byte + half, KIND) * wide[None, :]
    sums = gl.sum(near.reshape([BN, WORDS // NEAR, NEAR]), axis=2)
    if KIND == "e2m1":
        sums *= ONTO_SUMS
    if scales is not None:
        layout: gl.constexpr = sums.type.layout
        n = gl.minimum(n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, layout)), N - 1)
        place = (first + NEAR * gl.arange(0, WORDS // NEAR, layout=gl.SliceLayout(0, layout))) * 4
        group = _first_columns(place, half, SPAN) // GROUP
        at = n[:, None] * (columns // GROUP) + group[None, :]
        there = (place < columns // 2)[None, :]
        sums *= gl.load(scales + at, mask=there, other=0.0).to(gl.float32)
        if shifts is not None:
            near_x = gl.sum(of_x.reshape([WORDS // NEAR, NEAR]), axis=1)
            near_x = gl.convert_layout(near_x, gl.SliceLayout(0, layout))
            sums += gl.load(shifts + at, mask=there, other=0.0).to(gl.float32) * near_x[None, :]
    return sums


@gluon.jit
def weight_only_row_kernel(
    x, words, scales, shifts, factor, bias, y, stride_w, N, K,
    KIND: gl.constexpr, GROUP: gl.constexpr, SPAN: gl.constexpr, BN: gl.constexpr, WORDS: gl.constexpr,
    CHUNKS: gl.constexpr, WHOLE: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, NEAR], [1, 32], [1, WARPS], [1, 0])
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    n0 = gl.program_id(0) * BN
    row = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    n = gl.minimum(row, N - 1)
    rows = words + n.to(gl.int64)[:, None] * stride_w
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))
    held = ()
    for chunk in gl.static_range(CHUNKS):
        at = chunk * WORDS + column
        if WHOLE:
            part = gl.load(rows + at[None, :], eviction_policy="evict_first")
        else:
            part = gl.load(rows + at[None, :], mask=(at < K // 8)[None, :], other=0)
        held = held + (part,)  # noqa: RUF005  the compiler takes no star
    if OVERLAP and EARLY:
        gdc_wait()
    sums = _half(held[0], x, scales, shifts, 0, n0, N, K, 0, KIND, GROUP, SPAN, WHOLE)
    sums += _half(held[0], x, scales, shifts, 0, n0, N, K, 1, KIND, GROUP, SPAN, WHOLE)
    for chunk in gl.static_range(1, CHUNKS):
        for half in gl.static_range(2):
            sums += _half(
                held[chunk], x, scales, shifts, chunk * WORDS, n0, N, K, half, KIND, GROUP, SPAN, WHOLE
            )  # fmt: skip
    total = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, layout))
    if factor is not None:
        total *= gl.load(factor + n)
    if bias is not None:
        total += gl.load(bias + n).to(gl.float32)
    gl.store(y + row, total.to(y.dtype.element_ty), mask=row < N)
