/* The dot products of `dot.h` for ARM CPUs with dot products of 8-bit integers, straight from the packed blocks.
 *
 * 128 values of a row of weights are unpacked into registers (`pieces_neon.h`).
 *
 *     one row of x      the lanes of a sum are four neighbouring blocks
 *     four rows of x    interleaved by four values; the lanes of a sum are the rows, and there is a sum for each of four
 *                       blocks, so that a row adds up the same numbers in the same order: it has the same bits
 *
 * Four rows need no sum across lanes, and two thirds of the instructions of four single ones; two or three rows are
 * filled up with zeros.
 */
#ifndef CAIRN_DOT_NEON_H
#define CAIRN_DOT_NEON_H

#include "pairs_neon.h"
#include "quads_neon.h"

#ifdef HAS_DOT_NEON

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
    if (values_of_scale(type) > 32) return long_row_dot(type, w, x, columns);
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

INLINE void row_of_x_with_k(int type, const uint8_t *row, int64_t row_bytes, int count, const Rounded *x, int columns,
                            float *y, int stride) {
    for (int n = 0; n < count; n++, row += row_bytes) {
        const uint8_t *at = row;
        const Rounded *here = x;
        float32x4_t sum = vdupq_n_f32(0);
        for (int start = 0; start < columns; start += STRIDE, here++, at += block_bytes(type))
            for (int second = 0; second < 2; second++) {
                Piece p;
                if (type == Q6_K) half_of_q6_k(at, second, &p);
                else half_of_q4_q5_k(type == Q5_K, at, second, &p);
                sum = row_piece(type, &p, here, PIECE * second, sum);
            }
        y[(int64_t)n * stride] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
}

/* One row of x with `count` rows of k-quants: y [count, stride]. A function of its own, whose instructions GCC may order:
 * of a row at a time there are registers enough for that. */
static __attribute__((noinline, optimize("schedule-insns"))) void row_of_x_dot_k(int type, const uint8_t *row,
                                                                                int64_t row_bytes, int count,
                                                                                const Rounded *x, int columns,
                                                                                float *y, int stride) {
    switch (type) {
    case Q4_K: row_of_x_with_k(Q4_K, row, row_bytes, count, x, columns, y, stride); return;
    case Q5_K: row_of_x_with_k(Q5_K, row, row_bytes, count, x, columns, y, stride); return;
    case Q6_K: row_of_x_with_k(Q6_K, row, row_bytes, count, x, columns, y, stride); return;
    }
}

/* -- four rows of x ---------------------------------------------------------------------------------------------- */

/* A lane has to be written as a number. */
#define DOTS_OF_BOTH(lane)                                                                                          \
    {                                                                                                               \
        const int8x16_t x_0 = vld1q_s8(x + 16 * lane), x_1 = vld1q_s8(x + next + 16 * lane);                        \
        for (int r = 0; r < count; r++) first[r] = vdotq_laneq_s32(first[r], x_0, level_0[r], lane);                \
        for (int r = 0; r < count; r++) second[r] = vdotq_laneq_s32(second[r], x_1, level_1[r], lane);              \
    }

/* 16 values of two blocks of `count` rows of weights with four rows of x, whose second block is `next` bytes further: each
 * register of x is loaded once, and twice as many sums do not wait for one another. */
INLINE void quad_dots(int32x4_t *first, int32x4_t *second, const Piece *w, int count, int at, int registers,
                      const int8_t *x, int next) {
    /* Or the levels of both digits would be held at once, for which there are not registers enough. */
    __asm__ volatile("" ::: "memory");
    int8x16_t level_0[MOST_ROWS_OF_W], level_1[MOST_ROWS_OF_W];
    for (int r = 0; r < count; r++) level_0[r] = w[r].level[at], level_1[r] = w[r].level[at + registers];
    DOTS_OF_BOTH(0) DOTS_OF_BOTH(1) DOTS_OF_BOTH(2) DOTS_OF_BOTH(3)
}

/* Sums of integers of the b-th block onto `sum`, which has four vectors for each row of weights. */
INLINE void add_quad_block(int type, const Piece *w, int count, const Quad *x, int group, int b, const int32x4_t *dot,
                           float32x4_t *sum) {
    const float32x4_t scale_x = vld1q_f32(x->scale);
    float32x4_t of_x = vld1q_f32(x->sum[group]);
    if (values_of_scale(type) == 32) of_x = vaddq_f32(of_x, vld1q_f32(x->sum[group + 1]));
    for (int r = 0; r < count; r++) {
        const float *scale = (const float *)w[r].scale, *offset = (const float *)w[r].offset;
        float32x4_t *here = sum + 4 * r + b % 4;
        if (has_offset(type)) *here = vfmaq_n_f32(*here, of_x, offset[b]);
        *here = vfmaq_f32(*here, vmulq_n_f32(vcvtq_f32_s32(dot[r]), scale[b]), scale_x);
    }
}

/* A piece of `count` rows of weights with four rows of x. Behind an odd number of blocks there is one of zeros. */
INLINE void quad_piece(int type, const Piece *w, int count, const Quad *x, int at, int blocks, float32x4_t *sum) {
    const int size = values_of_scale(type), registers = size / 16, next = 4 * size;
#pragma GCC unroll 1 /* registers are enough for two blocks */
    for (int b = 0; b < blocks; b += 2) {
        const int start = at + size * b;
        int32x4_t first[MOST_ROWS_OF_W], second[MOST_ROWS_OF_W];
        for (int r = 0; r < count; r++) first[r] = second[r] = vdupq_n_s32(0);
        for (int i = 0; i < registers; i++)
            quad_dots(first, second, w, count, registers * b + i, registers, x->high + 4 * start + 64 * i, next);
        for (int r = 0; r < count; r++) first[r] = vshlq_n_s32(first[r], 8), second[r] = vshlq_n_s32(second[r], 8);
        for (int i = 0; i < registers; i++)
            quad_dots(first, second, w, count, registers * b + i, registers, x->low + 4 * start + 64 * i, next);
        add_quad_block(type, w, count, x, start / GROUP, b, first, sum);
        add_quad_block(type, w, count, x, start / GROUP + registers, b + 1, second, sum);
    }
}

/* `count` rows of weights with `quads` times four rows of x, of which `rows` are wanted: y [count, stride]. */
INLINE void quads_dot(int type, const Weights *w, int count, const Quad *x, int quads, int rows, int columns, float *y,
                      int stride) {
    const int pieces = pieces_of(columns), size = values_of_scale(type);
    if (count == MOST_ROWS_OF_W && in_blocks_of_32(type)) {
        for (int q = 0; q < quads; q += FEW_QUADS)
            few_quads_dot(type, w, x + q * pieces, least(quads - q, FEW_QUADS), rows - 4 * q, columns, y + 4 * q, stride);
        return;
    }
    float32x4_t sum[QUADS_AT_ONCE][4 * MOST_ROWS_OF_W];
    for (int q = 0; q < quads; q++)
        for (int i = 0; i < 4 * count; i++) sum[q][i] = vdupq_n_f32(0);
    for (int start = 0; start < columns; start += PIECE) {
        Piece p[MOST_ROWS_OF_W];
        for (int r = 0; r < count; r++) piece_of(type, w[r], start, columns, p + r);
        if (count == MOST_ROWS_OF_W) prefetch_rows(type, w, start);
        const Quad *here = x + start / STRIDE;
        const int left = columns - start, blocks = (left < PIECE ? left : PIECE) / size;
        for (int q = 0; q < quads; q++, here += pieces)
            if (size > 32) long_quad_piece(type, p, count, here, start % STRIDE, left, sum[q]);
            else quad_piece(type, p, count, here, start % STRIDE, blocks, sum[q]);
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

/* `count` rows of weights, a constant, with rows of x by four: y [count, stride]. */
INLINE void some_rows_dot(int type, const Weights *w, int count, const Quad *x, int rows, int columns, float *y,
                          int stride) {
    const int pieces = pieces_of(columns);
    for (int t = 0; t < rows; t += 4 * QUADS_AT_ONCE) {
        const int some = least(rows - t, 4 * QUADS_AT_ONCE);
        const Quad *here = x + (int64_t)(t / 4) * pieces;
        quads_dot(type, w, count, here, (some + 3) / 4, some, columns, y + t, stride);
    }
}

/* A row of x that is left over, or the only one. */
INLINE void alone_dot(int type, Weights first, int64_t row_bytes, int count, const Rounded *x, int columns, float *y,
                      int stride) {
    if (in_blocks_of_32(type)) row_of_x_dot(type, first.packed, row_bytes, count, x, columns, y, stride);
    else if (type == Q4_K || type == Q5_K || type == Q6_K)
        row_of_x_dot_k(type, first.packed, row_bytes, count, x, columns, y, stride);
    else
#pragma GCC unroll 1
        for (int n = 0; n < count; n++, first.packed += row_bytes)
            y[(int64_t)n * stride] = row_dot(type, first, x, columns);
}

/* `count` rows of weights, of which `first` is the first: y [count, rows]. Where fewer than four are left, the last one is
 * multiplied again in their place: a form for one row of each type would take as long to compile. */
INLINE void rows_dot(int type, Weights first, int64_t row_bytes, int count, const Quad *x, int rows, int columns,
                     float *y) {
    const int together = type == UNPACKED ? 1 : MOST_ROWS_OF_W, alone = rows % 4 == 1;
    float room[MOST_ROWS_OF_W * rows];
    for (int n = 0; n < count && rows > alone; n += together) {
        Weights w[MOST_ROWS_OF_W] = {first, first, first, first};
        for (int r = 0; r < together; r++) w[r].packed += row_bytes * least(n + r, count - 1);
        const int left = least(together, count - n);
        float *found = left < together ? room : y + (int64_t)n * rows;
        some_rows_dot(type, w, together, x, rows - alone, columns, found, rows);
        if (left < together) memcpy(y + (int64_t)n * rows, room, sizeof(float) * (size_t)(left * rows));
    }
    const Rounded *last = (const Rounded *)(x + (int64_t)(rows / 4) * pieces_of(columns));
    if (alone) alone_dot(type, first, row_bytes, count, last, columns, y + rows - 1, rows);
}

/* -- one kernel for each type ------------------------------------------------------------------------------------- */

/* `rows_dot` of one type. Each has a library of its own (`kind.c`), compiled when a matrix of the type is first made: of
 * fourteen types a model has one or two. */
typedef void RowsDot(Weights first, int64_t row_bytes, int count, const Quad *x, int rows, int columns, float *y);

#define SLOTS 36
enum { NO_KERNEL = 1 }; /* a slot that stays empty: GGUF's type 1 are floats */

INLINE int slot_of(int type) {
    if (type == UNPACKED) return 0;
    if (type < 32) return type;
    return type >> 16 ? 32 + (type >> 16 == 64) + 2 * (type_of(type) == LEVELS_4) : NO_KERNEL;
}

static RowsDot *kernels[SLOTS];

/* Returns 0 for types that are to be unpacked. */
static int packed_dots(int type, Weights first, int64_t row_bytes, int count, const Quad *x, int rows, int columns,
                       float *y) {
    if (type >= LEVELS_8 && first.group > 32) type = GROUPED(type, first.group == 64 ? 64 : PIECE);
    RowsDot *kernel = kernels[slot_of(type)];
    if (kernel) kernel(first, row_bytes, count, x, rows, columns, y);
    return kernel != NULL;
}

/* The same for every type; the first row's `row` is room for types that are unpacked first. */
static void dots_of_rows(int type, Weights first, int64_t row_bytes, int count, const Activations *x, int rows,
                         int columns, float *y) {
    if (packed_dots(type, first, row_bytes, count, x, rows, columns, y)) return;
    for (int r = 0; r < count; r++) {
        unpack(type, first.packed + row_bytes * r, columns, first.group, first.row);
        packed_dots(UNPACKED, first, 0, 1, x, rows, columns, y + (int64_t)r * rows);
    }
}

#endif
#endif
