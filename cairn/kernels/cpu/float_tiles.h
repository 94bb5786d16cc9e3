/* Products in float32 by tiles of sums that stay in registers, and what stands between them.
 *
 *     rows @ weights [depth][columns of a panel]  ->  a tile        its size: `tiles_neon.h`, `tiles_x86.h`
 *
 * TiledWeights are kept as [columns / SIDE][depth][SIDE]; a block of rows of x is multiplied with all of them before the
 * next one. One thread computes all of it: `encoder.h` says who computes which rows.
 */
#ifndef CAIRN_FLOAT_TILES_H
#define CAIRN_FLOAT_TILES_H
#include "vectors.h"

#ifdef HAS_VECTORS
#include <math.h>
#include <string.h>

/* Rows as the left factor of a product: number k of row r is at[r * row + k * step]; on NEON in tiles, as `to_tiles` has
 * them, of which the one with row r begins at at[r * row]. */
typedef struct {
    const float *at;
    int64_t row, step;
} Left;

#if defined(__aarch64__)
#include "tiles_neon.h"
#else
#include "tiles_x86.h"
#endif

#define SOME_ROWS 4 /* fewer than in a whole tile, where no more are left */

typedef struct {
    const void *tiles; /* [columns / SIDE][depth][SIDE], or as `half_tiles.h` has them */
    const float *bias;
    int32_t depth, columns;
} TiledWeights;

/* What becomes of a tile of sums. */
typedef struct {
    float *y; /* [rows][stride] */
    int64_t stride;
    const float *bias;    /* of the columns, or NULL */
    const float *factors; /* of the rows, or NULL */
    int adds;             /* to what y holds */
} Target;

/* Rows that fill tiles of either type. */
static inline int64_t whole_tiles(int rows) { return (rows + 15) / 16 * 16; }

/* Numbers from a register of a panel to the next one, where tiles have this depth. */
static inline int64_t apart_of(int64_t depth) { return PANEL > SIDE ? SIDE * depth : LANES; }

/* Rows [rows][stride] as tiles [rows / SIDE][depth][SIDE]; missing rows of the last tile are zero. Depth is a multiple of 4. */
static void to_tiles(const float *x, int64_t stride, int rows, int depth, float *tiles) {
    for (int t = 0; t < rows; t += SIDE, tiles += (int64_t)SIDE * depth) {
        if (rows - t >= SIDE) {
            for (int k = 0; k < depth; k += 4)
                for (int r = 0; r < SIDE; r += 4)
                    transpose_four(x + (t + r) * stride + k, stride, tiles + (int64_t)k * SIDE + r);
            continue;
        }
        memset(tiles, 0, sizeof(float) * SIDE * (size_t)depth);
        for (int r = 0; r < rows - t; r++)
            for (int k = 0; k < depth; k++) tiles[(int64_t)k * SIDE + r] = x[(t + r) * stride + k];
    }
}

INLINE void store_row(const int vecs, const Vec s[2], const Target *t, int row, float *y) {
    Vec first = s[0], second = s[1];
    if (t->factors) first = first * vec_all(t->factors[row]), second = second * vec_all(t->factors[row]);
    if (t->adds) first = first + vec_load(y);
    if (t->adds && vecs == 2) second = second + vec_load(y + LANES);
    vec_store(y, first);
    if (vecs == 2) vec_store(y + LANES, second);
}

/* `rows` and `vecs` are constants wherever this is inlined, and loops over them are unrolled: else the sums are not in
 * registers. `left` rows are written. */
INLINE void tile_of(const int rows, const int vecs, Left a, int left, int depth, const float *b, int64_t apart, const Target *t) {
    Vec s[TILE_ROWS][2];
    const Vec first = t->bias ? vec_load(t->bias) : vec_all(0.f);
    const Vec second = t->bias && vecs == 2 ? vec_load(t->bias + LANES) : first;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) s[r][0] = first, s[r][1] = second;
    multiply(rows, vecs, a, left, depth, b, apart, s);
    float *y = t->y;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, y += t->stride) {
        if (r >= left) break;
        store_row(vecs, s[r], t, r, y);
    }
}

/* The tile of these rows and of at most PANEL columns, if `left` rows and `columns` are left. */
static inline void tile(Left a, int left, int columns, int depth, const float *b, int64_t apart, const Target *t) {
    if (PANEL > SIDE && columns <= SIDE) {
        if (left > SOME_ROWS) tile_of(TILE_ROWS, 1, a, left, depth, b, apart, t);
        else tile_of(SOME_ROWS, 1, a, left, depth, b, apart, t);
    } else if (left > SOME_ROWS) tile_of(TILE_ROWS, 2, a, left, depth, b, apart, t);
    else tile_of(SOME_ROWS, 2, a, left, depth, b, apart, t);
}

static inline Left rows_from(Left a, int row) { return (Left){a.at + row * a.row, a.row, a.step}; }

/* y [rows][columns] = x @ weights.T + bias, of at most BLOCK rows; `onto`: added to what y holds. `room`: BLOCK * DEPTH. */
static void product(const TiledWeights *w, const float *x, int64_t stride, int rows, float *y, int onto, float *room) {
    for (int at = 0; at < w->depth; at += DEPTH) {
        const int depth = w->depth - at < DEPTH ? w->depth - at : DEPTH;
        const Left a = left_rows(x + at, stride, rows, depth, room);
        for (int n = 0; n < w->columns; n += PANEL) {
            const float *b = (const float *)w->tiles + ((int64_t)n * w->depth + (int64_t)at * SIDE);
            Target to = {y + n, w->columns, at ? NULL : w->bias + n, NULL, onto || at};
            for (int t = 0; t < rows; t += TILE_ROWS, to.y += TILE_ROWS * to.stride) {
                for (int side = PANEL; side < 2 * PANEL; side += SIDE) /* of the next panel */
                    ask_for(b + (int64_t)side * w->depth, sizeof(float) * SIDE * depth, t, rows);
                tile(rows_from(a, t), rows - t, w->columns - n, depth, b, apart_of(w->depth), &to);
            }
        }
    }
}

/* exp(x) for x <= 88, within 2 units of the last place: 2^n * e^r with |r| <= ln(2) / 2. */
static inline Vec exponential(Vec x) {
    x = vec_max(x, vec_all(-87.f));
    const Vec rounds = vec_all(0x1.8p23f); /* a sum with it has n in its lowest bits */
    const Vec sum = vec_fma(rounds, x, vec_all(1.44269504f)), n = sum - rounds;
    const Vec r = vec_fma(vec_fma(x, n, vec_all(-0.693145752f)), n, vec_all(-1.42860677e-6f));
    /* 1 + r + r^2 (1/2 + r/6 + r^2 (1/24 + r/120 + r^2/720)): short chains, because each waits for its own sums */
    const Vec square = r * r, low = vec_fma(vec_all(1.f / 2), r, vec_all(1.f / 6));
    Vec p = vec_fma(vec_fma(vec_all(1.f / 24), r, vec_all(1.f / 120)), square, vec_all(1.f / 720));
    p = vec_fma(vec_all(1.f) + r, vec_fma(low, p, square), square);
    return vec_scale(p, sum);
}

/* x / 2 + x * erf(x / sqrt(2)) / 2. Half of the last factor is c * p(c^2) / q(c^2) of c = x within +-5.23, where both are
 * of degree 5: a least-squares fit whose weights were moved until all its errors were alike, 7e-9 at most. */
static inline Vec gelu_of(Vec x) {
    const Vec edge = vec_all(5.2325902f), c = vec_max(vec_min(x, edge), -edge), u = c * c;
    Vec p = vec_fma(vec_all(6.39749351e-06f), u, vec_all(2.45080827e-08f));
    Vec q = vec_fma(vec_all(7.07540094e-05f), u, vec_all(1.25170027e-06f));
    p = vec_fma(vec_all(0.000157935297f), p, u), q = vec_fma(vec_all(0.00182317197f), q, u);
    p = vec_fma(vec_all(0.00461455807f), p, u), q = vec_fma(vec_all(0.0279926546f), q, u);
    p = vec_fma(vec_all(0.0326668397f), p, u), q = vec_fma(vec_all(0.248549923f), q, u);
    p = vec_fma(vec_all(0.398942262f), p, u), q = vec_fma(vec_all(1.f), q, u);
    return vec_fma(x * vec_all(0.5f), x, p * c / q);
}

/* In place; `count` is a multiple of SIDE. */
static void gelu(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += SIDE)
        for (int v = 0; v < SIDE; v += LANES) vec_store(x + i + v, gelu_of(vec_load(x + i + v)));
}

/* By mean and variance; y may be x. */
static void layer_norm(const float *x, float *y, int rows, int width, const float *weight, const float *bias, float eps) {
    for (int t = 0; t < rows; t++, x += width, y += width) {
        Vec sum = vec_all(0.f), squares = sum;
        for (int i = 0; i < width; i += LANES) sum = sum + vec_load(x + i);
        const Vec mean = vec_all(vec_sum(sum) / (float)width);
        for (int i = 0; i < width; i += LANES) {
            const Vec apart = vec_load(x + i) - mean;
            squares = vec_fma(squares, apart, apart);
        }
        const Vec scale = vec_all(1.f / sqrtf(vec_sum(squares) / (float)width + eps));
        for (int i = 0; i < width; i += LANES) {
            const Vec unit = (vec_load(x + i) - mean) * scale;
            vec_store(y + i, vec_fma(vec_load(bias + i), unit, vec_load(weight + i)));
        }
    }
}

#endif
#endif
