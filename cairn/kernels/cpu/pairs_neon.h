/* One row of activations with four rows of weights in Q8_0 or Q5_0, two blocks at a time.
 *
 *     byte    0      2              34     36           68        0      2       6       22     24      28      44
 *     Q8_0    scale  levels of one  scale  of the next      Q5_0  scale  fifths  levels  scale  fifths  levels
 *
 * Every other block begins in the middle of a word, from where a core reads 16 bytes more slowly; a pair of them begins and
 * ends with a word. Levels of Q8_0 are multiplied as the words lie, with activations that are shifted by two places and 0
 * where the scale is; its last two share a word with the next scale, and those words of four rows are multiplied together.
 * Levels of Q5_0 are shifted themselves. The integers are those of `rows_neon.h`: a row has the same bits.
 */
#ifndef CAIRN_PAIRS_NEON_H
#define CAIRN_PAIRS_NEON_H

#include "rows_neon.h"

#ifdef HAS_DOT_NEON

#define PAIR 64 /* values */

/* A digit of the first block of a pair: behind two zeros, and its last two values once for each of four rows. */
typedef struct {
    int8x16_t all[2], last;
} Shifted;

typedef struct {
    Shifted high, low;
} ShiftedPair;

INLINE Shifted shifted(const int8_t *x) {
    const int8x16_t zero = vdupq_n_s8(0), first = vld1q_s8(x), second = vld1q_s8(x + 16);
    const int32x4_t last = vreinterpretq_s32_s8(vextq_s8(second, zero, 14));
    return (Shifted){{vextq_s8(zero, first, 14), vextq_s8(first, second, 14)},
                     vreinterpretq_s8_s32(vdupq_laneq_s32(last, 0))};
}

INLINE void shift_pairs(const Rounded *x, int columns, ShiftedPair *out) {
    for (int k = 0; k + PAIR <= columns; k += PAIR) {
        const Rounded *here = x + k / STRIDE;
        out[k / PAIR] = (ShiftedPair){shifted(here->high + k % STRIDE), shifted(here->low + k % STRIDE)};
    }
}

/* The first 16 bits of four registers, or the fourth. */
INLINE float32x4_t scales_within(const int8x16_t *of_row, int fourth) {
    const int16x8_t a = vzip1q_s16(vreinterpretq_s16_s8(of_row[0]), vreinterpretq_s16_s8(of_row[1]));
    const int16x8_t b = vzip1q_s16(vreinterpretq_s16_s8(of_row[2]), vreinterpretq_s16_s8(of_row[3]));
    const int32x4_t c = vreinterpretq_s32_s16(a), d = vreinterpretq_s32_s16(b);
    if (fourth) return vcvt_high_f32_f16(vreinterpretq_f16_s32(vzip2q_s32(c, d)));
    return vcvt_f32_f16(vreinterpret_f16_s32(vget_low_s32(vzip1q_s32(c, d))));
}

/* A word of each row. */
INLINE float32x4_t words_of_four(const uint8_t *const *at, int skip) {
    float word[4];
    for (int r = 0; r < 4; r++) memcpy(word + r, at[r] + skip, 4);
    return (float32x4_t){word[0], word[1], word[2], word[3]};
}

INLINE void levels_of_four(const uint8_t *const *at, int skip, int8x16_t level[4][2]) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < 2; i++) level[r][i] = vld1q_s8((const int8_t *)at[r] + skip + 16 * i);
}

INLINE float32x4_t add_scaled(float32x4_t sum, int32x4_t dot, float32x4_t scale, float scale_x) {
    return vfmaq_n_f32(sum, vmulq_f32(vcvtq_f32_s32(dot), scale), scale_x);
}

/* What a pair of each row adds to two sums; its columns begin at `first` of x. */
INLINE void pair_of_q8_0(const uint8_t *const *at, int skip, const Rounded *x, int first, const ShiftedPair *s,
                         float32x4_t *sum_0, float32x4_t *sum_1) {
    int8x16_t level[4][2];
    levels_of_four(at, skip, level);
    const float32x4_t words = words_of_four(at, skip + 32);
    const int8x16_t last = vreinterpretq_s8_f32(words), front[4] = {level[0][0], level[1][0], level[2][0], level[3][0]};
    int32x4_t dot = vdotq_s32(vshlq_n_s32(vdotq_s32(zeros(), last, s->high.last), 8), last, s->low.last);
    dot = vaddq_s32(dot, dots_of_four(level, (const int8_t *)s->high.all, (const int8_t *)s->low.all));
    *sum_0 = add_scaled(*sum_0, dot, scales_within(front, 0), x->scale);
    levels_of_four(at, skip + 36, level);
    const int16x8_t scales = vuzp2q_s16(vreinterpretq_s16_f32(words), vreinterpretq_s16_f32(words));
    dot = dots_of_four(level, x->high + first + 32, x->low + first + 32);
    *sum_1 = add_scaled(*sum_1, dot, vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(scales))), x->scale);
}

INLINE void pair_of_q5_0(const uint8_t *const *at, int skip, const Rounded *x, int first, float32x4_t *sum_0,
                         float32x4_t *sum_1) {
    int8x16_t front[4], middle[4], level[4][2];
    for (int r = 0; r < 4; r++) {
        front[r] = vld1q_s8((const int8_t *)at[r] + skip), middle[r] = vld1q_s8((const int8_t *)at[r] + skip + 16);
        const uint8x16_t packed = vreinterpretq_u8_s8(vextq_s8(front[r], middle[r], 6));
        signed_fives(packed, vreinterpretq_u8_s8(front[r]), 2, level[r]);
    }
    int32x4_t dot = dots_of_four(level, x->high + first, x->low + first);
    *sum_0 = add_scaled(*sum_0, dot, scales_within(front, 0), x->scale);
    for (int r = 0; r < 4; r++)
        signed_fives(vld1q_u8(at[r] + skip + 28), vreinterpretq_u8_s8(middle[r]), 8, level[r]);
    dot = dots_of_four(level, x->high + first + 32, x->low + first + 32);
    *sum_1 = add_scaled(*sum_1, dot, scales_within(middle, 1), x->scale);
}

INLINE void four_pairs(int type, const uint8_t *const *at, int skip, const Rounded *x, int first, const ShiftedPair *s,
                       float32x4_t *sum_0, float32x4_t *sum_1) {
    if (type == Q8_0) pair_of_q8_0(at, skip, x, first, s, sum_0, sum_1);
    else pair_of_q5_0(at, skip, x, first, sum_0, sum_1);
}

/* Four rows from `row` on, or the last one several times where fewer are left; `s` has the pairs of x. */
INLINE float32x4_t pairs_dot(int type, const uint8_t *row, int64_t row_bytes, int rows, const Rounded *x,
                             const ShiftedPair *s, int columns) {
    const int size = block_bytes(type);
    const uint8_t *at[4], *next = row + 4 * row_bytes;
    for (int r = 0; r < 4; r++) at[r] = row + row_bytes * least(r, rows - 1);
    float32x4_t a = vdupq_n_f32(0), b = a, c = a, d = a;
    int start = 0;
    for (; start + PIECE <= columns; start += PIECE, s += PIECE / PAIR) {
        const Rounded *here = x + start / STRIDE;
        four_pairs(type, at, 0, here, start % STRIDE, s, &a, &b);
        four_pairs(type, at, 2 * size, here, start % STRIDE + PAIR, s + 1, &c, &d);
        prefetch_bytes(next, 16 * size), next += 16 * size;
        for (int r = 0; r < 4; r++) at[r] += 4 * size;
    }
    const int left = columns - start, first = start % STRIDE;
    x += start / STRIDE;
    if (left) prefetch_bytes(next, 12 * size);
    if (left >= PAIR) four_pairs(type, at, 0, x, first, s, &a, &b);
    if (left == 32) a = four_blocks(type, at, 0, x, first, a);
    if (left == 96) c = four_blocks(type, at, 2 * size, x, first + PAIR, c);
    return vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d));
}

INLINE void row_of_x_with(int type, const uint8_t *row, int64_t row_bytes, int count, const Rounded *x, int columns,
                          float *y, int stride) {
    ShiftedPair pairs[type == Q8_0 ? columns / PAIR + 1 : 1];
    if (type == Q8_0) shift_pairs(x, columns, pairs);
    for (int n = 0; n < count; n += 4, row += 4 * row_bytes) {
        float32x4_t found;
        if (type == Q8_0 || type == Q5_0) found = pairs_dot(type, row, row_bytes, count - n, x, pairs, columns);
        else found = four_rows_dot(type, row, row_bytes, count - n, x, columns);
        for (int r = 0; r < 4 && n + r < count; r++) y[(int64_t)(n + r) * stride] = found[r];
    }
}

#define ROW_OF_X_WITH(type) \
    case type: row_of_x_with(type, row, row_bytes, count, x, columns, y, stride); return

/* One row of x with `count` rows in blocks of 32: y [count, stride]. A function of its own, as `few_quads_dot`. */
static __attribute__((noinline)) void row_of_x_dot(int type, const uint8_t *row, int64_t row_bytes, int count,
                                                   const Rounded *x, int columns, float *y, int stride) {
    switch (type) {
        ROW_OF_X_WITH(Q4_0);
        ROW_OF_X_WITH(Q4_1);
        ROW_OF_X_WITH(Q5_0);
        ROW_OF_X_WITH(Q5_1);
        ROW_OF_X_WITH(Q8_0);
        ROW_OF_X_WITH(IQ4_NL);
    }
}

#endif
#endif
