/* Weights of 16 bits, [columns / 16][depth][16]. On x86 they are widened: products and sums are those of `float_tiles.h`. NEON
 * multiplies them as they are, twice as many in an instruction:
 *
 *     a: 8 rows x depth, as [depth][8]      b: 16 columns x depth, as [depth][16]      a tile: 8 x 16
 *
 * Sums are in 16 bits, too, of HALF_DEPTH products at most, and in 32 bits beyond: a conversion takes as long as four
 * products. RUN products are summed up from zero before they are added to those before them: two short sums round less
 * than one long one. So a product is off by about a thousandth of itself, and sums beyond 65504 become infinite.
 */
#ifndef CAIRN_HALF_TILES_H
#define CAIRN_HALF_TILES_H
#include "float_tiles.h"

#ifdef HAS_HALF
#define HALF_SIDE 16 /* columns of weights that lie together */

#if defined(__aarch64__)
#define HAS_HALF_PRODUCTS
#define HALF_DEPTH 512 /* of a and b at once */
#define RUN 32         /* products that are added up from zero */

typedef float16_t HalfTile[SIDE][HALF_SIDE];

/* sums = a.T @ b, of a whose rows of 8 are `step` apart. A function of its own: inlined, GCC keeps its caller's numbers in
 * registers and these sums in memory. */
static __attribute__((noinline)) void multiply_half(int depth, const float16_t *a, int step, const float16_t *b, HalfTile sums) {
/* GCC would spread each of the 8 numbers over a register first, which takes as long as a product. */
#define FMA(sum, b, lane) __asm__("fmla %0.8h, %1.8h, %2.h[" #lane "]" : "+w"(sum) : "w"(b), "x"(rows))
#define ROW(r) FMA(s[r][0], b0, r); FMA(s[r][1], b1, r);
    for (int at = 0; at < depth; at += RUN) {
        const int end = depth - at < RUN ? depth - at : RUN;
        float16x8_t s[SIDE][2];
        for (int r = 0; r < SIDE; r++) s[r][0] = s[r][1] = vdupq_n_f16(0);
        for (int k = 0; k < end; k++, a += step, b += HALF_SIDE) {
            const float16x8_t rows = vld1q_f16(a), b0 = vld1q_f16(b), b1 = vld1q_f16(b + 8);
            ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
        }
        for (int r = 0; r < SIDE; r++)
            for (int h = 0; h < 2; h++) {
                float16_t *to = sums[r] + 8 * h;
                vst1q_f16(to, at ? vaddq_f16(vld1q_f16(to), s[r][h]) : s[r][h]);
            }
    }
#undef ROW
#undef FMA
}

static inline float16x8_t halves_of(const float *x) {
    return vcvt_high_f16_f32(vcvt_f16_f32(vld1q_f32(x)), vld1q_f32(x + 4));
}

static inline float float_of(Half x) { return (float)x; }

/* 16 numbers that follow each other. */
static inline void halve_side(const float *x, Half *to) { vst1q_f16(to, halves_of(x)), vst1q_f16(to + 8, halves_of(x + 8)); }

/* Tiles of float32, [rows / 8][depth][8], in 16 bits and in place: what is read is behind what is written. */
static void to_half(float *tiles, int rows, int depth) {
    float16_t *to = (float16_t *)tiles;
    const int64_t count = (int64_t)(rows + SIDE - 1) / SIDE * SIDE * depth;
    for (int64_t i = 0; i < count; i += 8) vst1q_f16(to + i, halves_of(tiles + i));
}

/* Rows as tiles of 16 bits in the order of b, [rows / 16][depth][16]; missing rows are zero. `room`: 16 * depth floats. */
static void to_wide_half(const float *x, int64_t stride, int rows, int depth, float16_t *tiles, float *room) {
    for (int t = 0; t < rows; t += HALF_SIDE) {
        const int left = rows - t < HALF_SIDE ? rows - t : HALF_SIDE;
        if (left <= SIDE) memset(room + SIDE * depth, 0, sizeof(float) * SIDE * (size_t)depth);
        to_tiles(x + t * stride, stride, left, depth, room);
        for (int k = 0; k < depth; k++, tiles += HALF_SIDE) {
            vst1q_f16(tiles, halves_of(room + k * SIDE));
            vst1q_f16(tiles + SIDE, halves_of(room + (depth + k) * SIDE));
        }
    }
}

/* y [rows][16 columns] = or += sums and, where there is one, a bias. */
static inline void store_half(HalfTile sums, const float *bias, int rows, float *y, int64_t stride, int adds) {
    for (int r = 0; r < rows; r++, y += stride)
        for (int i = 0; i < HALF_SIDE; i += 4) {
            Vec sum = vcvt_f32_f16(vld1_f16(sums[r] + i));
            if (bias) sum = vaddq_f32(sum, vld1q_f32(bias + i));
            if (adds) sum = vaddq_f32(sum, vld1q_f32(y + i));
            vst1q_f32(y + i, sum);
        }
}

/* As `product`, with weights [columns / 16][depth][16] of 16 bits. */
static void half_product(const TiledWeights *w, const float *x, int64_t stride, int rows, float *y, int onto, float *tiles) {
    for (int at = 0; at < w->depth; at += HALF_DEPTH) {
        const int depth = w->depth - at < HALF_DEPTH ? w->depth - at : HALF_DEPTH;
        to_tiles(x + at, stride, rows, depth, tiles);
        to_half(tiles, rows, depth);
        for (int n = 0; n < w->columns; n += HALF_SIDE) {
            const float16_t *b = (const float16_t *)w->tiles + ((int64_t)n * w->depth + (int64_t)at * HALF_SIDE);
            for (int t = 0; t < rows; t += SIDE) {
                const int left = rows - t < SIDE ? rows - t : SIDE;
                HalfTile sums;
                multiply_half(depth, (const float16_t *)tiles + (int64_t)t * depth, SIDE, b, sums);
                store_half(sums, at ? NULL : w->bias + n, left, y + (int64_t)t * w->columns + n, w->columns, onto || at);
            }
        }
    }
}

#else

static inline float float_of(Half x) { return _cvtsh_ss(x); }

/* 16 numbers that follow each other. */
static inline void halve_side(const float *x, Half *to) {
    for (int v = 0; v < HALF_SIDE; v += LANES) vec_to_half(to + v, vec_load(x + v));
}

/* Rows as tiles of 16 bits, [rows / 16][depth][16]; missing rows are zero. `room`: 16 * depth floats. */
static void to_wide_half(const float *x, int64_t stride, int rows, int depth, Half *tiles, float *room) {
    for (int t = 0; t < rows; t += HALF_SIDE) {
        to_tiles(x + t * stride, stride, rows - t < HALF_SIDE ? rows - t : HALF_SIDE, depth, room);
        for (int k = 0; k < depth; k++, tiles += HALF_SIDE) halve_side(room + k * HALF_SIDE, tiles);
    }
}

/* As `product`. A panel of weights is widened once for all rows; `room` holds it. */
static void half_product(const TiledWeights *w, const float *x, int64_t stride, int rows, float *y, int onto, float *room) {
    for (int at = 0; at < w->depth; at += DEPTH) {
        const int depth = w->depth - at < DEPTH ? w->depth - at : DEPTH;
        for (int n = 0; n < w->columns; n += PANEL) {
            const int columns = w->columns - n < PANEL ? w->columns - n : PANEL;
            for (int side = 0; side < columns; side += SIDE) {
                const Half *from = (const Half *)w->tiles + ((int64_t)(n + side) * w->depth + (int64_t)at * SIDE);
                float *to = room + side * depth;
                for (int64_t i = 0; i < (int64_t)SIDE * depth; i += LANES) vec_store(to + i, vec_from_half(from + i));
            }
            Target to = {y + n, w->columns, at ? NULL : w->bias + n, NULL, onto || at};
            const Half *next = (const Half *)w->tiles + ((int64_t)(n + PANEL) * w->depth + (int64_t)at * SIDE);
            for (int t = 0; t < rows; t += TILE_ROWS, to.y += TILE_ROWS * to.stride) {
                for (int side = 0; side < PANEL; side += SIDE)
                    ask_for(next + (int64_t)side * w->depth, sizeof(Half) * SIDE * depth, t, rows);
                tile((Left){x + at + t * stride, stride, 1}, rows - t, columns, depth, room, apart_of(depth), &to);
            }
        }
    }
}

#endif
#endif
#endif
