/* Packed rows of weights, unpacked: a level for each value, and a scale and an offset for each 16.
 *
 *     w = scale * level + offset
 *
 * The layouts are those of the GGUF format, and two for other checkpoints, whose scales stay in float32:
 *
 *     LEVELS_8    a row's levels with a sign | its scales, one for each `group` values
 *     LEVELS_4    a row's levels, of 32 values the first 16 in the low halves of 16 bytes | its scales | its offsets
 *
 * Loops are plain C that compilers vectorise.
 */
#ifndef CAIRN_BLOCKS_H
#define CAIRN_BLOCKS_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define GROUP 16   /* values that share a scale and an offset */
#define STRIDE 256 /* values of 16 groups: how far the buffers are padded */
#define PIECE 128  /* values of a row that `dot_neon.h` unpacks at once */

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
       IQ4_NL = 20, IQ4_XS = 23, LEVELS_8 = 1000, LEVELS_4 = 1001 };

typedef struct {
    uint8_t *level; /* unsigned and below 64; of `signed_levels` int8_t */
    float *scale, *offset;
} Row;

static inline float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
#endif
}

/* Vectors that every compiler has instructions for, whatever the CPU. */
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
typedef int8_t Signed8 __attribute__((vector_size(8)));
typedef float Floats8 __attribute__((vector_size(32)));

static inline Bytes16 load16(const uint8_t *at) {
    Bytes16 bytes;
    memcpy(&bytes, at, 16);
    return bytes;
}

static inline Bytes32 load32(const uint8_t *at) {
    Bytes32 bytes;
    memcpy(&bytes, at, 32);
    return bytes;
}

static inline void store16(uint8_t *at, Bytes16 bytes) { memcpy(at, &bytes, 16); }
static inline void store32(uint8_t *at, Bytes32 bytes) { memcpy(at, &bytes, 32); }

/* Of two groups. */
static inline void set_pair(Row out, int group, float scale, float offset) {
    float scales[2] = {scale, scale}, offsets[2] = {offset, offset};
    memcpy(out.scale + group, scales, sizeof scales);
    memcpy(out.offset + group, offsets, sizeof offsets);
}

static inline Floats8 scaled(Signed8 levels, float factor) {
    return __builtin_convertvector(levels, Floats8) * factor;
}

/* Each of eight values twice. */
static inline void store_twice(float *to, Floats8 values) {
    typedef int32_t Lanes __attribute__((vector_size(32)));
    Floats8 low = __builtin_shuffle(values, (Lanes){0, 0, 1, 1, 2, 2, 3, 3});
    Floats8 high = __builtin_shuffle(values, (Lanes){4, 4, 5, 5, 6, 6, 7, 7});
    memcpy(to, &low, sizeof low);
    memcpy(to + 8, &high, sizeof high);
}

/* Bit i is the fifth of level i. */
static inline Bytes32 fifth_bits(const uint8_t *at) {
    uint32_t bits;
    memcpy(&bits, at, 4);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (Bytes32)_mm256_maskz_set1_epi8(bits, 16);
#elif defined(__AVX2__)
    const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte);
    __m256i bit = _mm256_and_si256(spread, _mm256_set1_epi64x((long long)0x8040201008040201));
    __m256i there = _mm256_cmpeq_epi8(bit, _mm256_set1_epi64x((long long)0x8040201008040201));
    return (Bytes32)_mm256_and_si256(there, _mm256_set1_epi8(16));
#else
    Bytes32 found;
    for (int i = 0; i < 32; i++) found[i] = (bits >> i & 1) << 4;
    return found;
#endif
}

/* Q4_0, Q4_1, Q5_0, Q5_1: 32 values share a scale, and an offset where the type stores one. */
static inline __attribute__((always_inline)) void unpack_32(int wide, int shifted, const uint8_t *at, int columns,
                                                            Row out) {
    for (int k = 0; k < columns; k += 32) {
        float scale = half(at), offset = shifted ? half(at + 2) : scale * (wide ? -16.f : -8.f);
        at += shifted ? 4 : 2;
        Bytes16 packed = load16(at + (wide ? 4 : 0)), low = packed & 15, high = packed >> 4;
        store16(out.level + k, low), store16(out.level + k + 16, high);
        if (wide) store32(out.level + k, load32(out.level + k) | fifth_bits(at));
        at += wide ? 20 : 16;
        set_pair(out, k / GROUP, scale, offset);
    }
}

static void unpack_q8_0(const uint8_t *at, int columns, Row out) {
    for (int k = 0; k < columns; k += 32, at += 34) {
        store32(out.level + k, load32(at + 2));
        set_pair(out, k / GROUP, half(at), 0.f);
    }
}

/* Eight pairs of a 6-bit scale and a 6-bit minimum in 12 bytes. */
static inline void scales_and_minima(const uint8_t *at, Signed8 *scale, Signed8 *minimum) {
    uint32_t a, b, c;
    memcpy(&a, at, 4), memcpy(&b, at + 4, 4), memcpy(&c, at + 8, 4);
    uint32_t scales[2] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)};
    uint32_t minima[2] = {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
    memcpy(scale, scales, 8), memcpy(minimum, minima, 8);
}

static inline __attribute__((always_inline)) void unpack_q4_q5_k(int wide, const uint8_t *at, int columns, Row out) {
    for (int k = 0; k < columns; k += 256, at += wide ? 176 : 144) {
        Signed8 scale, minimum;
        scales_and_minima(at + 4, &scale, &minimum);
        const uint8_t *packed = at + (wide ? 48 : 16);
        Bytes32 high = load32(at + 16);
        for (int j = 0; j < 4; j++) {
            Bytes32 both = load32(packed + 32 * j), first = both & 15, second = both >> 4;
            if (wide) first |= (high >> (2 * j) & 1) << 4, second |= (high >> (2 * j + 1) & 1) << 4;
            store32(out.level + k + 64 * j, first), store32(out.level + k + 64 * j + 32, second);
        }
        store_twice(out.scale + k / GROUP, scaled(scale, half(at)));
        store_twice(out.offset + k / GROUP, scaled(minimum, -half(at + 2)));
    }
}

static void unpack_q6_k(const uint8_t *at, int columns, Row out) {
    for (int k = 0; k < columns; k += 256, at += 210) {
        for (int n = 0; n < 2; n++) {
            Bytes32 low = load32(at + 64 * n), next = load32(at + 64 * n + 32), high = load32(at + 128 + 32 * n);
            uint8_t *level = out.level + k + 128 * n;
            store32(level, (low & 15) | (high << 4 & 48));
            store32(level + 32, (next & 15) | (high << 2 & 48));
            store32(level + 64, low >> 4 | (high & 48));
            store32(level + 96, next >> 4 | (high >> 2 & 48));
            Signed8 packed;
            memcpy(&packed, at + 192 + 8 * n, 8);
            Floats8 scale = scaled(packed, half(at + 208)), offset = scale * -32.f;
            memcpy(out.scale + k / GROUP + 8 * n, &scale, sizeof scale);
            memcpy(out.offset + k / GROUP + 8 * n, &offset, sizeof offset);
        }
    }
}

static inline void set_group(Row out, int group, float scale, float offset) {
    out.scale[group] = scale, out.offset[group] = offset;
}

static void unpack_q2_k(const uint8_t *at, int columns, Row out) {
    for (int k = 0; k < columns; k += 256, at += 84) {
        float d = half(at + 80), m = half(at + 82);
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++)
                    out.level[k + 128 * n + 32 * j + i] = at[16 + 32 * n + i] >> (2 * j) & 3;
        for (int j = 0; j < 16; j++) set_group(out, k / GROUP + j, d * (at[j] & 15), -m * (at[j] >> 4));
    }
}

static void unpack_q3_k(const uint8_t *at, int columns, Row out) {
    for (int k = 0; k < columns; k += 256, at += 110) {
        const uint8_t *high = at, *low = at + 32, *packed = at + 96;
        float d = half(at + 108);
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++)
                    out.level[k + 128 * n + 32 * j + i] =
                        (low[32 * n + i] >> (2 * j) & 3) | (high[i] >> (4 * n + j) & 1) << 2;
        for (int j = 0; j < 16; j++) {
            int nibble = j < 8 ? packed[j] & 15 : packed[j - 8] >> 4;
            float scale = d * ((nibble | (packed[8 + j % 4] >> (2 * (j / 4)) & 3) << 4) - 32);
            set_group(out, k / GROUP + j, scale, -4.f * scale);
        }
    }
}

static const int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline void levels_of_nibbles(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < 16; i++) {
        to[i] = (uint8_t)IQ4_LEVELS[from[i] & 15];
        to[16 + i] = (uint8_t)IQ4_LEVELS[from[i] >> 4];
    }
}

static void unpack_iq4(int type, const uint8_t *at, int columns, Row out) {
    for (int k = 0; type == IQ4_NL && k < columns; k += 32, at += 18) {
        levels_of_nibbles(at + 2, out.level + k);
        set_pair(out, k / GROUP, half(at), 0.f);
    }
    for (int k = 0; type == IQ4_XS && k < columns; k += 256, at += 136) {
        uint16_t high;
        memcpy(&high, at + 2, 2);
        for (int j = 0; j < 8; j++) {
            int scale = (at[4 + j / 2] >> (4 * (j % 2)) & 15) | (high >> (2 * j) & 3) << 4;
            levels_of_nibbles(at + 8 + 16 * j, out.level + k + 32 * j);
            set_pair(out, k / GROUP + 2 * j, half(at) * (scale - 32), 0.f);
        }
    }
}

/* Scales of a row behind its levels. */
static inline const float *scales_of(int type, const uint8_t *row, int columns) {
    return (const float *)(row + (type == LEVELS_8 ? columns : columns / 2));
}

/* How many there are: of whole pieces, so that those of the last can be loaded together. */
static inline int count_of_scales(int columns, int group) {
    return ((columns + PIECE - 1) / PIECE * PIECE + group - 1) / group;
}

/* A group has 32, 64, or a multiple of PIECE values; the last may be shorter. */
static void unpack_levels(int type, const uint8_t *at, int columns, int group, Row out) {
    const float *scale = scales_of(type, at, columns), *offset = scale + count_of_scales(columns, group);
    for (int k = 0; k < columns; k += 32) {
        if (type == LEVELS_8) store32(out.level + k, load32(at + k));
        else {
            Bytes16 packed = load16(at + k / 2);
            store16(out.level + k, packed & 15), store16(out.level + k + 16, packed >> 4);
        }
        set_pair(out, k / GROUP, scale[k / group], type == LEVELS_8 ? 0.f : offset[k / group]);
    }
}

static int signed_levels(int type) {
    return type == Q8_0 || type == IQ4_NL || type == IQ4_XS || type == LEVELS_8;
}

/* `group`: values that share a scale, of the types that do not say so. */
static void unpack(int type, const uint8_t *at, int columns, int group, Row out) {
    switch (type) {
    case LEVELS_8:
    case LEVELS_4: unpack_levels(type, at, columns, group, out); break;
    case Q8_0: unpack_q8_0(at, columns, out); break;
    case Q2_K: unpack_q2_k(at, columns, out); break;
    case Q3_K: unpack_q3_k(at, columns, out); break;
    case Q4_K: unpack_q4_q5_k(0, at, columns, out); break;
    case Q5_K: unpack_q4_q5_k(1, at, columns, out); break;
    case Q6_K: unpack_q6_k(at, columns, out); break;
    case IQ4_NL:
    case IQ4_XS: unpack_iq4(type, at, columns, out); break;
    case Q4_1: unpack_32(0, 1, at, columns, out); break;
    case Q5_0: unpack_32(1, 0, at, columns, out); break;
    case Q5_1: unpack_32(1, 1, at, columns, out); break;
    default: unpack_32(0, 0, at, columns, out);
    }
}

#endif
