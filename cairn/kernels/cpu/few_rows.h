/* Products in float32 of few rows with weights in tiles of `float_tiles.h`, or in those of `half_tiles.h`, widened.
 *
 *     x [rows][depth] @ tiles [columns / side][depth][side]  ->  y [rows][columns]        at most 8 rows and 16 columns at once
 *
 * So few rows are read where they are, and every weight is read from memory once: that is the time of such a product.
 */
#ifndef CAIRN_FEW_ROWS_H
#define CAIRN_FEW_ROWS_H
#include "half_tiles.h"
#include "pool.h"

#ifdef HAS_FLOAT_TILES

#define FEW 8 /* rows that are multiplied while a weight is in a register */
#define INLINE static inline __attribute__((always_inline))

/* Where a few rows are multiplied: with the columns of one tile from `tiles` on. */
typedef struct {
    const float *x;
    const void *tiles;
    const float *bias; /* or NULL */
    float *y;
    int64_t x_stride, y_stride;
    int rows, depth, side, adds;
} FewTile;

/* Eight weights that follow each other, in float32. */
INLINE void load_eight(const void *tiles, int64_t at, int is_half, Four w[2]) {
#ifdef HAS_HALF_TILES
    if (is_half) {
        const float16x8_t given = vld1q_f16((const float16_t *)tiles + at);
        w[0] = vcvt_f32_f16(vget_low_f16(given)), w[1] = vcvt_high_f32_f16(given);
        return;
    }
#endif
    (void)is_half;
    w[0] = vld1q_f32((const float *)tiles + at), w[1] = vld1q_f32((const float *)tiles + at + 4);
}

/* `rows`, `fours` (columns) and `is_half` are constants wherever this is inlined, and the sums stay in registers. Where `f`
 * has fewer rows the last one is computed again. */
INLINE void multiply_few(const FewTile *f, const int rows, const int fours, const int is_half) {
    Four s[FEW][4], x[FEW], w[4];
    const float *from[FEW];
    for (int r = 0; r < rows; r++) from[r] = f->x + (r < f->rows ? r : f->rows - 1) * f->x_stride;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < fours; c++) s[r][c] = f->bias ? vld1q_f32(f->bias + 4 * c) : vdupq_n_f32(0.f);
    int k = 0;
#define STEP(lane)                                                                                             \
    for (int c = 0; c < fours; c += 2) load_eight(f->tiles, (int64_t)(k + lane) * f->side + 4 * c, is_half, w + c); \
    for (int r = 0; r < rows; r++)                                                                             \
        for (int c = 0; c < fours; c++) s[r][c] = vfmaq_laneq_f32(s[r][c], w[c], x[r], lane);
    for (; k + 4 <= f->depth; k += 4) {
        for (int r = 0; r < rows; r++) x[r] = vld1q_f32(from[r] + k);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
    for (; k < f->depth; k++) {
        for (int r = 0; r < rows; r++) x[r] = vdupq_n_f32(from[r][k]);
        STEP(0)
    }
#undef STEP
    for (int r = 0; r < rows; r++) {
        if (r >= f->rows) break;
        for (int c = 0; c < fours; c++) {
            float *y = f->y + r * f->y_stride + 4 * c;
            vst1q_f32(y, f->adds ? vaddq_f32(s[r][c], vld1q_f32(y)) : s[r][c]);
        }
    }
}

/* 8 rows and 8 columns, or 4 and 16 of a tile that is so wide: 16 registers of sums in either case. */
static void few_tile(const FewTile *f, int is_half) {
#define OF(count)                                      \
    if (f->rows <= count) {                            \
        if (!is_half) multiply_few(f, count, 2, 0);    \
        else multiply_few(f, count, count <= 4 ? 4 : 2, 1); \
        return;                                        \
    }
    OF(1) OF(2) OF(4) OF(8)
#undef OF
}

/* Columns [first, last) of y [rows][y_stride] = x @ tiles + bias, or added to it; `first` is a multiple of 16. */
static void few_product(const TiledWeights *w, int is_half, const float *x, int64_t x_stride, int rows, float *y,
                        int64_t y_stride, int adds, int first, int last) {
    const int side = is_half ? 16 : 8, size = is_half ? 2 : 4;
    for (int t = 0; t < rows; t += FEW) {
        const int left = rows - t < FEW ? rows - t : FEW, columns = is_half && left <= 4 ? 16 : 8;
        for (int n = first; n < last; n += columns) {
            const int64_t at = (int64_t)(n / side * side) * w->depth + n % side;
            const FewTile f = {x + t * x_stride, (const char *)w->tiles + at * size, w->bias ? w->bias + n : NULL,
                               y + t * y_stride + n, x_stride, y_stride, left, w->depth, side, adds};
            few_tile(&f, is_half);
        }
    }
}

/* -- by all threads ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const TiledWeights *w;
    const float *x;
    float *y;
    int is_half, rows, adds, gelu, columns; /* of a chunk */
} FewProduct;

static void few_chunk(void *given, int chunk) {
    const FewProduct *p = given;
    const int all = p->w->columns, first = chunk * p->columns, last = all - first < p->columns ? all : first + p->columns;
    few_product(p->w, p->is_half, p->x, p->w->depth, p->rows, p->y, all, p->adds, first, last);
    for (int r = 0; p->gelu && r < p->rows; r++) gelu(p->y + (int64_t)r * all + first, last - first);
}

static void few_shared(Pool *pool, FewProduct p) {
    p.columns = (p.w->columns / (4 * pool->threads) + 15) / 16 * 16;
    if (p.columns < 32) p.columns = 32;
    run(pool, few_chunk, &p, (p.w->columns + p.columns - 1) / p.columns);
}

#endif
#endif
