/* Products of `float_tiles.h` with factors of 16 bits: twice as many in an instruction, where NEON has them.
 *
 *     a: 8 rows x depth, as [depth][8]      b: 16 columns x depth, as [depth][16]      a tile: 8 x 16
 *
 * Sums of 64 products stay in 16 bits; they are added up in 32. So a product is off by about a thousandth of itself,
 * and numbers beyond 65504 become infinite, as with every use of this type.
 */
#ifndef CAIRN_HALF_TILES_H
#define CAIRN_HALF_TILES_H
#include "float_tiles.h"

#if defined(HAS_FLOAT_TILES) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define HAS_HALF_TILES

#define HALF_SIDE 16 /* columns of a tile */
#define RUN 64       /* products that are added up in 16 bits */

/* sums = sums + a.T @ b */
static inline void multiply_half(int depth, const float16_t *a, const float16_t *b, float sums[SIDE][HALF_SIDE]) {
/* GCC would spread each of the 8 numbers over a register first, which takes as long as a product. */
#define FMA(sum, b, lane) __asm__("fmla %0.8h, %1.8h, %2.h[" #lane "]" : "+w"(sum) : "w"(b), "x"(rows))
#define ROW(r) FMA(s[r][0], b0, r); FMA(s[r][1], b1, r);
    for (int at = 0; at < depth; at += RUN) {
        const int end = depth - at < RUN ? depth - at : RUN;
        float16x8_t s[SIDE][2];
        for (int r = 0; r < SIDE; r++) s[r][0] = s[r][1] = vdupq_n_f16(0);
        for (int k = 0; k < end; k++, a += SIDE, b += HALF_SIDE) {
            const float16x8_t rows = vld1q_f16(a), b0 = vld1q_f16(b), b1 = vld1q_f16(b + 8);
            ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
        }
        for (int r = 0; r < SIDE; r++)
            for (int h = 0; h < 2; h++) {
                float *to = sums[r] + 8 * h;
                vst1q_f32(to, vaddq_f32(vld1q_f32(to), vcvt_f32_f16(vget_low_f16(s[r][h]))));
                vst1q_f32(to + 4, vaddq_f32(vld1q_f32(to + 4), vcvt_high_f32_f16(s[r][h])));
            }
    }
#undef ROW
#undef FMA
}

/* Tiles of float32, [rows / 8][depth][8], in 16 bits and in place: what is read is behind what is written. */
static void to_half(float *tiles, int rows, int depth) {
    float16_t *to = (float16_t *)tiles;
    for (int64_t i = 0; i < (int64_t)(rows + SIDE - 1) / SIDE * SIDE * depth; i += 8) {
        const Four low = vld1q_f32(tiles + i), high = vld1q_f32(tiles + i + 4);
        vst1q_f16(to + i, vcvt_high_f16_f32(vcvt_f16_f32(low), high));
    }
}

/* As `product`, with weights [columns / 16][depth][16] of 16 bits. */
static void half_product(const TiledWeights *w, const float *x, int64_t stride, int rows, float *y, int onto, float *tiles) {
    for (int at = 0; at < w->depth; at += DEPTH) {
        const int depth = w->depth - at < DEPTH ? w->depth - at : DEPTH, adds = onto || at;
        to_tiles(x + at, stride, rows, depth, tiles);
        to_half(tiles, rows, depth);
        for (int n = 0; n < w->columns; n += HALF_SIDE) {
            const float16_t *b = (const float16_t *)w->tiles + ((int64_t)n * w->depth + (int64_t)at * HALF_SIDE);
            for (int t = 0; t < rows; t += SIDE) {
                float sums[SIDE][HALF_SIDE];
                for (int r = 0; r < SIDE; r++) {
                    if (at) memset(sums[r], 0, sizeof sums[r]);
                    else memcpy(sums[r], w->bias + n, sizeof sums[r]);
                }
                multiply_half(depth, (const float16_t *)tiles + (int64_t)t * depth, b, sums);
                for (int r = 0; r < SIDE && t + r < rows; r++) {
                    float *out = y + (int64_t)(t + r) * w->columns + n;
                    for (int i = 0; i < HALF_SIDE; i += 4) {
                        const Four sum = vld1q_f32(sums[r] + i);
                        vst1q_f32(out + i, adds ? vaddq_f32(sum, vld1q_f32(out + i)) : sum);
                    }
                }
            }
        }
    }
}

#endif
#endif
