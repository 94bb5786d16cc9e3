/* Dot products of one unpacked row of weights with rows of activations that are rounded to 16 bits.
 *
 *     x = scale * (256 * high + low)        two digits of 8 bits, and a scale for each 256 columns
 *     y = sum over groups of 16:  scale_w * (levels . x) + offset_w * sum(x)
 *
 * With one digit, a difference in the last bit of a float32 decides here and there what a value is rounded to, and thirty
 * layers make another answer of it. The second one costs a product of integers, and not the unpacking of the weights.
 * Integers are multiplied exactly; groups are summed in float32, in an order that does not depend on how many rows of x
 * there are: a row has the same result in any batch. One form for each instruction set (`dot512.h`, `dot_neon.h`), and one in
 * plain C.
 */
#ifndef CAIRN_DOT_H
#define CAIRN_DOT_H

#include "blocks.h"
#include "vectors.h"

#define MOST_TOGETHER 4
#define MOST_STEPS 32512.f /* 127 * 256 */
#define AHEAD_BYTES 8192   /* that weights are asked for before they are multiplied, on x86 */

/* STRIDE columns of one row of activations; zeros behind the last. `dot512.h` has another order of columns. Pieces of the rows lie one behind the other, then
 * those of the next columns, so that one address is enough for all rows. */
typedef struct {
    _Alignas(64) int8_t high[STRIDE];
    int8_t low[STRIDE];
    float sum[STRIDE / GROUP]; /* of each group */
    float scale;
} Rounded;

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_DOT512 1 /* `dot512.h` */

#elif defined(__AVX2__) && defined(__FMA__)

/* The first digit of 32 columns, or the second added to it. */
static inline __m256i products(__m256i level, __m256i signs, int is_signed, const int8_t *x) {
    __m256i digit = _mm256_load_si256((const __m256i *)x);
    if (is_signed) digit = _mm256_sign_epi8(digit, signs);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(level, digit), _mm256_set1_epi16(1));
}

static inline __attribute__((always_inline)) void dot_of(Row w, const Rounded *x, int rows, int count, int columns,
                                                         int is_signed, float *y) {
    __m256 sum[MOST_TOGETHER], piece[MOST_TOGETHER];
    for (int j = 0; j < count; j++) sum[j] = _mm256_setzero_ps();
    for (int start = 0; start < columns; start += STRIDE / 2) {
        int at = start % STRIDE, group = start / GROUP;
        __m256 scale_w = _mm256_loadu_ps(w.scale + group), offset_w = _mm256_loadu_ps(w.offset + group);
        for (int j = 0; j < count; j++) piece[j] = _mm256_setzero_ps();
        for (int k = 0; k < STRIDE / 2; k += 32) {
            __m256i lane = _mm256_add_epi32(_mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0), _mm256_set1_epi32(k / GROUP));
            __m256 factor = _mm256_permutevar8x32_ps(scale_w, lane);
            __m256i signs = _mm256_loadu_si256((const __m256i *)(w.level + start + k));
            __m256i level = is_signed ? _mm256_abs_epi8(signs) : signs;
            for (int j = 0; j < count; j++) {
                __m256i high = products(level, signs, is_signed, x[j].high + at + k);
                __m256i low = products(level, signs, is_signed, x[j].low + at + k);
                __m256i dot = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
                piece[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, piece[j]);
            }
        }
        for (int j = 0; j < count; j++) {
            if (!is_signed) sum[j] = _mm256_fmadd_ps(offset_w, _mm256_load_ps(x[j].sum + at / GROUP), sum[j]);
            sum[j] = _mm256_fmadd_ps(piece[j], _mm256_set1_ps(x[j].scale), sum[j]);
        }
        if (at) x += rows;
    }
    for (int j = 0; j < count; j++) {
        __m128 low = _mm_add_ps(_mm256_castps256_ps128(sum[j]), _mm256_extractf128_ps(sum[j], 1));
        low = _mm_add_ps(low, _mm_movehl_ps(low, low));
        y[j] = _mm_cvtss_f32(_mm_add_ss(low, _mm_movehdup_ps(low)));
    }
}

#elif defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOT_NEON 1 /* `dot_neon.h` */

#else

static inline void dot_of(Row w, const Rounded *x, int rows, int count, int columns, int is_signed, float *y) {
    (void)is_signed;
    const int8_t *level = (const int8_t *)w.level; /* levels below 64 are the same with a sign */
    for (int j = 0; j < count; j++) {
        float sum = 0;
        for (int k = 0; k < columns; k += GROUP) {
            const Rounded *here = x + (int64_t)(k / STRIDE) * rows + j;
            int dot = 0, at = k % STRIDE;
            for (int i = 0; i < GROUP; i++) dot += level[k + i] * (256 * here->high[at + i] + here->low[at + i]);
            sum += w.scale[k / GROUP] * here->scale * (float)dot + w.offset[k / GROUP] * here->sum[at / GROUP];
        }
        y[j] = sum;
    }
}

#endif

#if !defined(HAS_DOT_NEON) && !defined(HAS_DOT512)

/* The counts are constants where they are used, so that sums stay in registers. `rows`: all that x has. */
static void dot(Row w, const Rounded *x, int rows, int columns, int is_signed, float *y) {
    int j = 0;
    for (; j + 4 <= rows; j += 4)
        if (is_signed) dot_of(w, x + j, rows, 4, columns, 1, y + j);
        else dot_of(w, x + j, rows, 4, columns, 0, y + j);
    for (; j + 2 <= rows; j += 2)
        if (is_signed) dot_of(w, x + j, rows, 2, columns, 1, y + j);
        else dot_of(w, x + j, rows, 2, columns, 0, y + j);
    for (; j < rows; j++)
        if (is_signed) dot_of(w, x + j, rows, 1, columns, 1, y + j);
        else dot_of(w, x + j, rows, 1, columns, 0, y + j);
}

#endif

#if !defined(HAS_DOT512)

/* Up to STRIDE columns of a row, by the largest of them. */
static void round_piece(const float *restrict x, int columns, Rounded *restrict out) {
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < columns; i++) largest = larger_of(__builtin_fabsf(x[i]), largest);
    float inverse = largest > 0 ? MOST_STEPS / largest : 0.f;
    out->scale = largest / MOST_STEPS;
    for (int at = 0; at < STRIDE; at += GROUP) {
        int sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = at; i < at + GROUP; i++) {
            float value = at < columns ? x[i] * inverse : 0.f;
            int steps = (int)(value + (value < 0 ? -0.5f : 0.5f)), high = (steps + 128) >> 8, low = steps - 256 * high;
            low = low < -127 ? -127 : low; /* whose sign can be changed */
            out->high[i] = (int8_t)high, out->low[i] = (int8_t)low;
            sum += 256 * high + low;
        }
        out->sum[at / GROUP] = out->scale * (float)sum;
    }
}

#endif

/* The caches of x86 look ahead to the end of a page. With one row of x a core would wait for its weights half of the time. */
static inline __attribute__((always_inline)) void ask_ahead(const uint8_t *weights, int64_t bytes, int64_t ahead) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(weights + ahead + line);
}

static inline int pieces_of(int columns) { return (columns + STRIDE - 1) / STRIDE; }

#if !defined(HAS_DOT_NEON)
typedef Rounded Activations;

static size_t activation_bytes(int columns, int rows) { return sizeof(Rounded) * (size_t)pieces_of(columns) * rows; }
#endif

#if !defined(HAS_DOT_NEON) && !defined(HAS_DOT512)

/* The t-th row of x; `rows` of them lie side by side. */
static void round_row(const float *x, int columns, int rows, int t, Activations *out) {
    out += t;
    for (int k = 0; k < columns; k += STRIDE, out += rows)
        round_piece(x + k, columns - k < STRIDE ? columns - k : STRIDE, out);
}

#endif

#endif
