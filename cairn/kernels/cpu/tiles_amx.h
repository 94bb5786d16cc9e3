/* Products with packed weights by the tile instructions of x86 (AMX): 16 rows of weights with 8 rows of activations.
 *
 *     a block of columns    levels [16 rows of w][32]  @  digits [32][8 rows of x: high | low]  ->  integers [16][16]
 *                           integers * scale of each row's block + offset * sums of digits      ->  sums [16][16]
 *
 * Levels are unpacked as rows lie in the file; x is what is transposed, once for all weights. The two digits of a row of x are
 * columns of their own, so that one instruction multiplies both, and integers become floats exactly. Eight rows of x take as
 * long as one, and a row has the same bits whatever rows are beside it. Vectors are the compiler's own, which every CPU has.
 */
#ifndef CAIRN_TILES_AMX_H
#define CAIRN_TILES_AMX_H

#include "dot512.h"

#if defined(__AMX_INT8__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS_OF_TILE 16 /* of weights */
#define TILE_X 8     /* rows of x, of two digits each */
#define REQUEST_PERMISSION 0x1023 /* arch_prctl: the system saves tiles for processes that ask for it */
#define TILE_DATA 18

typedef float Floats16 __attribute__((vector_size(64), may_alias));
typedef int32_t Ints16 __attribute__((vector_size(64), may_alias));

/* STRIDE columns of eight rows of x; the lanes are high digits of all rows, then low ones. */
typedef struct {
    _Alignas(64) int8_t digit[STRIDE / 4][2 * TILE_X][4];
    float sum[STRIDE / GROUP][2 * TILE_X]; /* of the digits of a group */
    float scale[2 * TILE_X];
} Octet;

/* 16 unpacked rows, `stride` values apart. */
typedef struct {
    uint8_t *level;
    float *scale, *offset;
    int64_t stride;
} TileOfRows;

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

static int ask_for_tiles(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

/* Whether this process may use them. The first to ask is the thread that makes a pool. */
static int tiles_are_used(void) {
    static int answer = -1;
    if (answer < 0) answer = ask_for_tiles();
    return answer;
}

/* Tiles 0 and 1: integers. 2 and 3: levels of blocks of `size` columns. 4 and 5: digits. */
static void shape_tiles(int size) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 2; i++) shapes.rows[i] = ROWS_OF_TILE, shapes.row_bytes[i] = 64;
    for (int i = 2; i < 4; i++) shapes.rows[i] = ROWS_OF_TILE, shapes.row_bytes[i] = (uint16_t)size;
    for (int i = 4; i < 6; i++) shapes.rows[i] = (uint8_t)(size / 4), shapes.row_bytes[i] = 64;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* of which GCC 12 believes that the instruction reads 8 bytes */
    _tile_loadconfig(&shapes);
}

/* -- activations ------------------------------------------------------------------------------------------------------- */

static size_t octet_bytes(int columns, int rows) {
    return sizeof(Octet) * (size_t)pieces_of(columns) * (size_t)((rows + TILE_X - 1) / TILE_X);
}

static void into_octet(const Rounded *from, int lane, int is_last, Octet *to) {
    const size_t others = is_last ? (size_t)(TILE_X - 1 - lane) : 0; /* rows that are missing are zeros */
    for (int k = 0; k < STRIDE / 4; k++) {
        memcpy(to->digit[k][lane], from->high + 4 * k, 4);
        memcpy(to->digit[k][TILE_X + lane], from->low + 4 * k, 4);
        memset(to->digit[k][lane] + 4, 0, 4 * others);
        memset(to->digit[k][TILE_X + lane] + 4, 0, 4 * others);
    }
    for (int group = 0; group < STRIDE / GROUP; group++) {
        int high = 0, low = 0;
        for (int i = GROUP * group; i < GROUP * (group + 1); i++) high += from->high[i], low += from->low[i];
        to->sum[group][lane] = (float)high, to->sum[group][TILE_X + lane] = (float)low;
        memset(to->sum[group] + lane + 1, 0, 4 * others);
        memset(to->sum[group] + TILE_X + lane + 1, 0, 4 * others);
    }
    to->scale[lane] = 256.f * from->scale, to->scale[TILE_X + lane] = from->scale;
    memset(to->scale + lane + 1, 0, 4 * others);
    memset(to->scale + TILE_X + lane + 1, 0, 4 * others);
}

/* The t-th row of x. */
static void round_octet_row(const float *x, int columns, int rows, int t, Octet *out) {
    out += (int64_t)(t / TILE_X) * pieces_of(columns);
    for (int k = 0; k < columns; k += STRIDE, out++) {
        Rounded one;
        round_piece(x + k, columns - k < STRIDE ? columns - k : STRIDE, &one);
        into_octet(&one, t % TILE_X, t == rows - 1, out);
    }
}

/* -- weights ----------------------------------------------------------------------------------------------------------- */

/* Columns that share a scale at least. */
static int columns_of_scale(int type) { return type == Q2_K || type == Q3_K || type == Q6_K ? 16 : 32; }

#ifdef HAS_DOT512
INLINE void unpack_pieces(int type, const uint8_t *at, int columns, Row out) {
    for (int start = 0; start < columns; start += STRIDE, at += piece_bytes(type)) {
        Piece w;
        ask_ahead(at, piece_bytes(type));
        piece_of(type, at, columns - start, &w);
        for (int c = 0; c < 4; c++) _mm512_store_si512(out.level + start + 64 * c, w.level[c]);
        _mm512_store_ps(out.scale + start / GROUP, w.scale);
        _mm512_store_ps(out.offset + start / GROUP, w.offset);
    }
}

/* Returns whether the levels have no sign. */
static int unpack_for_tile(int type, const uint8_t *at, int64_t bytes, int columns, int group, Row out) {
    switch (type) {
#define UNPACK_AS(name) case name: unpack_pieces(name, at, columns, out); return 1
        UNPACK_AS(Q4_0);
        UNPACK_AS(Q4_1);
        UNPACK_AS(Q5_0);
        UNPACK_AS(Q5_1);
        UNPACK_AS(Q8_0);
        UNPACK_AS(Q4_K);
        UNPACK_AS(Q5_K);
        UNPACK_AS(Q6_K);
        UNPACK_AS(IQ4_NL);
#undef UNPACK_AS
    }
    ask_ahead(at, bytes);
    unpack(type, at, columns, group, out);
    return !signed_levels(type);
}
#else
static int unpack_for_tile(int type, const uint8_t *at, int64_t bytes, int columns, int group, Row out) {
    (void)bytes;
    unpack(type, at, columns, group, out);
    return !signed_levels(type);
}
#endif

/* -- products ---------------------------------------------------------------------------------------------------------- */

/* What a block adds: its integers, which follow `scale` and `offset` of 16 rows. */
#define ADD_BLOCK(found, group, of_x)                                                           \
    _Pragma("GCC unroll 16") for (int n = 0; n < ROWS_OF_TILE; n++) {                              \
        const int64_t at = n * (w->stride / GROUP) + (group);                                   \
        part[n] += __builtin_convertvector(found[n], Floats16) * w->scale[at];                  \
        if (has_offset) part[n] += of_x * w->offset[at];                                        \
    }

/* 16 rows of weights with eight of x: sums [16][high | low]. The last three are constants wherever this is inlined. */
static inline __attribute__((always_inline)) void tile_dots(const TileOfRows *w, const Octet *x, int columns,
                                                            Floats16 *sums, const int size, const int has_offset,
                                                            const int is_signed) {
    _Alignas(64) Ints16 found[2][ROWS_OF_TILE];
    for (int n = 0; n < ROWS_OF_TILE; n++) sums[n] = (Floats16){0};
    for (int start = 0; start < columns; start += STRIDE, x++) {
        const int left = columns - start < STRIDE ? columns - start : STRIDE;
        Floats16 part[ROWS_OF_TILE];
        _Pragma("GCC unroll 16") for (int n = 0; n < ROWS_OF_TILE; n++) part[n] = (Floats16){0};
        for (int k = 0; k < left; k += 2 * size) { /* behind an odd number of blocks there is one of zeros */
            const uint8_t *level = w->level + start + k;
            const int group = (start + k) / GROUP, groups = size / GROUP;
            _tile_loadd(2, level, w->stride);
            _tile_loadd(4, x->digit[k / 4], 64);
            _tile_zero(0);
            if (is_signed) _tile_dpbssd(0, 2, 4);
            else _tile_dpbusd(0, 2, 4);
            _tile_stored(0, found[0], 64);
            _tile_loadd(3, level + size, w->stride);
            _tile_loadd(5, x->digit[(k + size) / 4], 64);
            _tile_zero(1);
            if (is_signed) _tile_dpbssd(1, 3, 5);
            else _tile_dpbusd(1, 3, 5);
            _tile_stored(1, found[1], 64);
            const Floats16 *of = (const Floats16 *)x->sum[k / GROUP];
            Floats16 first = of[0], second = of[groups];
            if (groups == 2) first += of[1], second += of[3];
            ADD_BLOCK(found[0], group, first)
            ADD_BLOCK(found[1], group + groups, second)
        }
        const Floats16 scale = *(const Floats16 *)x->scale;
        _Pragma("GCC unroll 16") for (int n = 0; n < ROWS_OF_TILE; n++) sums[n] += part[n] * scale;
    }
}

static __attribute__((noinline)) void tile_of_32(const TileOfRows *w, const Octet *x, int columns, Floats16 *sums) {
    tile_dots(w, x, columns, sums, 32, 1, 0);
}

static __attribute__((noinline)) void tile_of_16(const TileOfRows *w, const Octet *x, int columns, Floats16 *sums) {
    tile_dots(w, x, columns, sums, 16, 1, 0);
}

static __attribute__((noinline)) void tile_signed(const TileOfRows *w, const Octet *x, int columns, Floats16 *sums) {
    tile_dots(w, x, columns, sums, 32, 0, 1);
}

/* `count` rows of weights with all rows of x: y [count, rows]. */
static void tiles_dot(int type, const uint8_t *packed, int64_t row_bytes, int group, int count, const Octet *x, int rows,
                      int columns, float *y) {
    const int64_t stride = (int64_t)pieces_of(columns) * STRIDE;
    _Alignas(64) uint8_t level[ROWS_OF_TILE * stride];
    _Alignas(64) float scale[ROWS_OF_TILE * stride / GROUP], offset[ROWS_OF_TILE * stride / GROUP];
    for (int r = 0; r < ROWS_OF_TILE; r++) { /* behind the last column */
        const int64_t groups = stride / GROUP, first = columns / GROUP;
        memset(level + r * stride + columns, 0, (size_t)(stride - columns));
        memset(scale + r * groups + first, 0, sizeof(float) * (size_t)(groups - first));
        memset(offset + r * groups + first, 0, sizeof(float) * (size_t)(groups - first));
    }
    const TileOfRows w = {level, scale, offset, stride};
    const int size = columns_of_scale(type);
    Floats16 sums[ROWS_OF_TILE];
    shape_tiles(size);
    for (int n = 0; n < count; n += ROWS_OF_TILE) {
        const int some = count - n < ROWS_OF_TILE ? count - n : ROWS_OF_TILE;
        int is_plain = 1;
        for (int r = 0; r < some; r++, packed += row_bytes) {
            const Row row = {level + r * stride, scale + r * (stride / GROUP), offset + r * (stride / GROUP)};
            is_plain = unpack_for_tile(type, packed, row_bytes, columns, group, row);
        }
        __asm__ volatile("" ::: "memory"); /* tiles are loaded by instructions that the compiler does not look into */
        for (int t = 0; t < rows; t += TILE_X) {
            const Octet *here = x + (int64_t)(t / TILE_X) * pieces_of(columns);
            if (!is_plain) tile_signed(&w, here, columns, sums);
            else if (size == 32) tile_of_32(&w, here, columns, sums);
            else tile_of_16(&w, here, columns, sums);
            for (int r = 0; r < some; r++)
                for (int j = 0; j < TILE_X && t + j < rows; j++)
                    y[(int64_t)(n + r) * rows + t + j] = sums[r][j] + sums[r][TILE_X + j];
        }
    }
    _tile_release();
}

#else
static int tiles_are_used(void) { return 0; }
#endif
#endif
