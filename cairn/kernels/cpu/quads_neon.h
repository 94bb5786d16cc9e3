/* Rows of activations with four rows of weights in blocks of 32 values, from the packed blocks to the sums.
 *
 *     four passes over the rows of weights, one for every fourth block, because a row has four sums:
 *         unpack a block of each row of weights        into registers, for one or two quads of x
 *         both digits of a quad, then the scales       onto sums that stay in registers until the pass ends
 *         prefetch a piece of a row behind these       a few lines at a time: a core waits where it asks for many at once
 *
 * With more than two quads the next two take the same weights, which are in the first-level cache then. `rows_neon.h` has
 * one row of x: it adds up the same numbers in the same order and has the same bits.
 */
#ifndef CAIRN_QUADS_NEON_H
#define CAIRN_QUADS_NEON_H

#include "levels_neon.h"

#ifdef HAS_DOT_NEON

#define FEW_QUADS 2 /* of x: for their sums there are registers */

/* The same block of four rows of weights; the lanes of scale and offset are the rows. */
typedef struct {
    int8x16_t level[4][2];
    float32x4_t scale, offset;
} FourBlocks;

/* Of four rows of weights; the lanes are rows of x. */
typedef struct {
    float32x4_t of_0, of_1, of_2, of_3;
} FourSums;

INLINE FourBlocks blocks_of_rows(int type, const Weights *w, int block) {
    const int64_t at = (int64_t)block * block_bytes(type);
    uint32x4_t heads = vdupq_n_u32(0); /* the first four bytes of each block */
    FourBlocks b;
    for (int r = 0; r < 4; r++) heads = lane_of(w[r].packed + at, heads, r);
    for (int r = 0; r < 4; r++) block_of_32(type, w[r].packed + at, b.level[r]);
    b.scale = floats_of_halves(vmovn_u32(heads));
    if (type == Q4_1 || type == Q5_1) b.offset = floats_of_halves(vshrn_n_u32(heads, 16));
    else b.offset = vmulq_n_f32(b.scale, -8.f);
    return b;
}

/* Four values of each row, which are the same lane of all levels; a lane has to be written as a number. */
#define DOTS_OF_ROWS(i, lane)                                                                                       \
    {                                                                                                               \
        const int8x16_t x_high = vld1q_s8(high + 64 * (i) + 16 * (lane)), x_low = vld1q_s8(low + 64 * (i) + 16 * (lane)); \
        for (int r = 0; r < 4; r++) whole[r] = vdotq_laneq_s32(whole[r], x_high, b->level[r][i], lane);             \
        for (int r = 0; r < 4; r++) rest[r] = vdotq_laneq_s32(rest[r], x_low, b->level[r][i], lane);                \
    }
#define ADD_ROW(r)                                                                                                  \
    {                                                                                                               \
        const float32x4_t dot = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(whole[r], 8), rest[r]));                        \
        if (has_offset(type)) sum.of_##r = vfmaq_laneq_f32(sum.of_##r, of_x, b->offset, r);                         \
        sum.of_##r = vfmaq_f32(sum.of_##r, vmulq_laneq_f32(dot, b->scale, r), scale_x);                             \
    }

/* A block of four rows of weights with four rows of x, from column `first` of theirs. */
INLINE FourSums add_quad(int type, FourBlocks *b, const Quad *x, int first, FourSums sum) {
    /* Or each scale would be spread over a register for all quads, and there are not registers enough. */
    __asm__("" : "+w"(b->scale), "+w"(b->offset));
    int32x4_t whole[4] = {zeros(), zeros(), zeros(), zeros()};
    int32x4_t rest[4] = {zeros(), zeros(), zeros(), zeros()};
    const int8_t *high = x->high + 4 * first, *low = x->low + 4 * first;
    DOTS_OF_ROWS(0, 0) DOTS_OF_ROWS(0, 1) DOTS_OF_ROWS(0, 2) DOTS_OF_ROWS(0, 3)
    DOTS_OF_ROWS(1, 0) DOTS_OF_ROWS(1, 1) DOTS_OF_ROWS(1, 2) DOTS_OF_ROWS(1, 3)
    const float32x4_t scale_x = vld1q_f32(x->scale);
    const float32x4_t of_x = vaddq_f32(vld1q_f32(x->sum[first / GROUP]), vld1q_f32(x->sum[first / GROUP + 1]));
    ADD_ROW(0) ADD_ROW(1) ADD_ROW(2) ADD_ROW(3)
    return sum;
}

/* Four rows of weights with one or two quads of x, of which `rows` are wanted: y [4, stride]. */
INLINE void quads_of_blocks(int type, const Weights *w, const Quad *x, int quads, int rows, int columns, float *y,
                            int stride) {
    const int pieces = pieces_of(columns), size = piece_bytes(type);
    const int64_t row_bytes = w[1].packed - w[0].packed;
    FourSums found[FEW_QUADS][4];
    for (int pass = 0; pass < 4; pass++) {
        FourSums one = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)}, two = one;
        const uint8_t *next = w[3].packed + (1 + pass) * row_bytes; /* a row behind these four in each pass */
        for (int column = 32 * pass; column < columns; column += PIECE, next += size) {
            const Quad *here = x + column / STRIDE;
            prefetch_bytes(next, size);
            FourBlocks b = blocks_of_rows(type, w, column / 32);
            one = add_quad(type, &b, here, column % STRIDE, one);
            if (quads > 1) two = add_quad(type, &b, here + pieces, column % STRIDE, two);
        }
        found[0][pass] = one, found[1][pass] = two;
    }
    for (int q = 0; q < quads; q++)
        for (int r = 0; r < 4; r++) {
            const float32x4_t *s = &found[q][0].of_0 + r; /* the passes are four vectors apart */
            const float32x4_t all = vaddq_f32(vaddq_f32(s[0], s[4]), vaddq_f32(s[8], s[12]));
            for (int t = 0; t < 4 && 4 * q + t < rows; t++) y[r * stride + 4 * q + t] = all[t];
        }
}

#define FEW_QUADS_OF(type)                                                                       \
    case type:                                                                                   \
        if (quads == 1) quads_of_blocks(type, w, x, 1, rows, columns, y, stride);                \
        else quads_of_blocks(type, w, x, 2, rows, columns, y, stride);                           \
        return

/* A function of its own: the compiler finds registers for loops of moderate functions only. */
static __attribute__((noinline)) void few_quads_dot(int type, const Weights *w, const Quad *x, int quads, int rows,
                                                    int columns, float *y, int stride) {
    switch (type) {
        FEW_QUADS_OF(Q4_0);
        FEW_QUADS_OF(Q4_1);
        FEW_QUADS_OF(Q5_0);
        FEW_QUADS_OF(Q5_1);
        FEW_QUADS_OF(Q8_0);
        FEW_QUADS_OF(IQ4_NL);
    }
}

#endif
#endif
