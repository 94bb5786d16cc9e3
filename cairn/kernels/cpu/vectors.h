/* A vector of floats, and the operations that the layers of encoders and of speech are written in.
 *
 *     NEON  4 numbers        AVX2 with FMA and F16C  8        AVX-512  16
 *
 * Its type has + - * / of its own. Elsewhere HAS_VECTORS is not defined, and there are no such layers.
 */
#ifndef CAIRN_VECTORS_H
#define CAIRN_VECTORS_H
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* The larger one; b where a is not a number. This vectorises: C's function is an instruction on ARM and a call on x86. */
static inline float larger_of(float a, float b) {
#if defined(__aarch64__)
    return __builtin_fmaxf(a, b);
#else
    return a > b ? a : b;
#endif
}

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#define HAS_VECTORS

typedef float32x4_t Vec;
INLINE Vec vec_load(const float *at) { return vld1q_f32(at); }
INLINE void vec_store(float *at, Vec v) { vst1q_f32(at, v); }
INLINE Vec vec_all(float x) { return vdupq_n_f32(x); }
INLINE Vec vec_fma(Vec sum, Vec a, Vec b) { return vfmaq_f32(sum, a, b); }
INLINE Vec vec_max(Vec a, Vec b) { return vmaxq_f32(a, b); }
INLINE Vec vec_min(Vec a, Vec b) { return vminq_f32(a, b); }
INLINE float vec_sum(Vec v) { return vaddvq_f32(v); }
INLINE float vec_top(Vec v) { return vmaxvq_f32(v); }
/* v * 2^n, of a power whose lowest bits hold n */
INLINE Vec vec_scale(Vec v, Vec power) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), vshlq_n_s32(vreinterpretq_s32_f32(power), 23)));
}

/* Four numbers of which each is multiplied with a vector. */
typedef float32x4_t FourFactors;
INLINE FourFactors four_load(const float *at) { return vld1q_f32(at); }
INLINE FourFactors four_first(const float *at) { return vdupq_n_f32(*at); }
#define four_fma(sum, v, four, lane) vfmaq_laneq_f32(sum, v, four, lane)

#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
#define HAS_HALF
typedef float16_t Half;
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAS_VECTORS
#define HAS_HALF
typedef uint16_t Half;

/* As on NEON, but an operand in memory is spread over a register as quickly as it is loaded. */
typedef const float *FourFactors;
INLINE FourFactors four_load(const float *at) { return at; }
INLINE FourFactors four_first(const float *at) { return at; }
#define four_fma(sum, v, four, lane) vec_fma(sum, v, vec_all((four)[lane]))

#if defined(__AVX512F__)
typedef __m512 Vec;
INLINE Vec vec_load(const float *at) { return _mm512_loadu_ps(at); }
INLINE void vec_store(float *at, Vec v) { _mm512_storeu_ps(at, v); }
INLINE Vec vec_all(float x) { return _mm512_set1_ps(x); }
INLINE Vec vec_fma(Vec sum, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE Vec vec_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec vec_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE float vec_sum(Vec v) { return _mm512_reduce_add_ps(v); }
INLINE float vec_top(Vec v) { return _mm512_reduce_max_ps(v); }
INLINE Vec vec_scale(Vec v, Vec power) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(power), 23)));
}
INLINE Vec vec_from_half(const Half *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE void vec_to_half(Half *at, Vec v) { _mm256_storeu_si256((__m256i *)at, _mm512_cvtps_ph(v, 0)); }

/* The lanes of four sums, each in the same order. */
INLINE __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all));
}
#else
typedef __m256 Vec;
INLINE Vec vec_load(const float *at) { return _mm256_loadu_ps(at); }
INLINE void vec_store(float *at, Vec v) { _mm256_storeu_ps(at, v); }
INLINE Vec vec_all(float x) { return _mm256_set1_ps(x); }
INLINE Vec vec_fma(Vec sum, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, sum); }
INLINE Vec vec_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec vec_min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE float vec_sum(Vec v) {
    __m128 low = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    low = _mm_add_ps(low, _mm_movehl_ps(low, low));
    return _mm_cvtss_f32(_mm_add_ss(low, _mm_movehdup_ps(low)));
}
INLINE float vec_top(Vec v) {
    __m128 low = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    low = _mm_max_ps(low, _mm_movehl_ps(low, low));
    return _mm_cvtss_f32(_mm_max_ss(low, _mm_movehdup_ps(low)));
}
INLINE Vec vec_scale(Vec v, Vec power) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(power), 23)));
}
INLINE Vec vec_from_half(const Half *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE void vec_to_half(Half *at, Vec v) { _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(v, 0)); }
#endif
#endif

#endif
