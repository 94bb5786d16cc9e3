/* The dot products of `dot.h` for CPUs with AVX-512: registers in which a lane stays within a group of 16 values.
 *
 *     group   0       1       2       3          in the order of the columns a register has 64 of them: a scale for every
 *             4       5       6       7          four lanes, so each register would be scaled by itself
 *             8 ...
 *
 *     lanes   0 4 8 12 | 1 5 9 13 | 2 6 ...      transposed, four lanes at a time: each of the four registers has four values
 *                                                of every group, and their products are added before they are scaled once
 *
 * The activations are transposed when they are rounded. The last piece of a row has fewer columns: two registers hold up to
 * 128, one up to 64. One row of x takes the weights as they come out of a block. Several take four rows of weights that are
 * unpacked into the first-level cache, two rows of x at a time; they add up the same numbers in the same order.
 */
#ifndef CAIRN_DOT512_H
#define CAIRN_DOT512_H

#include "pieces512.h"

#ifdef HAS_DOT512

#define ROWS_OF_W 4     /* that are multiplied with two rows of x while their sums are in registers */
#define PIECES_IN_CACHE 8 /* of four rows of weights and two of x: 22 KB */
#define ROWS_TOGETHER 16  /* of weights whose sums are kept from some pieces to the next: 64 KB with 64 rows of x */

/* Registers of 64 columns that a piece has. */
INLINE int registers_of(int columns) { return columns > 128 ? 4 : columns > 64 ? 2 : 1; }

/* -- the order of lanes ------------------------------------------------------------------------------------------------- */

/* In place; it is its own inverse for four registers. */
INLINE void order_lanes(__m512i r[4], int registers) {
    if (registers == 2) {
        const __m512i low = _mm512_unpacklo_epi64(r[0], r[1]);
        r[1] = _mm512_unpackhi_epi64(r[0], r[1]), r[0] = low;
    }
    if (registers != 4) return;
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
}

/* The scale of each lane's group. */
INLINE __m512 order_scales(__m512 scale, int registers) {
    const __m512i of_4 = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i of_2 = _mm512_set_epi32(7, 7, 3, 3, 6, 6, 2, 2, 5, 5, 1, 1, 4, 4, 0, 0);
    const __m512i of_1 = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(registers == 4 ? of_4 : registers == 2 ? of_2 : of_1, scale);
}

INLINE __m512i add_products(__m512i sum, __m512i level, __m512i x, int is_signed) {
    if (is_signed) { /* products of levels with a sign: |level| * (x with that sign) */
        x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(level), _mm512_setzero_si512(), x);
        level = _mm512_abs_epi8(level);
    }
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, level, x);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(level, x), _mm512_set1_epi16(1)));
#endif
}

/* -- activations --------------------------------------------------------------------------------------------------------- */

/* Lanes of four registers of 32 bits, or groups of four registers of 8 bits in order, to the order in memory and back. */
#define TRANSPOSED _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0)

/* 64 values in 8 bits. */
INLINE __m512i narrowed(const __m512i v[4]) {
    const __m512i lanes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    return _mm512_permutexvar_epi32(TRANSPOSED, lanes);
}

/* 16 of `columns` values; zeros behind the last. */
INLINE __m512 load_group(const float *x, int columns) {
    return _mm512_maskz_loadu_ps((__mmask16)(columns < 16 ? (1 << (columns < 0 ? 0 : columns)) - 1 : 0xffff), x);
}

/* What all values of each group add up to. */
INLINE __m512i group_sums(const __m512i digit[4]) {
    __m512i r[4] = {digit[0], digit[1], digit[2], digit[3]}, sum = _mm512_setzero_si512();
    order_lanes(r, 4);
    for (int c = 0; c < 4; c++) sum = add_products(sum, _mm512_set1_epi8(1), r[c], 0);
    return _mm512_permutexvar_epi32(TRANSPOSED, sum);
}

INLINE void store_digit(__m512i digit[4], int registers, int8_t *to) {
    order_lanes(digit, registers);
    for (int c = 0; c < 4; c++) _mm512_store_si512(to + 64 * c, digit[c]);
}

/* `round_piece`, with lanes in order; what is no number does not count for the largest. */
INLINE void round_ordered(const float *x, int columns, Rounded *out) {
    __m512 largest = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 16) largest = _mm512_max_ps(_mm512_abs_ps(load_group(x + k, columns - k)), largest);
    const float most = _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(most > 0 ? MOST_STEPS / most : 0.f);
    __m512i high[4], low[4];
    for (int c = 0; c < 4; c++) {
        __m512i of_16[4], rest[4];
        for (int i = 0; i < 4; i++) {
            const int k = 64 * c + 16 * i;
            const __m512 value = _mm512_mul_ps(load_group(x + k, columns - k), inverse);
            const __mmask16 below = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_LT_OQ);
            const __m512 half_away = _mm512_mask_mov_ps(_mm512_set1_ps(0.5f), below, _mm512_set1_ps(-0.5f));
            const __m512i steps = _mm512_cvttps_epi32(_mm512_add_ps(value, half_away));
            of_16[i] = _mm512_srai_epi32(_mm512_add_epi32(steps, _mm512_set1_epi32(128)), 8);
            rest[i] = _mm512_sub_epi32(steps, _mm512_slli_epi32(of_16[i], 8));
            rest[i] = _mm512_max_epi32(rest[i], _mm512_set1_epi32(-127));
        }
        high[c] = narrowed(of_16), low[c] = narrowed(rest);
    }
    out->scale = most / MOST_STEPS;
    const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(group_sums(high), 8), group_sums(low));
    _mm512_store_ps(out->sum, _mm512_mul_ps(_mm512_set1_ps(out->scale), _mm512_cvtepi32_ps(sums)));
    store_digit(high, registers_of(columns), out->high);
    store_digit(low, registers_of(columns), out->low);
}

/* The t-th row of x; `rows` of them lie side by side. */
static void round_row(const float *x, int columns, int rows, int t, Activations *out) {
    out += t;
    for (int k = 0; k < columns; k += STRIDE, out += rows)
        round_ordered(x + k, columns - k < STRIDE ? columns - k : STRIDE, out);
}

/* -- weights ------------------------------------------------------------------------------------------------------------ */

/* Rows of weights. `form` is their type, or for types without a form in `pieces512.h` one with levels like theirs; it is a
 * constant wherever it is used. */
typedef struct {
    int form, type, group;
    const uint8_t *packed;
    int64_t row_bytes;
    Row room; /* for one unpacked row */
} Rows;

INLINE void unpacked_piece(int form, Row row, int start, Piece *out) {
    for (int c = 0; c < 4; c++) out->level[c] = _mm512_loadu_si512(row.level + start + 64 * c);
    out->scale = _mm512_loadu_ps(row.scale + start / GROUP), out->offset = _mm512_loadu_ps(row.offset + start / GROUP);
    if (!LIFTED(form)) return;
    for (int c = 0; c < 4; c++) out->level[c] = _mm512_xor_si512(out->level[c], _mm512_set1_epi8(-128));
    out->offset = _mm512_mul_ps(out->scale, _mm512_set1_ps(-128.f));
}

INLINE void unpack_if_needed(const Rows *w, const uint8_t *packed, int columns) {
    if (!has_pieces(w->form)) unpack(w->type, packed, columns, w->group, w->room);
}

/* The piece of a row from column `start` on, with lanes in order. `whole`: it is not the last of its row. */
INLINE void ordered_piece(const Rows *w, const uint8_t *packed, int start, int left, int whole, Piece *out) {
    const int registers = whole ? 4 : registers_of(left);
    const uint8_t *at = packed + (int64_t)(start / STRIDE) * piece_bytes(w->form);
    Piece piece; /* in registers, which nothing else can point to */
    if (!has_pieces(w->form)) unpacked_piece(w->form, w->room, start, &piece);
    else if (whole) piece_of(w->form, at, STRIDE, &piece);
    else if (left == 64) piece_of(w->form, at, 64, &piece); /* as of 576 columns; a constant leaves out what is not there */
    else piece_of(w->form, at, left, &piece);
    order_lanes(piece.level, registers);
    piece.scale = order_scales(piece.scale, registers);
    *out = piece;
}

/* -- products ------------------------------------------------------------------------------------------------------------ */

/* A piece of `count` rows of weights with `tokens` rows of x, onto their sums. */
INLINE void add_piece(int is_signed, const Piece *w, int count, const Rounded *x, int tokens, int registers,
                      __m512 sum[ROWS_OF_W][2]) {
    __m512i dot[ROWS_OF_W][2];
    for (int r = 0; r < count; r++)
        for (int j = 0; j < tokens; j++) dot[r][j] = _mm512_setzero_si512();
    for (int c = 0; c < registers; c++)
        for (int j = 0; j < tokens; j++) {
            const __m512i high = _mm512_load_si512(x[j].high + 64 * c);
            for (int r = 0; r < count; r++) dot[r][j] = add_products(dot[r][j], w[r].level[c], high, is_signed);
        }
    for (int r = 0; r < count; r++)
        for (int j = 0; j < tokens; j++) dot[r][j] = _mm512_slli_epi32(dot[r][j], 8);
    for (int c = 0; c < registers; c++)
        for (int j = 0; j < tokens; j++) {
            const __m512i low = _mm512_load_si512(x[j].low + 64 * c);
            for (int r = 0; r < count; r++) dot[r][j] = add_products(dot[r][j], w[r].level[c], low, is_signed);
        }
    for (int j = 0; j < tokens; j++) {
        const __m512 of_groups = _mm512_load_ps(x[j].sum), scale = _mm512_set1_ps(x[j].scale);
        for (int r = 0; r < count; r++) {
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][j]), w[r].scale);
            if (!is_signed) sum[r][j] = _mm512_fmadd_ps(w[r].offset, of_groups, sum[r][j]);
            sum[r][j] = _mm512_fmadd_ps(scaled, scale, sum[r][j]);
        }
    }
}

/* The last piece of a row, of so many columns. */
INLINE void add_last_piece(int is_signed, const Piece *w, int count, const Rounded *x, int tokens, int columns,
                           __m512 sum[ROWS_OF_W][2]) {
    switch (registers_of(columns)) {
    case 1: add_piece(is_signed, w, count, x, tokens, 1, sum); break;
    case 2: add_piece(is_signed, w, count, x, tokens, 2, sum); break;
    default: add_piece(is_signed, w, count, x, tokens, 4, sum);
    }
}

/* One row of weights with one of x. */
INLINE float one_dot(const Rows *w, const uint8_t *packed, const Rounded *x, int columns) {
    const int is_signed = SIGNED(w->form), size = piece_bytes(w->form);
    __m512 sum[ROWS_OF_W][2] = {{_mm512_setzero_ps()}};
    Piece piece;
    int start = 0;
    unpack_if_needed(w, packed, columns);
    for (; start + STRIDE <= columns; start += STRIDE, x++) {
        ask_ahead(packed + (int64_t)(start / STRIDE) * size, size, AHEAD_BYTES);
        ordered_piece(w, packed, start, STRIDE, 1, &piece);
        add_piece(is_signed, &piece, 1, x, 1, 4, sum);
    }
    if (start < columns) {
        ordered_piece(w, packed, start, columns - start, 0, &piece);
        add_last_piece(is_signed, &piece, 1, x, 1, columns - start, sum);
    }
    return _mm_cvtss_f32(four_sums(sum[0][0], sum[0][0], sum[0][0], sum[0][0]));
}

/* Some pieces of up to four rows of weights. */
typedef struct {
    Piece (*piece)[ROWS_OF_W];
    int first, count, last_columns; /* of the last piece, if it is the last of the row and not whole */
    int is_end;                     /* of the rows */
    int rows_of_w, is_signed;
} Depth;

/* Sums of four rows of weights with one or two of x, to y [count, rows]. */
INLINE void write_sums(__m512 sum[ROWS_OF_W][2], int tokens, int count, int rows, float *y) {
    const __m128 first = four_sums(sum[0][0], sum[1][0], sum[2][0], sum[3][0]);
    if (tokens == 1) {
        for (int r = 0; r < count; r++) y[(int64_t)r * rows] = first[r];
        return;
    }
    const __m128 next = four_sums(sum[0][1], sum[1][1], sum[2][1], sum[3][1]);
    const __m128 upper = _mm_unpacklo_ps(first, next), lower = _mm_unpackhi_ps(first, next);
    _mm_storel_pi((__m64 *)y, upper);
    if (count > 1) _mm_storeh_pi((__m64 *)(y + rows), upper);
    if (count > 2) _mm_storel_pi((__m64 *)(y + 2 * (int64_t)rows), lower);
    if (count > 3) _mm_storeh_pi((__m64 *)(y + 3 * (int64_t)rows), lower);
}

/* Four rows of weights with `tokens` rows of x, from piece `d->first` on; sums that are not at their end are kept. */
INLINE void add_depth(int is_signed, const Depth *d, const Rounded *x, int rows, int tokens, float *kept, float *y) {
    __m512 sum[ROWS_OF_W][2];
    for (int r = 0; r < ROWS_OF_W; r++)
        for (int j = 0; j < tokens; j++)
            sum[r][j] = d->first ? _mm512_load_ps(kept + 16 * (ROWS_OF_W * j + r)) : _mm512_setzero_ps();
    x += (int64_t)d->first * rows;
    const int whole = d->count - (d->last_columns > 0);
    for (int p = 0; p < whole; p++, x += rows) add_piece(is_signed, d->piece[p], ROWS_OF_W, x, tokens, 4, sum);
    if (d->last_columns) add_last_piece(is_signed, d->piece[whole], ROWS_OF_W, x, tokens, d->last_columns, sum);
    if (d->is_end) {
        write_sums(sum, tokens, d->rows_of_w, rows, y);
        return;
    }
    for (int r = 0; r < ROWS_OF_W; r++)
        for (int j = 0; j < tokens; j++) _mm512_store_ps(kept + 16 * (ROWS_OF_W * j + r), sum[r][j]);
}

/* All rows of x, one function for all types of weights. */
static __attribute__((noinline)) void add_depths(const Depth *d, const Rounded *x, int rows, float (*kept)[ROWS_OF_W][16],
                                                 float *y) {
    for (int t = 0; t < rows; t += 2) {
#if !defined(__AVX512VNNI__)
        if (d->is_signed && t + 1 < rows) add_depth(1, d, x + t, rows, 2, kept[t][0], y + t);
        else if (d->is_signed) add_depth(1, d, x + t, rows, 1, kept[t][0], y + t);
        if (d->is_signed) continue;
#endif
        if (t + 1 < rows) add_depth(0, d, x + t, rows, 2, kept[t][0], y + t);
        else add_depth(0, d, x + t, rows, 1, kept[t][0], y + t);
    }
}

/* The pieces; those of the last row in place of rows that are missing. */
INLINE void ordered_pieces(const Rows *w, int columns, const Depth *d) {
    const int size = piece_bytes(w->form);
    const int64_t ahead = ROWS_OF_W * w->row_bytes > AHEAD_BYTES ? ROWS_OF_W * w->row_bytes : AHEAD_BYTES;
    for (int r = 0; r < ROWS_OF_W; r++) {
        const uint8_t *packed = w->packed + w->row_bytes * (r < d->rows_of_w ? r : d->rows_of_w - 1);
        unpack_if_needed(w, packed, columns);
        for (int p = 0; p < d->count; p++) {
            const int start = (d->first + p) * STRIDE;
            ask_ahead(packed + (int64_t)(d->first + p) * size, size, ahead);
            if (d->last_columns && p == d->count - 1) ordered_piece(w, packed, start, d->last_columns, 0, &d->piece[p][r]);
            else ordered_piece(w, packed, start, STRIDE, 1, &d->piece[p][r]);
        }
    }
}

/* Up to ROWS_TOGETHER rows of weights with all rows of x: y [count, rows]. Some pieces at a time, so that those of x come
 * from the second-level cache, however long the rows are. */
INLINE void dots_in_depth(const Rows *w, int count, const Rounded *x, int rows, int columns, float *y) {
    const int pieces = pieces_of(columns), most = has_pieces(w->form) ? PIECES_IN_CACHE : pieces;
    const int fours = most < pieces ? (count + ROWS_OF_W - 1) / ROWS_OF_W : 1; /* whose sums are kept */
    _Alignas(64) float kept[fours][rows][ROWS_OF_W][16];
    _Alignas(64) Piece room[most][ROWS_OF_W];
    for (int first = 0; first < pieces; first += most) {
        const int some = pieces - first < most ? pieces - first : most, is_end = first + some == pieces;
        for (int n = 0; n < count; n += ROWS_OF_W) {
            const int of_w = count - n < ROWS_OF_W ? count - n : ROWS_OF_W;
            const Depth depth = {room, first, some, is_end ? columns % STRIDE : 0, is_end, of_w, SIGNED(w->form)};
            Rows four = *w;
            four.packed += n * w->row_bytes;
            ordered_pieces(&four, columns, &depth);
            add_depths(&depth, x, rows, kept[n / ROWS_OF_W % fours], y + (int64_t)n * rows);
        }
    }
}

INLINE void dots_of_form(int form, Rows w, int count, const Rounded *x, int rows, int columns, float *y) {
    const int together = rows == 1 ? 1 : ROWS_TOGETHER;
    w.form = form;
    for (int n = 0; n < count; n += together, w.packed += together * w.row_bytes) {
        const int some = count - n < together ? count - n : together;
        if (rows == 1) y[n] = one_dot(&w, w.packed, x, columns);
        else dots_in_depth(&w, some, x, rows, columns, y + (int64_t)n * rows);
    }
}

/* `count` rows of weights with all rows of x: y [count, rows]. */
static void dots_of_rows(Rows w, int count, const Rounded *x, int rows, int columns, float *y) {
#define DOTS_OF(form) \
    case form: dots_of_form(form, w, count, x, rows, columns, y); break
    switch (has_pieces(w.type) ? w.type : signed_levels(w.type) ? LEVELS_8 : LEVELS_4) {
        DOTS_OF(Q4_0);
        DOTS_OF(Q4_1);
        DOTS_OF(Q5_0);
        DOTS_OF(Q5_1);
        DOTS_OF(Q8_0);
        DOTS_OF(Q4_K);
        DOTS_OF(Q5_K);
        DOTS_OF(Q6_K);
        DOTS_OF(IQ4_NL);
        DOTS_OF(LEVELS_8);
        DOTS_OF(LEVELS_4);
    }
#undef DOTS_OF
}

#endif
#endif
