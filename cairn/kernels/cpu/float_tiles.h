/* Products in float32 by tiles of 8 x 8 sums that stay in registers, and what stands between them, on NEON.
 *
 *     a: 8 rows x depth, as [depth][8]      b: 8 columns x depth, as [depth][8]      a tile: 8 x 8
 *
 * TiledWeights are kept in the order of b, [columns / 8][depth][8]; rows of x are brought into that of a, 64 at a time. One
 * thread computes all of it: `encoder.h` says who computes which rows.
 */
#ifndef CAIRN_FLOAT_TILES_H
#define CAIRN_FLOAT_TILES_H
#if defined(__aarch64__)
#define HAS_FLOAT_TILES

#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIDE 8     /* of a tile: 16 of the 32 registers hold sums */
#define BLOCK 64   /* rows of x that are multiplied with the weights before the next ones */
#define DEPTH 2048 /* of a and b at once: rows of that width stay in the second-level cache */
#define AHEAD 32   /* numbers of depth that a is asked for before they are multiplied */

typedef float32x4_t Four;

typedef struct {
    const void *tiles; /* [columns / 8][depth][8], or as `half_tiles.h` has them */
    const float *bias;
    int32_t depth, columns;
} TiledWeights;

/* Rows that fill tiles of either type. */
static inline int64_t whole_tiles(int rows) { return (rows + 15) / 16 * 16; }

static inline void clear(Four s[SIDE][2]) {
    for (int r = 0; r < SIDE; r++) s[r][0] = s[r][1] = vdupq_n_f32(0.f);
}

/* s = s + a.T @ b */
static inline void multiply(int depth, const float *a, const float *b, Four s[SIDE][2]) {
#define ROW(r, four, lane)                            \
    s[r][0] = vfmaq_laneq_f32(s[r][0], b0, four, lane); \
    s[r][1] = vfmaq_laneq_f32(s[r][1], b1, four, lane);
    for (int k = 0; k < depth; k++, a += SIDE, b += SIDE) {
        __builtin_prefetch(a + AHEAD * SIDE); /* b is in the first-level cache after its first tile */
        const Four a0 = vld1q_f32(a), a1 = vld1q_f32(a + 4), b0 = vld1q_f32(b), b1 = vld1q_f32(b + 4);
        ROW(0, a0, 0) ROW(1, a0, 1) ROW(2, a0, 2) ROW(3, a0, 3)
        ROW(4, a1, 0) ROW(5, a1, 1) ROW(6, a1, 2) ROW(7, a1, 3)
    }
}

/* As `multiply`, of the first 4 rows of a. */
static inline void multiply_four(int depth, const float *a, const float *b, Four s[SIDE / 2][2]) {
    for (int k = 0; k < depth; k++, a += SIDE, b += SIDE) {
        const Four a0 = vld1q_f32(a), b0 = vld1q_f32(b), b1 = vld1q_f32(b + 4);
        ROW(0, a0, 0) ROW(1, a0, 1) ROW(2, a0, 2) ROW(3, a0, 3)
    }
}
#undef ROW

/* 4 x 4 numbers of rows [4][stride] as columns [4][SIDE]. */
static inline void transpose_four(const float *rows, int64_t stride, float *columns) {
    const Four r0 = vld1q_f32(rows), r1 = vld1q_f32(rows + stride);
    const Four r2 = vld1q_f32(rows + 2 * stride), r3 = vld1q_f32(rows + 3 * stride);
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), b = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), d = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
    vst1q_f32(columns, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
    vst1q_f32(columns + SIDE, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
    vst1q_f32(columns + 2 * SIDE, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
    vst1q_f32(columns + 3 * SIDE, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
}

/* Rows [rows][stride] as tiles [rows / 8][depth][8]; missing rows of the last tile are zero. Depth is a multiple of 4. */
static void to_tiles(const float *x, int64_t stride, int rows, int depth, float *tiles) {
    for (int t = 0; t < rows; t += SIDE, tiles += (int64_t)SIDE * depth) {
        if (rows - t >= SIDE) {
            for (int k = 0; k < depth; k += 4) {
                transpose_four(x + t * stride + k, stride, tiles + (int64_t)k * SIDE);
                transpose_four(x + (t + 4) * stride + k, stride, tiles + (int64_t)k * SIDE + 4);
            }
            continue;
        }
        memset(tiles, 0, sizeof(float) * SIDE * (size_t)depth);
        for (int r = 0; r < rows - t; r++)
            for (int k = 0; k < depth; k++) tiles[(int64_t)k * SIDE + r] = x[(t + r) * stride + k];
    }
}

/* y [rows][8 columns] = or += sums; `most` is a constant, else the tile lies in memory. */
static inline __attribute__((always_inline)) void store_tile(Four s[][2], int most, int rows, float *y, int64_t stride, int adds) {
    for (int r = 0; r < most; r++, y += stride) {
        if (r >= rows) break;
        if (adds) s[r][0] = vaddq_f32(s[r][0], vld1q_f32(y)), s[r][1] = vaddq_f32(s[r][1], vld1q_f32(y + 4));
        vst1q_f32(y, s[r][0]), vst1q_f32(y + 4, s[r][1]);
    }
}

/* y [rows][columns] = x @ weights.T + bias, of at most BLOCK rows; `onto`: added to what y holds. */
static void product(const TiledWeights *w, const float *x, int64_t stride, int rows, float *y, int onto, float *tiles) {
    for (int at = 0; at < w->depth; at += DEPTH) {
        const int depth = w->depth - at < DEPTH ? w->depth - at : DEPTH, adds = onto || at;
        to_tiles(x + at, stride, rows, depth, tiles);
        for (int n = 0; n < w->columns; n += SIDE) {
            const float *b = (const float *)w->tiles + ((int64_t)n * w->depth + (int64_t)at * SIDE);
            const Four zero = vdupq_n_f32(0.f);
            const Four bias0 = at ? zero : vld1q_f32(w->bias + n), bias1 = at ? zero : vld1q_f32(w->bias + n + 4);
            for (int t = 0; t < rows; t += SIDE) {
                const float *a = tiles + (int64_t)t * depth;
                float *to = y + (int64_t)t * w->columns + n;
                Four s[SIDE][2];
                for (int r = 0; r < SIDE; r++) s[r][0] = bias0, s[r][1] = bias1;
                if (rows - t <= SIDE / 2) {
                    multiply_four(depth, a, b, s);
                    store_tile(s, SIDE / 2, rows - t, to, w->columns, adds);
                    break;
                }
                multiply(depth, a, b, s);
                store_tile(s, SIDE, rows - t, to, w->columns, adds);
            }
        }
    }
}

/* exp(x) for x <= 88, within 2 units of the last place: 2^n * e^r with |r| <= ln(2) / 2. */
static inline Four exponential(Four x) {
    x = vmaxq_f32(x, vdupq_n_f32(-87.f));
    const Four rounds = vdupq_n_f32(0x1.8p23f); /* a sum with it has n in its lowest bits */
    const Four sum = vfmaq_n_f32(rounds, x, 1.44269504f), n = vsubq_f32(sum, rounds);
    const Four r = vfmsq_n_f32(vfmsq_n_f32(x, n, 0.693145752f), n, 1.42860677e-6f);
    /* 1 + r + r^2 (1/2 + r/6 + r^2 (1/24 + r/120 + r^2/720)): short chains, because each waits for its own sums */
    const Four square = vmulq_f32(r, r), low = vfmaq_n_f32(vdupq_n_f32(1.f / 2), r, 1.f / 6);
    Four p = vfmaq_n_f32(vfmaq_n_f32(vdupq_n_f32(1.f / 24), r, 1.f / 120), square, 1.f / 720);
    p = vfmaq_f32(vaddq_f32(vdupq_n_f32(1.f), r), vfmaq_f32(low, p, square), square);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vreinterpretq_s32_f32(sum), 23)));
}

/* x / 2 + x * erf(x / sqrt(2)) / 2. Half of the last factor is c * p(c^2) / q(c^2) of c = x within +-5.23, where both are
 * of degree 5: a least-squares fit whose weights were moved until all its errors were alike, 7e-9 at most. */
static inline Four gelu_of(Four x) {
    const Four edge = vdupq_n_f32(5.2325902f), c = vmaxq_f32(vminq_f32(x, edge), vnegq_f32(edge)), u = vmulq_f32(c, c);
    Four p = vfmaq_n_f32(vdupq_n_f32(6.39749351e-06f), u, 2.45080827e-08f);
    Four q = vfmaq_n_f32(vdupq_n_f32(7.07540094e-05f), u, 1.25170027e-06f);
    p = vfmaq_f32(vdupq_n_f32(0.000157935297f), p, u), q = vfmaq_f32(vdupq_n_f32(0.00182317197f), q, u);
    p = vfmaq_f32(vdupq_n_f32(0.00461455807f), p, u), q = vfmaq_f32(vdupq_n_f32(0.0279926546f), q, u);
    p = vfmaq_f32(vdupq_n_f32(0.0326668397f), p, u), q = vfmaq_f32(vdupq_n_f32(0.248549923f), q, u);
    p = vfmaq_f32(vdupq_n_f32(0.398942262f), p, u), q = vfmaq_f32(vdupq_n_f32(1.f), q, u);
    return vfmaq_f32(vmulq_n_f32(x, 0.5f), x, vdivq_f32(vmulq_f32(p, c), q));
}

/* In place; `count` is a multiple of 8. */
static void gelu(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) {
        const Four low = gelu_of(vld1q_f32(x + i)), high = gelu_of(vld1q_f32(x + i + 4));
        vst1q_f32(x + i, low), vst1q_f32(x + i + 4, high);
    }
}

/* By mean and variance; y may be x. */
static void layer_norm(const float *x, float *y, int rows, int width, const float *weight, const float *bias, float eps) {
    for (int t = 0; t < rows; t++, x += width, y += width) {
        Four sum = vdupq_n_f32(0.f), squares = sum;
        for (int i = 0; i < width; i += 4) sum = vaddq_f32(sum, vld1q_f32(x + i));
        const Four mean = vdupq_n_f32(vaddvq_f32(sum) / (float)width);
        for (int i = 0; i < width; i += 4) {
            const Four apart = vsubq_f32(vld1q_f32(x + i), mean);
            squares = vfmaq_f32(squares, apart, apart);
        }
        const float scale = 1.f / sqrtf(vaddvq_f32(squares) / (float)width + eps);
        for (int i = 0; i < width; i += 4) {
            const Four unit = vmulq_n_f32(vsubq_f32(vld1q_f32(x + i), mean), scale);
            vst1q_f32(y + i, vfmaq_f32(vld1q_f32(bias + i), unit, vld1q_f32(weight + i)));
        }
    }
}

#endif
#endif
