"""The kernels of `penalties`: logits after masks and penalties, and counts of what was chosen."""

import triton
import triton.language as tl


@triton.jit
def _penalize_kernel(
    logits, out, rows, repetitions, presences, frequencies, counts, prompt, allowed,
    logits_stride, out_stride, counts_stride, prompt_stride, allowed_stride,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, PENALTIES: tl.constexpr, PROMPT: tl.constexpr,
    ALLOWED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (VOCABULARY + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    word = tl.program_id(0) % BLOCKS * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[:, None]
    bit = tl.arange(0, 32)[None, :]  # a row of the tile for each word of bits: it is loaded once
    column = word * 32 + bit
    there = column < VOCABULARY
    score = tl.load(logits + row * logits_stride + column, mask=there, other=0.0).to(tl.float32)
    if PENALTIES:
        state = tl.maximum(tl.load(rows + row), 0).to(tl.int64)
        repetition = tl.load(repetitions + state)
        presence = tl.load(presences + state)
        frequency = tl.load(frequencies + state)
        strict = tl.where((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0), 1, 0)
        times = tl.load(counts + state * counts_stride + column, mask=there & (strict > 0), other=0)
        seen = times > 0
        if PROMPT:
            mask = (word * 32 < VOCABULARY) & (strict > 0)
            said = tl.load(prompt + state * prompt_stride + word, mask=mask, other=0)
            seen = seen | ((said >> bit) & 1 != 0)
        weaker = tl.where(score > 0.0, tl.div_rn(score, repetition), score * repetition)
        score = tl.where(seen, weaker, score)
        score -= frequency * times.to(tl.float32) + tl.where(times > 0, presence, 0.0)
    if ALLOWED:
        may = tl.load(allowed + row * allowed_stride + word, mask=word * 32 < VOCABULARY, other=0)
        score = tl.where((may >> bit) & 1 != 0, score, float("-inf"))
    tl.store(out + row * out_stride + column, score, mask=there)


@triton.jit(do_not_specialize=["tokens_count"])
def _count_kernel(counts, tokens, rows, tokens_count, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < tokens_count, other=-1).to(tl.int64)
    token = tl.load(tokens + index, mask=row >= 0, other=0)
    tl.atomic_add(counts + row * stride + token, 1, mask=row >= 0)
