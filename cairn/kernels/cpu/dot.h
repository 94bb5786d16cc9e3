/* Dot products of one unpacked row of weights with rows of activations that are rounded to 8 bits.
 *
 *     y = sum over groups of 16:  scale_w * scale_x * (levels . rounded) + offset_w * scale_x * sum(rounded)
 *
 * Integers are multiplied exactly; groups are summed in float32. One form for each instruction set, and one in plain C.
 */
#ifndef CAIRN_DOT_H
#define CAIRN_DOT_H

#include "blocks.h"

#define SHARED 32 /* activations that share a scale */
#define MOST_TOGETHER 4

/* One row of activations; padded with zeros up to a multiple of STRIDE. */
typedef struct {
    int8_t *rounded;
    float *scale; /* of each group */
    float *sum;   /* scale * sum(rounded) of each group */
} Activation;

#if defined(__AVX512BW__) && defined(__AVX512DQ__)

static inline __m512i products(__m512i level, __m512i x) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), level, x);
#else
    return _mm512_madd_epi16(_mm512_maddubs_epi16(level, x), _mm512_set1_epi16(1));
#endif
}

static inline __attribute__((always_inline)) void dot_of(Row w, const Activation *x, int count, int columns,
                                                         int is_signed, float *y) {
    const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    __m512 sum[MOST_TOGETHER], scale[MOST_TOGETHER];
    for (int j = 0; j < count; j++) sum[j] = _mm512_setzero_ps();
    for (int start = 0; start < columns; start += STRIDE) {
        int group = start / GROUP, end = columns < start + STRIDE ? columns : start + STRIDE;
        __m512 scale_w = _mm512_loadu_ps(w.scale + group), offset_w = _mm512_loadu_ps(w.offset + group);
        for (int j = 0; j < count; j++) {
            scale[j] = _mm512_mul_ps(scale_w, _mm512_loadu_ps(x[j].scale + group));
            if (!is_signed) sum[j] = _mm512_fmadd_ps(offset_w, _mm512_loadu_ps(x[j].sum + group), sum[j]);
        }
        __m512i lane = lanes;
        for (int k = start; k < end; k += 64, lane = _mm512_add_epi32(lane, _mm512_set1_epi32(4))) {
            __m512i level = _mm512_loadu_si512(w.level + k);
            __mmask64 negative = is_signed ? _mm512_movepi8_mask(level) : 0;
            if (is_signed) level = _mm512_abs_epi8(level);
            for (int j = 0; j < count; j++) {
                __m512i rounded = _mm512_loadu_si512(x[j].rounded + k);
                if (is_signed) rounded = _mm512_mask_sub_epi8(rounded, negative, _mm512_setzero_si512(), rounded);
                __m512 dot = _mm512_cvtepi32_ps(products(level, rounded));
                sum[j] = _mm512_fmadd_ps(dot, _mm512_permutexvar_ps(lane, scale[j]), sum[j]);
            }
        }
    }
    for (int j = 0; j < count; j++) y[j] = _mm512_reduce_add_ps(sum[j]);
}

#elif defined(__AVX2__) && defined(__FMA__)

static inline __attribute__((always_inline)) void dot_of(Row w, const Activation *x, int count, int columns,
                                                         int is_signed, float *y) {
    __m256 sum[MOST_TOGETHER], scale[MOST_TOGETHER];
    for (int j = 0; j < count; j++) sum[j] = _mm256_setzero_ps();
    for (int start = 0; start < columns; start += STRIDE / 2) {
        int group = start / GROUP, end = columns < start + STRIDE / 2 ? columns : start + STRIDE / 2;
        __m256 scale_w = _mm256_loadu_ps(w.scale + group), offset_w = _mm256_loadu_ps(w.offset + group);
        for (int j = 0; j < count; j++) {
            scale[j] = _mm256_mul_ps(scale_w, _mm256_loadu_ps(x[j].scale + group));
            if (!is_signed) sum[j] = _mm256_fmadd_ps(offset_w, _mm256_loadu_ps(x[j].sum + group), sum[j]);
        }
        __m256i lane = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
        for (int k = start; k < end; k += 32, lane = _mm256_add_epi32(lane, _mm256_set1_epi32(2))) {
            __m256i signs = _mm256_loadu_si256((const __m256i *)(w.level + k));
            __m256i level = is_signed ? _mm256_abs_epi8(signs) : signs;
            for (int j = 0; j < count; j++) {
                __m256i rounded = _mm256_loadu_si256((const __m256i *)(x[j].rounded + k));
                if (is_signed) rounded = _mm256_sign_epi8(rounded, signs);
                __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(level, rounded), _mm256_set1_epi16(1));
                __m256 factor = _mm256_permutevar8x32_ps(scale[j], lane);
                sum[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sum[j]);
            }
        }
    }
    for (int j = 0; j < count; j++) {
        __m128 low = _mm_add_ps(_mm256_castps256_ps128(sum[j]), _mm256_extractf128_ps(sum[j], 1));
        low = _mm_add_ps(low, _mm_movehl_ps(low, low));
        y[j] = _mm_cvtss_f32(_mm_add_ss(low, _mm_movehdup_ps(low)));
    }
}

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

static inline __attribute__((always_inline)) void dot_of(Row w, const Activation *x, int count, int columns,
                                                         int is_signed, float *y) {
    (void)is_signed; /* levels below 64 are the same with a sign */
    float32x4_t sum[MOST_TOGETHER];
    for (int j = 0; j < count; j++) sum[j] = vdupq_n_f32(0);
    for (int k = 0; k < columns; k += GROUP) {
        int group = k / GROUP;
        int8x16_t level = vld1q_s8((const int8_t *)w.level + k);
        for (int j = 0; j < count; j++) {
            int32x4_t dot = vdotq_s32(vdupq_n_s32(0), level, vld1q_s8(x[j].rounded + k));
            sum[j] = vfmaq_n_f32(sum[j], vcvtq_f32_s32(dot), w.scale[group] * x[j].scale[group]);
        }
    }
    for (int j = 0; j < count; j++) {
        float offsets = 0;
        for (int group = 0; group < columns / GROUP; group++) offsets += w.offset[group] * x[j].sum[group];
        y[j] = vaddvq_f32(sum[j]) + offsets;
    }
}

#else

static inline void dot_of(Row w, const Activation *x, int count, int columns, int is_signed, float *y) {
    (void)is_signed;
    const int8_t *level = (const int8_t *)w.level; /* levels below 64 are the same with a sign */
    for (int j = 0; j < count; j++) {
        float sum = 0;
        for (int group = 0; group < columns / GROUP; group++) {
            int dot = 0;
            for (int i = GROUP * group; i < GROUP * (group + 1); i++) dot += level[i] * x[j].rounded[i];
            sum += w.scale[group] * x[j].scale[group] * (float)dot + w.offset[group] * x[j].sum[group];
        }
        y[j] = sum;
    }
}

#endif

/* The counts are constants where they are used, so that sums stay in registers. */
static void dot(Row w, const Activation *x, int count, int columns, int is_signed, float *y) {
    int j = 0;
    for (; j + 4 <= count; j += 4)
        if (is_signed) dot_of(w, x + j, 4, columns, 1, y + j);
        else dot_of(w, x + j, 4, columns, 0, y + j);
    for (; j + 2 <= count; j += 2)
        if (is_signed) dot_of(w, x + j, 2, columns, 1, y + j);
        else dot_of(w, x + j, 2, columns, 0, y + j);
    for (; j < count; j++)
        if (is_signed) dot_of(w, x + j, 1, columns, 1, y + j);
        else dot_of(w, x + j, 1, columns, 0, y + j);
}

/* Rounds a row to 8 bits, 32 values to a scale. */
static void round_row(const float *restrict x, int columns, Activation out) {
    for (int k = 0; k < columns; k += SHARED) {
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < SHARED; i++) largest = __builtin_fmaxf(largest, __builtin_fabsf(x[k + i]));
        float scale = largest / 127.f, inverse = largest > 0 ? 127.f / largest : 0.f;
        for (int half = 0; half < SHARED / GROUP; half++) {
            int sum = 0, at = k + GROUP * half;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < GROUP; i++) {
                float value = x[at + i] * inverse;
                int level = (int)(value + (value < 0 ? -0.5f : 0.5f));
                out.rounded[at + i] = (int8_t)level;
                sum += level;
            }
            out.scale[at / GROUP] = scale, out.sum[at / GROUP] = scale * (float)sum;
        }
    }
}

#endif
