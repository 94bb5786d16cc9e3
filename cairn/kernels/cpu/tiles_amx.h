/* Products of many rows of x with packed weights by the tile instructions of x86 (AMX), in two parts of bfloat16 each.
 *
 *     w = high + low, x = high + low        16 bits of a float32's 24
 *     y += high . high + high . low + low . high        three instructions for 16 rows of w, 16 of x and 32 columns
 *
 * Weights are dequantised some rows and TILES_DEPTH columns at a time, as they lie in the file; x is transposed, once for all
 * weights. A product errs by about 1/100,000. With few rows the dequantising is most of it: they go through `dot512.h`.
 */
#ifndef CAIRN_TILES_AMX_H
#define CAIRN_TILES_AMX_H

#include "pieces512.h"

#define TILES_FROM 32 /* rows of x: 16 took as long in `dot512.h` */

#if defined(__AMX_BF16__) && defined(__AVX512VNNI__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#define SIDE_OF_TILE 16           /* rows of w, or of x */
#define COLUMNS_OF_TILE 32
#define TILES_DEPTH 1024          /* columns, whose weights and activations stay in the second-level cache */
#define REQUEST_PERMISSION 0x1023 /* arch_prctl: the system saves tiles for processes that ask for it */
#define TILE_DATA 18

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* 32 columns of 16 rows of x, in pairs of columns. */
typedef struct {
    _Alignas(64) uint16_t high[COLUMNS_OF_TILE / 2][SIDE_OF_TILE][2], low[COLUMNS_OF_TILE / 2][SIDE_OF_TILE][2];
} TileOfX;

/* TILES_DEPTH columns of 32 rows of weights. */
typedef struct {
    _Alignas(64) uint16_t high[2 * SIDE_OF_TILE][TILES_DEPTH], low[2 * SIDE_OF_TILE][TILES_DEPTH];
} TilesOfW;

/* Whether this process may use them. The first to ask is the thread that makes a pool. */
static int tiles_are_used(void) {
    static int answer = -1;
    if (answer < 0) answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return answer;
}

static int has_tile_form(int type) {
    return type == IQ4_NL || type == Q4_0 || type == Q4_1 || type == Q5_0 || type == Q5_1 || type == Q8_0 ||
           type == Q4_K || type == Q5_K || type == Q6_K;
}

static void shape_tiles(void) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = SIDE_OF_TILE, shapes.row_bytes[i] = 64;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* of which GCC 12 believes that the instruction reads 8 bytes */
    _tile_loadconfig(&shapes);
}

/* The upper 16 bits of each value, and those of what is left. */
static inline void split(const float *restrict x, int count, uint16_t *restrict high, uint16_t *restrict low) {
#pragma omp simd
    for (int i = 0; i < count; i++) {
        union { float value; uint32_t bits; } whole = {.value = x[i]}, top = {.bits = whole.bits & 0xffff0000u}, rest;
        rest.value = whole.value - top.value;
        high[i] = (uint16_t)(top.bits >> 16), low[i] = (uint16_t)((rest.bits + 0x8000u) >> 16);
    }
}

/* -- activations ------------------------------------------------------------------------------------------------------- */

static size_t tile_bytes(int columns, int rows) {
    const int count = (rows + SIDE_OF_TILE - 1) / SIDE_OF_TILE;
    return sizeof(TileOfX) * (size_t)(columns / COLUMNS_OF_TILE) * (size_t)count;
}

/* The t-th row of x, and zeros for the rows that are missing behind the last. */
static void split_row(const float *x, int columns, int rows, int t, TileOfX *out) {
    const int lane = t % SIDE_OF_TILE;
    const size_t others = t == rows - 1 ? (size_t)(SIDE_OF_TILE - 1 - lane) : 0;
    out += (int64_t)(t / SIDE_OF_TILE) * (columns / COLUMNS_OF_TILE);
    for (int k = 0; k < columns; k += COLUMNS_OF_TILE, out++) {
        uint16_t high[COLUMNS_OF_TILE], low[COLUMNS_OF_TILE];
        split(x + k, COLUMNS_OF_TILE, high, low);
        for (int i = 0; i < COLUMNS_OF_TILE / 2; i++) {
            memcpy(out->high[i][lane], high + 2 * i, 4), memcpy(out->low[i][lane], low + 2 * i, 4);
            memset(out->high[i][lane] + 2, 0, 4 * others), memset(out->low[i][lane] + 2, 0, 4 * others);
        }
    }
}

/* -- products ---------------------------------------------------------------------------------------------------------- */

/* Macros, because the numbers of tiles have to be written out; each of them is several statements. */
#define MULTIPLY_PARTS(c, a_high, a_low, b_high, b_low) \
    _tile_dpbf16ps(c, a_high, b_high);                  \
    _tile_dpbf16ps(c, a_high, b_low);                   \
    _tile_dpbf16ps(c, a_low, b_high)

#define LOAD_PARTS(tile_high, tile_low, high, low, stride) \
    _tile_loadd(tile_high, high, stride);                  \
    _tile_loadd(tile_low, low, stride)

/* 32 rows of weights with 32 of x, or with 16: sums [32][32]. */
static inline __attribute__((always_inline)) void tile_product(const TilesOfW *w, const TileOfX *x, int64_t next,
                                                               int columns, float *sums, const int both) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < columns; k += COLUMNS_OF_TILE, x++) {
        LOAD_PARTS(4, 5, &w->high[0][k], &w->low[0][k], 2 * TILES_DEPTH);
        LOAD_PARTS(6, 7, x->high, x->low, 64);
        MULTIPLY_PARTS(0, 4, 5, 6, 7);
        if (both) {
            LOAD_PARTS(6, 7, x[next].high, x[next].low, 64);
            MULTIPLY_PARTS(2, 4, 5, 6, 7);
        }
        LOAD_PARTS(4, 5, &w->high[SIDE_OF_TILE][k], &w->low[SIDE_OF_TILE][k], 2 * TILES_DEPTH);
        if (both) {
            MULTIPLY_PARTS(3, 4, 5, 6, 7);
            LOAD_PARTS(6, 7, x->high, x->low, 64);
        }
        MULTIPLY_PARTS(1, 4, 5, 6, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 512, 128);
    if (both) {
        _tile_stored(2, sums + 16, 128);
        _tile_stored(3, sums + 528, 128);
    }
}

/* Columns from `start` on of up to 32 rows. */
static void dequantise(int type, const uint8_t *packed, int64_t row_bytes, int rows, int start, int columns, TilesOfW *w) {
    float values[TILES_DEPTH];
    packed += (int64_t)(start / STRIDE) * piece_bytes(type);
    for (int r = 0; r < rows; r++, packed += row_bytes) {
        packed_floats(type, packed, columns, values);
        split(values, columns, w->high[r], w->low[r]);
    }
    __asm__ volatile("" ::: "memory"); /* tiles are loaded by instructions that the compiler does not look into */
}

/* Sums [32][32] of `rows` rows of weights and `tokens` of x onto y [rows, stride]. */
static void add_sums(const float *sums, int rows, int tokens, float *y, int stride) {
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++) y[(int64_t)r * stride + t] += sums[32 * r + t];
}

/* `count` rows of weights with all rows of x: y [count, rows]. */
static void tiles_dot(int type, const uint8_t *packed, int64_t row_bytes, int count, const TileOfX *x, int rows,
                      int columns, float *y) {
    const int64_t next = columns / COLUMNS_OF_TILE;
    _Alignas(64) TilesOfW w;
    _Alignas(64) float sums[32 * 32];
    memset(y, 0, sizeof(float) * (size_t)count * (size_t)rows);
    shape_tiles();
    for (int start = 0; start < columns; start += TILES_DEPTH) {
        const int depth = columns - start < TILES_DEPTH ? columns - start : TILES_DEPTH;
        for (int n = 0; n < count; n += 32) {
            const int some = count - n < 32 ? count - n : 32;
            dequantise(type, packed + row_bytes * n, row_bytes, some, start, depth, &w);
            for (int t = 0; t < rows; t += 32) {
                const TileOfX *here = x + (t / SIDE_OF_TILE) * next + start / COLUMNS_OF_TILE;
                const int tokens = rows - t < 32 ? rows - t : 32;
                if (tokens > SIDE_OF_TILE) tile_product(&w, here, next, depth, sums, 1);
                else tile_product(&w, here, next, depth, sums, 0);
                add_sums(sums, some, tokens, y + (int64_t)n * rows + t, rows);
            }
        }
    }
    _tile_release();
}

#else
static int tiles_are_used(void) { return 0; }
static int has_tile_form(int type) { return type < 0; }
#endif
#endif
