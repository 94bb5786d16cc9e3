"""Search for the truncation threshold in a row of scores: bounds from a sample, the exact value by full passes.

A row is read in tiles of LANES columns, [LANES / GROUP, GROUP]: a group is what a thread loads at once, so what is
done along it needs no other thread. The next tile is on its way while one is worked on.
"""

import triton
import triton.language as tl

from cairn.kernels.sampling.sampling_noise import mixed, noisy, start_word

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1.0e30)  # a finite minus infinity: no NaN from the difference of two
LOWEST = tl.constexpr(-0.9e30)  # what is less counts as minus infinity
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(score):
    """Integers that are ordered as the floats are; the two zeros are one."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def disordered(key):
    """The float of an integer of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def limited(score):
    """Without infinities and NaN."""
    return tl.minimum(tl.maximum(score, NOTHING), -NOTHING)


@triton.jit
def scores_at(logits, column, end):
    """float32; -inf from `end` on, or where it is not a number."""
    score = tl.load(logits + column, mask=column < end, other=float("-inf")).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def tile(logits, column, end):
    return tl.load(logits + column, mask=column < end, other=float("-inf"))


@triton.jit
def tile_columns(LANES: tl.constexpr, GROUP: tl.constexpr):
    return tl.arange(0, LANES // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def first_of_largest(best, column):
    """The column of the largest of all lanes; the lowest of equals."""
    return tl.min(tl.where(best == tl.max(best, 0), column, _LAST), 0)


@triton.jit
def bisect(key, weight, target, low, high):
    """The highest bound in [low, high) whose weight still reaches the target, if that of `low` does.

    Or a lower one with the very weight of the target. Never too high. The mean of two signed numbers without
    overflow is what they share, and half of what they do not.
    """
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        reached = tl.sum(tl.where(key >= middle, weight, 0), 0)
        low = tl.where(reached >= target, middle, low)
        high = tl.where(reached > target, high, middle)
    return low


@triton.jit
def bound_of(score, weight, target, low, top):
    """As `bisect`, but to 1 part in 512, and a float."""
    key = bisect(ordered(score) >> 14, weight, target, ordered(low) >> 14, (ordered(top) >> 14) + 1)
    return disordered(key << 14)


@triton.jit
def units(mass):
    """Masses as integers, whose sum is the same in any order; the likeliest token's is 2^30."""
    return (mass * 1073741824.0).to(tl.int64)


@triton.jit
def whole(mass):
    """Their sum."""
    return tl.sum(units(mass), 0).to(tl.float32) * 9.313225746154785e-10


@triton.jit
def survey(
    logits, sharpness, step, SUMMING: tl.constexpr, vocabulary, LANES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Of a tile every `step` columns: the maximum of each lane, of all, and the sum of exp((score - that) / T)."""
    column = tile_columns(LANES, GROUP)
    maxima = tl.full([LANES // GROUP, GROUP], NOTHING, tl.float32)
    anchors = tl.full([LANES // GROUP], NOTHING, tl.float32)
    sums = tl.zeros([LANES // GROUP], tl.float32)
    ahead = tile(logits, column, vocabulary)
    for start in tl.range(0, vocabulary, step, num_stages=1):
        score = ahead.to(tl.float32)
        ahead = tile(logits, start + step + column, vocabulary)
        maxima = tl.maximum(maxima, score)
        if SUMMING:
            score = tl.maximum(score, NOTHING)  # no NaN
            anchor = tl.maximum(anchors, tl.max(score, 1))
            new = tl.sum(tl.math.exp2((score - anchor[:, None]) * sharpness), 1)
            sums = sums * tl.math.exp2((anchors - anchor) * sharpness) + new
            anchors = anchor
    maxima = limited(tl.reshape(maxima, [LANES]))
    top = tl.max(maxima, 0)
    return maxima, top, whole(sums * tl.math.exp2((anchors - top) * sharpness))


@triton.jit
def rare(top, total, top_p, sharpness, vocabulary):
    """All that is less likely than this adds up to less than what top-p may cut off."""
    least = tl.log((1.0 - top_p) * total / vocabulary) * (LOG2_E / sharpness)
    return top + least * 1.00001 - tl.abs(top) * 1.0e-6


@triton.jit
def search_row(
    logits, target, low, high, SHIFT: tl.constexpr, vocabulary, LANES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """As `bisect`, over a whole row with weights of 1: three bounds in each pass.

    SHIFT: bits that do not tell scores apart (16 for bfloat16 logits).
    """
    column = tile_columns(LANES, GROUP)
    low = (low >> SHIFT).to(tl.int64)
    high = (high >> SHIFT).to(tl.int64) + 1
    while low + 1 < high:
        quarter = tl.maximum((high - low) // 4, 1)
        first = low + quarter
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter, high)
        first_score = disordered((first << SHIFT).to(tl.int32))
        second_score = disordered((second << SHIFT).to(tl.int32))
        third_score = disordered((third << SHIFT).to(tl.int32))
        above_first = tl.zeros([LANES // GROUP], tl.float32)
        above_second = tl.zeros([LANES // GROUP], tl.float32)
        above_third = tl.zeros([LANES // GROUP], tl.float32)
        ahead = tile(logits, column, vocabulary)
        for start in tl.range(0, vocabulary, LANES, num_stages=1):
            score = ahead.to(tl.float32)
            ahead = tile(logits, start + LANES + column, vocabulary)
            above_first += tl.sum(tl.where(score >= first_score, 1.0, 0.0), 1)
            above_second += tl.sum(tl.where(score >= second_score, 1.0, 0.0), 1)
            above_third += tl.sum(tl.where(score >= third_score, 1.0, 0.0), 1)
        enough_first = tl.sum(above_first, 0) >= target
        enough_second = (tl.sum(above_second, 0) >= target) & (second < high)
        enough_third = (tl.sum(above_third, 0) >= target) & (third < high)
        beyond = tl.where(enough_second, third, tl.where(enough_first, second, first))
        beyond = tl.where(enough_third, high, beyond)
        low = tl.where(enough_first, first, low)
        low = tl.where(enough_second, second, low)
        low = tl.where(enough_third, third, low)
        high = tl.minimum(beyond, high)
    return (low << SHIFT).to(tl.int32)


@triton.jit
def search(
    logits, bound, sharpness, coolness, top_k, by_count, top_p, by_mass, min_p, key_y, key_z, SHIFT: tl.constexpr,
    vocabulary, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The token of a row with any number of candidates."""
    _, top, total = survey(logits, sharpness, LANES, True, vocabulary, LANES, GROUP)
    floor = ordered(
        tl.where(by_mass & (not by_count), LOWEST, bound)
    )  # that of top-p alone was a guess
    if by_count:
        floor = search_row(logits, top_k.to(tl.float32), floor, ordered(top) + 1, SHIFT,
                           vocabulary, LANES, GROUP)  # fmt: skip
        if by_mass:
            total = _mass(logits, sharpness, top, disordered(floor), vocabulary, LANES, GROUP)
    target = tl.where(by_mass, top_p * total, float("inf"))
    return _first_kept(logits, top, disordered(floor), target, min_p, sharpness, coolness, key_y, key_z,
                       vocabulary, LANES, GROUP)  # fmt: skip


@triton.jit
def _first_kept(
    logits, top, least, target, min_p, sharpness, coolness, key_y, key_z,
    vocabulary, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest with noise of what top-p keeps, without a search for the cut.

    The largest of all is the answer if it is kept, which it is with probability p: if what is likelier has less than
    `target` together. If it is not, nothing that is less likely is, and the next is drawn from what is likelier.
    """
    token = -1
    while token < 0:
        drawn = _draw(logits, top, least, min_p, sharpness, coolness, key_y, key_z,
                      vocabulary, LANES, GROUP)  # fmt: skip
        token = drawn
        score = tl.load(logits + drawn).to(tl.float32)
        if (score < top) & (score >= least) & (target < float("inf")):
            least = disordered(ordered(score) + 1)
            likelier = _mass(logits, sharpness, top, least, vocabulary, LANES, GROUP)
            token = tl.where(likelier < target, drawn, -1)
    return token


@triton.jit
def _mass(
    logits, sharpness, top, least, vocabulary, LANES: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Sum of exp((score - top) / temperature) of all scores from `least` on."""
    column = tile_columns(LANES, GROUP)
    sums = tl.zeros([LANES // GROUP], tl.float32)
    for start in tl.range(0, vocabulary, LANES, num_stages=1):
        score = tile(logits, start + column, vocabulary).to(tl.float32)
        share = tl.math.exp2((score - top) * sharpness)
        sums += tl.sum(tl.where(score >= least, share, 0.0), 1)
    return tl.sum(sums, 0)


@triton.jit
def _draw(
    logits, top, least, min_p, sharpness, coolness, key_y, key_z,
    vocabulary, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest with noise among those from `least` on."""
    column = tile_columns(LANES, GROUP)
    best = tl.full([LANES // GROUP, GROUP], float("-inf"), tl.float32)
    chosen = tl.zeros([LANES // GROUP, GROUP], tl.int32)
    for start in tl.range(0, vocabulary, LANES, num_stages=1):
        score = tile(logits, start + column, vocabulary).to(tl.float32)
        kept = (score >= least) & (tl.math.exp2((score - top) * sharpness) >= min_p)
        value = noisy(score, coolness, mixed(start_word(start + column) + key_y, key_z))
        better = kept & (value > best)  # the first of equals stays
        best = tl.where(better, value, best)
        chosen = tl.where(better, start + column, chosen)
    return first_of_largest(tl.reshape(best, [LANES]), tl.reshape(chosen, [LANES]))
