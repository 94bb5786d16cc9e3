/* 128 values of a row of weights in the registers of an ARM CPU, straight from the packed blocks.
 *
 * Blocks of 32 or groups of 16 values share a scale, or 64 or PIECE where a row has its scales behind its levels. Types that
 * are seldom met are unpacked into memory first (`blocks.h`) and read from there.
 */
#ifndef CAIRN_PIECES_NEON_H
#define CAIRN_PIECES_NEON_H

#include "dot.h"

#ifdef HAS_DOT_NEON
#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))
#define UNPACKED (-1) /* a type: levels, scales and offsets in memory */

typedef struct {
    int8x16_t level[8];
    float32x4_t scale[2], offset[2]; /* of the four blocks of 32, the eight groups of 16, or as many as there are */
} Piece;

/* Where a row of weights is: packed, or unpacked. */
typedef struct {
    const uint8_t *packed;
    Row row;
    int group; /* values that share a scale, where the type does not say so */
} Weights;

/* The compiler would copy one register of zeros, which takes a cycle where `movi` takes none. */
INLINE int32x4_t zeros(void) {
    int32x4_t zero;
    __asm__ volatile("movi %0.4s, #0" : "=w"(zero));
    return zero;
}

/* LEVELS_8 or LEVELS_4 in groups of `values`, as one constant. */
#define GROUPED(type, values) ((values) << 16 | (type))
INLINE int type_of(int type) { return type == UNPACKED ? type : type & 0xffff; }

INLINE int values_of_scale(int type) {
    if (type == Q6_K || type == UNPACKED) return 16;
    return type >> 16 ? type >> 16 : 32;
}
INLINE int has_offset(int type) {
    return type != Q8_0 && type != Q5_0 && type != Q6_K && type != IQ4_NL && type_of(type) != LEVELS_8;
}

INLINE int block_bytes(int type) {
    switch (type) {
    case Q4_0:
    case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;
    }
}

/* Of PIECE values. */
INLINE int piece_bytes(int type) {
    if (type == UNPACKED) return 0;
    if (type_of(type) >= LEVELS_8) return type_of(type) == LEVELS_8 ? PIECE : PIECE / 2;
    return type >= Q2_K && type <= Q6_K ? block_bytes(type) / 2 : 4 * block_bytes(type);
}

INLINE void prefetch_bytes(const uint8_t *from, int size) {
    for (int line = 0; line < size; line += 64) __builtin_prefetch(from + line);
}

/* As much of the four rows behind these as a piece of these has, which begins at column `start`. */
INLINE void prefetch_rows(int type, const Weights *w, int start) {
    const int size = 4 * piece_bytes(type);
    prefetch_bytes(w[3].packed + (w[1].packed - w[0].packed) + (int64_t)size * (start / PIECE), size);
}

INLINE float32x4_t floats_of_halves(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

/* The fifth bits of 16 levels: bit i of two bytes is that of level i. `bytes` has all four from `first` on. */
INLINE uint8x16_t fifth_bits_at(uint8x16_t bytes, int first) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const uint8x16_t place = vcombine_u8(vdup_n_u8((uint8_t)first), vdup_n_u8((uint8_t)(first + 1)));
    return vtstq_u8(vqtbl1q_u8(bytes, place), bit);
}

/* Levels of Q5_0 less 16, whose upper halves are then ones where the fifth bit is not set. */
INLINE void signed_fives(uint8x16_t packed, uint8x16_t bytes, int first, int8x16_t *level) {
    const uint8x16_t none = vmvnq_u8(bytes);
    level[0] = vreinterpretq_s8_u8(vsliq_n_u8(packed, fifth_bits_at(none, first), 4));
    level[1] = vreinterpretq_s8_u8(vsriq_n_u8(fifth_bits_at(none, first + 2), packed, 4));
}

INLINE void block_of_32(int type, const uint8_t *at, int8x16_t *level) {
    const int front = block_bytes(type) - 16;
    if (type == Q8_0) {
        level[0] = vld1q_s8((const int8_t *)at + 2), level[1] = vld1q_s8((const int8_t *)at + 18);
        return;
    }
    if (type == Q5_0) {
        signed_fives(vld1q_u8(at + front), vld1q_u8(at + front - 4), 0, level); /* and some levels behind the bits */
        return;
    }
    uint8x16_t packed = vld1q_u8(at + front), low = vandq_u8(packed, vdupq_n_u8(15)), high = vshrq_n_u8(packed, 4);
    if (type == Q5_1) {
        const uint8x16_t fifths = vld1q_u8(at + front - 4);
        low = vbslq_u8(vdupq_n_u8(16), fifth_bits_at(fifths, 0), low);
        high = vbslq_u8(vdupq_n_u8(16), fifth_bits_at(fifths, 2), high);
    }
    level[0] = vreinterpretq_s8_u8(low), level[1] = vreinterpretq_s8_u8(high);
    if (type == IQ4_NL) {
        const int8x16_t table = vld1q_s8(IQ4_LEVELS);
        level[0] = vqtbl1q_s8(table, low), level[1] = vqtbl1q_s8(table, high);
    }
}

/* `lane` is a constant where this is used; the intrinsic asks for one that is written as such. */
INLINE uint32x4_t lane_of(const uint8_t *at, uint32x4_t into, int lane) {
    const uint32_t *word = (const uint32_t *)at;
    switch (lane) {
    case 0: return vld1q_lane_u32(word, into, 0);
    case 1: return vld1q_lane_u32(word, into, 1);
    case 2: return vld1q_lane_u32(word, into, 2);
    default: return vld1q_lane_u32(word, into, 3);
    }
}

/* Up to four blocks of 32; what is missing has scale 0. */
INLINE void blocks_of_32(int type, const uint8_t *at, int blocks, Piece *out) {
    const int size = block_bytes(type), shifted = type == Q4_1 || type == Q5_1;
    uint32x4_t heads = vdupq_n_u32(0); /* the first four bytes of each block */
    for (int b = 0; b < 4; b++, at += size) {
        if (b >= blocks) {
            out->level[2 * b] = out->level[2 * b + 1] = vdupq_n_s8(0);
            continue;
        }
        heads = lane_of(at, heads, b);
        block_of_32(type, at, out->level + 2 * b);
    }
    out->scale[0] = floats_of_halves(vmovn_u32(heads));
    if (shifted) out->offset[0] = floats_of_halves(vshrn_n_u32(heads, 16));
    else out->offset[0] = vmulq_n_f32(out->scale[0], -8.f);
}

/* Four numbers of 8 bits as floats. */
INLINE float32x4_t floats_of_bytes(uint32_t bytes, float factor) {
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)));
    return vmulq_n_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), factor);
}

/* A half of a block of Q4_K or Q5_K: four of its eight scales and minima of 6 bits. */
INLINE void half_of_q4_q5_k(int wide, const uint8_t *at, int second, Piece *out) {
    uint32_t a, b, c;
    memcpy(&a, at + 4, 4), memcpy(&b, at + 8, 4), memcpy(&c, at + 12, 4);
    uint32_t scales = second ? (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030) : a & 0x3f3f3f3f;
    uint32_t minima = second ? (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030) : b & 0x3f3f3f3f;
    out->scale[0] = floats_of_bytes(scales, half(at));
    out->offset[0] = floats_of_bytes(minima, -half(at + 2));
    const uint8_t *packed = at + (wide ? 48 : 16) + 64 * second;
    for (int i = 0; i < 4; i++) { /* 16 bytes: the first or second half of two blocks of 32 */
        uint8x16_t both = vld1q_u8(packed + 16 * i), low = vandq_u8(both, vdupq_n_u8(15)), high = vshrq_n_u8(both, 4);
        if (wide) {
            uint8x16_t fifths = vld1q_u8(at + 16 + 16 * (i % 2));
            const uint8_t bit = (uint8_t)(1 << (4 * second + 2 * (i / 2)));
            low = vorrq_u8(low, vandq_u8(vtstq_u8(fifths, vdupq_n_u8(bit)), vdupq_n_u8(16)));
            high = vorrq_u8(high, vandq_u8(vtstq_u8(fifths, vdupq_n_u8((uint8_t)(2 * bit))), vdupq_n_u8(16)));
        }
        out->level[4 * (i / 2) + i % 2] = vreinterpretq_s8_u8(low);
        out->level[4 * (i / 2) + 2 + i % 2] = vreinterpretq_s8_u8(high);
    }
}

INLINE void half_of_q6_k(const uint8_t *at, int second, Piece *out) {
    int16x8_t scales = vmovl_s8(vld1_s8((const int8_t *)at + 192 + 8 * second));
    float factor = half(at + 208);
    out->scale[0] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(scales))), factor);
    out->scale[1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(scales))), factor);
    const uint8x16_t fifteen = vdupq_n_u8(15), bits = vdupq_n_u8(48);
    for (int i = 0; i < 2; i++) {
        uint8x16_t low = vld1q_u8(at + 64 * second + 16 * i), next = vld1q_u8(at + 64 * second + 32 + 16 * i);
        uint8x16_t high = vld1q_u8(at + 128 + 32 * second + 16 * i);
        uint8x16_t level[4] = {
            vorrq_u8(vandq_u8(low, fifteen), vandq_u8(vshlq_n_u8(high, 4), bits)),
            vorrq_u8(vandq_u8(next, fifteen), vandq_u8(vshlq_n_u8(high, 2), bits)),
            vorrq_u8(vshrq_n_u8(low, 4), vandq_u8(high, bits)),
            vorrq_u8(vshrq_n_u8(next, 4), vandq_u8(vshrq_n_u8(high, 2), bits)),
        };
        for (int j = 0; j < 4; j++)
            out->level[2 * j + i] = vsubq_s8(vreinterpretq_s8_u8(level[j]), vdupq_n_s8(32));
    }
}

/* Levels of up to four times 32 values; what is missing is 0. */
INLINE void levels_from(int type, const uint8_t *row, int start, int blocks, Piece *out) {
    for (int b = 0; b < 4; b++) {
        const uint8_t *at = row + (type == LEVELS_8 ? start + 32 * b : (start + 32 * b) / 2);
        int8x16_t *level = out->level + 2 * b;
        if (b >= blocks) level[0] = level[1] = vdupq_n_s8(0);
        else if (type == LEVELS_8) level[0] = vld1q_s8((const int8_t *)at), level[1] = vld1q_s8((const int8_t *)at + 16);
        else {
            uint8x16_t packed = vld1q_u8(at);
            level[0] = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15)));
            level[1] = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
        }
    }
}

/* Scales or offsets of a piece. */
INLINE float32x4_t of_groups(const float *of_row, int start, int values, int group) {
    if (values == PIECE) return vld1q_dup_f32(of_row + start / group);
    return vcombine_f32(vld1_f32(of_row + start / 64), vdup_n_f32(0));
}

INLINE void piece_of_levels(int type, Weights w, int start, int columns, Piece *out) {
    const int left = columns - start, values = values_of_scale(type), stored = type_of(type);
    const float *scale = scales_of(stored, w.packed, columns);
    if (left >= PIECE) levels_from(stored, w.packed, start, 4, out);
    else levels_from(stored, w.packed, start, left / 32, out);
    out->scale[0] = of_groups(scale, start, values, w.group);
    if (has_offset(type))
        out->offset[0] = of_groups(scale + count_of_scales(columns, w.group), start, values, w.group);
}

/* PIECE values from `start`, or as many as `columns` leaves. */
INLINE void piece_of(int type, Weights w, int start, int columns, Piece *out) {
    const uint8_t *block = w.packed + (int64_t)(start / STRIDE) * block_bytes(type);
    const int second = start / PIECE % 2;
    if (type == UNPACKED) {
        for (int i = 0; i < 8; i++) out->level[i] = vld1q_s8((const int8_t *)w.row.level + start + 16 * i);
        for (int i = 0; i < 2; i++) {
            out->scale[i] = vld1q_f32(w.row.scale + start / GROUP + 4 * i);
            out->offset[i] = vld1q_f32(w.row.offset + start / GROUP + 4 * i);
        }
    } else if (type_of(type) >= LEVELS_8) piece_of_levels(type, w, start, columns, out);
    else if (type == Q4_K || type == Q5_K) half_of_q4_q5_k(type == Q5_K, block, second, out);
    else if (type == Q6_K) half_of_q6_k(block, second, out);
    else {
        const uint8_t *at = w.packed + (int64_t)(start / 32) * block_bytes(type);
        if (columns - start >= PIECE) blocks_of_32(type, at, 4, out);
        else blocks_of_32(type, at, (columns - start) / 32, out);
    }
}

#endif
#endif
