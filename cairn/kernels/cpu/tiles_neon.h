/* The tile of `float_tiles.h` on NEON: 8 rows and 8 columns. Rows are transposed first, because a number of a register can
 * be multiplied with another register, and one in memory cannot. */
#ifndef CAIRN_TILES_NEON_H
#define CAIRN_TILES_NEON_H
#include "vectors.h"

#define SIDE 8      /* columns of weights that lie together */
#define PANEL 8     /* columns of a tile */
#define BLOCK 64    /* rows of x that are multiplied with the weights before the next ones */
#define TILE_ROWS 8 /* 16 of the 32 registers hold sums */
#define DEPTH 2048  /* of rows and weights at once: rows of that width stay in the second-level cache */
#define AHEAD 32    /* numbers of depth that rows are asked for before they are multiplied */

/* s = s + rows @ weights; `rows` is 8 or 4. */
INLINE void multiply(const int rows, const int vecs, Left a, int left, int depth, const float *b, int64_t apart, Vec s[][2]) {
    const float *at = a.at;
    (void)vecs, (void)left, (void)apart;
#define ROW(r, four, lane)                            \
    s[r][0] = vfmaq_laneq_f32(s[r][0], b0, four, lane); \
    s[r][1] = vfmaq_laneq_f32(s[r][1], b1, four, lane);
    if (rows == 4)
        for (int k = 0; k < depth; k++, at += SIDE, b += SIDE) {
            const Vec a0 = vld1q_f32(at), b0 = vld1q_f32(b), b1 = vld1q_f32(b + 4);
            ROW(0, a0, 0) ROW(1, a0, 1) ROW(2, a0, 2) ROW(3, a0, 3)
        }
    else
        for (int k = 0; k < depth; k++, at += SIDE, b += SIDE) {
            __builtin_prefetch(at + AHEAD * SIDE); /* b is in the first-level cache after its first tile */
            const Vec a0 = vld1q_f32(at), a1 = vld1q_f32(at + 4), b0 = vld1q_f32(b), b1 = vld1q_f32(b + 4);
            ROW(0, a0, 0) ROW(1, a0, 1) ROW(2, a0, 2) ROW(3, a0, 3)
            ROW(4, a1, 0) ROW(5, a1, 1) ROW(6, a1, 2) ROW(7, a1, 3)
        }
#undef ROW
}

/* 4 x 4 numbers of rows [4][stride] as columns [4][SIDE]. */
static inline void transpose_four(const float *rows, int64_t stride, float *columns) {
    const Vec r0 = vld1q_f32(rows), r1 = vld1q_f32(rows + stride);
    const Vec r2 = vld1q_f32(rows + 2 * stride), r3 = vld1q_f32(rows + 3 * stride);
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), b = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), d = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
    vst1q_f32(columns, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
    vst1q_f32(columns + SIDE, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
    vst1q_f32(columns + 2 * SIDE, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
    vst1q_f32(columns + 3 * SIDE, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
}

static void to_tiles(const float *x, int64_t stride, int rows, int depth, float *tiles);

/* Weights of the next panel, which the caches find by themselves here. */
static inline void ask_for(const void *weights, int64_t bytes, int row, int rows) {
    (void)weights, (void)bytes, (void)row, (void)rows;
}

/* Rows as the left factor: in memory of their own, or, where this CPU multiplies them so, where they are. */
static Left packed_rows(const float *x, int64_t stride, int rows, int depth, float *room) {
    to_tiles(x, stride, rows, depth, room);
    return (Left){room, depth, SIDE};
}

static Left left_rows(const float *x, int64_t stride, int rows, int depth, float *room) {
    return packed_rows(x, stride, rows, depth, room);
}

#endif
