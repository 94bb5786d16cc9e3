"""The kernels of `logprobs`: one for the parts of a row, one for what they have found together."""

import triton
import triton.language as tl

from cairn.kernels.sampling.sampling_search import (
    LN_2,
    LOG2_E,
    NOTHING,
    first_of_largest,
    scores_at,
)

_TAKEN = tl.constexpr(0x7FFFFFFF)  # behind every token


@triton.jit
def _after(logits, previous, token, first, end, NOBODY: tl.constexpr, LANES: tl.constexpr):
    """The largest that comes after (previous, token), by a pass over the part."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    chosen = tl.full([LANES], NOBODY, tl.int32)
    for start in tl.range(first, end, LANES, num_stages=1):
        column = start + lane
        score = scores_at(logits, column, end)
        later = (score < previous) | ((score == previous) & (column > token))
        better = later & ((score > best) | (chosen == NOBODY)) & (column < end)
        best = tl.where(better, score, best)
        chosen = tl.where(better, column, chosen)
    return tl.max(best, 0), first_of_largest(best, chosen)


@triton.jit
def _after_in_lane(logits, previous, token, first, end, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """The largest that comes after (previous, token) in the token's lane, of DEPTH columns; -inf: there is none."""
    column = first + (token - first) % LANES + tl.arange(0, DEPTH) * LANES
    score = scores_at(logits, column, end)
    later = (score < previous) | ((score == previous) & (column > token))
    score = tl.where(later, score, float("-inf"))
    return tl.max(score, 0), first_of_largest(score, column)


@triton.jit
def _logprobs_kernel(
    logits, sums_of, top, ids, logits_stride,
    VOCABULARY: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The largest logit of a part, the sum of exponentials beside it, and the part's N likeliest."""
    EACH: tl.constexpr = (VOCABULARY + PARTS * LANES - 1) // (PARTS * LANES) * LANES
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    logits += row * logits_stride
    place_of = row * PARTS + part
    begin = part * EACH
    end = tl.minimum(begin + EACH, VOCABULARY)
    lane = tl.arange(0, LANES)
    first = tl.full([LANES], float("-inf"), tl.float32)
    second = tl.full([LANES], float("-inf"), tl.float32)
    first_id = tl.full([LANES], VOCABULARY, tl.int32)
    second_id = tl.full([LANES], VOCABULARY, tl.int32)
    sums = tl.zeros([LANES], tl.float32)
    for start in tl.range(begin, end, LANES, num_stages=STAGES):
        column = start + lane
        score = scores_at(logits, column, end)
        larger = tl.maximum(tl.maximum(first, score), NOTHING)
        sums = sums * tl.math.exp2((first - larger) * LOG2_E) + tl.math.exp2(
            (score - larger) * LOG2_E
        )
        if N > 0:
            leads = score > first
            follows = score > second
            second_id = tl.where(leads, first_id, tl.where(follows, column, second_id))
            second = tl.where(leads, first, tl.where(follows, score, second))
            first_id = tl.where(leads, column, first_id)
            first = tl.where(leads, score, first)
        else:
            first = tl.maximum(first, score)
    largest = tl.maximum(tl.max(first, 0), NOTHING)
    total = tl.sum(sums * tl.math.exp2((tl.maximum(first, NOTHING) - largest) * LOG2_E), 0)
    tl.store(sums_of + place_of * 2, largest)
    tl.store(sums_of + place_of * 2 + 1, total)

    if N > 0:
        given = tl.zeros([LANES], tl.int32)  # how many each lane has given
        value = float("inf")
        winner = -1
        for place in tl.range(0, N, num_stages=1):
            if tl.max(first, 0) > float("-inf"):
                value = tl.max(first, 0)
                winner = first_of_largest(first, first_id)
                mine = first_id == winner
                first = tl.where(mine, second, first)
                first_id = tl.where(mine, second_id, first_id)
                second = tl.where(mine, float("-inf"), second)
                second_id = tl.where(mine, VOCABULARY, second_id)
                given += mine.to(tl.int32)
                if tl.max(tl.where(mine, given, 0), 0) >= 2:
                    third, third_id = _after_in_lane(
                        logits, value, winner, begin, end, LANES, DEPTH
                    )
                    first = tl.where(mine, third, first)
                    first_id = tl.where(mine, third_id, first_id)
            else:
                value, winner = _after(logits, value, winner, begin, end, VOCABULARY, LANES)
            tl.store(top + place_of * N + place, value)
            tl.store(ids + place_of * N + place, winner)


@triton.jit
def _likeliest_kernel(
    logits, tokens, of_token, top, ids, sums_of, top_of, ids_of, logits_stride,
    VOCABULARY: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What the parts of a row have found together: its log-sum-exp, and the N likeliest in order."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    largest = tl.load(sums_of + (row * PARTS + part) * 2)
    total = tl.load(sums_of + (row * PARTS + part) * 2 + 1)
    highest = tl.max(largest, 0)
    total = tl.sum(total * tl.math.exp2((largest - highest) * LOG2_E), 0)
    level = highest + tl.math.log2(total) * LN_2
    token = tl.load(tokens + row)
    inside = (token >= 0) & (token < VOCABULARY)
    chosen = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf"))
    tl.store(of_token + row, chosen.to(tl.float32) - level)
    if N > 0:
        index = tl.arange(0, ROOM)
        there = index < PARTS * N
        best = tl.load(top_of + row * PARTS * N + index, mask=there, other=float("-inf"))
        column = tl.load(ids_of + row * PARTS * N + index, mask=there, other=_TAKEN)
        for place in tl.range(0, N, num_stages=1):
            value = tl.max(best, 0)
            winner = first_of_largest(best, column)
            tl.store(top + row * N + place, value - level)
            tl.store(ids + row * N + place, winner)
            mine = column == winner
            best = tl.where(mine, float("-inf"), best)
            column = tl.where(mine, _TAKEN, column)
