/* The tile of `float_tiles.h` on x86: two registers of columns, and as many rows as leave registers for both factors. A
 * number in memory is spread over a register as it is loaded, so rows are read where they are. */
#ifndef CAIRN_TILES_X86_H
#define CAIRN_TILES_X86_H
#include <string.h>

#include "vectors.h"

#define SIDE 16           /* columns of weights that lie together */
#define PANEL (2 * LANES) /* columns of a tile: with AVX-512 two of those, which may lie apart */
#define BLOCK 128         /* rows of x that are multiplied with the weights before the next ones */
#define TILE_ROWS (LANES == 16 ? 8 : 6) /* 16 of 32 registers hold sums, or 12 of 16 */
#define DEPTH 512                       /* of rows and weights at once */

/* s = s + rows @ weights. Where there are fewer rows than `rows`, which is a constant, the last one is computed again. */
INLINE void multiply(const int rows, const int vecs, Left a, int left, int depth, const float *b, int64_t apart, Vec s[][2]) {
    const float *from[TILE_ROWS], *const second = b + apart;
    for (int r = 0; r < rows; r++) from[r] = a.at + (r < left ? r : left - 1) * a.row;
#pragma GCC unroll 4
    for (int64_t k = 0, at = 0; k < depth; k++, at += a.step) {
        const Vec w0 = vec_load(b + k * SIDE), w1 = vecs == 2 ? vec_load(second + k * SIDE) : w0;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const Vec x = vec_all(from[r][at]);
            s[r][0] = vec_fma(s[r][0], x, w0);
            if (vecs == 2) s[r][1] = vec_fma(s[r][1], x, w1);
        }
    }
}

/* 4 x 4 numbers of rows [4][stride] as columns [4][SIDE]. */
static inline void transpose_four(const float *rows, int64_t stride, float *columns) {
    __m128 r0 = _mm_loadu_ps(rows), r1 = _mm_loadu_ps(rows + stride);
    __m128 r2 = _mm_loadu_ps(rows + 2 * stride), r3 = _mm_loadu_ps(rows + 3 * stride);
    _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
    _mm_storeu_ps(columns, r0), _mm_storeu_ps(columns + SIDE, r1);
    _mm_storeu_ps(columns + 2 * SIDE, r2), _mm_storeu_ps(columns + 3 * SIDE, r3);
}

/* The share of a tile from `row` on of the weights of the next panel: they are further away than the caches look ahead, and a
 * core that waits for them multiplies nothing. */
static inline void ask_for(const void *weights, int64_t bytes, int row, int rows) {
    const int64_t last = row + TILE_ROWS < rows ? bytes * (row + TILE_ROWS) / rows : bytes;
    for (int64_t at = bytes * row / rows / 64 * 64; at < last; at += 64)
        _mm_prefetch((const char *)weights + at, _MM_HINT_T1);
}

/* Rows as the left factor: in memory of their own, or, where this CPU multiplies them so, where they are. */
static Left packed_rows(const float *x, int64_t stride, int rows, int depth, float *room) {
    for (int t = 0; t < rows; t++) memcpy(room + (int64_t)t * depth, x + t * stride, sizeof(float) * (size_t)depth);
    return (Left){room, depth, 1};
}

static Left left_rows(const float *x, int64_t stride, int rows, int depth, float *room) {
    (void)rows, (void)depth, (void)room;
    return (Left){x, stride, 1};
}

#endif
