"""The next token of each row, in one kernel: one program for a row, and no sort.

    temperature 0      one pass: the largest, the first of equals
    no restriction     one pass: the largest of score / temperature + Gumbel noise, which is a draw from the softmax
    top-k, top-p, ..   two passes, and a search among a few candidates that stay on the chip

How two passes are enough. The first keeps the maximum of each of LANES interleaved columns. The k-th largest of these
maxima is a bound: at least k scores reach it, and hardly more do. The second pass writes down whatever reaches the
bound (CANDIDATES at most), and the exact cut is found among those by bisection on their bit patterns. For top-p
alone the bound is where the probabilities of the maxima add up to p. Where there are too many candidates (a flat
distribution, or k above LANES), the cut is searched for in the row itself, four times finer with each pass.

Noise is a function of (seed, position, token) and of nothing else: not of the row, the batch, or the launch.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1.0e30)  # a finite minus infinity: no NaN from the difference of two
_BOUND_STEPS = tl.constexpr(16)  # a bound need not be exact: each step halves what it may miss by
_MINUS_INFINITY = tl.constexpr(-2139095041)  # ordered(-inf)
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(score):
    """Integers that are ordered as the floats are."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def gumbel(seed, position, token):
    """-log(-log(u)) of a u that belongs to (seed, position, token), by the multiplying rounds of pcg3d.

    Jarzynski and Olano, Hash Functions for GPU Rendering, 2020. The logarithm of 1 - u keeps its precision where u is
    small, and that is where noise is large and decides.
    """
    x = token.to(tl.uint32) * 1664525 + 1013904223
    y = (position.to(tl.uint32) ^ ((seed >> 32).to(tl.uint32) * 0x9E3779B9)) * 1664525 + 1013904223
    z = seed.to(tl.uint32) * 1664525 + 1013904223
    x += y * z
    y += z * x
    z += x * y
    x ^= x >> 16
    y ^= y >> 16
    z ^= z >> 16
    x += y * z
    y += z * x
    z += x * y
    u = tl.minimum((z.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return -tl.log(tl.where(u < 0.03125, small, -tl.log(1.0 - u)))


@triton.jit
def scores_at(logits, column, VOCABULARY: tl.constexpr):
    """float32; -inf where there is no such token, or NaN."""
    score = tl.load(logits + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def first_of_largest(best, column):
    """The column of the largest of all lanes; the lowest of equals."""
    return tl.min(tl.where(best == tl.max(best, 0), column, _LAST), 0)


@triton.jit
def bisect(key, weight, target, low, high, steps):
    """The highest bound in [low, high) whose weight still reaches the target, if that of `low` does.

    At most `steps` halvings; the result is never too high. The mean of two signed numbers without overflow is what
    they share, and half of what they do not.
    """
    step = 0
    while (low + 1 < high) & (step < steps):
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum(tl.where(key >= middle, weight, 0.0), 0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        step += 1
    return low


@triton.jit
def _search_row(
    logits, counting, sharpness, top, target, floor, low, high,
    VOCABULARY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """As `bisect`, over a whole row: three bounds in each pass. Weights are 1, or probabilities from `floor` on.

    SHIFT: bits that do not tell scores apart (16 for bfloat16 logits).
    """
    lane = tl.arange(0, LANES)
    low = (low >> SHIFT).to(tl.int64)
    high = (high >> SHIFT).to(tl.int64) + 1
    while low + 1 < high:
        quarter = tl.maximum((high - low) // 4, 1)
        first = low + quarter
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter, high)
        above_first = tl.zeros([LANES], tl.float32)
        above_second = tl.zeros([LANES], tl.float32)
        above_third = tl.zeros([LANES], tl.float32)
        for start in tl.range(0, VOCABULARY, LANES, num_stages=STAGES):
            score = scores_at(logits, start + lane, VOCABULARY)
            key = ordered(score)
            weight = tl.where(counting, 1.0, tl.math.exp2((score - top) * sharpness))
            weight = tl.where(key >= floor, weight, 0.0)
            above_first += tl.where(key >= (first << SHIFT).to(tl.int32), weight, 0.0)
            above_second += tl.where(key >= (second << SHIFT).to(tl.int32), weight, 0.0)
            above_third += tl.where(key >= (third << SHIFT).to(tl.int32), weight, 0.0)
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
def _survey(
    logits, sharpness, summing, VOCABULARY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The first pass: maximum of each lane, and sum of exp((score - maximum) / temperature) if asked for."""
    lane = tl.arange(0, LANES)
    maxima = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, VOCABULARY, LANES, num_stages=STAGES):
        score = scores_at(logits, start + lane, VOCABULARY)
        larger = tl.maximum(maxima, score)
        if summing:
            anchor = tl.maximum(larger, NOTHING)
            sums = sums * tl.math.exp2((maxima - anchor) * sharpness) + tl.math.exp2(
                (score - anchor) * sharpness
            )
        maxima = larger
    return maxima, sums


@triton.jit
def _collect(
    logits, values, columns, bound,
    VOCABULARY: tl.constexpr, LANES: tl.constexpr, CANDIDATES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second pass: write down what reaches the bound, in order; how many there are."""
    lane = tl.arange(0, LANES)
    found = 0
    for start in tl.range(0, VOCABULARY, LANES, num_stages=STAGES):
        column = start + lane
        score = scores_at(logits, column, VOCABULARY)
        kept = (ordered(score) >= bound).to(tl.int32)
        here = tl.sum(kept, 0)
        if here > 0:
            place = found + tl.cumsum(kept, 0) - 1
            mask = (kept != 0) & (place < CANDIDATES)
            tl.store(values + place, score, mask=mask)
            tl.store(columns + place, column, mask=mask)
        found += here
    return found


@triton.jit
def _choose(
    values, columns, found, sharpness, top, high, total, top_k, by_count, top_p, by_mass, min_p, seed, position,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The exact cut among the candidates, and the largest of what is left with its noise."""
    index = tl.arange(0, CANDIDATES)
    there = index < found
    score = tl.load(values + index, mask=there, other=float("-inf"))
    column = tl.load(columns + index, mask=there, other=_LAST)
    key = ordered(score)
    floor = _MINUS_INFINITY
    if by_count:
        floor = bisect(key, there.to(tl.float32), top_k.to(tl.float32), floor, high, 64)
    relative = (score - top) * sharpness
    share = tl.where(there & (key >= floor), tl.math.exp2(relative), 0.0)
    if by_mass:
        whole = tl.where(by_count, tl.sum(share, 0), total)
        floor = bisect(key, share, top_p * whole, floor, high, 64)
    kept = (share > 0.0) & (share >= min_p) & (key >= floor)
    noisy = tl.where(kept, relative * LN_2 + gumbel(seed, position, column), float("-inf"))
    return first_of_largest(noisy, column)


@triton.jit
def _draw(
    logits, noise, sharpness, top, floor, min_p, seed, position,
    VOCABULARY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """In one pass: the largest score, or the largest with noise among those from `floor` on."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    chosen = lane
    for start in tl.range(0, VOCABULARY, LANES, num_stages=STAGES):
        column = start + lane
        score = scores_at(logits, column, VOCABULARY)
        if noise:
            relative = (score - top) * sharpness
            kept = (ordered(score) >= floor) & (tl.math.exp2(relative) >= min_p)
            noisy = relative * LN_2 + gumbel(seed, position, column)
            score = tl.where(kept, noisy, float("-inf"))
        better = score > best  # the first of equals stays
        best = tl.where(better, score, best)
        chosen = tl.where(better, column, chosen)
    return first_of_largest(best, chosen)


@triton.jit
def sample_kernel(
    logits, tokens, temperatures, top_ks, top_ps, min_ps, seeds, positions, rows, values, columns, logits_stride,
    VOCABULARY: tl.constexpr, LANES: tl.constexpr, CANDIDATES: tl.constexpr, STAGES: tl.constexpr,
    SHIFT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    state = row
    if ROWS:
        state = tl.load(rows + row).to(tl.int64)
    if state < 0:  # padding of a graph
        tl.store(tokens + row, 0)
        return
    logits += row * logits_stride
    values += row * CANDIDATES
    columns += row * CANDIDATES
    temperature = tl.load(temperatures + state)
    top_k = tl.load(top_ks + state)
    top_p = tl.load(top_ps + state)
    min_p = tl.load(min_ps + state)
    seed = tl.load(seeds + state)
    position = tl.load(positions + row)
    noise = temperature > 0.0
    by_count = (top_k > 0) & (top_k < VOCABULARY)
    by_mass = top_p < 1.0
    sharpness = LOG2_E / tl.where(noise, temperature, 1.0)

    token = -1
    top = 0.0
    floor = _MINUS_INFINITY
    if noise & (by_count | by_mass | (min_p > 0.0)):
        maxima, sums = _survey(logits, sharpness, by_mass & (top_k <= 0), VOCABULARY, LANES, STAGES)
        top = tl.maximum(tl.max(maxima, 0), NOTHING)
        high = ordered(top) + 1
        shares = tl.math.exp2(
            (maxima - top) * sharpness
        )  # of the lanes' largest, in units of the row's largest
        total = tl.sum(sums * shares, 0)

        # A bound that everything kept is known to reach; a little lower, for what rounding may have lost.
        target = tl.where(by_count, top_k.to(tl.float32), top_p * total * 1.00001)
        weights = tl.where(by_count, 1.0, shares)
        if (by_count | by_mass) & (tl.sum(weights, 0) >= target):
            floor = bisect(ordered(maxima), weights, target, floor, high, _BOUND_STEPS)
        slack = tl.abs(top) * 1.0e-6
        if (min_p > 0.0) & (not by_mass):
            least = top + tl.log(min_p) * (LOG2_E / sharpness) * 1.00001 - slack
            floor = tl.maximum(floor, ordered(least))

        found = 0
        if floor > _MINUS_INFINITY:
            found = _collect(logits, values, columns, floor, VOCABULARY, LANES, CANDIDATES, STAGES)
        if found > 0 and found <= CANDIDATES:
            tl.debug_barrier()  # other threads wrote what this one reads
            token = _choose(values, columns, found, sharpness, top, high, total, top_k, by_count, top_p, by_mass,
                            min_p, seed, position, CANDIDATES)  # fmt: skip
        else:
            if by_count:
                floor = _search_row(logits, True, sharpness, top, top_k.to(tl.float32), floor, floor, high,
                                    VOCABULARY, LANES, STAGES, SHIFT)  # fmt: skip
            if by_mass:
                if by_count:
                    total = _mass(logits, sharpness, top, floor, VOCABULARY, LANES, STAGES)
                # All that is less likely than this adds up to less than what may be cut off.
                rare = tl.log((1.0 - top_p) * total / VOCABULARY) * (LOG2_E / sharpness)
                low = tl.maximum(floor, ordered(top + rare * 1.00001 - slack))
                floor = _search_row(logits, False, sharpness, top, top_p * total, floor, low, high,
                                    VOCABULARY, LANES, STAGES, SHIFT)  # fmt: skip
    if token < 0:
        token = _draw(
            logits, noise, sharpness, top, floor, min_p, seed, position, VOCABULARY, LANES, STAGES
        )
    tl.store(tokens + row, token)


@triton.jit
def _mass(
    logits, sharpness, top, floor, VOCABULARY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Sum of exp((score - top) / temperature) of all scores from `floor` on."""
    lane = tl.arange(0, LANES)
    sums = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, VOCABULARY, LANES, num_stages=STAGES):
        score = scores_at(logits, start + lane, VOCABULARY)
        sums += tl.where(ordered(score) >= floor, tl.math.exp2((score - top) * sharpness), 0.0)
    return tl.sum(sums, 0)
