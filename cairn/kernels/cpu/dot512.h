/* The dot products of `dot.h` for CPUs with AVX-512, straight from the packed blocks: 256 values at a time in registers.
 *
 * Two blocks of 32 values fill a register in the order in which their activations lie. Scales of eight blocks are
 * gathered at once. Types that are seldom met go through `dot.h`.
 */
#ifndef CAIRN_DOT512_H
#define CAIRN_DOT512_H

#include "dot.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_DOT512 1
#define MOST_AT_ONCE 8

/* Levels of Q8_0 have a sign. Where products are added in 32 bits they become 0..255, with an offset. */
#if defined(__AVX512VNNI__)
#define SIGNED(type) 0
#else
#define SIGNED(type) ((type) == Q8_0)
#endif
#define LIFTED(type) ((type) == IQ4_NL || ((type) == Q8_0 && !SIGNED(type))) /* by 128 */

typedef struct {
    __m512i level[4]; /* 64 values each */
    __m512 scale, offset;
} Piece;

#define INLINE static inline __attribute__((always_inline))

INLINE __m512i low_then_high_nibbles(__m512i packed, __m512i shifts) {
    return _mm512_and_si512(_mm512_srlv_epi16(packed, shifts), _mm512_set1_epi8(15));
}

/* Shifts of 16 bits that differ from one run of 16 or 32 bytes to the next. */
INLINE __m512i shifts_by_16(int first, int second) {
    __m512i all = _mm512_set1_epi16((short)first);
    return _mm512_mask_set1_epi16(all, 0xff00ff00, (short)second);
}

INLINE __m512i shifts_by_32(int first, int second) {
    return _mm512_inserti64x4(_mm512_set1_epi16((short)first), _mm256_set1_epi16((short)second), 1);
}

INLINE __m512 each_twice(__m256 values) {
    const __m512i lanes = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(values));
}

/* Levels of IQ4_NL, which are no multiples of a step, above their least. */
INLINE __m512i iq4_levels(__m512i nibbles) {
    const __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *)IQ4_LEVELS), _mm_set1_epi8(-128));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

/* Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL: up to eight blocks of 32. */
INLINE void blocks_of_32(int type, const uint8_t *at, int blocks, Piece *out) {
    const int wide = type == Q5_0 || type == Q5_1, shifted = type == Q4_1 || type == Q5_1, whole = type == Q8_0;
    const int front = (shifted ? 4 : 2) + (wide ? 4 : 0), size = front + (whole ? 32 : 16);
    const __m256i starts = _mm256_mullo_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(size));
    __m256i heads = _mm256_mmask_i32gather_epi32(_mm256_setzero_si256(), (__mmask8)((1u << blocks) - 1), starts, at, 1);
    __m256 scale = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(heads));
    out->scale = each_twice(scale);
    if (shifted) out->offset = each_twice(_mm256_cvtph_ps(_mm256_cvtepi32_epi16(_mm256_srli_epi32(heads, 16))));
    else out->offset = _mm512_mul_ps(out->scale, _mm512_set1_ps(LIFTED(type) ? -128.f : wide ? -16.f : -8.f));
    for (int c = 0; c < 4; c++, at += 2 * size) {
        int both = 2 * c + 1 < blocks;
        if (2 * c >= blocks) {
            out->level[c] = _mm512_setzero_si512();
            continue;
        }
        if (whole) {
            __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(at + 2)));
            __m256i next = both ? _mm256_loadu_si256((const __m256i *)(at + size + 2)) : _mm256_setzero_si256();
            out->level[c] = _mm512_inserti64x4(first, next, 1);
            if (!SIGNED(type)) out->level[c] = _mm512_xor_si512(out->level[c], _mm512_set1_epi8(-128));
            continue;
        }
        __m256i pair = _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(at + front)));
        if (both) pair = _mm256_inserti128_si256(pair, _mm_loadu_si128((const __m128i *)(at + size + front)), 1);
        __m512i twice = _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), _mm512_castsi256_si512(pair));
        out->level[c] = low_then_high_nibbles(twice, shifts_by_16(0, 4));
        if (type == IQ4_NL) out->level[c] = iq4_levels(out->level[c]);
        if (wide) {
            uint32_t bits[2] = {0, 0};
            memcpy(bits, at + front - 4, 4);
            if (both) memcpy(bits + 1, at + size + front - 4, 4);
            __mmask64 fifth = (uint64_t)bits[1] << 32 | bits[0];
            out->level[c] = _mm512_mask_add_epi8(out->level[c], fifth, out->level[c], _mm512_set1_epi8(16));
        }
    }
}

/* Q4_K, Q5_K: eight scales and minima of 6 bits. */
INLINE void block_of_q4_q5_k(int wide, const uint8_t *at, Piece *out) {
    uint32_t a, b, c;
    memcpy(&a, at + 4, 4), memcpy(&b, at + 8, 4), memcpy(&c, at + 12, 4);
    uint64_t scales = (a & 0x3f3f3f3f) | (uint64_t)((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
    uint64_t minima = (b & 0x3f3f3f3f) | (uint64_t)((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
    __m256 scale = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)scales)));
    __m256 minimum = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)minima)));
    out->scale = each_twice(_mm256_mul_ps(scale, _mm256_set1_ps(half(at))));
    out->offset = each_twice(_mm256_mul_ps(minimum, _mm256_set1_ps(-half(at + 2))));
    const uint8_t *packed = at + (wide ? 48 : 16);
    __m512i fifths = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 16)));
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(packed + 32 * j)));
        out->level[j] = low_then_high_nibbles(both, shifts_by_32(0, 4));
        if (wide) {
            __m512i bit = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << (2 * j))),
                                             _mm256_set1_epi8((char)(2 << (2 * j))), 1);
            __mmask64 there = _mm512_test_epi8_mask(fifths, bit);
            out->level[j] = _mm512_mask_add_epi8(out->level[j], there, out->level[j], _mm512_set1_epi8(16));
        }
    }
}

INLINE void block_of_q6_k(const uint8_t *at, Piece *out) {
    __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + 192)));
    out->scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(half(at + 208)));
    out->offset = _mm512_mul_ps(out->scale, _mm512_set1_ps(-32.f));
    const __m512i fifteen = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(48);
    for (int n = 0; n < 2; n++) {
        __m512i low = _mm512_loadu_si512(at + 64 * n);
        __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 128 + 32 * n)));
        __m512i first = _mm512_and_si512(_mm512_sllv_epi16(high, shifts_by_32(4, 2)), high_bits);
        __m512i second = _mm512_and_si512(_mm512_srlv_epi16(high, shifts_by_32(0, 2)), high_bits);
        out->level[2 * n] = _mm512_or_si512(_mm512_and_si512(low, fifteen), first);
        out->level[2 * n + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low, 4), fifteen), second);
    }
}

INLINE void piece_of(int type, const uint8_t *at, int left, Piece *out) {
    if (type == Q4_K || type == Q5_K) block_of_q4_q5_k(type == Q5_K, at, out);
    else if (type == Q6_K) block_of_q6_k(at, out);
    else blocks_of_32(type, at, left < 256 ? left / 32 : 8, out);
}

INLINE int piece_bytes(int type) {
    switch (type) {
    case Q4_0:
    case IQ4_NL: return 8 * 18;
    case Q4_1: return 8 * 20;
    case Q5_0: return 8 * 22;
    case Q5_1: return 8 * 24;
    case Q8_0: return 8 * 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;
    }
}

/* One piece of a row of weights with `count` rows of x. Both counts are constants where this is used. */
INLINE void piece_dots(int type, const Piece *w, int chunks, const Rounded *x, int count, __m512 *sum) {
    const int is_signed = SIGNED(type);
    __m512i level[4];
    __mmask64 negative[4] = {0, 0, 0, 0};
    __m512 factor[4];
    for (int c = 0; c < chunks; c++) {
        factor[c] = factor_of(w->scale, c);
        level[c] = is_signed ? _mm512_abs_epi8(w->level[c]) : w->level[c];
        if (is_signed) negative[c] = _mm512_movepi8_mask(w->level[c]);
    }
    for (int j = 0; j < count; j++) {
        __m512 piece = _mm512_setzero_ps();
        for (int c = 0; c < chunks; c++)
            piece = _mm512_fmadd_ps(digits_dot(level[c], negative[c], is_signed, x + j, 64 * c), factor[c], piece);
        if (!is_signed) sum[j] = _mm512_fmadd_ps(w->offset, _mm512_load_ps(x[j].sum), sum[j]);
        sum[j] = _mm512_fmadd_ps(piece, _mm512_set1_ps(x[j].scale), sum[j]);
    }
}

INLINE void packed_dot_of(int type, const uint8_t *at, const Rounded *x, int rows, int count, int columns, float *y) {
    __m512 sum[MOST_AT_ONCE];
    for (int j = 0; j < count; j++) sum[j] = _mm512_setzero_ps();
    Piece w;
    int left = columns;
    for (; left >= STRIDE; left -= STRIDE, at += piece_bytes(type), x += rows) {
        ask_ahead(at, piece_bytes(type));
        piece_of(type, at, STRIDE, &w);
        piece_dots(type, &w, 4, x, count, sum);
    }
    if (left && (type < Q2_K || type == IQ4_NL)) { /* others have blocks of STRIDE values */
        piece_of(type, at, left, &w);
        if (left > STRIDE / 2) piece_dots(type, &w, 4, x, count, sum);
        else piece_dots(type, &w, 2, x, count, sum);
    }
    for (int j = 0; j < count; j++) y[j] = _mm512_reduce_add_ps(sum[j]);
}

/* Rows of x by eight, four, two or one. */
INLINE void packed_dot(int type, const uint8_t *at, const Rounded *x, int rows, int columns, float *y) {
    int j = 0;
    for (; j + 8 <= rows; j += 8) packed_dot_of(type, at, x + j, rows, 8, columns, y + j);
    if (j + 4 <= rows) packed_dot_of(type, at, x + j, rows, 4, columns, y + j), j += 4;
    if (j + 2 <= rows) packed_dot_of(type, at, x + j, rows, 2, columns, y + j), j += 2;
    if (j < rows) packed_dot_of(type, at, x + j, rows, 1, columns, y + j);
}

/* Returns 0 for types that have no such form. */
static int packed_dots(int type, const uint8_t *at, const Rounded *x, int rows, int columns, float *y) {
    switch (type) {
    case Q4_0: packed_dot(Q4_0, at, x, rows, columns, y); return 1;
    case Q4_1: packed_dot(Q4_1, at, x, rows, columns, y); return 1;
    case Q5_0: packed_dot(Q5_0, at, x, rows, columns, y); return 1;
    case Q5_1: packed_dot(Q5_1, at, x, rows, columns, y); return 1;
    case Q8_0: packed_dot(Q8_0, at, x, rows, columns, y); return 1;
    case Q4_K: packed_dot(Q4_K, at, x, rows, columns, y); return 1;
    case Q5_K: packed_dot(Q5_K, at, x, rows, columns, y); return 1;
    case Q6_K: packed_dot(Q6_K, at, x, rows, columns, y); return 1;
#if defined(__AVX512VNNI__) /* others add products in 16 bits, which these levels may exceed */
    case IQ4_NL: packed_dot(IQ4_NL, at, x, rows, columns, y); return 1;
#endif
    default: return 0;
    }
}

/* A row in float32. */
INLINE void floats_of(int type, const uint8_t *at, int columns, float *out) {
    for (int left = columns; left > 0; left -= STRIDE, at += piece_bytes(type), out += STRIDE) {
        Piece w;
        piece_of(type, at, left, &w);
        for (int group = 0; group < STRIDE / GROUP && GROUP * group < left; group++) {
            __m512i lane = _mm512_set1_epi32(group);
            __m128i level = _mm_load_si128((const __m128i *)w.level + group);
            const int has_sign = type == Q8_0 || type == IQ4_NL;
            if (LIFTED(type)) level = _mm_xor_si128(level, _mm_set1_epi8(-128));
            __m512i wide = has_sign ? _mm512_cvtepi8_epi32(level) : _mm512_cvtepu8_epi32(level);
            __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_permutexvar_ps(lane, w.scale));
            if (!has_sign) value = _mm512_add_ps(value, _mm512_permutexvar_ps(lane, w.offset));
            _mm512_storeu_ps(out + GROUP * group, value);
        }
    }
}

/* Returns 0 for types that have no such form. */
static int packed_floats(int type, const uint8_t *at, int columns, float *out) {
    switch (type) {
    case Q4_0: floats_of(Q4_0, at, columns, out); return 1;
    case Q4_1: floats_of(Q4_1, at, columns, out); return 1;
    case Q5_0: floats_of(Q5_0, at, columns, out); return 1;
    case Q5_1: floats_of(Q5_1, at, columns, out); return 1;
    case Q8_0: floats_of(Q8_0, at, columns, out); return 1;
    case Q4_K: floats_of(Q4_K, at, columns, out); return 1;
    case Q5_K: floats_of(Q5_K, at, columns, out); return 1;
    case Q6_K: floats_of(Q6_K, at, columns, out); return 1;
    case IQ4_NL: floats_of(IQ4_NL, at, columns, out); return 1;
    default: return 0;
    }
}

#endif
#endif
