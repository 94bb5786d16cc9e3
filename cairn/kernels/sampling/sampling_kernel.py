"""The next token of each row: the logits are read about once, what can matter is written down, and nothing is sorted.

    temperature 0      the largest, the first of equals
    no restriction     the largest score + noise of every 16th tile is a bound. One pass writes down what may exceed
                       it, by a test without logarithms; exact noise is for those few
    top-k              the k-th largest score of every 8th tile is a bound: at least k scores of the row reach it, and
                       some 8 k do. One pass writes those down, and the exact cut is found among them
    min-p              likewise, from the largest of every 8th tile
    top-p alone        likewise, but a first pass over the whole row finds the sum that the bound depends on

What is written down are groups, the 16 bytes of columns that a thread loads at once: the loop asks once for each
group, and keeps the answer as a bit. It neither waits for other threads nor writes; places are counted out afterwards.

A row is one program's, or, with few rows, that of several: each scans its part of the columns with the same bound, and
a second launch finishes. Where too much is written down (a flat distribution, or a large k), the cut is searched for
in the row itself. Each way leads to the same token.

    sampling_noise     what is added to a score          sampling_search    bounds, and cuts in a whole row
    sampling_kernel    the scan                          sampling_finish    the choice among what it has found
"""

import triton
import triton.language as tl

from cairn.kernels.sampling.sampling_finish import finish
from cairn.kernels.sampling.sampling_noise import may_exceed, mixed, noise_key, noisy, start_word
from cairn.kernels.sampling.sampling_search import (
    LOG2_E,
    LOWEST,
    bound_of,
    first_of_largest,
    limited,
    rare,
    survey,
    tile,
    tile_columns,
)

_NOISE_SAMPLE = tl.constexpr(16)  # tiles of which one is looked at
_SCORE_SAMPLE = tl.constexpr(8)


@triton.jit
def _best_group(
    logits, coolness, key_y, key_z, first, end, step,
    NOISE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest score, with noise or without, and where its group begins. A tile every `step` columns."""
    column = tile_columns(LANES, GROUP)
    words = start_word(column)
    best = tl.full([LANES // GROUP], float("-inf"), tl.float32)
    found = tl.zeros([LANES // GROUP], tl.int32)
    ahead = tile(logits, first + column, end)
    for start in tl.range(first, end, step, num_stages=1):
        score = ahead.to(tl.float32)
        ahead = tile(logits, start + step + column, end)
        if NOISE:
            score = noisy(score, coolness, mixed(words + (start_word(start) + key_y), key_z))
        largest = tl.max(score, 1)
        better = largest > best  # the first of equals stays
        best = tl.where(better, largest, best)
        found = tl.where(better, start, found)
    group = tl.arange(0, LANES // GROUP) * GROUP
    return tl.max(best, 0), first_of_largest(best, found + group)


@triton.jit
def _ones(word):
    """How many bits are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _reaching(
    logits, bound, sharpness, key_y, key_z, first, end,
    NOISE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A bit for each of up to 32 tiles: has the group a score from `bound` on, or one that may exceed it with noise?"""
    column = tile_columns(LANES, GROUP)
    words = start_word(column)
    tiles = tl.zeros([LANES // GROUP], tl.uint32)
    bit = tl.full([], 1, tl.uint32)
    if NOISE:  # arithmetic takes longer than the loads: other programs hide them
        for start in tl.range(first, end, LANES, num_stages=1):
            score = tile(logits, start + column, end).to(tl.float32)
            word = mixed(words + (start_word(start) + key_y), key_z)
            highest = tl.max(may_exceed(score, sharpness, bound, word), 1)
            tiles |= tl.where(highest >= -8388608.0, bit, 0)
            bit <<= 1
    else:
        ahead = tile(logits, first + column, end)
        for start in tl.range(first, end, LANES, num_stages=1):
            score = ahead.to(tl.float32)
            ahead = tile(logits, start + LANES + column, end)
            tiles |= tl.where(tl.max(score, 1) >= bound, bit, 0)
            bit <<= 1
    return tiles


@triton.jit
def _collect(
    logits, groups, bound, sharpness, key_y, key_z, first, end,
    NOISE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write down where the groups begin that `_reaching` finds; how many there are, even where ROOM is less."""
    written = 0
    for start in tl.range(first, end, 32 * LANES, num_stages=1):
        until = tl.minimum(start + 32 * LANES, end)
        tiles = _reaching(logits, bound, sharpness, key_y, key_z, start, until, NOISE, LANES, GROUP)
        count = _ones(tiles)
        place = written + tl.cumsum(count, 0) - count
        column = start + tl.arange(0, LANES // GROUP) * GROUP
        for _ in tl.range(0, tl.max(count, 0), num_stages=1):
            rest = tiles & (tiles - 1)
            # The lowest bit as a float: its exponent says which bit it is.
            power = (tiles ^ rest).to(tl.float32).to(tl.int32, bitcast=True)
            at = column + ((power >> 23) - 127) * LANES
            tl.store(groups + place, at, mask=(tiles != 0) & (place < ROOM))
            place += 1
            tiles = rest
        written += tl.sum(count, 0)
    return written


@triton.jit
def _kth(maxima, top_k, top):
    """A bound that about k of the maxima reach, and not fewer, if there are so many."""
    low = tl.maximum(tl.min(maxima, 0), LOWEST)
    return bound_of(maxima, tl.full(maxima.shape, 1, tl.int32), top_k, low, top)


@triton.jit
def _bound(
    logits, sharpness, top_k, by_count, top_p, by_mass, min_p,
    vocabulary, LANES: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """What everything kept reaches; and for top-p alone the sum of all, in units of the largest.

    For top-p alone it can be a guess, which `finish` will notice if it is wrong.
    """
    bound = LOWEST
    if by_mass & (not by_count):
        maxima, top, total = survey(logits, sharpness, LANES, True, vocabulary, LANES, GROUP)
        target = top_p * total * 1.00001  # a little more, for what rounding may have lost
        share = tl.math.exp2((maxima - top) * sharpness)
        least = tl.maximum(rare(top, total, top_p, sharpness, vocabulary), LOWEST)
        bound = tl.maximum(bound_of(maxima, share, target, least, top), least)
        if tl.sum((maxima >= bound).to(tl.int32), 0) > CANDIDATES // 2:
            bound = _kth(maxima, CANDIDATES // 2, top)  # what there is room for may be enough
    else:
        tiles = CANDIDATES // 8 // tl.maximum(top_k, 1)
        step = tl.minimum(tl.maximum(tiles, 1), _SCORE_SAMPLE) * LANES
        maxima, top, total = survey(logits, sharpness, step, False, vocabulary, LANES, GROUP)
        if by_count:
            if top_k <= LANES // GROUP // 8:  # fewer maxima will do
                maxima_of = tl.max(tl.reshape(maxima, [LANES // GROUP, GROUP]), 1)
                bound = _kth(maxima_of, top_k, top)
            elif top_k <= LANES:  # of more than there are maxima the least is too high a bound
                bound = _kth(maxima, top_k, top)
        if (min_p > 0.0) & (not by_mass):
            least = top + tl.log(min_p) * (LOG2_E / sharpness) * 1.00001 - tl.abs(top) * 1.0e-6
            bound = tl.maximum(bound, least)
    return tl.maximum(bound, LOWEST), total


@triton.jit
def _scan(
    logits, groups, counts, notes, parts, noise, cut, sharpness, coolness, top_k, by_count, top_p, by_mass, min_p,
    key_y, key_z, vocabulary,
    LANES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, CANDIDATES: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Write down the groups of this part that may hold the token. Its bound, the sum, and the token if it is clear."""
    bound = LOWEST
    total = 0.0
    token = -1
    part = tl.program_id(1)
    columns_each = tl.cdiv(tl.cdiv(vocabulary, LANES), parts) * LANES
    first = part * columns_each
    end = tl.minimum(first + columns_each, vocabulary)
    mine = groups + part * ROOM
    if cut:
        bound, total = _bound(logits, sharpness, top_k, by_count, top_p, by_mass, min_p,
                              vocabulary, LANES, GROUP, CANDIDATES)  # fmt: skip
        count = _collect(logits, mine, bound, sharpness, key_y, key_z, first, end,
                         False, LANES, GROUP, ROOM)  # fmt: skip
    elif noise:
        step = LANES * _NOISE_SAMPLE
        best, group = _best_group(logits, coolness, key_y, key_z, first, end, step,
                                  True, LANES, GROUP)  # fmt: skip
        best = limited(best)
        # Lower, for what rounding may have lost.
        level = (best - tl.abs(best) * 1.0e-6 - 1.0e-3) * LOG2_E
        count = _collect(logits, mine, level, sharpness, key_y, key_z, first, end,
                         True, LANES, GROUP, ROOM)  # fmt: skip
    else:
        best, group = _best_group(logits, coolness, key_y, key_z, first, end, LANES,
                                  False, LANES, GROUP)  # fmt: skip
        if FINISH:
            column = group + tl.arange(0, GROUP)
            score = tile(logits, column, vocabulary).to(tl.float32)
            token = tl.where(tl.max(score, 0) > float("-inf"), first_of_largest(score, column), 0)
        tl.store(mine, group)
        count = 1
    tl.store(counts + part, count)
    if not FINISH:
        tl.store(notes, bound)
        tl.store(notes + 1, total)
    return bound, total, token


@triton.jit(do_not_specialize=["parts"])
def sample_kernel(
    logits, tokens, temperatures, top_ks, top_ps, min_ps, seeds, positions, rows, groups, counts, columns, values,
    notes, logits_stride, vocabulary, parts,
    LANES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr, ROWS: tl.constexpr, SCAN: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """A program for each row and part that scans, one for each row that finishes, or one that does both."""
    row = tl.program_id(0).to(tl.int64)
    state = row
    if ROWS:
        state = tl.load(rows + row).to(tl.int64)
    if state < 0:  # padding of a graph
        tl.store(tokens + row, 0)
        return
    if SCAN and FINISH:
        parts = 1
    logits += row * logits_stride
    groups += row * parts * ROOM
    counts += row * parts
    columns += row * CANDIDATES
    values += row * CANDIDATES
    notes += row * 2
    temperature = tl.load(temperatures + state)
    top_k = tl.load(top_ks + state)
    top_p = tl.load(top_ps + state)
    min_p = tl.load(min_ps + state)
    key_y, key_z = noise_key(tl.load(seeds + state), tl.load(positions + row))
    noise = temperature > 0.0
    by_count = noise & (top_k > 0) & (top_k < vocabulary)
    by_mass = noise & (top_p < 1.0)
    cut = by_count | by_mass | (noise & (min_p > 0.0))
    coolness = 1.0 / tl.where(noise, temperature, 1.0)
    sharpness = LOG2_E * coolness
    bound = LOWEST
    total = 0.0
    token = -1
    if SCAN:
        bound, total, token = _scan(
            logits, groups, counts, notes, parts, noise, cut, sharpness, coolness, top_k, by_count, top_p, by_mass,
            min_p, key_y, key_z, vocabulary, LANES, GROUP, ROOM, CANDIDATES, FINISH,
        )  # fmt: skip
    if FINISH:
        if SCAN:
            tl.debug_barrier()  # other threads wrote what this one reads
        else:
            bound = tl.load(notes)
            total = tl.load(notes + 1)
        if token < 0:
            token = finish(logits, groups, counts, parts, values, columns, bound, total, noise, cut, sharpness,
                           coolness, top_k, by_count, top_p, by_mass, min_p, key_y, key_z, vocabulary,
                           LANES, GROUP, ROOM, CANDIDATES, SHIFT)  # fmt: skip
        tl.store(tokens + row, token)
