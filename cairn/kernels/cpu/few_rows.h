/* Products in float32 of few rows with weights in tiles of `float_tiles.h`, or in those of `half_tiles.h`, widened.
 *
 *     x [rows][depth] @ tiles [columns / side][depth][side]  ->  y [rows][columns]        at most 8 rows and 32 columns at once
 *
 * So few rows are read where they are, and every weight is read from memory once: that is the time of such a product.
 */
#ifndef CAIRN_FEW_ROWS_H
#define CAIRN_FEW_ROWS_H
#include "half_tiles.h"
#include "pool.h"

#ifdef HAS_VECTORS

#define FEW 8 /* rows that are multiplied while a weight is in a register */
#define FEW_AHEAD 2048 /* bytes before they are multiplied weights are asked for, on x86 */

/* Where a few rows are multiplied: with the columns of one tile from `tiles` on, or of two with `apart` between them. */
typedef struct {
    const float *x;
    const void *tiles;
    const float *bias; /* or NULL */
    float *y;
    int64_t x_stride, y_stride, apart;
    int rows, depth, side, adds;
} FewTile;

/* Weights in float32, `vecs` registers of them. */
INLINE void load_weights(const void *tiles, int64_t at, int64_t apart, const int is_half, const int vecs, Vec w[4]) {
    if (!is_half) {
        for (int v = 0; v < vecs; v++) w[v] = vec_load((const float *)tiles + at + v * apart);
        return;
    }
#if defined(HAS_HALF_PRODUCTS)
    for (int v = 0; v < vecs; v += 2) {
        const float16x8_t given = vld1q_f16((const float16_t *)tiles + at + 4 * v);
        w[v] = vcvt_f32_f16(vget_low_f16(given)), w[v + 1] = vcvt_high_f32_f16(given);
    }
#elif defined(HAS_HALF)
    for (int v = 0; v < vecs; v++) w[v] = vec_from_half((const Half *)tiles + at + v * apart);
#endif
}

/* Asks for weights that come later; each line of the cache once or twice. */
INLINE void ask_few(const FewTile *f, int k, const int vecs, const int is_half) {
    if (LANES == 4) return; /* a Neoverse looks far enough ahead by itself */
    for (int v = 0; v < vecs; v += LANES == 16 ? 1 : 2)
        __builtin_prefetch((const char *)f->tiles + ((int64_t)k * f->side + v * f->apart) * (is_half ? 2 : 4) + FEW_AHEAD);
}

/* `rows`, `vecs` (of columns) and `is_half` are constants wherever this is inlined, and the sums stay in registers. Where `f`
 * has fewer rows the last one is computed again. */
INLINE void multiply_few(const FewTile *f, const int rows, const int vecs, const int is_half) {
    Vec s[FEW][4], w[4];
    FourFactors x[FEW];
    const float *from[FEW];
    for (int r = 0; r < rows; r++) from[r] = f->x + (r < f->rows ? r : f->rows - 1) * f->x_stride;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) s[r][v] = f->bias ? vec_load(f->bias + v * LANES) : vec_all(0.f);
    int k = 0;
#define STEP(lane)                                                                     \
    ask_few(f, k + lane, vecs, is_half);                                               \
    load_weights(f->tiles, (int64_t)(k + lane) * f->side, f->apart, is_half, vecs, w); \
    for (int r = 0; r < rows; r++)                                                     \
        for (int v = 0; v < vecs; v++) s[r][v] = four_fma(s[r][v], w[v], x[r], lane);
    for (; k + 4 <= f->depth; k += 4) {
        for (int r = 0; r < rows; r++) x[r] = four_load(from[r] + k);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
    for (; k < f->depth; k++) {
        for (int r = 0; r < rows; r++) x[r] = four_first(from[r] + k);
        STEP(0)
    }
#undef STEP
    for (int r = 0; r < rows; r++) {
        if (r >= f->rows) break;
        for (int v = 0; v < vecs; v++) {
            float *y = f->y + r * f->y_stride + v * LANES;
            if (f->adds) s[r][v] = s[r][v] + vec_load(y);
            vec_store(y, s[r][v]);
        }
    }
}

/* Registers of columns for so many rows: 16 of sums in all, or 8 of AVX2. Two of AVX-512 are of two tiles. */
INLINE int few_vecs(int rows, int is_half, int columns) {
    if (LANES == 4) return is_half && rows <= 4 ? 4 : 2;
    if (LANES == 8) return rows <= 4 ? 2 : 1;
    return columns > SIDE ? 2 : 1;
}

static void few_tile(const FewTile *f, int is_half, int columns) {
#define OF(count)                                                                                 \
    if (f->rows <= count) {                                                                       \
        if (PANEL > SIDE && columns <= SIDE && is_half) multiply_few(f, count, 1, 1);             \
        else if (PANEL > SIDE && columns <= SIDE) multiply_few(f, count, 1, 0);                   \
        else if (is_half) multiply_few(f, count, few_vecs(count, 1, PANEL), 1);                   \
        else multiply_few(f, count, few_vecs(count, 0, PANEL), 0);                                \
        return;                                                                                   \
    }
    OF(1) OF(2) OF(4) OF(8)
#undef OF
}

/* Columns [first, last) of y [rows][y_stride] = x @ tiles + bias, or added to it; `first` is a multiple of 16. */
static void few_product(const TiledWeights *w, int is_half, const float *x, int64_t x_stride, int rows, float *y,
                        int64_t y_stride, int adds, int first, int last) {
    const int side = is_half ? 16 : SIDE, size = is_half ? 2 : 4;
    const int64_t apart = LANES == 16 ? side * (int64_t)w->depth : LANES;
    for (int t = 0; t < rows; t += FEW) {
        const int left = rows - t < FEW ? rows - t : FEW;
        for (int n = first; n < last; n += LANES * few_vecs(left, is_half, last - n)) {
            const int64_t at = (int64_t)(n / side * side) * w->depth + n % side;
            const FewTile f = {x + t * x_stride, (const char *)w->tiles + at * size, w->bias ? w->bias + n : NULL,
                               y + t * y_stride + n, x_stride, y_stride, apart, left, w->depth, side, adds};
            few_tile(&f, is_half, last - n);
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
