"""The last step of sampling: the exact rule among the few groups of columns that a scan has written down.

The order in which they were written means nothing: equals are told apart by their column, and masses are added as
integers. So it does not matter how many programs have scanned a row. Where they had no room for what they found, the
whole row is searched.
"""

import triton
import triton.language as tl

from cairn.kernels.sampling.sampling import MOST_PARTS
from cairn.kernels.sampling.sampling_noise import mixed, noisy, start_word
from cairn.kernels.sampling.sampling_search import (
    NOTHING,
    bisect,
    first_of_largest,
    ordered,
    search,
    tile,
    units,
)

_PARTS = tl.constexpr(MOST_PARTS)
_LAST = tl.constexpr(0x7FFFFFFF)
_FEW = tl.constexpr(64)  # groups that are looked at in a step, where a few are written down
_MANY = tl.constexpr(512)  # and where many are


@triton.jit
def _written(groups, counts, index, parts, vocabulary, ROOM: tl.constexpr):
    """Where the groups begin that the parts have written down, taking turns; vocabulary: none."""
    part = index % parts
    place = index // parts
    there = place < tl.load(counts + part)
    return tl.load(groups + part * ROOM + place, mask=there, other=vocabulary)


@triton.jit
def _best_written(
    logits, groups, counts, most, parts, noise, coolness, key_y, key_z,
    vocabulary, GROUP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The largest score, or the largest with noise, in the groups that were written down."""
    best = tl.full([_FEW, GROUP], float("-inf"), tl.float32)
    chosen = tl.full([_FEW, GROUP], _LAST, tl.int32)
    for start in tl.range(0, most * parts, _FEW, num_stages=1):
        index = start + tl.arange(0, _FEW)
        group = _written(groups, counts, index, parts, vocabulary, ROOM)
        column = group[:, None] + tl.arange(0, GROUP)[None, :]
        score = tile(logits, column, vocabulary).to(tl.float32)
        if noise:
            score = noisy(score, coolness, mixed(start_word(column) + key_y, key_z))
        better = (score > best) | ((score == best) & (column < chosen))
        best = tl.where(better, score, best)
        chosen = tl.where(better, column, chosen)
    best = tl.reshape(best, [_FEW * GROUP])
    column = first_of_largest(best, tl.reshape(chosen, [_FEW * GROUP]))
    return tl.where(tl.max(best, 0) > float("-inf"), column, 0)


@triton.jit
def _gather(
    logits, groups, counts, most, parts, bound, values, columns,
    vocabulary, GROUP: tl.constexpr, ROOM: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Scores from `bound` on, of the groups that were written down, and their columns; how many there are."""
    found = 0
    for start in tl.range(0, most * parts, _MANY, num_stages=1):
        index = start + tl.arange(0, _MANY)
        group = _written(groups, counts, index, parts, vocabulary, ROOM)
        column = group[:, None] + tl.arange(0, GROUP)[None, :]
        score = tile(logits, column, vocabulary).to(tl.float32)
        kept = (score >= bound).to(tl.int32)
        count = tl.sum(kept, 1)
        place = (found + tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(kept, 1) - kept
        mask = (kept > 0) & (place < CANDIDATES)
        tl.store(values + place, tl.minimum(score, -NOTHING), mask=mask)
        tl.store(columns + place, column, mask=mask)
        found += tl.sum(count, 0)
    return found


@triton.jit
def _choose(
    values, columns, found, bound, total, sharpness, coolness, top_k, by_count, top_p, by_mass, min_p, key_y, key_z,
    SHIFT: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The exact cut among the candidates, and the largest of what is left with its noise; -1: it is not among them."""
    index = tl.arange(0, CANDIDATES)
    there = index < found
    score = tl.load(values + index, mask=there, other=NOTHING)
    top = tl.max(score, 0)
    key = ordered(score) >> SHIFT
    high = (ordered(top) >> SHIFT) + 1
    floor = ordered(bound) >> SHIFT
    if by_count:
        floor = bisect(key, there.to(tl.int32), top_k, floor, high)
    share = tl.math.exp2((score - top) * sharpness)
    share = tl.where(there & (key >= floor), share, 0.0)
    enough = True
    if by_mass:
        mass = units(share)
        sum_here = tl.sum(mass, 0)
        sum_of_all = tl.where(by_count, sum_here, units(total))
        target = (top_p.to(tl.float64) * sum_of_all.to(tl.float64)).to(tl.int64)
        enough = sum_here >= target
        floor = bisect(key, mass, target, floor, high)
    kept = (share > 0.0) & (share >= min_p) & (key >= floor)
    column = tl.load(columns + index, mask=there, other=_LAST)
    value = noisy(score, coolness, mixed(start_word(column) + key_y, key_z))
    value = tl.where(kept, value, float("-inf"))
    token = tl.where(tl.max(value, 0) > float("-inf"), first_of_largest(value, column), 0)
    return tl.where(enough, token, -1)


@triton.jit
def finish(
    logits, groups, counts, parts, values, columns, bound, total, noise, cut, sharpness, coolness,
    top_k, by_count, top_p, by_mass, min_p, key_y, key_z, vocabulary,
    LANES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, CANDIDATES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of a row that has been scanned."""
    token = -1
    part = tl.arange(0, _PARTS)
    most = tl.max(tl.load(counts + part, mask=part < parts, other=0), 0)
    if most <= ROOM:
        if cut:
            found = _gather(logits, groups, counts, most, parts, bound, values, columns,
                            vocabulary, GROUP, ROOM, CANDIDATES)  # fmt: skip
            tl.debug_barrier()  # other threads wrote what this one reads
            if found <= CANDIDATES // 4:
                token = _choose(values, columns, found, bound, total, sharpness, coolness, top_k, by_count, top_p,
                                by_mass, min_p, key_y, key_z, SHIFT, CANDIDATES // 4)  # fmt: skip
            elif found <= CANDIDATES:
                token = _choose(values, columns, found, bound, total, sharpness, coolness, top_k, by_count, top_p,
                                by_mass, min_p, key_y, key_z, SHIFT, CANDIDATES)  # fmt: skip
        else:
            token = _best_written(logits, groups, counts, most, parts, noise, coolness, key_y, key_z,
                                  vocabulary, GROUP, ROOM)  # fmt: skip
    if token < 0:
        token = search(logits, bound, sharpness, coolness, top_k, by_count, top_p, by_mass, min_p, key_y, key_z,
                       SHIFT, vocabulary, LANES // 2, GROUP)  # fmt: skip
    return token
