/* Rows of packed weights in registers of AVX-512, 256 values at a time, for `dot512.h` and `tiles_amx.h`.
 *
 * Two blocks of 32 values fill a register, in their order. Types that are
 * seldom met are unpacked as in `blocks.h`.
 */
#ifndef CAIRN_PIECES512_H
#define CAIRN_PIECES512_H

#include "dot.h"

#if defined(HAS_DOT512)

/* Levels with a sign: where products are added in 32 bits they become 0..255, with an offset. */
#if defined(__AVX512VNNI__)
#define SIGNED(type) 0
#else
#define SIGNED(type) signed_levels(type)
#endif
#define LIFTED(type) (signed_levels(type) && !SIGNED(type)) /* by 128 */

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

/* Levels of IQ4_NL, which are no multiples of a step. */
INLINE __m512i iq4_levels(__m512i nibbles) {
    const __m128i lift = _mm_set1_epi8(LIFTED(IQ4_NL) ? -128 : 0);
    const __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *)IQ4_LEVELS), lift);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

INLINE uint16_t word(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return bits;
}

/* Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL: up to eight blocks of 32. */
INLINE void blocks_of_32(int type, const uint8_t *at, int blocks, Piece *out) {
    const int wide = type == Q5_0 || type == Q5_1, shifted = type == Q4_1 || type == Q5_1, whole = type == Q8_0;
    const int front = (shifted ? 4 : 2) + (wide ? 4 : 0), size = front + (whole ? 32 : 16);
    uint64_t heads[4] = {0, 0, 0, 0}; /* scales, then offsets */
#pragma GCC unroll 8                  /* or they are in memory, and what reads them at once waits for what wrote them singly */
    for (int i = 0; i < 8; i++) {
        if (i >= blocks) break;
        heads[i / 4] |= (uint64_t)word(at + size * i) << 16 * (i % 4);
        if (shifted) heads[2 + i / 4] |= (uint64_t)word(at + size * i + 2) << 16 * (i % 4);
    }
    out->scale = each_twice(_mm256_cvtph_ps(_mm_set_epi64x((int64_t)heads[1], (int64_t)heads[0])));
    if (shifted) out->offset = each_twice(_mm256_cvtph_ps(_mm_set_epi64x((int64_t)heads[3], (int64_t)heads[2])));
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

/* Whether the functions below know this type. */
INLINE int has_pieces(int type) {
    return type == IQ4_NL || type == Q4_0 || type == Q4_1 || type == Q5_0 || type == Q5_1 || type == Q8_0 ||
           type == Q4_K || type == Q5_K || type == Q6_K;
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
