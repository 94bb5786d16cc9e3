/* One row of activations with four rows of weights: the lanes of a sum are the rows of weights.
 *
 *     block       row 0   row 1   row 2   row 3        each register of x is loaded once for four rows, and the sums
 *     dots        [.. 4]  [.. 4]  [.. 4]  [.. 4]       across lanes of four rows are three additions of neighbours
 *     sum[b % 4]  [  0       1       2       3  ]
 *
 * A row adds up the same numbers in the same order as in `dot_neon.h`: it has the same bits.
 */
#ifndef CAIRN_ROWS_NEON_H
#define CAIRN_ROWS_NEON_H

#include "levels_neon.h"

#ifdef HAS_DOT_NEON

INLINE int32x4_t across(const int32x4_t *dot) {
    return vpaddq_s32(vpaddq_s32(dot[0], dot[1]), vpaddq_s32(dot[2], dot[3]));
}

/* 32 values of each of four rows of weights with both digits of x. */
INLINE int32x4_t dots_of_four(int8x16_t level[4][2], const int8_t *high, const int8_t *low) {
    int32x4_t dot[4];
    for (int r = 0; r < 4; r++) dot[r] = zeros();
    for (int i = 0; i < 2; i++) {
        const int8x16_t x_high = vld1q_s8(high + 16 * i);
        for (int r = 0; r < 4; r++) dot[r] = vdotq_s32(dot[r], level[r][i], x_high);
    }
    for (int r = 0; r < 4; r++) dot[r] = vshlq_n_s32(dot[r], 8);
    for (int i = 0; i < 2; i++) {
        const int8x16_t x_low = vld1q_s8(low + 16 * i);
        for (int r = 0; r < 4; r++) dot[r] = vdotq_s32(dot[r], level[r][i], x_low);
    }
    return across(dot);
}

/* Of a block of each row. */
INLINE void scales_of_four(int type, const uint8_t *const *at, int skip, float32x4_t *scale, float32x4_t *offset) {
    if (type == Q4_1 || type == Q5_1) {
        float word[4]; /* two halves */
        for (int r = 0; r < 4; r++) memcpy(word + r, at[r] + skip, 4);
        const uint32x4_t heads = vreinterpretq_u32_f32((float32x4_t){word[0], word[1], word[2], word[3]});
        *scale = floats_of_halves(vmovn_u32(heads)), *offset = floats_of_halves(vshrn_n_u32(heads, 16));
        return;
    }
    float16_t half[4];
    for (int r = 0; r < 4; r++) memcpy(half + r, at[r] + skip, 2);
    *scale = vcvt_f32_f16((float16x4_t){half[0], half[1], half[2], half[3]});
    *offset = vmulq_n_f32(*scale, -8.f);
}

/* A block of 32 of each row, `skip` bytes behind `at`, and what it adds to the lanes of `sum`. */
INLINE float32x4_t four_blocks(int type, const uint8_t *const *at, int skip, const Rounded *x, int first,
                               float32x4_t sum) {
    int8x16_t level[4][2];
    for (int r = 0; r < 4; r++) block_of_32(type, at[r] + skip, level[r]);
    float32x4_t scale, offset;
    scales_of_four(type, at, skip, &scale, &offset);
    if (has_offset(type)) sum = vfmaq_n_f32(sum, offset, x->sum[first / GROUP] + x->sum[first / GROUP + 1]);
    const int32x4_t dot = dots_of_four(level, x->high + first, x->low + first);
    return vfmaq_n_f32(sum, vmulq_f32(vcvtq_f32_s32(dot), scale), x->scale);
}

/* Four rows from `row` on, or the last one several times where fewer than four are left. */
INLINE float32x4_t four_rows_dot(int type, const uint8_t *row, int64_t row_bytes, int rows, const Rounded *x,
                                 int columns) {
    const int size = block_bytes(type);
    const uint8_t *at[4], *next = row + 4 * row_bytes;
    for (int r = 0; r < 4; r++) at[r] = row + row_bytes * least(r, rows - 1);
    float32x4_t a = vdupq_n_f32(0), b = a, c = a, d = a;
    int start = 0;
    for (; start + PIECE <= columns; start += PIECE, next += 16 * size) {
        const Rounded *here = x + start / STRIDE;
        const int first = start % STRIDE;
        a = four_blocks(type, at, 0, here, first, a);
        b = four_blocks(type, at, size, here, first + 32, b);
        c = four_blocks(type, at, 2 * size, here, first + 64, c);
        d = four_blocks(type, at, 3 * size, here, first + 96, d);
        prefetch_bytes(next, 16 * size);
        for (int r = 0; r < 4; r++) at[r] += 4 * size;
    }
    const int left = columns - start, first = start % STRIDE;
    x += start / STRIDE;
    if (left) prefetch_bytes(next, 12 * size);
    if (left) a = four_blocks(type, at, 0, x, first, a);
    if (left >= 64) b = four_blocks(type, at, size, x, first + 32, b);
    if (left >= 96) c = four_blocks(type, at, 2 * size, x, first + 64, c);
    return vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d));
}

#endif
#endif
