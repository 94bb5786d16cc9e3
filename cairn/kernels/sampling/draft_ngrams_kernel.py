"""The kernel of `draft_ngrams`: a program for each sequence compares the end of its text with every place in it."""

import triton
import triton.language as tl

from cairn.kernels.dependent import begin


@triton.jit
def _following_match(
    text, start, last, draft, drafts, lane, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, SEARCHED: tl.constexpr,
    PLACE_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What follows the best match with the end of the text; `last` is its last token, at `start`."""
    length = start + 1
    best = start * 0  # length of the match, and its place below
    for i in tl.range(tl.maximum(SHORTEST, length - SEARCHED), length, BLOCK, num_stages=1):
        at = i + lane
        same = tl.load(text + at - 1, mask=at < length, other=-1) == last
        match = tl.where(same, 1, 0)
        back = start * 0 + 1
        matching = tl.max(match, 0)
        while (matching > 0) & (back < LONGEST):
            wanted = tl.load(text + tl.maximum(start - back, 0))
            there = same & (at - 1 - back >= 0)
            same = there & (tl.load(text + at - 1 - back, mask=there, other=-1) == wanted)
            match += tl.where(same, 1, 0)
            matching = tl.max(tl.where(same, 1, 0), 0)
            back += 1
        score = tl.where(match >= SHORTEST, (match << PLACE_BITS) + at, 0)
        best = tl.maximum(best, tl.max(score, 0))
    at = best - (best >> PLACE_BITS << PLACE_BITS)
    source = at + draft % (length - at)
    inside = (draft < drafts) & (best > 0)
    found = tl.load(text + source, mask=inside & (source < start), other=0)
    return tl.where(inside & (source == start), last, found)


@triton.jit
def _draft_kernel(
    rows, bounds, tokens, positions, text, made, text_stride, made_stride,
    DRAFTED: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, SEARCHED: tl.constexpr,
    PLACE_BITS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each sequence. It reads no word of the text that it writes."""
    begin(OVERLAP)
    b = tl.program_id(0)
    row = tl.load(rows + b).to(tl.int64)
    opens = tl.load(bounds + b)
    count = tl.load(bounds + b + 1) - opens
    if (row < 0) | (count == 0):
        return
    start = tl.load(positions + opens)
    text += row * text_stride
    lane = tl.arange(0, BLOCK)
    for i in tl.range(0, count, BLOCK, num_stages=1):
        token = tl.load(tokens + opens + i + lane, mask=i + lane < count, other=-1)
        tl.store(text + start + i + lane, token, mask=token >= 0)
    draft = tl.arange(0, LANES)
    given = tl.load(tokens + opens + 1 + draft, mask=1 + draft < count, other=0)
    drafts = tl.sum(tl.where(given == DRAFTED, 1, 0), 0)
    if drafts == 0:
        return
    length = start + 1
    if made is not None:
        found = tl.load(made + row * made_stride + draft, mask=draft < drafts, other=0)
    else:
        last = tl.load(tokens + opens)
        found = _following_match(
            text, start, last, draft, drafts, lane, SHORTEST, LONGEST, SEARCHED, PLACE_BITS, BLOCK
        )
    tl.store(tokens + opens + 1 + draft, found, mask=draft < drafts)
    tl.store(text + length + draft, found, mask=draft < drafts)
