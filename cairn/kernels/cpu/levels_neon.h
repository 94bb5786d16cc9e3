/* Dot products of rows of weights whose scales belong to 64 values or more: integers are added up further, and floats seldom.
 *
 *     one row of x      both digits have a sum in integers, whose lanes are added up at the end of a group
 *     four rows of x    interleaved by four values; the lanes of a sum are the rows
 *
 * A row adds up the same numbers in the same order in both: it has the same bits.
 */
#ifndef CAIRN_LEVELS_NEON_H
#define CAIRN_LEVELS_NEON_H

#include "pieces_neon.h"

#ifdef HAS_DOT_NEON

INLINE int in_blocks_of_32(int type) {
    return type == Q4_0 || type == Q4_1 || type == Q5_0 || type == Q5_1 || type == Q8_0 || type == IQ4_NL;
}

#define QUADS_AT_ONCE 8  /* of x, for which a piece is unpacked once */
#define MOST_ROWS_OF_W 4 /* that are multiplied together */

/* STRIDE columns of four rows of activations: four values of each row in turn. */
typedef struct {
    _Alignas(64) int8_t high[4 * STRIDE];
    int8_t low[4 * STRIDE];
    float sum[STRIDE / GROUP][4], scale[4];
} Quad;

/* Quads of rows one behind the other, the columns of each without gaps. One row that is left over lies as `Rounded`. */
typedef Quad Activations;

INLINE int least(int a, int b) { return a < b ? a : b; }

/* `values` of a row, from the first register of a group. */
INLINE int group_dot(const int8x16_t *level, int values, const int8_t *high, const int8_t *low) {
    int32x4_t whole = vdupq_n_s32(0), rest = vdupq_n_s32(0);
    for (int i = 0; i < values / 16; i++) {
        whole = vdotq_s32(whole, level[i], vld1q_s8(high + 16 * i));
        rest = vdotq_s32(rest, level[i], vld1q_s8(low + 16 * i));
    }
    return vaddvq_s32(vaddq_s32(vshlq_n_s32(whole, 8), rest));
}

/* Sums of x over a group, by pairs of neighbours. */
INLINE float group_sum(const float *sum, int values) {
    float32x4_t pairs = vld1q_f32(sum);
    if (values == PIECE) pairs = vpaddq_f32(pairs, vld1q_f32(sum + 4));
    pairs = vpaddq_f32(pairs, pairs);
    return pairs[0] + pairs[1];
}

INLINE float long_row_piece(int type, const Piece *p, const Rounded *x, int at, float sum) {
    const int values = values_of_scale(type);
    for (int b = 0; b < PIECE / values; b++) {
        const int first = at + values * b;
        const int dot = group_dot(p->level + values / 16 * b, values, x->high + first, x->low + first);
        if (has_offset(type)) sum = __builtin_fmaf(group_sum(x->sum + first / GROUP, values), p->offset[0][b], sum);
        sum = __builtin_fmaf((float)dot * p->scale[0][b], x->scale, sum);
    }
    return sum;
}

INLINE float long_row_dot(int type, Weights w, const Rounded *x, int columns) {
    float sum = 0;
    for (int start = 0; start < columns; start += PIECE) {
        Piece p;
        piece_of(type, w, start, columns, &p);
        sum = long_row_piece(type, &p, x + start / STRIDE, start % STRIDE, sum);
    }
    return sum;
}

/* The same sums of four rows of x. */
INLINE float32x4_t quad_sum(const float sum[][4], int values) {
    float32x4_t pair[4];
    for (int i = 0; i < values / 32; i++) pair[i] = vaddq_f32(vld1q_f32(sum[2 * i]), vld1q_f32(sum[2 * i + 1]));
    if (values == 64) return vaddq_f32(pair[0], pair[1]);
    return vaddq_f32(vaddq_f32(pair[0], pair[1]), vaddq_f32(pair[2], pair[3]));
}

/* A lane has to be written as a number. */
#define DOTS_OF_LANE(lane)                                                                                          \
    {                                                                                                               \
        const int8x16_t x_high = vld1q_s8(high + 16 * lane), x_low = vld1q_s8(low + 16 * lane);                     \
        for (int r = 0; r < count; r++) whole[r] = vdotq_laneq_s32(whole[r], x_high, level[r], lane);               \
        for (int r = 0; r < count; r++) rest[r] = vdotq_laneq_s32(rest[r], x_low, level[r], lane);                  \
    }

/* A piece of `count` rows of weights, of which `left` values are there, with four rows of x; `sum` has four vectors for each
 * row of weights, of which the first is used. */
INLINE void long_quad_piece(int type, const Piece *w, int count, const Quad *x, int at, int left, float32x4_t *sum) {
    const int values = values_of_scale(type);
    const float32x4_t scale_x = vld1q_f32(x->scale);
    for (int b = 0; b < PIECE / values && values * b < left; b++) {
        const int first = at + values * b, registers = least(values, left - values * b) / 16;
        int32x4_t whole[MOST_ROWS_OF_W], rest[MOST_ROWS_OF_W];
        for (int r = 0; r < count; r++) whole[r] = rest[r] = vdupq_n_s32(0);
#pragma GCC unroll 1 /* registers are enough for 16 values */
        for (int i = 0; i < registers; i++) {
            int8x16_t level[MOST_ROWS_OF_W];
            for (int r = 0; r < count; r++) level[r] = w[r].level[values / 16 * b + i];
            const int8_t *high = x->high + 4 * first + 64 * i, *low = x->low + 4 * first + 64 * i;
            DOTS_OF_LANE(0) DOTS_OF_LANE(1) DOTS_OF_LANE(2) DOTS_OF_LANE(3)
        }
        const float32x4_t of_x = quad_sum(x->sum + first / GROUP, values);
        for (int r = 0; r < count; r++) {
            const float32x4_t dot = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(whole[r], 8), rest[r]));
            if (has_offset(type)) sum[4 * r] = vfmaq_n_f32(sum[4 * r], of_x, w[r].offset[0][b]);
            sum[4 * r] = vfmaq_f32(sum[4 * r], vmulq_n_f32(dot, w[r].scale[0][b]), scale_x);
        }
    }
}

#endif
#endif
