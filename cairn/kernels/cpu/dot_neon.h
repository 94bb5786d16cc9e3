/* The dot products of `dot.h` for ARM CPUs with dot products of 8-bit integers, straight from the packed blocks.
 *
 * 128 values of a row of weights are unpacked into registers: blocks of 32 or groups of 16 that share a scale.
 *
 *     one row of x      the lanes of a sum are four neighbouring blocks
 *     four rows of x    interleaved by four values; the lanes of a sum are the rows, and there is a sum for each of four
 *                       blocks, so that a row adds up the same numbers in the same order: it has the same bits
 *
 * Four rows need no sum across lanes, and two thirds of the instructions of four single ones; two or three rows are
 * filled up with zeros. Types that are seldom met are unpacked into memory first (`blocks.h`).
 */
#ifndef CAIRN_DOT_NEON_H
#define CAIRN_DOT_NEON_H

#include "dot.h"

#ifdef HAS_DOT_NEON
#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))
#define PIECE 128          /* values that are unpacked at once */
#define QUADS_AT_ONCE 8    /* of x, for which a piece is unpacked once */
#define MOST_ROWS_OF_W 4   /* that are multiplied together */
#define UNPACKED (-1)      /* a type: levels, scales and offsets in memory */

typedef struct {
    int8x16_t level[8];
    float32x4_t scale[2], offset[2]; /* of the four blocks of 32, or the eight groups of 16 */
} Piece;

/* STRIDE columns of four rows of activations: four values of each row in turn. */
typedef struct {
    _Alignas(64) int8_t high[4 * STRIDE];
    int8_t low[4 * STRIDE];
    float sum[STRIDE / GROUP][4], scale[4];
} Quad;

/* Quads of rows one behind the other, the columns of each without gaps. One row that is left over lies as `Rounded`. */
typedef Quad Activations;

/* Where a row of weights is: packed, or unpacked. */
typedef struct {
    const uint8_t *packed;
    Row row;
} Weights;

INLINE int values_of_scale(int type) { return type == Q6_K || type == UNPACKED ? 16 : 32; }
INLINE int has_offset(int type) { return type != Q8_0 && type != Q6_K && type != IQ4_NL; }

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

INLINE float32x4_t floats_of_halves(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

/* 16 where a bit is set, of eight bits for each half of the lanes. */
INLINE uint8x16_t fifth_bits_of(const uint8_t *at) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    uint8x16_t spread = vcombine_u8(vdup_n_u8(at[0]), vdup_n_u8(at[1]));
    return vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(16));
}

INLINE void block_of_32(int type, const uint8_t *at, int8x16_t *level) {
    const int wide = type == Q5_0 || type == Q5_1, front = block_bytes(type) - 16;
    if (type == Q8_0) {
        level[0] = vld1q_s8((const int8_t *)at + 2), level[1] = vld1q_s8((const int8_t *)at + 18);
        return;
    }
    uint8x16_t packed = vld1q_u8(at + front), low = vandq_u8(packed, vdupq_n_u8(15)), high = vshrq_n_u8(packed, 4);
    if (wide) low = vorrq_u8(low, fifth_bits_of(at + front - 4)), high = vorrq_u8(high, fifth_bits_of(at + front - 2));
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
    else out->offset[0] = vmulq_n_f32(out->scale[0], type == Q5_0 ? -16.f : -8.f);
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
    } else if (type == Q4_K || type == Q5_K) half_of_q4_q5_k(type == Q5_K, block, second, out);
    else if (type == Q6_K) half_of_q6_k(block, second, out);
    else {
        const uint8_t *at = w.packed + (int64_t)(start / 32) * block_bytes(type);
        if (columns - start >= PIECE) blocks_of_32(type, at, 4, out);
        else blocks_of_32(type, at, (columns - start) / 32, out);
    }
}

/* -- one row of x ------------------------------------------------------------------------------------------------ */

/* Both digits of a block of 16 or 32 values. */
INLINE int32x4_t block_dot(const int8x16_t *level, int registers, const int8_t *high, const int8_t *low) {
    int32x4_t dot = vdupq_n_s32(0);
    for (int i = 0; i < registers; i++) dot = vdotq_s32(dot, level[i], vld1q_s8(high + 16 * i));
    dot = vshlq_n_s32(dot, 8);
    for (int i = 0; i < registers; i++) dot = vdotq_s32(dot, level[i], vld1q_s8(low + 16 * i));
    return dot;
}

/* A piece, whose columns begin at `at` of x. Scales belong to four blocks at a time, the lanes of `sum`. */
INLINE float32x4_t row_piece(int type, const Piece *p, const Rounded *x, int at, float32x4_t sum) {
    const int size = values_of_scale(type), registers = size / 16;
    for (int v = 0; v < PIECE / (4 * size); v++) {
        int32x4_t dot[4];
        for (int b = 0; b < 4; b++) {
            const int block = 4 * v + b, first = at + size * block;
            dot[b] = block_dot(p->level + registers * block, registers, x->high + first, x->low + first);
        }
        int32x4_t four = vpaddq_s32(vpaddq_s32(dot[0], dot[1]), vpaddq_s32(dot[2], dot[3]));
        const float *sums = x->sum + (at + 4 * size * v) / GROUP;
        float32x4_t of_x = vld1q_f32(sums);
        if (size == 32) of_x = vpaddq_f32(of_x, vld1q_f32(sums + 4));
        if (has_offset(type)) sum = vfmaq_f32(sum, p->offset[v], of_x);
        sum = vfmaq_n_f32(sum, vmulq_f32(vcvtq_f32_s32(four), p->scale[v]), x->scale);
    }
    return sum;
}

INLINE float row_dot(int type, Weights w, const Rounded *x, int columns) {
    float32x4_t sum = vdupq_n_f32(0);
    Piece p;
    int start = 0;
    for (; start + STRIDE <= columns; start += STRIDE, x++) {
        piece_of(type, w, start, columns, &p);
        sum = row_piece(type, &p, x, 0, sum);
        piece_of(type, w, start + PIECE, columns, &p);
        sum = row_piece(type, &p, x, PIECE, sum);
    }
    for (int at = 0; start + at < columns; at += PIECE) {
        piece_of(type, w, start + at, columns, &p);
        sum = row_piece(type, &p, x, at, sum);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* -- four rows of x ---------------------------------------------------------------------------------------------- */

/* 16 values of each of `count` rows of weights with four rows of x: each register of x is loaded once. */
INLINE void quad_dots(int32x4_t *dot, const int8x16_t *level, int count, const int8_t *x) {
    int8x16_t x_0 = vld1q_s8(x), x_1 = vld1q_s8(x + 16), x_2 = vld1q_s8(x + 32), x_3 = vld1q_s8(x + 48);
    for (int r = 0; r < count; r++) dot[r] = vdotq_laneq_s32(dot[r], x_0, level[r], 0);
    for (int r = 0; r < count; r++) dot[r] = vdotq_laneq_s32(dot[r], x_1, level[r], 1);
    for (int r = 0; r < count; r++) dot[r] = vdotq_laneq_s32(dot[r], x_2, level[r], 2);
    for (int r = 0; r < count; r++) dot[r] = vdotq_laneq_s32(dot[r], x_3, level[r], 3);
}

/* A piece of `count` rows of weights with four rows of x; `sum` has four vectors for each row of weights. */
INLINE void quad_piece(int type, const Piece *w, int count, const Quad *x, int at, int blocks, float32x4_t *sum) {
    const int size = values_of_scale(type), registers = size / 16;
    const float32x4_t scale_x = vld1q_f32(x->scale);
#pragma GCC unroll 1 /* registers are enough for one block */
    for (int b = 0; b < blocks; b++) {
        const int first = at + size * b;
        int8x16_t level[2][MOST_ROWS_OF_W];
        int32x4_t dot[MOST_ROWS_OF_W];
        for (int r = 0; r < count; r++) {
            for (int i = 0; i < registers; i++) level[i][r] = w[r].level[registers * b + i];
            dot[r] = vdupq_n_s32(0);
        }
        for (int i = 0; i < registers; i++) quad_dots(dot, level[i], count, x->high + 4 * first + 64 * i);
        for (int r = 0; r < count; r++) dot[r] = vshlq_n_s32(dot[r], 8);
        for (int i = 0; i < registers; i++) quad_dots(dot, level[i], count, x->low + 4 * first + 64 * i);
        float32x4_t of_x = vld1q_f32(x->sum[first / GROUP]);
        if (size == 32) of_x = vaddq_f32(of_x, vld1q_f32(x->sum[first / GROUP + 1]));
        for (int r = 0; r < count; r++) {
            const float *scale = (const float *)w[r].scale, *offset = (const float *)w[r].offset;
            float32x4_t *here = sum + 4 * r + b % 4;
            if (has_offset(type)) *here = vfmaq_n_f32(*here, of_x, offset[b]);
            *here = vfmaq_f32(*here, vmulq_n_f32(vcvtq_f32_s32(dot[r]), scale[b]), scale_x);
        }
    }
}

/* `count` rows of weights with `quads` times four rows of x, of which `rows` are wanted: y [count, stride]. */
INLINE void quads_dot(int type, const Weights *w, int count, const Quad *x, int quads, int rows, int columns, float *y,
                      int stride) {
    const int pieces = pieces_of(columns), size = values_of_scale(type);
    float32x4_t sum[QUADS_AT_ONCE][4 * MOST_ROWS_OF_W];
    for (int q = 0; q < quads; q++)
        for (int i = 0; i < 4 * count; i++) sum[q][i] = vdupq_n_f32(0);
    for (int start = 0; start < columns; start += PIECE) {
        Piece p[MOST_ROWS_OF_W];
        for (int r = 0; r < count; r++) piece_of(type, w[r], start, columns, p + r);
        const Quad *here = x + start / STRIDE;
        const int left = columns - start;
        for (int q = 0; q < quads; q++, here += pieces)
            if (left >= PIECE) quad_piece(type, p, count, here, start % STRIDE, PIECE / size, sum[q]);
            else quad_piece(type, p, count, here, start % STRIDE, left / size, sum[q]);
    }
    for (int q = 0; q < quads; q++)
        for (int r = 0; r < count; r++) {
            const float32x4_t *s = sum[q] + 4 * r;
            float32x4_t found = vaddq_f32(vaddq_f32(s[0], s[1]), vaddq_f32(s[2], s[3]));
            for (int t = 0; t < 4 && 4 * q + t < rows; t++) y[r * stride + 4 * q + t] = found[t];
        }
}

/* -- activations ------------------------------------------------------------------------------------------------- */

static size_t activation_bytes(int columns, int rows) {
    return sizeof(Quad) * (size_t)pieces_of(columns) * (size_t)((rows + 3) / 4);
}

static void into_lane(const Rounded *from, int lane, Quad *to) {
    for (int k = 0; k < STRIDE; k += 4) {
        memcpy(to->high + 4 * k + 4 * lane, from->high + k, 4);
        memcpy(to->low + 4 * k + 4 * lane, from->low + k, 4);
    }
    for (int group = 0; group < STRIDE / GROUP; group++) to->sum[group][lane] = from->sum[group];
    to->scale[lane] = from->scale;
}

/* The t-th row of x, and zeros for the rows that are missing behind the last. */
static void round_row(const float *x, int columns, int rows, int t, Activations *out) {
    const int pieces = pieces_of(columns), last = t == rows - 1;
    out += (int64_t)(t / 4) * pieces;
    for (int i = 0; i < pieces; i++) {
        const int left = columns - i * STRIDE, count = left < STRIDE ? left : STRIDE;
        Rounded one;
        if (last && t % 4 == 0) {
            round_piece(x + i * STRIDE, count, (Rounded *)out + i);
            continue;
        }
        round_piece(x + i * STRIDE, count, &one);
        into_lane(&one, t % 4, out + i);
        memset(&one, 0, sizeof one);
        for (int lane = t % 4 + 1; last && lane < 4; lane++) into_lane(&one, lane, out + i);
    }
}

/* -- any number of rows ------------------------------------------------------------------------------------------ */

INLINE void rows_dot(int type, const Weights *w, int count, const Quad *x, int rows, int columns, float *y) {
    const int single = rows % 4 == 1 ? rows - 1 : rows, pieces = pieces_of(columns); /* the first row alone, if any */
    for (int t = 0; t < single; t += 4 * QUADS_AT_ONCE) {
        const int some = single - t < 4 * QUADS_AT_ONCE ? single - t : 4 * QUADS_AT_ONCE;
        const Quad *here = x + (int64_t)(t / 4) * pieces;
        if (count == MOST_ROWS_OF_W)
            quads_dot(type, w, MOST_ROWS_OF_W, here, (some + 3) / 4, some, columns, y + t, rows);
        else
            for (int r = 0; r < count; r++)
                quads_dot(type, w + r, 1, here, (some + 3) / 4, some, columns, y + (int64_t)r * rows + t, rows);
    }
    if (single < rows)
        for (int r = 0; r < count; r++)
            y[(int64_t)r * rows + single] = row_dot(type, w[r], (const Rounded *)(x + (int64_t)(single / 4) * pieces), columns);
}

/* Up to MOST_ROWS_OF_W rows of weights with all rows of x: y [count, rows]. Returns 0 for types that are to be unpacked. */
static int packed_dots(int type, const Weights *w, int count, const Quad *x, int rows, int columns, float *y) {
    switch (type) {
    case Q4_0: rows_dot(Q4_0, w, count, x, rows, columns, y); return 1;
    case Q4_1: rows_dot(Q4_1, w, count, x, rows, columns, y); return 1;
    case Q5_0: rows_dot(Q5_0, w, count, x, rows, columns, y); return 1;
    case Q5_1: rows_dot(Q5_1, w, count, x, rows, columns, y); return 1;
    case Q8_0: rows_dot(Q8_0, w, count, x, rows, columns, y); return 1;
    case Q4_K: rows_dot(Q4_K, w, count, x, rows, columns, y); return 1;
    case Q5_K: rows_dot(Q5_K, w, count, x, rows, columns, y); return 1;
    case Q6_K: rows_dot(Q6_K, w, count, x, rows, columns, y); return 1;
    case IQ4_NL: rows_dot(IQ4_NL, w, count, x, rows, columns, y); return 1;
    case UNPACKED: rows_dot(UNPACKED, w, count, x, rows, columns, y); return 1;
    default: return 0;
    }
}

/* The same by a row's place in the file; `room` is for types that are unpacked first. */
static void dots_of_rows(int type, const uint8_t *packed, int64_t row_bytes, int count, const Activations *x, int rows,
                         int columns, Row room, float *y) {
    Weights w[MOST_ROWS_OF_W], one = {NULL, room};
    for (int r = 0; r < count; r++) w[r] = (Weights){packed + row_bytes * r, room};
    if (packed_dots(type, w, count, x, rows, columns, y)) return;
    for (int r = 0; r < count; r++) {
        unpack(type, w[r].packed, columns, room);
        packed_dots(UNPACKED, &one, 1, x, rows, columns, y + (int64_t)r * rows);
    }
}

#endif
#endif
